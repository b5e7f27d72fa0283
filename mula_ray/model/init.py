"""Initial weights: each element a pure function of (seed, parameter name, global index).

So every layout starts from the same model, and a rank makes only what it holds. Counter-based: the 64-bit hash of the
element's index (splitmix64, Steele et al. 2014) goes through the inverse of the normal distribution. Only operations
that IEEE 754 rounds exactly are used (no log, no cosine of a maths library), so all machines agree to the bit.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_CHUNK = 1 << 15  # elements in flight: the temporaries stay in the L2 cache
_TAIL = 0.02425
# Rational approximation of the inverse normal distribution by P. J. Acklam, relative error 1.2e-9.
_A = (
    -39.69683028665376,
    220.9460984245205,
    -275.9285104469687,
    138.3577518672690,
    -30.66479806614716,
    2.506628277459239,
)
_B = (-54.47609879822406, 161.5858368580409, -155.6989798598866, 66.80131188771972, -13.28068155288572, 1.0)
_C = (
    -0.007784894002430293,
    -0.3223964580411365,
    -2.400758277161838,
    -2.549732539343734,
    4.374664141464968,
    2.938163982698783,
)
_D = (0.007784695709041462, 0.3224671290700398, 2.445134137142996, 3.754408661907416, 1.0)

F64 = npt.NDArray[np.float64]


def init_param(
    name: str,
    seed: int,
    global_shape: tuple[int, ...],
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    init: Literal["normal", "ones"],
    std: float,
) -> Tensor:
    """The box (`offset`, `shape`) of the initial value of parameter `name`, fp32, on the CPU.

    Args:
        global_shape: shape of the whole parameter; its row-major index is the counter.
        init: "normal" draws Normal(0, std), "ones" is the norms' start.

    Returns:
        a new tensor of `shape`: bit for bit the slice of the whole tensor.
    """
    if init == "ones":
        return torch.ones(shape)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    key = np.uint64(int.from_bytes(digest, "little"))
    out = np.empty(math.prod(shape), dtype=np.float32)
    done = 0
    for start, length in _runs(global_shape, offset, shape):
        for at in range(0, length, _CHUNK):
            count = min(_CHUNK, length - at)
            out[done : done + count] = _normal(key, start + at, count) * std
            done += count
    return torch.from_numpy(out.reshape(shape))


def _runs(global_shape: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first global index, length) of the contiguous runs that make up the box, in row-major order."""
    strides = [math.prod(global_shape[dim + 1 :]) for dim in range(len(shape))]
    inner = len(shape)  # dims from here on are held whole: they belong to the run
    while inner > 0 and shape[inner - 1] == global_shape[inner - 1]:
        inner -= 1
    split = max(inner - 1, 0)
    length = math.prod(shape[split:])
    tail = offset[split] * strides[split] if shape else 0
    rows = itertools.product(*(range(offset[dim], offset[dim] + shape[dim]) for dim in range(split)))
    return [(sum(i * s for i, s in zip(row, strides, strict=False)) + tail, length) for row in rows]


def _normal(key: np.uint64, start: int, count: int) -> F64:
    """Standard normal values of the elements start .. start+count-1."""
    bits = np.arange(start, start + count, dtype=np.uint64)
    bits = (bits + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # never 0 or 1
    return _inverse_normal(uniform)


def _inverse_normal(p: F64) -> F64:
    """Quantile of the standard normal distribution, 0 < p < 1."""
    q = p - 0.5
    r = q * q
    x = q * _horner(_A, r) / _horner(_B, r)
    low = np.minimum(p, 1.0 - p)
    (tail,) = np.nonzero(low < _TAIL)
    s = np.sqrt(-2.0 * _log(low[tail]))
    x[tail] = np.copysign(_horner(_C, s) / _horner(_D, s), q[tail])
    return x


def _horner(coefficients: tuple[float, ...], x: F64) -> F64:
    value = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        value *= x
        value += c
    return value


def _log(x: F64) -> F64:
    """Natural logarithm from additions, multiplications and one division, so that every machine rounds alike."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa = np.where(low, 2.0 * mantissa, mantissa)
    power: npt.NDArray[Any] = exponent - low
    t = (mantissa - 1.0) / (mantissa + 1.0)  # |t| < 0.172: log m = 2 (t + t^3/3 + t^5/5 + ...)
    series = _horner(tuple(1.0 / n for n in range(19, 0, -2)), t * t)
    return 2.0 * t * series + power * math.log(2.0)
