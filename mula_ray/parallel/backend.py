"""Which device and which communication backend, and how a backend's group object is made.

Groups are built straight from the backend's own class and a store prefix, without torch's global registry: no state in
the module, no barrier over the whole world for each group (4 ranks, 4 groups: 6-17 ms with gloo), and a fresh process
of the next generation cannot meet a leftover of the last one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # re-exported by torch.distributed, untyped there

from mula_ray.config.errors import UserError
from mula_ray.parallel.legacy import find_legacy, make_legacy_group, show_devices

__all__ = [
    "BackendName", "PrefixStore", "Store", "TCPStore", "choose_backend", "choose_device", "gloo_device", "make_gloo",
    "make_group", "synchronize",
]  # fmt: skip
BackendName = Literal["gloo", "ccl", "xccl", "nccl"]
DeviceName = Literal["cpu", "cuda", "xpu"]


def choose_device(wanted: str, local_index: int = 0) -> torch.device:
    """`cluster.device` → the device of this rank: `auto` takes an accelerator if torch sees one, else the CPU.

    Raises:
        UserError: the wanted kind is not there.
    """
    if wanted in ("auto", "xpu"):
        show_devices(find_legacy())
    has = {"cuda": torch.cuda.is_available(), "xpu": hasattr(torch, "xpu") and torch.xpu.is_available(), "cpu": True}
    kind = next(name for name in ("xpu", "cuda", "cpu") if has[name]) if wanted == "auto" else wanted
    if not has[kind]:
        found = ", ".join(name for name, there in has.items() if there)
        raise UserError(f"cluster.device is {wanted}, but torch finds only: {found}; use one of these or auto")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if kind == "cuda" else torch.xpu.device_count()
    return torch.device(kind, local_index % count)


def choose_backend(wanted: str, device: torch.device) -> BackendName:
    """`parallel.backend` → the backend of the device groups. The control group is gloo always.

    Raises:
        UserError: the wanted backend does not carry tensors of the device.
    """
    natural: dict[str, BackendName] = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
    legal: dict[str, tuple[BackendName, ...]] = {"cpu": ("gloo", "ccl"), "cuda": ("nccl",), "xpu": ("xccl", "ccl")}
    if wanted == "auto":
        return natural[device.type]
    for name in legal[device.type]:
        if name == wanted:
            return name
    raise UserError(
        f"parallel.backend is {wanted}, which does not carry tensors of device {device.type}; "
        f"use one of {', '.join(legal[device.type])}, or auto"
    )


def gloo_device(interface: str | None = None) -> Any:
    """One transport endpoint that all gloo groups of a process share.

    Without `interface`, loopback-only machines included, gloo resolves the host's own name.
    """
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


def make_gloo(store: Store, index: int, size: int, timeout: timedelta, transport: Any) -> Any:
    """A gloo group object; `transport` from `gloo_device`."""
    options: Any = getattr(dist.ProcessGroupGloo, "_Options")()  # noqa: B009
    options._devices = [transport]
    options._timeout = timeout
    options._threads = 2
    return dist.ProcessGroupGloo(store, index, size, options)


def make_group(name: BackendName, store: Store, index: int, size: int, timeout: timedelta, transport: Any) -> Any:
    """A group object of backend `name`: a torch `Backend` or `ProcessGroup`, they share the methods that we use.

    xccl and nccl were not run over several devices here.
    """
    if name == "gloo":
        return make_gloo(store, index, size, timeout, transport)
    if name == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, index, size, options)
    if name == "xccl" and not hasattr(dist, "ProcessGroupXCCL"):
        return make_legacy_group(find_legacy(), store, index, size, timeout)
    if name == "xccl":
        xccl: Any = getattr(dist, "ProcessGroupXCCL")  # noqa: B009
        xccl_options = xccl.Options()
        xccl_options._timeout = timeout
        return xccl(store, index, size, xccl_options)
    from mula_ray.parallel.oneccl import OneCCLGroup

    return OneCCLGroup(store, index, size, timeout)


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work; nothing to do on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "xpu":
        torch.xpu.synchronize(device)
