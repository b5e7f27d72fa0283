(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const format = (value) => value === null ? "-" : Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3)
    ? value.toExponential(3) : String(Number(value.toPrecision(5)));
  const levels = {};
  const bytes = (key, text) => levels[key] ??= Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

  const nearest = (list, x) => {
    let low = 0, high = list.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (list[middle] < x) low = middle; else high = middle;
    }
    return high >= 0 && Math.abs(list[high] - x) < Math.abs(list[low] - x) ? high : low;
  };

  const lineText = (chart, x) => {
    const rows = [`step ${Math.round(x)}`];
    for (const one of chart.series) {
      if (!one.x.length) continue;
      const index = nearest(one.x, x);
      const band = one.low ? `  (${format(one.low[index])} to ${format(one.high[index])})` : "";
      rows.push(`${one.name}: ${format(one.y[index])}${band}`);
    }
    return rows.join("\n");
  };

  const heatText = (key, chart, x, down) => {
    const share = (x - chart.span[0]) / (chart.span[1] - chart.span[0] || 1);
    if (share < 0 || share > 1) return "";
    const column = Math.min(chart.columns - 1, Math.floor(share * chart.columns));
    const row = Math.min(chart.rows - 1, Math.max(0, Math.floor(down * chart.rows)));
    const level = bytes(key, chart.levels)[row * chart.columns + column];
    const head = `step ${Math.round(x)}, ${chart.row} ${Math.floor(row / (chart.sub || 1))}\n`;
    if (level === 0) return `${head}nothing on file`;
    if (level === 1) return `${head}${chart.sub ? "an expert got " : ""}no token at all`;
    let value = chart.scale[0] + (chart.scale[1] - chart.scale[0]) * (level - 2) / 253;
    if (chart.power) return `${head}${(2 ** value).toFixed(2)} ${chart.what}`;
    return `${head}${(100 * value).toFixed(1)} % ${chart.what}`;
  };

  const show = (plot, left, down, pageX, pageY) => {
    const key = plot.dataset.key, chart = data[key];
    if (!chart) return;
    const x = chart.x[0] + left * (chart.x[1] - chart.x[0]);
    const text = chart.kind === "heat" ? heatText(key, chart, x, down) : lineText(chart, x);
    if (!text) return hide(plot);
    const frame = plot.querySelector(".frame");
    let cursor = frame.querySelector(".cursor");
    if (!cursor) {
      cursor = document.createElement("div");
      cursor.className = "cursor";
      frame.append(cursor);
    }
    cursor.style.left = `${100 * left}%`;
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(pageX + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${pageY + 18 + box.height > innerHeight ? Math.max(8, pageY - box.height - 12) : pageY + 18}px`;
  };

  const hide = (plot) => {
    tip.hidden = true;
    plot.querySelector(".cursor")?.remove();
  };

  for (const plot of document.querySelectorAll(".plot[data-key]")) {
    const frame = plot.querySelector(".frame");
    const at = { left: 1, down: 0.5 };
    plot.addEventListener("pointermove", (event) => {
      const box = frame.getBoundingClientRect();
      at.left = (event.clientX - box.left) / box.width;
      at.down = (event.clientY - box.top) / box.height;
      if (at.left < 0 || at.left > 1 || at.down < 0 || at.down > 1) return hide(plot);
      show(plot, at.left, at.down, event.clientX, event.clientY);
    });
    plot.addEventListener("pointerleave", () => hide(plot));
    plot.addEventListener("blur", () => hide(plot));
    plot.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [-0.01, 0], ArrowRight: [0.01, 0], ArrowUp: [0, -0.02], ArrowDown: [0, 0.02] };
      const move = moves[event.key];
      if (event.key === "Escape") return hide(plot);
      if (!move) return;
      event.preventDefault();
      at.left = Math.min(1, Math.max(0, at.left + move[0] * (event.shiftKey ? 10 : 1)));
      at.down = Math.min(0.999, Math.max(0, at.down + move[1]));
      const box = frame.getBoundingClientRect();
      show(plot, at.left, at.down, box.left + at.left * box.width, box.top + at.down * box.height);
    });
  }
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  document.documentElement.dataset.ready = "yes";
})();
