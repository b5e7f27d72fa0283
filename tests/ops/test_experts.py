"""Every backend that runs on a CPU equals the oracle: output and all gradients, in every shape of routing."""

from __future__ import annotations

import pytest
import torch
from expert_cases import Case, assert_equal_to_oracle, expected, make_case, relative_errors, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from mula_ray.config.errors import UserError
from mula_ray.ops.experts import expert_ffn
from mula_ray.ops.runtime import Runtime

BACKENDS = ["classic", "reference", "cpu", "cpu_kernel", "grouped"]
FAST = ["cpu", "cpu_kernel", "grouped"]
FP32, BF16 = 1e-5, 2e-2


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 33])
def test_token_counts(backend: str, tokens: int, runtime: Runtime) -> None:
    assert_equal_to_oracle(make_case(tokens, 32, 24, 7, 3), backend, FP32, runtime)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", range(1, 34))
def test_all_token_counts_and_slots(backend: str, tokens: int, runtime: Runtime) -> None:
    for top_k in range(1, 8):
        assert_equal_to_oracle(make_case(tokens, 32, 24, 7, top_k, seed=tokens), backend, FP32, runtime)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("top_k", [1, 4, 10])
def test_slots(backend: str, top_k: int, runtime: Runtime) -> None:
    assert_equal_to_oracle(make_case(19, 16, 8, 10, top_k), backend, FP32, runtime)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_to_one_expert_leaves_the_others_empty(backend: str, runtime: Runtime) -> None:
    case = make_case(40, 32, 16, 6, 1)
    case.ids.fill_(4)
    assert_equal_to_oracle(case, backend, FP32, runtime)
    ours = run(case, backend, runtime)
    assert ours[3][:4].count_nonzero() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_token_for_this_rank(backend: str, runtime: Runtime) -> None:
    case = make_case(9, 16, 8, 4, 2)
    case.ids[:] = torch.tensor([-1, 4])
    for tensor in run(case, backend, runtime):
        assert tensor.count_nonzero() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slice_of_the_experts(backend: str, runtime: Runtime) -> None:
    whole = make_case(24, 32, 16, 12, 5)
    parts = []
    for first in (0, 4, 8):
        part = Case(
            whole.hidden,
            whole.weights,
            whole.ids,
            whole.gate_up[first : first + 4],
            whole.down[first : first + 4],
            whole.grad,
        )
        parts.append(run(part, backend, runtime, first=first))
    joined = [sum(p[i] for p in parts) for i in range(3)] + [torch.cat([p[i] for p in parts]) for i in (3, 4)]
    errors = relative_errors(joined, expected(whole))
    assert max(errors.values()) <= FP32, errors


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expert_twice_in_a_token(backend: str, runtime: Runtime) -> None:
    case = make_case(64, 16, 8, 4, 3)
    case.ids[:, 2] = case.ids[:, 0]
    assert_equal_to_oracle(case, backend, FP32, runtime)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_that_are_not_contiguous(backend: str, runtime: Runtime) -> None:
    case = make_case(21, 32, 16, 5, 2)
    case.hidden = case.hidden.t().contiguous().t()
    case.weights = case.weights.repeat_interleave(2, dim=1)[:, ::2]
    case.ids = case.ids.t().contiguous().t()
    case.grad = torch.ones(1, 1).expand(21, 32)
    assert_equal_to_oracle(case, backend, FP32, runtime)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_of_any_integer_dtype(backend: str, dtype: torch.dtype, runtime: Runtime) -> None:
    case = make_case(33, 32, 16, 5, 3)
    want = expected(case)
    case.ids = case.ids.to(dtype)
    got = expert_ffn(
        case.hidden, case.weights, case.ids, nn.Parameter(case.gate_up), nn.Parameter(case.down),
        backend=backend, runtime=runtime,
    )  # fmt: skip
    torch.testing.assert_close(got.double(), want[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", FAST)
def test_no_tokens_at_all(backend: str, runtime: Runtime) -> None:
    out = run(make_case(0, 16, 8, 4, 2), backend, runtime)
    assert out[0].shape == (0, 16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16(backend: str, runtime: Runtime) -> None:
    case = make_case(33, 64, 32, 8, 3).to(torch.bfloat16)
    assert_equal_to_oracle(case, backend, BF16, runtime)
    assert run(case, backend, runtime)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("backend", FAST)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_routings(backend: str, runtime: Runtime, data: st.DataObject) -> None:
    tokens, experts = data.draw(st.integers(1, 33)), data.draw(st.integers(1, 13))
    top_k = data.draw(st.integers(1, experts))
    width = data.draw(st.sampled_from([8, 24] if backend == "grouped" else [1, 7, 8, 24]))
    case = make_case(tokens, 16, width, experts, top_k, data.draw(st.integers(0, 99)))
    slot = st.integers(-2, experts + 1)
    case.ids = torch.tensor(data.draw(st.lists(slot, min_size=tokens * top_k, max_size=tokens * top_k)))
    case.ids = case.ids.view(tokens, top_k)
    chunk = data.draw(st.sampled_from([0, 1, 5, 40]))
    assert_equal_to_oracle(case, backend, FP32, runtime, chunk=chunk, defer=data.draw(st.booleans()))


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("defer", [False, True])
def test_the_memory_guard_does_not_change_the_result(backend: str, defer: bool, runtime: Runtime) -> None:
    case = make_case(200, 32, 16, 6, 2)
    case.ids[:150] = torch.tensor([3, 1])
    free = run(case, backend, runtime, defer=defer)
    for chunk in (1, 64, 250):
        errors = relative_errors(run(case, backend, runtime, chunk=chunk, defer=defer), free)
        assert max(errors.values()) <= 1e-6, errors


@pytest.mark.parametrize("backend", FAST)
def test_bit_identical(backend: str, runtime: Runtime) -> None:
    case = make_case(300, 48, 40, 9, 4)
    for first, second in zip(run(case, backend, runtime), run(case, backend, runtime), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_add_up_in_the_persistent_buffer(backend: str, runtime: Runtime) -> None:
    case = make_case(12, 16, 8, 4, 2)
    gate_up, down = nn.Parameter(case.gate_up.clone()), nn.Parameter(case.down.clone())
    buffers = [torch.ones_like(gate_up), torch.ones_like(down)]
    gate_up.grad, down.grad = buffers
    for _ in range(2):  # also when nothing but the weights asks for a gradient
        out = expert_ffn(case.hidden, case.weights, case.ids, gate_up, down, backend=backend, runtime=runtime)
        out.backward(case.grad)
    assert gate_up.grad is buffers[0]
    torch.testing.assert_close(gate_up.grad.double(), 1 + 2 * expected(case)[3], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(down.grad.double(), 1 + 2 * expected(case)[4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", FAST)
def test_backward_twice_and_many_graphs_alive(backend: str, runtime: Runtime) -> None:
    """Pooled buffers come back only when nobody can ask for them any more."""
    cases = [make_case(50, 32, 16, 5, 2, seed=seed) for seed in range(3)]
    params = [nn.Parameter(cases[0].gate_up.clone()), nn.Parameter(cases[0].down.clone())]
    inputs = [case.hidden.clone().requires_grad_() for case in cases]
    outs = [
        expert_ffn(x, c.weights, c.ids, *params, backend=backend, runtime=runtime)
        for x, c in zip(inputs, cases, strict=True)
    ]
    for out, x, case in zip(outs, inputs, cases, strict=True):
        out.backward(case.grad, retain_graph=True)
        first = x.grad.clone()
        out.backward(case.grad)
        torch.testing.assert_close(x.grad, 2 * first)
        alone = Case(case.hidden, case.weights, case.ids, cases[0].gate_up, cases[0].down, case.grad)
        torch.testing.assert_close(first.double(), expected(alone)[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": torch.rand(8, 3)}, "routing weights (8, 3) and ids (8, 2)"),
        ({"weights": torch.ones(8, 2, dtype=torch.int64)}, "must be floating"),
        ({"ids": torch.zeros(8, 2)}, "must be integers"),
        ({"ids": torch.zeros(8, 2, dtype=torch.complex64)}, "must be integers"),
        ({"hidden": torch.rand(8, 15)}, "hidden (8, 15)"),
        ({"hidden": torch.tensor(1.0)}, "(tokens, hidden)"),
        ({"hidden": torch.rand(8, 16, dtype=torch.float64)}, "float32 or bfloat16"),
        ({"hidden": torch.rand(8, 16, dtype=torch.bfloat16)}, "dtype of hidden"),
        ({"down": torch.rand(4, 16, 9)}, "(R, H, I)"),
    ],
)
def test_bad_input_names_layer_and_rank(change: dict[str, torch.Tensor], said: str) -> None:
    case = make_case(8, 16, 8, 4, 2)
    values = {**case.__dict__, **change}
    with pytest.raises(UserError, match=r"layer 7 on rank 3") as caught:
        expert_ffn(
            values["hidden"], values["weights"], values["ids"], nn.Parameter(values["gate_up"]),
            nn.Parameter(values["down"]), where="experts of layer 7 on rank 3",
        )  # fmt: skip
    assert said in str(caught.value)


def test_half_frozen_experts_and_negative_bounds_are_refused() -> None:
    case = make_case(8, 16, 8, 4, 2)
    frozen, trained = nn.Parameter(case.gate_up, requires_grad=False), nn.Parameter(case.down)
    with pytest.raises(UserError, match="both are trained or neither"):
        expert_ffn(case.hidden, case.weights, case.ids, frozen, trained)
    with pytest.raises(UserError, match="chunk_tokens is -5"):
        expert_ffn(case.hidden, case.weights, case.ids, nn.Parameter(case.gate_up), trained, chunk_tokens=-5)


def test_backend_that_cannot_run_here() -> None:
    case = make_case(8, 16, 8, 4, 2)
    with pytest.raises(UserError, match="cannot run on cpu"):
        run(case, "no-such-backend")


def test_grouped_refuses_rows_that_torch_cannot_take() -> None:
    with pytest.raises(UserError, match="multiples of 16 bytes"):
        run(make_case(8, 16, 7, 4, 2), "grouped")
