"""What outlives a call of the expert computation: pooled memory and the built kernel."""

from __future__ import annotations

import warnings

from mula_ray.config.errors import UserError
from mula_ray.ops.grouped import GroupedRows
from mula_ray.ops.kernel import KernelPasses, KernelUnavailable, load_kernel
from mula_ray.ops.passes import Passes, TorchPasses
from mula_ray.ops.rows import RowOps
from mula_ray.ops.workspace import Workspace


class Runtime:
    """One a model: its layers share it. Holds no result of any call."""

    def __init__(self) -> None:
        self.workspace = Workspace()
        self._passes: dict[str, Passes] = {}
        self._row_ops: dict[str, RowOps] = {}

    def passes(self, backend: str) -> Passes:
        """The passes of backend `cpu` or `cpu_kernel`; `auto` is the kernel where it can be built."""
        if backend not in self._passes:
            self._passes[backend] = TorchPasses() if backend == "cpu" else _kernel_or_torch()
        return self._passes[backend]

    def row_ops(self, backend: str) -> RowOps:
        """The device operations of backend `grouped` or `triton`.

        Raises:
            UserError: triton is not installed.
        """
        if backend not in self._row_ops:
            self._row_ops[backend] = GroupedRows() if backend == "grouped" else _triton()
        return self._row_ops[backend]


def _triton() -> RowOps:
    try:
        from mula_ray.ops.triton_rows import TritonRows
    except ImportError as error:
        raise UserError(
            f"expert backend triton: {error}; install triton, or set model.moe.backend to grouped"
        ) from error
    return TritonRows()


def _kernel_or_torch() -> Passes:
    try:
        return KernelPasses(load_kernel())
    except KernelUnavailable as error:
        warnings.warn(
            f"expert backend cpu_kernel: {error}; torch operations are used instead", RuntimeWarning, stacklevel=4
        )
        return TorchPasses()
