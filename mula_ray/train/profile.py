"""The profiler window (`--profile A:B`): for each rank a trace that Perfetto opens, and spans for the report's picture.

    profile/rank00003.trace.json.gz   everything torch.profiler saw, with our phases named `mula::...`
    profile/rank00003.spans.json      forward, dispatch, expert, combine, backward, reduce, agree, update

Nothing is put in the way outside the window: dispatcher and expert modules are wrapped when it opens and given back
when it closes. Files are written by a thread, so that a large trace does not look like a hang.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from mula_ray.model.moe import Dispatcher, MoE, Routed

PREFIX = "mula::"
BACKWARD = "autograd::engine::evaluate_function: "
GAP_US = 300.0
"""Backward nodes nearer to each other than this are drawn as one block."""


class Span(NamedTuple):
    """A stretch of time on a rank's main thread: microseconds since the epoch."""

    name: str
    start: float
    stop: float


class _NamedDispatcher:
    """A dispatcher whose calls carry names in the trace."""

    def __init__(self, inner: Dispatcher) -> None:
        self.inner = inner

    def dispatch(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> Routed:
        """As `inner`."""
        with record_function(PREFIX + "dispatch"):
            return self.inner.dispatch(hidden, weights, ids)

    def combine(self, out: Tensor) -> Tensor:
        """As `inner`."""
        with record_function(PREFIX + "combine"):
            return self.inner.combine(out)


class StepProfiler:
    """`EngineHooks` that profiles the steps A to B-1 of one rank, counted from 1 as in `metrics.jsonl`.

    Call `attach(engine.stages)` once the engine is built, and `close()` at the end. A generation that starts inside or
    after the window profiles what is left of it; its files replace those of an earlier one.
    """

    def __init__(
        self, folder: Path, rank: int, window: tuple[int, int], device: torch.device, generation: int = 0
    ) -> None:
        self._folder, self._rank, self._window, self._device = folder, rank, window, device
        self._generation = generation
        self._stages: list[nn.Module] = []
        self._profiler: Any = None
        self._open: Any = None
        self._undo: list[Callable[[], None]] = []
        self._writer: threading.Thread | None = None

    def attach(self, stages: Iterable[nn.Module]) -> None:
        """The modules in which expert layers are to be named. The first profile of a process imports some 900 modules:
        that is done here, not within a step."""
        self._stages = list(stages)
        with _quiet(), torch.profiler.profile(activities=_activities(self._device)):
            pass

    def phase(self, name: str, step: int) -> None:
        """A phase of the engine's `step` (from 0) begins; `done` ends the step."""
        number, (first, stop) = step + 1, self._window
        if self._profiler is None and name == "forward_backward" and first <= number < stop and self._writer is None:
            self._begin()
        if self._profiler is None:
            return
        self._border(None if name == "done" else name)
        if name == "done" and number >= stop - 1:
            self._end()

    def _border(self, name: str | None) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
        if name is not None:
            self._open = record_function(PREFIX + name)
            self._open.__enter__()

    def _begin(self) -> None:
        for stage in self._stages:
            for module in stage.modules():
                if isinstance(module, MoE):
                    self._wrap(module)
        self._profiler = torch.profiler.profile(activities=_activities(self._device))
        with _quiet():
            self._profiler.__enter__()

    def _wrap(self, layer: MoE) -> None:
        inner = layer.dispatcher
        layer.dispatcher = _NamedDispatcher(inner)
        ranges: list[Any] = []

        def enter(*_: Any) -> None:
            ranges.append(record_function(PREFIX + "expert"))
            ranges[-1].__enter__()

        def leave(*_: Any) -> None:
            ranges.pop().__exit__(None, None, None)

        handles = (
            layer.experts.register_forward_pre_hook(enter),
            layer.experts.register_forward_hook(leave, always_call=True),
        )

        def undo() -> None:
            layer.dispatcher = inner
            for handle in handles:
                handle.remove()

        self._undo.append(undo)

    def _end(self) -> None:
        self._border(None)
        profiler, self._profiler = self._profiler, None
        with _quiet():
            profiler.__exit__(None, None, None)
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._writer = threading.Thread(target=self._write, args=(profiler,), name="profile-writer")
        self._writer.start()

    def _write(self, profiler: Any) -> None:
        """Trace and spans, each under a temporary name first. A full disk costs the profile, not the run."""
        stem = f"rank{self._rank:05d}"
        raw = self._folder / f".{stem}.{os.getpid()}.json"
        with suppress(OSError, RuntimeError):
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(raw))
            text = raw.read_bytes()
            trace = json.loads(text)
            name_process(trace, self._rank)
            packed = gzip.compress(json.dumps(trace).encode(), compresslevel=5)
            _replace(self._folder / f"{stem}.trace.json.gz", packed)
            spans = spans_of(trace, backward_kinds())
            out = {"rank": self._rank, "generation": self._generation, "spans": [list(span) for span in spans]}
            _replace(self._folder / f"{stem}.spans.json", json.dumps(out).encode())
        raw.unlink(missing_ok=True)

    def close(self) -> None:
        """Ends an open window and waits for its files."""
        if self._profiler is not None:
            self._end()
        if self._writer is not None:
            self._writer.join(60)


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler's library announces its start and stop on descriptor 2: nothing for a person's screen."""
    kept, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(sink)


def _activities(device: torch.device) -> list[torch.profiler.ProfilerActivity]:
    kinds = {"cuda": torch.profiler.ProfilerActivity.CUDA, "xpu": torch.profiler.ProfilerActivity.XPU}
    found = [torch.profiler.ProfilerActivity.CPU]
    return [*found, kinds[device.type]] if device.type in kinds else found


def _replace(path: Path, body: bytes) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(body)
    part.replace(path)


def name_process(trace: dict[str, Any], rank: int) -> None:
    """Names the processes of a trace by rank, so that several traces can be opened together."""
    pids = {event.get("pid") for event in trace["traceEvents"] if str(event.get("name", "")).startswith(PREFIX)}
    for pid in pids:
        trace["traceEvents"].append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"rank {rank}"}})
        trace["traceEvents"].append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": rank}})


def backward_kinds() -> dict[str, str]:
    """Autograd node names of our own functions -> what they do, by the module that defines them."""
    rooms = {"mula_ray.ops": "expert", "mula_ray.parallel.dispatch": "dispatch"}
    kinds = {"_ReduceRowsBackward": "combine"}
    for name, module in list(sys.modules.items()):
        kind = next((kind for room, kind in rooms.items() if name.startswith(room)), None)
        if kind is None:
            continue
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, torch.autograd.Function) and value.__module__ == name:
                kinds[value.__name__ + "Backward"] = kind
    return kinds


def spans_of(trace: dict[str, Any], kinds: dict[str, str]) -> list[Span]:
    """The spans of a Chrome trace of one rank, by start.

    `forward_backward` becomes `forward` and `backward`: backward is where autograd nodes ran, forward the rest.
    """
    base = float(trace.get("baseTimeNanoseconds", 0)) / 1000.0
    whole: list[Span] = []
    nodes: list[Span] = []
    for event in trace["traceEvents"]:
        name = event.get("name", "")
        if event.get("ph") != "X" or not isinstance(name, str):
            continue
        start = base + float(event["ts"])
        stop = start + float(event.get("dur", 0.0))
        if name.startswith(PREFIX) and event.get("cat") == "user_annotation":
            whole.append(Span(name.removeprefix(PREFIX), start, stop))
        elif name.startswith(BACKWARD):
            nodes.append(Span(name.removeprefix(BACKWARD), start, stop))
    nodes.sort(key=lambda span: span.start)
    spans = [span for span in whole if span.name != "forward_backward"]
    spans += [Span(kinds[node.name], node.start, node.stop) for node in nodes if node.name in kinds]
    for span in whole:
        if span.name == "forward_backward":
            spans += _split(span, [node for node in nodes if span.start <= node.start < span.stop])
    return sorted(spans, key=lambda span: span.start)


def _split(span: Span, nodes: Sequence[Span]) -> list[Span]:
    """`span` cut into backward blocks (nodes with small gaps closed) and the forward stretches between them."""
    blocks: list[Span] = []
    for node in nodes:
        if blocks and node.start - blocks[-1].stop <= GAP_US:
            blocks[-1] = Span("backward", blocks[-1].start, max(blocks[-1].stop, node.stop))
        else:
            blocks.append(Span("backward", node.start, node.stop))
    out: list[Span] = []
    at = span.start
    for block in blocks:
        out += [Span("forward", at, block.start), block]
        at = block.stop
    return [*out, Span("forward", at, span.stop)]
