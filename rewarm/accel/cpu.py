"""What MLX is slow at on a Linux x86 CPU, by other operations of its own (docs/accel.md).

There its exponential takes some 15 ns for a number, and a multiplication less than one. So a
sigmoid is a quotient of polynomials here, attention has an exponential made of multiplications and
additions, and a depthwise convolution is a sum of shifted products. All of them are more operations
than MLX's own, so what is short goes through those.
"""

from __future__ import annotations

import functools
import importlib
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx

from . import is_off
from .replace import Place, note, put

nn: Any = importlib.import_module("mlx.nn")  # its names come by a star, which mypy does not follow

# tanh(x) = x P(x^2) / Q(x^2) up to TANH_END, to 1e-8; beyond it is 1 to 1.3e-7.
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
# log 2 in two parts, of which the first has few digits: its product with a whole number is exact.
LOG_2 = (0.693359375, -2.12194440e-4)
# exp(x) to 1e-8 for |x| up to half of log 2, by increasing powers.
EXP = (
    1.0000000006,
    1.00000003854,
    0.49999991591,
    0.166664102033,
    0.0416682892754,
    0.00837564859568,
    0.00138357808267,
)
ROUNDING = 1.5 * 2.0**23  # added to a float32, leaves the nearest whole number in its last bits
HIDDEN = -1e30  # a score that no score reaches
LOWEST = -87.0  # exp of less is no normal float32

BLOCK = 2**17
"""Scores that are worked on at a time, so that they stay in a core's cache."""
SHORTEST = 8
"""Tokens from which attention and convolutions are faster than MLX's own."""
MANY = 2**13
"""Numbers from which SiLU is."""

Operation = Callable[..., mx.array]

_stock: dict[str, Operation] = {}


def install() -> bool:
    """Make MLX use these on a Linux x86 CPU; says whether it does.

    To be called again after loading a model, which may have mlx-lm's functions by name.
    """
    if is_off() or not is_slow():
        return False
    if not _stock:
        _stock["silu"] = nn.silu
        _stock["convolution"] = nn.Conv1d.__call__
        _stock["attention"] = mx.fast.scaled_dot_product_attention
        for name, ours in (
            ("silu", _silu),
            ("convolution", _convolution),
            ("attention", _attention),
        ):
            note(ours, _stock[name])
        nn.silu = _silu
        nn.Conv1d.__call__ = _convolution
        mx.fast.scaled_dot_product_attention = _attention
    for place in COMPILED:
        put(place, _stock, f"{place.name} stays as it is")
    return True


def is_slow() -> bool:
    """Whether MLX's own are, where this runs."""
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
    Place("activations", "swiglu", ("gate", "x"), _swiglu),
    Place("activations", "precise_swiglu", ("h", "gate", "x"), _precise_swiglu),
    Place("iquestloopcoder", "_silu_mul", ("gate", "up"), _silu_mul),
    Place("step3p5", "clamped_swiglu", ("x", "gate", "limit"), _clamped_swiglu),
)
"""What mlx-lm compiles without shapes, with a SiLU in it. The one that it would find at its first
call, with however many tokens, would be its SiLU for ever."""


@functools.partial(mx.compile, shapeless=True)
def _powers(x: mx.array) -> tuple[mx.array, mx.array]:
    """exp(x) as m 2^n: m, and n in the last bits of a float."""
    x = mx.maximum(x, LOWEST)
    rounded = x * LOG2_E + ROUNDING
    n = rounded - ROUNDING
    rest = x - n * LOG_2[0] - n * LOG_2[1]
    return _polynomial(EXP, rest), rounded


def exp(x: mx.array) -> mx.array:
    """Of float32 numbers up to 0."""
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
    """Depthwise, of x [B, T, C] with weight [C, K, 1], without padding."""
    taps = mx.contiguous(weight[..., 0].T).astype(mx.float32)
    length = x.shape[1] - len(taps) + 1
    exact = x.astype(mx.float32)
    result = exact[:, :length] * taps[0]
    for i in range(1, len(taps)):
        result = result + exact[:, i : i + length] * taps[i]
    return result.astype(x.dtype)


def _convolution(self: Any, x: mx.array) -> mx.array:
    channels, taps, depth = self.weight.shape
    plain = (self.stride, self.padding, self.dilation) == (1, 0, 1)
    if (
        not (plain and depth == 1 and self.groups == channels == x.shape[-1])
        or x.shape[1] < SHORTEST + taps - 1
        or x.dtype != self.weight.dtype
        or mx.default_device() != mx.cpu
    ):
        return _stock["convolution"](self, x)
    y = convolution(x, self.weight)
    return y + self.bias if "bias" in self else y


def attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: mx.array | str | None = None
) -> mx.array:
    """Of q [B, Hq, T, D] to k and v [B, Hk, L, D], as `mx.fast.scaled_dot_product_attention`."""
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
    """What is added to the scores of the last `rows` tokens of `seen`, so that none looks ahead."""
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
    """Whether ours knows these. What is wrong with others is MLX's to say."""
    tokens, context = q.shape[2], k.shape[2]
    if tokens < SHORTEST or not context or not q.shape[0] == k.shape[0] == v.shape[0]:
        return False
    if isinstance(mask, str) and (mask != "causal" or tokens > context):
        return False
    return q.dtype == k.dtype == v.dtype
