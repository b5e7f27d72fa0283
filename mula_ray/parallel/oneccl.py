"""`parallel.backend: ccl`: a torch process group, in Python, over Intel's real oneCCL on the CPU.

The same library that carries collectives on Aurora runs here on a laptop. Facts that shape it:
- calls block, so each communicator has one thread that runs them in order: `async_op=True` overlaps with backward;
- oneCCL's send and receive crash the CPU plugin and are not offered: pipeline transfers are broadcasts in two-rank
  groups, one a direction (parallel/pipeline.py);
- it knows neither abort nor time-outs: a wait is bounded here, and a rank that is stuck ends with its process;
- objects and strings stay on the gloo control group.

Bar: same losses as gloo within fp32 rounding. Not for speed on few cores: its worker threads poll.
"""

# The signatures are torch's (overloaded stubs, arguments that a backend may ignore).
# mypy: disable-error-code="override, assignment"
# ruff: noqa: ARG002

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from mula_ray.parallel.oneccl_library import Library, UniqueId, load_library

BACKEND = "mula_ccl"
_OPS = {dist.ReduceOp.SUM: 0, dist.ReduceOp.PRODUCT: 1, dist.ReduceOp.MAX: 2, dist.ReduceOp.MIN: 3}


class OneCCLWork(dist.Work):
    """Handle of one queued call."""

    def __init__(self, label: str, timeout: timedelta) -> None:
        super().__init__()
        self._label, self._timeout = label, timeout
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def finish(self, result: object, error: BaseException | None) -> None:
        """Called by the communicator's thread when the call has ended."""
        self._error = error
        self._done.set()
        if error is None:
            self._future.set_result(result)
        elif isinstance(error, Exception):
            self._future.set_exception(error)

    def is_completed(self) -> bool:
        """Whether the call has ended."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it ended well."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """The error of a call that failed."""
        return self._error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end, bounded by `timeout` or the group's own.

        Raises:
            TimeoutError: names the call and the group.
            RuntimeError: oneCCL's own error.
        """
        bound = timeout if timeout > timedelta(0) else self._timeout
        if not self._done.wait(bound.total_seconds()):
            raise TimeoutError(f"{self._label} did not end within {bound.total_seconds():.0f} s")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A torch future of the result."""
        return self._future


class Channel:
    """A communicator and the one thread that runs its calls, in order."""

    def __init__(self, connect: Callable[[], ctypes.c_void_p], name: str, timeout: timedelta) -> None:
        self._connect, self._name, self._timeout = connect, name, timeout
        self._calls: queue.SimpleQueue[tuple[OneCCLWork, Callable[[ctypes.c_void_p], object]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"oneccl {name}", daemon=True)
        self._thread.start()

    def submit(self, what: str, call: Callable[[ctypes.c_void_p], object]) -> OneCCLWork:
        """Queue `call(communicator)`."""
        work = OneCCLWork(f"oneCCL {what} on {self._name}", self._timeout)
        self._calls.put((work, call))
        return work

    def close(self) -> None:
        """End the thread after the calls already queued; never waits for a stuck one."""
        self._calls.put(None)

    def _serve(self) -> None:
        comm: ctypes.c_void_p | None = None
        while (item := self._calls.get()) is not None:
            work, call = item
            try:
                comm = comm or self._connect()
                work.finish(call(comm), None)
            except BaseException as error:
                work.finish(None, error)


class OneCCLGroup(dist.ProcessGroup):
    """Collectives of one group of ranks over oneCCL. Created through `register`, by torch."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store, self._me, self._size, self._timeout = store, rank, size, timeout
        self._lib: Library = load_library()
        self._main = Channel(lambda: self._join(rank, size), f"group of {size}", timeout)
        self._main.submit("connect", lambda _comm: None).wait()

    def _join(self, rank: int, size: int) -> ctypes.c_void_p:
        if rank == 0:
            uid = self._lib.unique_id()
            self._store.set("oneccl/id", uid.to_bytes().hex())
        else:
            uid = UniqueId.from_bytes(bytes.fromhex(self._fetch("oneccl/id")))
        return self._lib.init(uid, rank, size)

    def _fetch(self, key: str) -> str:
        # A blocking get would hold the store's one connection, and another group's set behind it for ever.
        until = time.monotonic() + self._timeout.total_seconds()
        while not self._store.check([key]):
            if time.monotonic() > until:
                raise TimeoutError(f"rank 0 of the group did not come within {self._timeout.total_seconds():.0f} s")
            time.sleep(0.002)
        return bytes(self._store.get(key)).decode()

    def getBackendName(self) -> str:
        """torch asks for this by name."""
        return BACKEND

    def name(self) -> str:
        """Name of the backend."""
        return BACKEND

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> OneCCLWork:
        """In place; SUM, PRODUCT, MAX, MIN."""
        tensor, op = _dense(tensors[0]), _op(opts)
        return self._main.submit("all-reduce", lambda comm: self._lib.all_reduce(tensor, op, comm))

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> OneCCLWork:
        """In place, from the group's rank `opts.rootRank`."""
        tensor, root = _dense(tensors[0]), opts.rootRank
        return self._main.submit("broadcast", lambda comm: self._lib.broadcast(tensor, root, comm))

    def all_gather_single(self, out: torch.Tensor, inp: torch.Tensor, opts: Any = None) -> OneCCLWork:
        """(n) -> (size x n)."""
        _dense(out), _dense(inp)
        return self._main.submit("all-gather", lambda comm: self._lib.all_gather(out, inp, comm))

    def allgather(
        self, outs: Sequence[Sequence[torch.Tensor]], inps: Sequence[torch.Tensor], opts: Any = None
    ) -> OneCCLWork:
        """List form: one output tensor a member."""
        inp, parts = inps[0].contiguous(), outs[0]
        flat = inp.new_empty(self._size * inp.numel())

        def call(comm: ctypes.c_void_p) -> None:
            self._lib.all_gather(flat, inp, comm)
            for part, got in zip(parts, flat.chunk(self._size), strict=True):
                part.copy_(got.view_as(part))

        return self._main.submit("all-gather", call)

    def reduce_scatter_single(self, out: torch.Tensor, inp: torch.Tensor, opts: Any = None) -> OneCCLWork:
        """(size x n) -> (n)."""
        _dense(out), _dense(inp)
        op = _op(opts)
        return self._main.submit("reduce-scatter", lambda comm: self._lib.reduce_scatter(out, inp, op, comm))

    def all_to_all_single(
        self, out: torch.Tensor, inp: torch.Tensor, out_sizes: list[int], in_sizes: list[int], opts: Any = None
    ) -> OneCCLWork:
        """Equal splits only; zero-sized ones are refused, since oneCCL may hang on them.

        Raises:
            ValueError: unequal splits or nothing to send.
        """
        if len(set(out_sizes) | set(in_sizes)) > 1 or inp.numel() == 0:
            raise ValueError(
                f"oneCCL all-to-all needs equal, non-empty splits, got {in_sizes} -> {out_sizes}; pad them"
            )
        _dense(out), _dense(inp)
        return self._main.submit("all-to-all", lambda comm: self._lib.all_to_all(out, inp, self._size, comm))

    def barrier(self, opts: Any = None) -> OneCCLWork:
        """An all-reduce of one element."""
        token = torch.zeros(1)
        return self._main.submit("barrier", lambda comm: self._lib.all_reduce(token, 0, comm))

    # torch before 2.13 calls the same collectives by these names.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def shutdown(self) -> None:
        """Let the thread end; the communicator goes with the process."""
        self._main.close()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"oneCCL needs contiguous tensors, got strides {tensor.stride()}; call contiguous()")
    return tensor


def _op(opts: Any) -> int:
    """oneCCL's number for `opts.reduceOp`; SUM without options. AVG is refused: sum, then divide."""
    if opts is None:
        return 0
    for op, number in _OPS.items():
        if opts.reduceOp == op:
            return number
    raise ValueError(f"oneCCL has no {opts.reduceOp}; use SUM, then divide")


def register() -> str:
    """Make the backend known to torch, once a process; returns its name for `new_group(backend=…)`."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, OneCCLGroup, devices=["cpu"])
    return BACKEND
