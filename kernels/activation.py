"""Activations and their derivatives on float32 tiles; `ops.activation` defines them."""

from typing import NamedTuple

import triton
import triton.language as tl


class Form(NamedTuple):
    """Constants of the function from gate and up to h; `moe_runtime.ops.activation` defines it."""

    ACT: str | None  # None: no activation is computed
    GATED: bool
    LIMIT: float  # 0: no limit
    UP_OFFSET: float
    INTERLEAVED: bool


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def activate(x, ACT: tl.constexpr):
    """act(x) on a float32 tile."""
    if ACT == "silu":
        return x * tl.sigmoid(x)
    elif ACT == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    elif ACT == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        return 0.5 * x * (1 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACT == "relu":
        return tl.where(x <= 0, 0.0, x)  # propagates NaN
    else:
        tl.static_assert(ACT == "relu2")
        positive = tl.where(x <= 0, 0.0, x)
        return positive * positive


@triton.jit
def activate_grad(x, ACT: tl.constexpr):
    """(act(x), d act(x) / dx) on a float32 tile."""
    if ACT == "silu":
        s = tl.sigmoid(x)
        value = x * s
        return value, s + value * (1 - s)
    elif ACT == "quick_gelu":
        s = tl.sigmoid(1.702 * x)
        value = x * s
        return value, s + 1.702 * value * (1 - s)
    elif ACT == "gelu":
        cdf = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        return x * cdf, cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACT == "gelu_tanh":
        t = _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        slope = 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
        return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope
    elif ACT == "relu":
        return tl.where(x <= 0, 0.0, x), tl.where(x <= 0, 0.0, 1.0)
    else:
        tl.static_assert(ACT == "relu2")
        positive = tl.where(x <= 0, 0.0, x)
        return positive * positive, 2 * positive


@triton.jit
def below(x, LIMIT: tl.constexpr):
    """min(x, LIMIT), propagating NaN. A LIMIT of 0 means no limit."""
    if LIMIT > 0:
        x = tl.where(x > LIMIT, LIMIT, x)
    return x


@triton.jit
def shifted(up, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr):
    """clamp(up, -LIMIT, LIMIT) + UP_OFFSET, the factor of the activation."""
    if LIMIT > 0:
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if UP_OFFSET != 0:
        up = up + UP_OFFSET
    return up
