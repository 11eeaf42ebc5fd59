"""The gated delta rule in one CUDA kernel: for which shapes, and how it is launched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

from .device import is_cuda
from .kernels.delta import HEADER, SOURCE
from .launch import FLOATS, Launch, agree, kernel

Rule = Callable[..., tuple[mx.array, mx.array]]

HALF = 128  # threads of a block that have the state; as many bring tokens
FULL = 100  # blocks: with fewer, a large GPU has processors without any
CHECKED = 37  # tokens of the check before first use: more than one tile, the last one not full


class Form(NamedTuple):
    """How the state of a head is shared out."""

    lanes: int  # that share a row
    rows: int  # of a lane

    @property
    def block(self) -> int:
        return HALF // self.lanes * self.rows


def form(key_dim: int, value_dim: int, heads: int) -> Form | None:
    """The one for such heads, if there is one: of the sequence's heads, and not of how many
    sequences there are, since a prompt is to give the same bits in a batch as alone.

    More rows of a lane are fewer reads of keys for each, and fewer blocks.
    """
    parts = key_dim // 4
    lanes = next((x for x in (32, 16) if parts % x == 0 and parts > x), 8)
    for rows in (4, 2, 1):
        found = Form(lanes, rows)
        fits = key_dim * rows <= 32 * lanes or rows == 1  # in registers
        summed = rows * 4 <= lanes  # the sums of four tokens, a row and a token to a lane
        fills = rows < 4 or heads * value_dim >= FULL * found.block
        if fits and summed and fills and value_dim % found.block == 0:
            return found
    return None


class Kind(NamedTuple):
    """What one compiled kernel is for."""

    queries: mx.Dtype
    values: mx.Dtype
    gates: mx.Dtype
    writes: mx.Dtype
    key_dim: int
    value_dim: int
    heads: int
    by_key: bool
    masked: bool


def kind_of(q: mx.array, v: mx.array, g: mx.array, beta: mx.array, mask: mx.array | None) -> Kind:
    sizes = (q.shape[-1], v.shape[-1], v.shape[-2], g.ndim == 4, mask is not None)
    return Kind(q.dtype, v.dtype, g.dtype, beta.dtype, *sizes)


def fits(q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array) -> bool:
    """Whether the kernel knows such shapes, and there is a device for it."""
    return is_cuda() and _knows(q, k, v, g, beta)


def _knows(q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array) -> bool:
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
def agrees(chunked: Rule, kind: Kind) -> bool:
    """Whether the kernel gives what the chunked form does for a few tokens."""
    given = _sample(kind)
    return agree(
        "gated delta layers run in chunks", lambda: in_steps(*given), lambda: chunked(*given)
    )


def _sample(kind: Kind) -> tuple[Any, ...]:
    """Two sequences; where it goes, two heads to a key."""
    heads = (2, CHECKED, kind.heads)
    shape = (2, CHECKED, kind.heads // (2 - kind.heads % 2), kind.key_dim)
    keys = [mx.random.key(i) for i in range(6)]
    q, k = (mx.random.normal(shape, key=key) * kind.key_dim**-0.5 for key in keys[:2])
    v = mx.random.normal((*heads, kind.value_dim), key=keys[2])
    g = mx.random.uniform(0.5, 1, (*heads, *[kind.key_dim] * kind.by_key), key=keys[3])
    beta = mx.random.uniform(0, 1, heads, key=keys[4])
    state = mx.random.normal((2, kind.heads, kind.value_dim, kind.key_dim), key=keys[5])
    mask = None
    if kind.masked:  # the outputs of masked tokens mean nothing, but a query of 0 reads 0
        mask = mx.arange(CHECKED)[None] >= mx.array([[0], [9]])
        q = mx.where(mask[..., None, None], q, 0)
    dtypes = (kind.queries, kind.queries, kind.values, kind.gates, kind.writes)
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
    """As `delta.chunked`, for shapes that fit."""
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
    # MLX knows a compiled kernel by its name and these: what the source depends on must be here.
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
    """Those of the chunked form: mlx-lm trains through this function."""
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
