"""Run a function on several ranks: processes forked from a server that has torch loaded, a store hosted by the caller.

`run_ranks(fn, world, *args)` calls `fn(rank, world, port, *args)` on every rank and returns the results in rank order.
The first real exception of any rank is raised here with its traceback; the others are ended; nothing is left behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from mula_ray.config.environment import ALLOCATOR
from mula_ray.parallel.backend import TCPStore

PRELOAD = ["torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes", "mula_ray.train.engine"]


class RankFailed(AssertionError):
    """A rank raised; the message has its traceback."""


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 100.0, allocator: bool = False
) -> list[Any]:
    """Results of `fn(rank, world, port, *args)` on `world` ranks. `fn`, `args`: picklable.

    `allocator`: the fork server gets the ranks' allocator settings, as in a run, where this call is what starts it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks, pipes = [], []
    try:
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(fn, rank, world, store.port, args, theirs), daemon=True)
            with _variables(ALLOCATOR if allocator else {}):
                process.start()
            theirs.close()
            ranks.append(process)
            pipes.append(ours)
        return _collect(ranks, pipes, timeout)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
        del store


@contextlib.contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """For what is started meanwhile."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _collect(ranks: list[Any], pipes: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[int, str]] = []
    until = time.monotonic() + timeout
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        left = until - time.monotonic() if not failures else min(1.0, until - time.monotonic())
        ready = wait(list(open_pipes), timeout=max(0.0, left))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                good, value = pipe.recv()
            except EOFError:
                ranks[rank].join(1.0)
                good, value = False, f"rank {rank} died with exit code {ranks[rank].exitcode}"
            if good:
                results[rank] = pickle.loads(value)
            else:
                failures.append((rank, value))
    if failures:
        # A peer's broken connection is a consequence: show a failure of another kind first, if there is one.
        failures.sort(key=lambda item: "CollectiveError" in item[1] or "died with" in item[1])
        raise RankFailed(f"rank {failures[0][0]} of {len(ranks)}:\n{failures[0][1]}")
    if len(results) < len(ranks):
        missing = sorted(set(range(len(ranks))) - set(results))
        raise RankFailed(f"ranks {missing} gave no result within {timeout:.0f} s")
    return [results[rank] for rank in range(len(ranks))]


def _rank(fn: Callable[..., Any], rank: int, world: int, port: int, args: tuple[Any, ...], pipe: Connection) -> None:
    torch.set_num_threads(1)
    faulthandler.enable()
    try:
        value = pickle.dumps(fn(rank, world, port, *args))
        pipe.send((True, value))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    os._exit(0)
