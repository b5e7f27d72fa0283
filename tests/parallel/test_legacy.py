"""Intel's retired packages: seen when they are there, used only with a torch that needs them, never required."""

import sys
import types
from datetime import timedelta

import pytest
import torch.distributed as dist

from mula_ray.config.errors import UserError
from mula_ray.parallel import backend
from mula_ray.parallel.legacy import Legacy, find_legacy, make_legacy_group, show_devices


@pytest.mark.parametrize(
    ("torch", "wanted"), [("2.7.1+xpu", True), ("2.8.0", False), ("2.13.0+cpu", False), ("1.13.1", True)]
)
def test_only_an_old_torch_wants_them(torch: str, wanted: bool) -> None:
    assert Legacy(torch, None, None).wanted is wanted


def test_without_them_nothing_is_missing() -> None:
    found = find_legacy()
    assert not found.wanted
    show_devices(found)
    assert backend.choose_device("auto").type in ("cpu", "cuda", "xpu")


def test_the_extension_is_imported_for_an_old_torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", None)  # an import of it raises
    show_devices(Legacy("2.13.0", "2.8.0", None))
    with pytest.raises(ImportError):
        show_devices(Legacy("2.7.1", "2.7.10", None))


def test_groups_of_an_old_torch_come_from_the_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="has no xccl backend and oneccl_bindings_for_pytorch is not installed"):
        make_legacy_group(Legacy("2.7.1", None, None), None, 0, 2, timedelta(seconds=1))
    monkeypatch.setitem(sys.modules, "oneccl_bindings_for_pytorch", types.ModuleType("oneccl_bindings_for_pytorch"))
    plugin = types.SimpleNamespace(creator_fn=lambda *args: args)
    monkeypatch.setitem(dist.Backend._plugins, "CCL", plugin)  # type: ignore[arg-type]
    made = make_legacy_group(Legacy("2.7.1", None, "2.7.0"), "store", 1, 2, timedelta(seconds=1))
    assert made == ("store", 1, 2, timedelta(seconds=1))
