"""Launch the CUDA kernel of the gated delta rule, for the shapes that it takes (docs/accel.md)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

from .device import is_cuda
from .kernels.delta import HEADER, SOURCE
from .launch import CHECKED, FLOATS, Launch, agree, kernel

Rule = Callable[..., tuple[mx.array, mx.array]]

HALF = 128
"""Threads of a block that hold the state. As many others load the tokens."""
FULL = 100
"""With fewer blocks than this, some processors of a large GPU have none."""


class Form(NamedTuple):
    """A way to divide the state of a head among threads."""

    lanes: int
    """Threads that share a row."""
    rows: int
    """Rows that a thread has a share of."""

    @property
    def block(self) -> int:
        return HALF // self.lanes * self.rows


def form(key_dim: int, value_dim: int, heads: int) -> Form | None:
    """Return the form for heads of such sizes, or None where the kernel has none.

    It does not depend on the number of sequences: a prompt gives the same bits in a batch as alone.
    With more rows a thread reads keys less often for each row, and there are fewer blocks.
    """
    parts = key_dim // 4
    lanes = next((x for x in (32, 16) if parts % x == 0 and parts > x), 8)
    for rows in (4, 2, 1):
        found = Form(lanes, rows)
        fits = key_dim * rows <= 32 * lanes or rows == 1  # in registers
        summed = rows * 4 <= lanes  # a thread gets one sum at most, of four tokens
        fills = rows < 4 or heads * value_dim >= FULL * found.block
        if fits and summed and fills and value_dim % found.block == 0:
            return found
    return None


class DeltaVariant(NamedTuple):
    """The properties for which the kernel is compiled and checked once."""

    queries: mx.Dtype
    values: mx.Dtype
    gates: mx.Dtype
    writes: mx.Dtype
    key_dim: int
    value_dim: int
    heads: int
    by_key: bool
    masked: bool


def variant_of(
    q: mx.array, v: mx.array, g: mx.array, beta: mx.array, mask: mx.array | None
) -> DeltaVariant:
    sizes = (q.shape[-1], v.shape[-1], v.shape[-2], g.ndim == 4, mask is not None)
    return DeltaVariant(q.dtype, v.dtype, g.dtype, beta.dtype, *sizes)


def fits(q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array) -> bool:
    """True where the kernel takes arrays like these, and there is a device for it."""
    return is_cuda() and _takes(q, k, v, g, beta)


def _takes(q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array) -> bool:
    key_dim = q.shape[-1]
    return (
        key_dim % 32 == 0
        and key_dim <= 256  # the state is in registers
        and form(key_dim, v.shape[-1], v.shape[-2]) is not None
        and v.shape[-2] % q.shape[-2] == 0
        and g.shape[3:] in ((), (key_dim,))
        and (q.shape, q.dtype) == (k.shape, k.dtype)
        and all(x.dtype in FLOATS for x in (q, v, g, beta))
    )


@functools.cache
def agrees(chunked: Rule, variant: DeltaVariant) -> bool:
    """Try the kernel on a few tokens, and return true where it agrees with the chunked form."""
    given = _sample(variant)
    return agree(
        "gated delta layers run in chunks", lambda: in_steps(*given), lambda: chunked(*given)
    )


def _sample(variant: DeltaVariant) -> tuple[Any, ...]:
    """Make random arguments: two sequences, and two heads to a key where their number is even."""
    heads = (2, CHECKED, variant.heads)
    shape = (2, CHECKED, variant.heads // (2 - variant.heads % 2), variant.key_dim)
    keys = [mx.random.key(i) for i in range(6)]
    q, k = (mx.random.normal(shape, key=key) * variant.key_dim**-0.5 for key in keys[:2])
    v = mx.random.normal((*heads, variant.value_dim), key=keys[2])
    g = mx.random.uniform(0.5, 1, (*heads, *[variant.key_dim] * variant.by_key), key=keys[3])
    beta = mx.random.uniform(0, 1, heads, key=keys[4])
    state = mx.random.normal((2, variant.heads, variant.value_dim, variant.key_dim), key=keys[5])
    mask = None
    if variant.masked:  # the outputs of masked tokens mean nothing, but a query of 0 reads 0
        mask = mx.arange(CHECKED)[None] >= mx.array([[0], [9]])
        q = mx.where(mask[..., None, None], q, 0)
    dtypes = (variant.queries, variant.queries, variant.values, variant.gates, variant.writes)
    arrays = (x.astype(dtype) for x, dtype in zip((q, k, v, g, beta), dtypes, strict=True))
    return *arrays, state, mask


def in_steps(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Compute what `delta.chunked` computes, for arrays that fit."""
    batch, length, heads, value_dim = v.shape
    if state is None:
        state = mx.zeros((batch, heads, value_dim, q.shape[-1]))
    given = [q, k, v, g, beta, state.astype(mx.float32)]
    if mask is not None:
        given.append(mx.broadcast_to(mask, (batch, length)).astype(mx.bool_))
    y, state = cast("Sequence[mx.array]", _launched(*given))
    return y, state


@mx.custom_function
def _launched(*given: mx.array) -> Sequence[mx.array]:
    q, _, v, g, beta, state = given[:6]
    batch, _, heads, value_dim = v.shape
    found = form(q.shape[-1], value_dim, heads)
    assert found is not None
    # MLX finds a compiled kernel by its name and template: what changes it must be in these.
    template = [
        *zip("TVGW", (q.dtype, v.dtype, g.dtype, beta.dtype), strict=True),
        ("Dk", q.shape[-1]),
        ("BY_KEY", g.ndim == 4),
        ("HALF", HALF),
        ("LANES", found.lanes),
        ("ROWS", found.rows),
    ]
    made: Sequence[mx.array] = _kernel(masked=len(given) > 6)(
        inputs=list(given),
        template=template,
        grid=(batch * heads * value_dim // found.block * 2 * HALF, 1, 1),
        threadgroup=(2 * HALF, 1, 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[q.dtype, mx.float32],
    )
    return made


@_launched.vjp
def _gradients(
    primals: Sequence[mx.array], cotangents: Sequence[mx.array], _: Sequence[mx.array]
) -> list[mx.array]:
    """Compute the gradients of the chunked form. mlx-lm trains through this function."""
    from .delta import chunked

    masks = list(primals[6:])

    def rule(*given: mx.array) -> list[mx.array]:
        return list(chunked(*given, *masks))

    _, found = mx.vjp(rule, list(primals[:6]), list(cotangents))
    return [*found, *map(mx.zeros_like, masks)]


@functools.cache
def _kernel(masked: bool) -> Launch:
    source = SOURCE.replace("COUNTS", "mask[t]" if masked else "true")
    inputs = ["q", "k", "v", "g", "beta", "state_in", *["mask"] * masked]
    return kernel("gated_delta", inputs, ["y", "state_out"], source, HEADER)
