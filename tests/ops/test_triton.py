"""The Triton kernels in Triton's interpreter: equal to the oracle, in every shape of routing.

The interpreter takes about a second a case, so the cases of `test_experts.py` are sampled here; all of them are slow.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed (pip install triton)")

import torch
from expert_cases import Case, assert_equal_to_oracle, make_case, relative_errors, run

from mula_ray.ops import triton_kernels
from mula_ray.ops.grouped import GroupedRows
from mula_ray.ops.triton_rows import TritonRows

pytestmark = pytest.mark.skipif(
    not triton_kernels.interpreted(), reason="Triton was imported before TRITON_INTERPRET=1 was set"
)
FP32, BF16 = 1e-5, 2e-2


def one_expert(tokens: int) -> Case:
    case = make_case(tokens, 16, 8, 5, 1)
    case.ids.fill_(3)
    return case


def elsewhere(tokens: int) -> Case:
    case = make_case(tokens, 16, 8, 5, 2)
    case.ids[:, 0] = -1
    case.ids[1::2, 1] = 5
    return case


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(make_case(33, 24, 20, 7, 3), id="t33-k3-e7"),
        pytest.param(make_case(1, 16, 8, 4, 4), id="one-token-k=E"),
        pytest.param(one_expert(9), id="all-to-one-expert"),
        pytest.param(elsewhere(6), id="slots-of-other-ranks"),
    ],
)
def test_equals_the_oracle(case: Case) -> None:
    assert_equal_to_oracle(case, "triton", FP32)


def test_bf16() -> None:
    assert_equal_to_oracle(make_case(17, 24, 20, 6, 2).to(torch.bfloat16), "triton", BF16)


def test_nothing_routed_here() -> None:
    case = make_case(3, 16, 8, 2, 1)
    case.ids.fill_(-1)
    assert all(tensor.count_nonzero() == 0 for tensor in run(case, "triton"))


def test_guard_and_deferred_weight_gradients() -> None:
    case = make_case(20, 16, 8, 4, 2)
    errors = relative_errors(run(case, "triton", chunk=16, defer=True), run(case, "triton"))
    assert max(errors.values()) <= 1e-6, errors


def test_bit_identical_and_inputs_that_are_not_contiguous() -> None:
    case = make_case(12, 16, 8, 4, 2)
    straight = run(case, "triton")
    case.hidden = case.hidden.t().contiguous().t()
    case.ids = case.ids.t().contiguous().t()
    case.weights = case.weights.repeat_interleave(2, dim=1)[:, ::2]
    assert all(torch.equal(a, b) for a, b in zip(run(case, "triton"), straight, strict=True))


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (50, 3, 5), (300, 4, 9)])
def test_counting_sort_equals_torchs(tokens: int, top_k: int, experts: int) -> None:
    ids = torch.randint(-1, experts + 2, (tokens, top_k), generator=torch.Generator().manual_seed(0))
    ours, theirs = TritonRows().plan(ids, experts), GroupedRows().plan(ids, experts)
    assert torch.equal(ours.offsets, theirs.offsets)
    assert torch.equal(ours.row_Tk, theirs.row_Tk)
    rows = int(ours.offsets[-1])
    assert torch.equal(ours.slot_N[:rows], theirs.slot_N[:rows])


@pytest.mark.slow
@pytest.mark.parametrize("tokens", range(1, 34))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_token_counts_and_slots(tokens: int, dtype: torch.dtype) -> None:
    for top_k in (1, 2, 7):
        case = make_case(tokens, 16, 12, 7, top_k, seed=tokens).to(dtype)
        assert_equal_to_oracle(case, "triton", FP32 if dtype == torch.float32 else BF16)
