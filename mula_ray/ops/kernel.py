"""The passes of `passes.py` fused in C++: built with the machine's compiler on first use, loaded through ctypes.

The library lies in a per-user cache folder under a name that hashes source, compiler and processor, so that machines
sharing a home folder do not run each other's code. It is built under a temporary name and renamed: processes that
start together are safe.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from mula_ray.ops.sorting import RowPlan

_SOURCE = Path(__file__).with_name("kernel.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp")
_BUILD_S = 120


class KernelUnavailable(RuntimeError):
    """There is no compiler, or the build failed; says why."""


class KernelPasses:
    """See `passes.Passes`; the same maths with one read and one write of every row."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._lib = library
        self._threads = torch.get_num_threads()

    def plan(self, ids_Tk: Tensor, experts: int) -> RowPlan:
        """`sorting.plan_rows`, in one pass over the slots."""
        ids = ids_Tk.contiguous()
        slots, top_k = ids.numel(), max(ids.shape[1], 1)
        slot, token = torch.empty(slots, dtype=torch.int64), torch.empty(slots, dtype=torch.int64)
        offsets, cursor = torch.empty(experts + 1, dtype=torch.int64), torch.empty(experts, dtype=torch.int64)
        self._lib.plan_rows(
            _at(ids), _i64(slots), _i64(top_k), _i64(experts), _at(slot), _at(token), _at(offsets), _at(cursor)
        )
        edges = tuple(offsets.tolist())
        return RowPlan(slot[: edges[-1]], token[: edges[-1]], edges)

    def gather(self, source_TH: Tensor, token_n: Tensor, out_nH: Tensor) -> None:
        """See `Passes`."""
        function = self._lib.gather_bf16 if source_TH.dtype == torch.bfloat16 else self._lib.gather_f32
        rows, width = out_nH.shape
        function(_at(source_TH), _at(token_n), _i64(rows), _i64(width), _at(out_nH), self._threads)

    def scatter_add(self, rows_nH: Tensor, token_n: Tensor, out_TH: Tensor) -> None:
        """See `Passes`."""
        rows, width = rows_nH.shape
        self._lib.scatter_add(_at(rows_nH), _at(token_n), _i64(rows), _i64(width), _at(out_TH), self._threads)

    def swiglu(self, h_n2I: Tensor, weight_n: Tensor, act_nI: Tensor) -> None:
        """See `Passes`."""
        rows, width = act_nI.shape
        self._lib.swiglu(_at(h_n2I), _at(weight_n), _i64(rows), _i64(width), _at(act_nI), self._threads)

    def swiglu_backward(
        self, h_n2I: Tensor, weight_n: Tensor, dact_nI: Tensor, act_nI: Tensor, dh_n2I: Tensor, dweight_n: Tensor
    ) -> None:
        """See `Passes`."""
        rows, width = act_nI.shape
        self._lib.swiglu_backward(
            _at(h_n2I), _at(weight_n), _at(dact_nI), _i64(rows), _i64(width), _at(act_nI), _at(dh_n2I), _at(dweight_n),
            self._threads,
        )  # fmt: skip


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _i64(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def load_kernel() -> ctypes.CDLL:
    """The library, built if this machine and version have none yet.

    Raises:
        KernelUnavailable: no compiler here, the build failed, or the cache folder cannot be written.
    """
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise KernelUnavailable("no C++ compiler (c++, g++, clang++) on the PATH")
    target = _cache_folder() / f"passes-{_fingerprint(compiler)}.so"
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_shared(target.parent)
        if not target.exists():
            _build(compiler, target)
        return ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        raise KernelUnavailable(
            f"building {_SOURCE.name} with {compiler} failed: {str(detail).strip()[-500:]}"
        ) from error


def _build(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / target.name
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(fresh)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_S)
        os.replace(fresh, target)


def _refuse_shared(folder: Path) -> None:
    """Code is loaded from here: nobody else may have put it there."""
    facts = folder.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise KernelUnavailable(f"others can write {folder}, and code is loaded from it; chmod 700 it")


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mula_ray"


def _fingerprint(compiler: str) -> str:
    path = Path(compiler).resolve()
    cpu = platform.machine()
    try:
        cpu += next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        cpu += platform.processor()
    made = f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}"
    text = "\n".join((_SOURCE.read_text(), made, cpu, *_FLAGS))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
