"""Intel's oneCCL on a plain CPU, through its C interface (`libccl.so.2` of the `oneccl` extra).

The library finds its plugins by name, which normally needs LD_LIBRARY_PATH before the process starts. Here every
library it needs is loaded by its full path first, in order of dependence: the dynamic linker then finds each one by
its soname, and a rank needs no environment of its own. Only `CCL_PLUGIN` is set, at load.

Not run on Aurora: there torch's own `xccl` backend is used (see parallel/backend.py).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from functools import cache
from pathlib import Path

import torch

from mula_ray.config.errors import UserError

# Order matters: each library is loaded after those it needs.
_LOAD_ORDER = (
    "libintlc.so.5",
    "libimf.so",
    "libirng.so",
    "libsvml.so",
    "libumf.so.1",
    "libur_loader.so.0",
    "libsycl.so.*",
    "libccl.so.2",
    "libccl.so.1",
    "libccl_legacy_cpu.so",
)
_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_UNIQUE_ID_BYTES = 4096


class UniqueId(ctypes.Structure):
    """oneCCL's rendezvous id, passed by value."""

    _fields_ = [("data", ctypes.c_char * _UNIQUE_ID_BYTES)]

    def to_bytes(self) -> bytes:
        """All bytes, zeros included."""
        return ctypes.string_at(ctypes.byref(self), _UNIQUE_ID_BYTES)

    @classmethod
    def from_bytes(cls, data: bytes) -> UniqueId:
        """The id whose bytes another rank made."""
        return cls.from_buffer_copy(data)


def library_folder() -> Path | None:
    """Folder of the `oneccl` package's shared libraries, or None when the extra is not installed."""
    try:
        files = importlib.metadata.files("oneccl") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == "libccl.so.2":
            return Path(str(file.locate())).resolve().parent
    return None


class Library:
    """The C functions that training needs, each raising RuntimeError with oneCCL's own words."""

    def __init__(self, folder: Path) -> None:
        os.environ["CCL_PLUGIN"] = "ONECCL_LEGACY_CPU"
        os.environ.setdefault("CCL_LOG_LEVEL", "error")
        self._keep = [self._load(folder, pattern) for pattern in _LOAD_ORDER]
        self._lib = self._keep[_LOAD_ORDER.index("libccl.so.2")]
        self._declare()

    @staticmethod
    def _load(folder: Path, pattern: str) -> ctypes.CDLL:
        found = sorted(folder.glob(pattern), key=lambda path: len(path.name))
        if not found:
            raise UserError(
                f"oneCCL's folder {folder} has no {pattern}; reinstall the extra: pip install 'mula-ray[oneccl]'"
            )
        return ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)

    def _declare(self) -> None:
        ptr, size, num = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        lib = self._lib
        lib.onecclGetErrorString.restype = ctypes.c_char_p
        lib.onecclCommInitRank.argtypes = [ctypes.POINTER(ptr), size, UniqueId, num]
        lib.onecclCommDestroy.argtypes = [ptr]
        lib.onecclAllReduce.argtypes = [ptr, ptr, size, num, num, ptr, ptr]
        lib.onecclReduceScatter.argtypes = [ptr, ptr, size, num, num, ptr, ptr]
        lib.onecclAllGather.argtypes = [ptr, ptr, size, num, ptr, ptr]
        lib.onecclBroadcast.argtypes = [ptr, ptr, size, num, num, ptr, ptr]
        lib.onecclAllToAll.argtypes = [ptr, ptr, size, num, ptr, ptr]

    def _check(self, code: int, what: str) -> None:
        if code:
            raise RuntimeError(f"oneCCL {what} failed: {code} {self._lib.onecclGetErrorString(code).decode()}")

    def unique_id(self) -> UniqueId:
        """A fresh rendezvous id, to be carried to the other members."""
        uid = UniqueId()
        self._check(self._lib.onecclGetUniqueId(ctypes.byref(uid)), "unique id")
        return uid

    def init(self, uid: UniqueId, rank: int, size: int) -> ctypes.c_void_p:
        """Join the communicator of `size` members; blocks until all have come (oneCCL has no time-out)."""
        comm = ctypes.c_void_p()
        self._check(self._lib.onecclCommInitRank(ctypes.byref(comm), size, uid, rank), "communicator init")
        return comm

    def destroy(self, comm: ctypes.c_void_p) -> None:
        """Leave a communicator."""
        self._check(self._lib.onecclCommDestroy(comm), "communicator destroy")

    def all_reduce(self, tensor: torch.Tensor, op: int, comm: ctypes.c_void_p) -> None:
        """In place."""
        at = tensor.data_ptr()
        code = self._lib.onecclAllReduce(at, at, tensor.numel(), dtype_code(tensor), op, comm, None)
        self._check(code, "all-reduce")

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor, op: int, comm: ctypes.c_void_p) -> None:
        """`inp` has size x out.numel() elements."""
        code = self._lib.onecclReduceScatter(
            inp.data_ptr(), out.data_ptr(), out.numel(), dtype_code(out), op, comm, None
        )
        self._check(code, "reduce-scatter")

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, comm: ctypes.c_void_p) -> None:
        """`out` has size x inp.numel() elements."""
        code = self._lib.onecclAllGather(inp.data_ptr(), out.data_ptr(), inp.numel(), dtype_code(inp), comm, None)
        self._check(code, "all-gather")

    def broadcast(self, tensor: torch.Tensor, root: int, comm: ctypes.c_void_p) -> None:
        """In place."""
        at = tensor.data_ptr()
        code = self._lib.onecclBroadcast(at, at, tensor.numel(), dtype_code(tensor), root, comm, None)
        self._check(code, "broadcast")

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, size: int, comm: ctypes.c_void_p) -> None:
        """Equal splits: numel / size elements to each member."""
        code = self._lib.onecclAllToAll(
            inp.data_ptr(), out.data_ptr(), inp.numel() // size, dtype_code(inp), comm, None
        )
        self._check(code, "all-to-all")


def dtype_code(tensor: torch.Tensor) -> int:
    """oneCCL's number for the dtype of `tensor`.

    Raises:
        TypeError: oneCCL does not know the dtype (bool, int16).
    """
    code = _DTYPES.get(tensor.dtype)
    if code is None:
        raise TypeError(f"oneCCL has no {tensor.dtype}; send it as bytes (view(torch.uint8))")
    return code


@cache
def load_library() -> Library:
    """The library, loaded once a process.

    Raises:
        UserError: the `oneccl` extra is not installed.
    """
    folder = library_folder()
    if folder is None:
        raise UserError("parallel.backend is ccl, but oneCCL is not installed; pip install 'mula-ray[oneccl]'")
    return Library(folder)
