"""Faster SiLU, attention and depthwise convolutions on a Linux x86 CPU (docs/accel.md).

MLX's exponential takes some 15 ns for a number there, and a multiplication less than one. So a
sigmoid is a quotient of polynomials here, attention has an exponential made of multiplications and
additions, and a depthwise convolution is a sum of shifted products. These are more operations than
MLX's own, so MLX's own functions compute short inputs.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx

from . import is_off
from .depthwise import is_depthwise, with_bias
from .replacement import Replacement, nn, put, swap

# tanh(x) = x P(x^2) / Q(x^2) up to TANH_END, within 1e-8. Beyond, tanh(x) is 1 within 1.3e-7.
TANH_END = 8.3
TANH_P = (
    0.9999999906635215,
    0.13425857794405532,
    0.003549153970207857,
    2.150823868635677e-05,
    1.4647882281948825e-08,
)
TANH_Q = (
    1.0,
    0.4675918261969173,
    0.026079892299108384,
    0.0003373925357328907,
    8.294959094119162e-07,
)

LOG2_E = 1.44269504
# log 2 in two parts. The first one has few digits, so its product with a whole number is exact.
LOG_2 = (0.693359375, -2.12194440e-4)
# The coefficients of exp(x) within 1e-8 for |x| up to half of log 2, by increasing powers.
EXP = (
    1.0000000006,
    1.00000003854,
    0.49999991591,
    0.166664102033,
    0.0416682892754,
    0.00837564859568,
    0.00138357808267,
)
ROUNDING = 1.5 * 2.0**23
"""Added to a float32, it leaves the nearest whole number in the last bits of the sum."""
HIDDEN = -1e30
"""The score of a key that a query must not see: lower than all real scores."""
LOWEST = -87.0
"""The exponential of a lower number is not a normal float32."""

BLOCK = 2**17
"""Scores that are computed at a time, so that they stay in a core's cache."""
SHORTEST = 8
"""Tokens from which attention and convolutions are faster than MLX's own."""
MANY = 2**13
"""Numbers from which SiLU is faster than MLX's own."""

Operation = Callable[..., mx.array]

_stock: dict[str, Operation] = {}


def install() -> bool:
    """Make MLX use these functions on a Linux x86 CPU; return true where it does.

    Call it again after a model is loaded: the model's module may have imported functions of mlx-lm
    by their names.
    """
    if is_off() or not is_slow():
        return False
    if not _stock:
        _stock["silu"] = swap(nn, "silu", _silu)
        _stock["convolution"] = swap(nn.Conv1d, "__call__", _convolution)
        _stock["attention"] = swap(mx.fast, "scaled_dot_product_attention", _attention)
    for new in COMPILED:
        put(new, _stock, f"{new.name} stays as it is")
    return True


def is_slow() -> bool:
    """True where MLX's own functions are slow."""
    here = sys.platform, platform.machine()
    return here == ("linux", "x86_64") and mx.default_device() == mx.cpu


@functools.partial(mx.compile, shapeless=True)
def silu(x: mx.array) -> mx.array:
    half = x.astype(mx.float32) * 0.5
    near = mx.minimum(mx.maximum(half, -TANH_END), TANH_END)
    square = near * near
    tanh = near * _polynomial(TANH_P, square) / _polynomial(TANH_Q, square)
    return (half + half * tanh).astype(x.dtype)


@functools.partial(mx.compile, shapeless=True)
def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return silu(gate) * x


def _is_many(x: mx.array) -> bool:
    return x.size >= MANY and mx.default_device() == mx.cpu


def _silu(x: mx.array) -> mx.array:
    return silu(x) if _is_many(x) else _stock["silu"](x)


def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return swiglu(gate, x) if _is_many(x) else _stock["swiglu"](gate, x)


def _silu_mul(gate: mx.array, up: mx.array) -> mx.array:
    return swiglu(gate, up) if _is_many(up) else _stock["_silu_mul"](gate, up)


def _precise_swiglu(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    if not _is_many(x):
        return _stock["precise_swiglu"](h, gate, x)
    return swiglu(gate.astype(mx.float32), x.astype(mx.float32)).astype(h.dtype)


def _clamped_swiglu(x: mx.array, gate: mx.array, limit: float) -> mx.array:
    if not _is_many(x):
        return _stock["clamped_swiglu"](x, gate, limit)
    return mx.minimum(silu(gate), limit) * mx.clip(x, -limit, limit)


COMPILED = (
    Replacement("activations", "swiglu", ("gate", "x"), _swiglu),
    Replacement("activations", "precise_swiglu", ("h", "gate", "x"), _precise_swiglu),
    Replacement("iquestloopcoder", "_silu_mul", ("gate", "up"), _silu_mul),
    Replacement("step3p5", "clamped_swiglu", ("x", "gate", "limit"), _clamped_swiglu),
)
"""Functions with a SiLU in them that mlx-lm compiles for all shapes at once. They are replaced as a
whole: the SiLU that is in place at such a function's first call stays in it for inputs of every
length."""


@functools.partial(mx.compile, shapeless=True)
def _powers(x: mx.array) -> tuple[mx.array, mx.array]:
    """Give exp(x) as m 2^n: m, and n in the last bits of a float."""
    x = mx.maximum(x, LOWEST)
    rounded = x * LOG2_E + ROUNDING
    n = rounded - ROUNDING
    rest = x - n * LOG_2[0] - n * LOG_2[1]
    return _polynomial(EXP, rest), rounded


def exp(x: mx.array) -> mx.array:
    """Return the exponential of float32 numbers up to 0."""
    return cast(mx.array, _exp(x))


@mx.custom_function
def _exp(x: mx.array) -> mx.array:
    m, n = _powers(x)
    return (m.view(mx.int32) + mx.left_shift(n.view(mx.int32), 23)).view(mx.float32)


@_exp.vjp
def _exp_vjp(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    return cotangent * output


def _polynomial(coefficients: Sequence[float], x: mx.array) -> mx.array:
    result = x * coefficients[-1] + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        result = result * x + coefficient
    return result


def convolution(x: mx.array, weight: mx.array) -> mx.array:
    """Compute a depthwise convolution of x [B, T, C] with weight [C, K, 1], without padding."""
    taps = mx.contiguous(weight[..., 0].T).astype(mx.float32)
    length = x.shape[1] - len(taps) + 1
    exact = x.astype(mx.float32)
    result = exact[:, :length] * taps[0]
    for i in range(1, len(taps)):
        result = result + exact[:, i : i + length] * taps[i]
    return result.astype(x.dtype)


def _convolution(self: Any, x: mx.array) -> mx.array:
    is_long = x.shape[1] >= SHORTEST + self.weight.shape[1] - 1
    if not (is_depthwise(self, x) and is_long and mx.default_device() == mx.cpu):
        return _stock["convolution"](self, x)
    return with_bias(self, convolution(x, self.weight))


def attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: mx.array | str | None = None
) -> mx.array:
    """Compute attention of q [B, Hq, T, D] to k and v [B, Hk, L, D].

    It takes the arguments of `mx.fast.scaled_dot_product_attention`."""
    batch, heads, length, dim = q.shape
    key_heads, context = k.shape[1:3]
    grouped = (q.astype(mx.float32) * scale).reshape(batch, key_heads, -1, length, dim)
    keys = k.astype(mx.float32)[:, :, None].swapaxes(-1, -2)
    values = v.astype(mx.float32)[:, :, None]
    if isinstance(mask, mx.array):
        mask = mx.broadcast_to(mask, (batch, heads, length, context))
        mask = mask.reshape(batch, key_heads, -1, length, context)
    rows = max(16, BLOCK // (batch * heads * context))
    parts = []
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        seen = context - length + stop if isinstance(mask, str) else context
        scores = grouped[..., start:stop, :] @ keys[..., :seen]
        if isinstance(mask, str):
            scores = scores + _causal(stop - start, seen)
        elif mask is not None and mask.dtype == mx.bool_:
            scores = mx.where(mask[..., start:stop, :], scores, HIDDEN)
        elif mask is not None:
            scores = scores + mask[..., start:stop, :]
        weights = exp(scores - scores.max(axis=-1, keepdims=True))
        total = weights.sum(axis=-1, keepdims=True)
        parts.append((weights @ values[..., :seen, :]) / total)
    y = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=3)
    return y.reshape(batch, heads, length, -1).astype(q.dtype)


def _causal(rows: int, seen: int) -> mx.array:
    """Return what to add to the scores of the last `rows` of `seen` tokens, so that no token sees
    a later one."""
    ahead = mx.triu(mx.full((rows, rows), HIDDEN), k=1)
    return mx.pad(ahead, [(0, 0), (seen - rows, 0)])


def _attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    **options: Any,
) -> mx.array:
    if sinks is None and not options and mx.default_device() == mx.cpu and _fits(q, k, v, mask):
        return attention(q, k, v, scale=scale, mask=mask)
    return _stock["attention"](q, k, v, scale=scale, mask=mask, sinks=sinks, **options)


def _fits(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str | None) -> bool:
    """True where our attention takes these arguments. For wrong ones, MLX's own raises."""
    tokens, context = q.shape[2], k.shape[2]
    if tokens < SHORTEST or not context or not q.shape[0] == k.shape[0] == v.shape[0]:
        return False
    if isinstance(mask, str) and (mask != "causal" or tokens > context):
        return False
    return q.dtype == k.dtype == v.dtype
