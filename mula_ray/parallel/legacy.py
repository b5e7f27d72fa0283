"""Intel's retired packages, `intel-extension-for-pytorch` and `oneccl_bindings_for_pytorch`: detected, never required.

torch carries XPU devices and the xccl backend itself from 2.8 on; only below that are these packages used, where they
are installed: the extension makes torch see the devices, the bindings make the groups (their backend `ccl`). With a
newer torch they are reported and left alone. Not run on an XPU here; detection and training on the CPU beside the
extension were (docs/verified.d/cli.md).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mula_ray.config.errors import UserError

EXTENSION, BINDINGS = "intel-extension-for-pytorch", "oneccl_bindings_for_pytorch"
NATIVE_SINCE = (2, 8)


@dataclass(frozen=True)
class Legacy:
    """What is installed, by version; None: not there."""

    torch: str
    extension: str | None
    bindings: str | None

    @property
    def wanted(self) -> bool:
        """Whether this torch needs them for an XPU."""
        return tuple(int(part) for part in self.torch.split("+")[0].split(".")[:2]) < NATIVE_SINCE


def find_legacy() -> Legacy:
    """Looks at what is installed; imports nothing."""
    return Legacy(version("torch"), _version(EXTENSION), _version(BINDINGS))


def show_devices(legacy: Legacy) -> None:
    """Before torch is asked for XPUs: the extension registers them with an old torch."""
    if legacy.wanted and legacy.extension is not None:
        importlib.import_module("intel_extension_for_pytorch")


def make_legacy_group(legacy: Legacy, store: Any, index: int, size: int, timeout: timedelta) -> Any:
    """A group of the bindings' backend.

    Raises:
        UserError: torch has no xccl, and the bindings are not there.
    """
    if legacy.bindings is None:
        raise UserError(
            f"torch {legacy.torch} has no xccl backend and {BINDINGS} is not installed; use an XPU build of torch "
            f">= 2.8, or pip install {BINDINGS} of torch's version"
        )
    import torch.distributed as dist

    importlib.import_module("oneccl_bindings_for_pytorch")
    plugin = dist.Backend._plugins["CCL"]
    return plugin.creator_fn(store, index, size, timeout)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
