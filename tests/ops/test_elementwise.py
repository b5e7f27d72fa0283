"""RMS norm and rotation against plain autograd in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mula_ray.ops.elementwise import rms_norm, rotate_pairs


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("transposed", [False, True])
def test_rms_norm(dtype: torch.dtype, tolerance: float, transposed: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 7, 32, generator=gen), torch.rand(32, generator=gen)
    grad = torch.randn(3, 7, 32, generator=gen)
    if transposed:
        x, grad = x.transpose(0, 1), grad.transpose(0, 1)
    ours = [x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    out = rms_norm(*ours, 1e-5)
    expected = F.rms_norm(theirs[0], (32,), theirs[1], 1e-5)
    out.backward(grad.to(dtype))
    expected.backward(grad.to(dtype).double())
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))]
    for a, b in pairs:
        assert (a.double() - b).norm() <= tolerance * b.norm()
    assert out.dtype == dtype


def test_rotation_and_its_backward() -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, 8, generator=gen).transpose(1, 2).requires_grad_()  # (B, N, S, D), as heads are
    angle = torch.rand(1, 1, 5, 4, generator=gen)
    out = rotate_pairs(x, angle.cos(), angle.sin())
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(out, torch.cat([pairs.real, pairs.imag], dim=-1))
    grad = torch.randn(out.shape, generator=gen)
    (ours,) = torch.autograd.grad(out, x, grad, retain_graph=True)
    (theirs,) = torch.autograd.grad(torch.cat([pairs.real, pairs.imag], dim=-1), x, grad)
    torch.testing.assert_close(ours, theirs)
