"""Attention of some queries to many keys by a CUDA kernel (docs/accel.md).

MLX leaves it to cuDNN, which takes 40 ms or more to plan for numbers of queries and keys that it
has not seen: every prompt that goes on from a cached one is such a case. Heads that cuDNN does not
take go through products of odd sizes, which are slow. Few queries leave most of a GPU idle, so here
the keys are divided among its processors as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

from . import is_off
from .device import is_cuda
from .kernels.attention import ATTENTION, HEAD_DIMS, HEADER, TOGETHER
from .launch import CHECKED, Launch, agree, kernel
from .replacement import swap

PLANNED_DIM = 128
"""Many queries of heads up to this size go through cuDNN, whose kernel is then the faster one."""
MOST_QUERIES, MOST_SCORES = 1024, 1 << 26
"""Up to these, cuDNN's plan costs more than its faster kernel saves."""
LONG = 256
"""From so many keys on, MLX leaves a single query to cuDNN, too, which plans for every 256 more."""
BLOCKS = 264
"""Blocks that keep all processors of a large GPU busy."""
LEAST_KEYS = 128
"""The fewest keys for which another block pays."""

HOPPER_ROWS = 64
"""Rows of one product on Hopper GPUs. A row is a query of one of the heads that share a key."""

_stock: list[Callable[..., mx.array]] = []


def install() -> bool:
    """Make MLX use the kernel on CUDA; return true where it does."""
    if is_off() or not is_cuda():
        return False
    if not _stock:
        _stock.append(swap(mx.fast, "scaled_dot_product_attention", _attention))
    return True


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    causal: bool = False,
    hopper: bool = False,
) -> mx.array:
    """Compute attention of q [B, Hq, T, D] to k and v [B, Hk, L, D].

    It gives what `mx.fast.scaled_dot_product_attention` gives."""
    return _differentiable(scale, causal, hopper)(q, k, v)


@functools.lru_cache(64)
def _differentiable(scale: float, causal: bool, hopper: bool) -> Callable[..., mx.array]:
    @mx.custom_function
    def launched(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return _launched(q, k, v, scale, causal, hopper)

    @launched.vjp
    def gradients(given: Sequence[mx.array], cotangent: mx.array, _: mx.array) -> list[mx.array]:
        """Compute the gradients of MLX's own attention."""

        def stock(*given: mx.array) -> list[mx.array]:
            return [_stock[0](*given, scale=scale, mask="causal" if causal else None)]

        return mx.vjp(stock, list(given), [cotangent])[1]

    return cast("Callable[..., mx.array]", launched)


def _launched(
    q: mx.array, k: mx.array, v: mx.array, scale: float, causal: bool, hopper: bool
) -> mx.array:
    batch, heads, length, dim = q.shape
    key_heads, context = k.shape[1:3]
    group = heads // key_heads
    rows = group * length
    a_block, keys = (64, 32) if dim > 128 and not hopper else (128, 64)
    blocks = batch * key_heads * -(-rows // a_block)
    splits = max(1, min(-(-BLOCKS // blocks), context // LEAST_KEYS))
    facts = _facts(scale, group)
    kind = [("T", q.dtype), ("D", dim)]
    partial, stats = _attention_kernel((a_block + 4 * keys) * dim * 2 + 1024)(
        inputs=[q, k, v, facts],
        template=[*kind, ("CAUSAL", causal), ("HOPPER", hopper)],
        grid=(-(-rows // a_block) * 2 * a_block, batch * key_heads, splits),
        threadgroup=(2 * a_block, 1, 1),
        output_shapes=[
            (splits, batch, key_heads, rows, dim),
            (splits, batch, key_heads, rows, 2),
        ],
        output_dtypes=[mx.float32, mx.float32],
    )
    at_once = 256 // (dim // 4)
    (y,) = _together_kernel()(
        inputs=[partial, stats, facts],
        template=kind,
        grid=(-(-rows // at_once) * 256, batch * key_heads, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(batch, length, heads, dim)],  # the order that mlx-lm needs next
        output_dtypes=[q.dtype],
    )
    return y.swapaxes(1, 2)


def fills_hopper(q: mx.array, k: mx.array) -> bool:
    """True where the GPU is a Hopper, and there are rows enough for one of its products."""
    return q.shape[1] // k.shape[1] * q.shape[2] >= HOPPER_ROWS and is_hopper()


@functools.cache
def is_hopper() -> bool:
    """True where the GPU has Hopper's instructions, which neither older nor newer GPUs have."""
    return mx.device_info(mx.gpu).get("architecture") == "sm_90"


@functools.lru_cache(64)
def _facts(scale: float, group: int) -> mx.array:
    facts = mx.array([scale, group], mx.float32)
    mx.eval(facts)
    return facts


class AttentionVariant(NamedTuple):
    """The properties for which the kernel is compiled and checked once."""

    dtype: mx.Dtype
    dim: int
    causal: bool
    hopper: bool


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
    plain = sinks is None and not options and scale > 0
    if not (plain and is_cuda() and fits(q, k, v, mask)):
        return _stock[0](q, k, v, scale=scale, mask=mask, sinks=sinks, **options)
    causal = mask is not None or q.shape[2] == 1  # the last token may see all keys anyway
    variant = AttentionVariant(q.dtype, q.shape[-1], causal, fills_hopper(q, k))
    if variant.hopper and not agrees(variant):
        variant = variant._replace(hopper=False)
    if not agrees(variant):
        return _stock[0](q, k, v, scale=scale, mask=mask)
    return attention(q, k, v, scale=scale, causal=causal, hopper=variant.hopper)


def fits(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str | None) -> bool:
    """True where the kernel takes these arguments, and is faster than MLX's own."""
    queries, dim, keys = q.shape[2], q.shape[-1], k.shape[2]
    known = (
        (mask is None or (isinstance(mask, str) and mask == "causal"))
        and dim in HEAD_DIMS
        and k.shape == v.shape
        and (q.shape[0], dim) == (k.shape[0], k.shape[-1])
        and q.size > 0
        and q.dtype in (mx.bfloat16, mx.float16)
        and q.dtype == k.dtype == v.dtype
        and q.shape[1] % k.shape[1] == 0
        and queries <= keys
    )
    if not known:
        return False
    if queries == 1:
        return keys >= LONG
    few = queries <= MOST_QUERIES and queries * keys <= MOST_SCORES
    return dim > PLANNED_DIM or few


@functools.cache
def agrees(variant: AttentionVariant) -> bool:
    """Try the kernel on a few tokens, and return true where it agrees with MLX's own."""
    dtype, dim, causal, hopper = variant
    queries, keys = CHECKED if hopper else 21, 12 * LEAST_KEYS + 5
    shapes = ((1, 4, queries, dim), (1, 2, keys, dim), (1, 2, keys, dim))
    draw = (mx.random.normal(s, key=mx.random.key(i)) for i, s in enumerate(shapes))
    q, k, v = (x.astype(dtype) for x in draw)
    scale, mask = dim**-0.5, "causal" if causal else None
    return agree(
        f"attention is left to {'the kernel for all GPUs' if hopper else 'MLX'}",
        lambda: [attention(q, k, v, scale=scale, causal=causal, hopper=hopper)],
        lambda: [_stock[0](q, k, v, scale=scale, mask=mask)],
    )


@functools.cache
def _attention_kernel(shared: int) -> Launch:
    return kernel(
        "attention",
        ("q", "k", "v", "facts"),
        ("partial", "stats"),
        ATTENTION,
        HEADER,
        ensure_row_contiguous=False,
        shared_memory=shared,
    )


@functools.cache
def _together_kernel() -> Launch:
    return kernel("attention_together", ("partial", "stats", "facts"), ("y",), TOGETHER)
