"""The optional C++ passes: built once, safe when many start together, replaced audibly where they cannot be built."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from expert_cases import assert_equal_to_oracle, make_case

from mula_ray.ops import kernel
from mula_ray.ops.kernel import KernelPasses, KernelUnavailable, load_kernel
from mula_ray.ops.passes import TorchPasses
from mula_ray.ops.runtime import Runtime

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="no C++ compiler here"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mula_ray"


@needs_compiler
def test_many_that_start_together_build_one_library(cache: Path) -> None:
    failures: list[BaseException] = []

    def load() -> None:
        try:
            load_kernel()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [path.suffix for path in cache.iterdir()] == [".so"]
    assert cache.stat().st_mode & 0o077 == 0  # code is loaded from here


def test_without_a_compiler_torch_takes_over_and_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.warns(RuntimeWarning, match=r"no C\+\+ compiler.*torch operations are used"):
        assert isinstance(Runtime().passes("cpu_kernel"), TorchPasses)


@needs_compiler
def test_a_build_that_fails_says_what_the_compiler_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_FLAGS", ("--no-such-flag",))
    with pytest.raises(KernelUnavailable, match="no-such-flag"):
        load_kernel()
    assert list(cache.iterdir()) == []
    with pytest.warns(RuntimeWarning, match="no-such-flag"):
        assert_equal_to_oracle(make_case(9, 16, 8, 4, 2), "auto", 1e-5)


@needs_compiler
def test_a_folder_that_others_can_write_is_not_trusted(cache: Path) -> None:
    cache.mkdir()
    os.chmod(cache, 0o777)
    with pytest.raises(KernelUnavailable, match="others can write"):
        load_kernel()


@needs_compiler
@pytest.mark.parametrize("width", [1, 5, 16, 33])
def test_passes_equal_torchs_at_extreme_values(width: int) -> None:
    rows, gen = 11, torch.Generator().manual_seed(0)
    h = torch.randn(rows, 2 * width, generator=gen) * 40
    weight, dact = torch.rand(rows, generator=gen), torch.randn(rows, width, generator=gen)
    weight[3] = 0.0
    results = []
    for passes in (TorchPasses(), KernelPasses(load_kernel())):
        act, act_again, dh, dweight = (torch.empty(rows, n) for n in (width, width, 2 * width, 1))
        passes.swiglu(h, weight, act)
        passes.swiglu_backward(h, weight, dact.clone(), act_again, dh, dweight.view(-1))
        results.append((act, act_again, dh, dweight))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_counting_sort_equals_torchs() -> None:
    ids = torch.randint(-2, 9, (77, 3), generator=torch.Generator().manual_seed(0))
    ours, theirs = KernelPasses(load_kernel()).plan(ids, 7), TorchPasses().plan(ids, 7)
    assert ours.offsets == theirs.offsets
    assert torch.equal(ours.slot_N, theirs.slot_N)
    assert torch.equal(ours.token_N, theirs.token_N)
