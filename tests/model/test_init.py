"""Initial weights are a pure function of seed, name and global index."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mula_ray.model.init import _inverse_normal, init_param


def whole(shape: tuple[int, ...], name: str = "a", seed: int = 1) -> torch.Tensor:
    return init_param(name, seed, shape, (0,) * len(shape), shape, "normal", 0.02)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_box_is_the_slice_of_the_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    box = tuple(data.draw(st.integers(1, size - at)) for size, at in zip(shape, offset, strict=True))
    slices = tuple(slice(at, at + size) for at, size in zip(offset, box, strict=True))
    assert torch.equal(init_param("a", 1, shape, offset, box, "normal", 0.02), whole(shape)[slices])


def test_is_normal() -> None:
    values = whole((400, 1000)).double() / 0.02
    assert abs(values.mean().item()) < 5 / math.sqrt(values.numel())
    assert abs(values.std().item() - 1) < 0.01
    assert abs((values**4).mean().item() - 3) < 0.05
    neighbours = (values.flatten()[1:] * values.flatten()[:-1]).mean().item()
    assert abs(neighbours) < 5 / math.sqrt(values.numel())


def test_inverse_normal_against_pythons() -> None:
    p = np.array([1e-16, 1e-9, 1e-3, 0.02425, 0.024251, 0.3, 0.5, 0.9, 0.99999])
    expected = [statistics.NormalDist().inv_cdf(float(x)) for x in p]
    np.testing.assert_allclose(_inverse_normal(p), expected, rtol=1e-7, atol=1e-9)


def test_seeds_and_names_differ() -> None:
    assert not torch.equal(whole((50,)), whole((50,), name="b"))
    assert not torch.equal(whole((50,)), whole((50,), seed=2))


def test_values_are_pinned() -> None:
    """A changed generator would start every run from another model."""
    ours = init_param("model.norm.weight", 0, (4,), (0,), (4,), "normal", 1.0)
    assert ours.tolist() == pytest.approx(PINNED, abs=0)


def test_ones() -> None:
    assert torch.equal(init_param("n", 0, (8,), (2,), (3,), "ones", 1.0), torch.ones(3))


PINNED = [-0.9197186231613159, -1.91276216506958, 1.3651193380355835, -0.503750741481781]
