"""The person's view while a run trains: one live line in a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mula_ray.train.metrics import EvalRecord, StepRecord


@dataclass
class View:
    """What the line shows."""

    steps: int
    done: int = 0
    loss: float = math.nan
    eval_loss: float | None = None
    tokens_per_s: float = 0.0
    mfu: float = 0.0
    generation: int = 0
    active: int = 0
    spares: int = 0
    checkpoint: int | None = None
    eta_s: float | None = None
    state: str = "starting"


def human_seconds(seconds: float) -> str:
    """Seconds as people say them: 8s, 3m05s, 2h07m, 4d03h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, second = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{second:02d}s"
    hours, minute = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minute:02d}m"
    return f"{hours // 24}d{hours % 24:02d}h"


def human_count(value: float) -> str:
    """A count with three digits and a unit: 950, 12.3k, 4.56M."""
    for bound, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= bound:
            return f"{value / bound:.3g}{unit}" if value / bound < 999.5 else f"{value / bound:.0f}{unit}"
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def line_of(view: View) -> str:
    """The line as plain text."""
    percent = 100.0 * view.done / view.steps if view.steps else 100.0
    parts = [f"{percent:5.1f}%", f"step {view.done}/{view.steps}", f"loss {view.loss:.4f}"]
    if view.eval_loss is not None:
        parts.append(f"held-out {view.eval_loss:.4f}")
    parts.append(f"{human_count(view.tokens_per_s)} tok/s")
    if view.mfu > 0:
        parts.append(f"MFU {100 * view.mfu:.1f}%")
    parts.append("ETA " + (human_seconds(view.eta_s) if view.eta_s is not None else "?"))
    parts.append(f"gen {view.generation}")
    parts.append(f"nodes {view.active}+{view.spares}")
    parts.append("ckpt -" if view.checkpoint is None else f"ckpt {view.checkpoint}")
    if view.state != "training":
        parts.append(view.state)
    return "  ".join(parts)


class Progress:
    """Call `step`, `evaluation`, `checkpoint`, `membership`, `state` as things happen, `close` at the end.

    `live`: None asks the stream whether it is a terminal. Otherwise plain lines: the first step, then one every
    `interval_s`, and the last. `note` prints a line that stays, above the live one. Not thread-safe: one caller.
    """

    def __init__(
        self,
        steps: int,
        *,
        done: int = 0,
        stream: TextIO | None = None,
        live: bool | None = None,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.view = View(steps=steps, done=done)
        self._stream = stream or sys.stdout
        self._interval_s, self._clock = interval_s, clock
        self._printed: float | None = None
        self._printed_step = -1
        self._recent: deque[tuple[float, int]] = deque(maxlen=64)
        self._live: Live | None = None
        if self._stream.isatty() if live is None else live:
            console = Console(file=self._stream, force_terminal=True)
            self._live = Live(Text(""), console=console, refresh_per_second=4, redirect_stdout=False)
            self._live.start()

    def step(self, record: StepRecord) -> None:
        """A step ended."""
        view = self.view
        view.done, view.generation, view.state = record.step, record.generation, "training"
        view.loss, view.mfu = record.loss, record.mfu
        view.tokens_per_s = record.tokens_per_s
        self._recent.append((self._clock(), view.done))
        view.eta_s = self._eta()
        self._show(force=view.done == view.steps)

    def _eta(self) -> float | None:
        """Seconds left at the recent pace: wall time, so that recoveries and replays count as what they cost."""
        (first, start), (last, stop) = self._recent[0], self._recent[-1]
        if stop <= start or last <= first:
            return None
        return (last - first) / (stop - start) * (self.view.steps - self.view.done)

    def evaluation(self, record: EvalRecord) -> None:
        """An evaluation ended."""
        self.view.eval_loss = record.eval_loss
        self.note(f"step {record.step}: held-out loss {record.eval_loss:.4f} over {record.eval_tokens} tokens")

    def checkpoint(self, step: int) -> None:
        """A checkpoint of `step` completed steps is committed."""
        self.view.checkpoint = step
        self._show()

    def membership(self, generation: int, active: int, spares: int) -> None:
        """Nodes that train, and whole nodes that wait."""
        self.view.generation, self.view.active, self.view.spares = generation, active, spares
        self._show()

    def state(self, text: str) -> None:
        """What the run does instead of training: starting, recovering, saving, waiting for nodes."""
        self.view.state = text
        self._show()

    def note(self, text: str) -> None:
        """A line that stays: an evaluation, a failure, a recovery."""
        if self._live is not None:
            self._live.console.print(Text(text))
        else:
            self._print(text)

    def _show(self, force: bool = False) -> None:
        if self._live is not None:
            self._live.update(Text(line_of(self.view), no_wrap=True, overflow="ellipsis"), refresh=force)
            return
        now = self._clock()
        due = self._printed is None or now - self._printed >= self._interval_s
        if self.view.done == self._printed_step or not (due or force) or math.isnan(self.view.loss):
            return
        self._printed, self._printed_step = now, self.view.done
        self._print(line_of(self.view))

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the live line and leaves its last state on the screen; a second call does nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
