"""What outlives a call of the expert computation: pooled memory and the built kernel."""

from __future__ import annotations

import warnings

from mula_ray.ops.kernel import KernelPasses, KernelUnavailable, load_kernel
from mula_ray.ops.passes import Passes, TorchPasses
from mula_ray.ops.workspace import Workspace


class Runtime:
    """One a model: its layers share it. Holds no result of any call."""

    def __init__(self) -> None:
        self.workspace = Workspace()
        self._passes: dict[str, Passes] = {}

    def passes(self, backend: str) -> Passes:
        """The passes of backend `cpu` or `cpu_kernel`; `auto` is the kernel where it can be built."""
        if backend not in self._passes:
            self._passes[backend] = TorchPasses() if backend == "cpu" else _kernel_or_torch()
        return self._passes[backend]


def _kernel_or_torch() -> Passes:
    try:
        return KernelPasses(load_kernel())
    except KernelUnavailable as error:
        warnings.warn(
            f"expert backend cpu_kernel: {error}; torch operations are used instead", RuntimeWarning, stacklevel=4
        )
        return TorchPasses()
