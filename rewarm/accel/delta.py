"""Compute the gated delta rule in chunks, where mlx-lm goes token by token (docs/accel.md).

For a head with state S [Dv, Dk], a token does S = S g, d = beta (v - S k), S = S + d k', y = S q.
Over a chunk, let D[t, s] be the product of the gates after s up to t, and G[t] that of all up to t:

    (I + A) d = beta (v - G k S'),   A[t, s] = beta[t] D[t, s] k[t] k[s]   for s < t
    y = G q S' + P d,                P[t, s] = D[t, s] q[t] k[s]           for s <= t

So all of it is matrix products. Only S goes from chunk to chunk.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from . import cuda, is_off
from .cuda import Rule
from .replacement import MODELS, Replacement, put, warn_once

GPU_CHUNK = 64
"""Tokens of a chunk on a GPU, where launches cost more than the work."""
CPU_CHUNK = 32
SMALL_CPU_CHUNK = 16
ONE_THREAD = 2**18
"""OpenBLAS splits products of more multiplications among threads. Thousands of small products then
wait for one another, and on cores that other programs use each wait takes a time slice."""
STRETCH = 2**17
"""Numbers in the keys of a stretch, in all heads of a prompt. The arrays that are made of so many
stay in a core's caches, and the next stretch uses the same memory. Larger ones go to main memory.
"""
GPU_PAYS = 8
"""Tokens from which a chunk is faster than the loop on a GPU."""
CPU_PAYS = 2**17
"""The same on a CPU, in tokens times the numbers of a state."""

_stock: dict[str, Rule] = {}


class Decayed(NamedTuple):
    """The keys and queries of a chunk, multiplied by gates."""

    key_products: list[mx.array]
    """k[t] k[s] for s < t, in the parts that `levels` gives."""
    query_products: mx.array
    """q[t] k[s] for s <= t, else 0."""
    queries: mx.array
    """Each query times the gates from the chunk's start: it reads the state before the chunk."""
    keys: mx.array
    """Each key times the same gates."""
    keys_left: mx.array
    """Each key times the gates after it: its share in the state after the chunk."""
    whole: mx.array
    """The decay of the state over the chunk."""


def install() -> bool:
    """Make mlx-lm's gated delta layers run in chunks; return true where they do.

    On Metal mlx-lm has a kernel of its own, and nothing is replaced.
    """
    if is_off() or mx.metal.is_available():
        return False
    otherwise = "gated delta layers run token by token"
    try:
        importlib.import_module(MODELS + REPLACED.module)
    except ImportError as error:
        warn_once(otherwise, str(error))
        return False
    return put(REPLACED, _stock, otherwise)


def _installed(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    return rule_for(q, k, v, g, beta, mask)(q, k, v, g, beta, state, mask)


REPLACED = Replacement(
    "gated_delta",
    "gated_delta_ops",
    ("q", "k", "v", "g", "beta", "state", "mask"),
    _installed,
)


def rule_for(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, mask: mx.array | None
) -> Rule:
    """Choose the fastest way to compute the rule for such arrays on this device."""
    if cuda.fits(q, k, v, g, beta) and cuda.agrees(chunked, cuda.variant_of(q, v, g, beta, mask)):
        return cuda.in_steps
    stock = _stock.get(REPLACED.name)
    return chunked if stock is None or _pays(q, v) else stock


def _pays(q: mx.array, v: mx.array) -> bool:
    length, key_dim = q.shape[1], q.shape[-1]
    if mx.default_device() != mx.cpu:
        return length >= GPU_PAYS
    return length > 1 and v.size * key_dim >= CPU_PAYS


def chunked(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Give the outputs [B, T, Hv, Dv] and the state [B, Hv, Dv, Dk] after the last token.

    q and k are [B, T, Hk, Dk], v is [B, T, Hv, Dv] with Hv a multiple of Hk, g is [B, T, Hv] or
    [B, T, Hv, Dk], beta is [B, T, Hv]. A token whose `mask` [B, T] is false leaves the state as it
    is; its output means nothing.
    """
    batch, length, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[-2:]
    if mask is not None:  # not times 0: a masked place may hold an infinity or NaN
        k, v = (mx.where(mask[..., None, None], x, 0) for x in (k, v))
        beta = mx.where(mask[..., None], beta, 0)
        g = mx.where(mask[..., None] if g.ndim == 3 else mask[..., None, None], g, 1)
    if state is None:
        state = mx.zeros((batch, heads, value_dim, key_dim))
    state = state.astype(mx.float32).reshape(1, batch, key_heads, -1, value_dim, key_dim)
    state = state.swapaxes(-1, -2)
    outputs = []
    for part in stretches(length, heads * key_dim):
        y, state = _stretch(q[:, part], k[:, part], v[:, part], g[:, part], beta[:, part], state)
        outputs.append(y)
    state = mx.contiguous(state.swapaxes(-1, -2)).reshape(batch, heads, value_dim, key_dim)
    return mx.concatenate(outputs, axis=1), state


def _stretch(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Compute what `chunked` does for a stretch, with the state as [1, B, Hk, Hv / Hk, Dk, Dv]."""
    length, key_heads, key_dim = q.shape[1:]
    by_key = g.ndim == 4
    size = chunk_size(length, key_dim, v.shape[-1], by_key)
    cut = functools.partial(in_chunks, size=size, key_heads=key_heads)
    keys, values, writes = cut(k), cut(v), cut(beta)
    decay = _decay_by_key if by_key else decay_by_head
    decayed = decay(cut(q), keys, cut(g, padding=1))

    solved = inverse([writes[..., None] * part for part in decayed.key_products])
    solved = solved * writes[..., None, :]
    alone = solved @ values  # the deltas from a state of zeros
    reads = solved @ decayed.keys  # times the state, to be taken from the deltas
    y_alone = decayed.query_products @ alone
    y_reads = mx.addmm(decayed.queries, decayed.query_products, reads, alpha=-1)

    chunks = (alone, reads, y_alone, y_reads, decayed.whole, decayed.keys_left)
    outputs = []
    for alone, reads, y_alone, y_reads, whole, left in each_chunk(*chunks):
        # Not for all chunks at once: their states together take too much memory.
        outputs.append(mx.addmm(y_alone, y_reads, state))
        delta = mx.addmm(alone, reads, state, alpha=-1)
        state = mx.addmm(state * whole, left.swapaxes(-1, -2), delta)
    return out_of_chunks(mx.concatenate(outputs), length).astype(q.dtype), state


def stretches(length: int, width: int) -> Iterator[slice]:
    """Cut a prompt into the slices of tokens to compute at once.

    The keys of a token have `width` numbers. The number of prompts does not count: a prompt gives
    the same bits in a batch as alone."""
    step = length
    if mx.default_device() == mx.cpu:
        step = max(CPU_CHUNK, STRETCH // width // CPU_CHUNK * CPU_CHUNK)
    return (slice(start, start + step) for start in range(0, length, step))


def chunk_size(length: int, key_dim: int, value_dim: int, by_key: bool) -> int:
    """Choose the tokens of a chunk. More of them need more work for a token, and fewer steps."""
    longest = CPU_CHUNK
    if mx.default_device() != mx.cpu:
        longest = GPU_CHUNK
    elif by_key or CPU_CHUNK * key_dim * value_dim > ONE_THREAD:
        longest = SMALL_CPU_CHUNK
    if by_key:  # `products_by_key` takes powers of 2
        return min(longest, max(2, 1 << (length - 1).bit_length()))
    count = -(-length // longest)
    return -(-length // count)  # all alike, so that the last one is not mostly padding


def in_chunks(x: mx.array, size: int, key_heads: int, padding: int = 0) -> mx.array:
    """Turn [B, T, H, ...] into float32 [count, B, Hk, H / Hk, size, ...]."""
    batch, length, heads = x.shape[:3]
    count = -(-length // size)
    missing = count * size - length
    if missing:
        x = mx.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=padding)
    x = x.astype(mx.float32)
    x = x.reshape(batch, count, size, key_heads, heads // key_heads, *x.shape[3:])
    return mx.contiguous(x.transpose(1, 0, 3, 4, 2, *range(5, x.ndim)))


def each_chunk(*arrays: mx.array) -> Iterator[tuple[mx.array, ...]]:
    """Go through arrays of `in_chunks` chunk by chunk. Each keeps a first axis of 1."""
    return zip(*(mx.split(x, x.shape[0]) for x in arrays), strict=True)


def out_of_chunks(y: mx.array, length: int) -> mx.array:
    """Turn [count, B, Hk, H / Hk, size, D] into [B, T, H, D]."""
    count, batch, key_heads, shared_by, size, dim = y.shape
    y = y.transpose(1, 0, 4, 2, 3, 5).reshape(batch, count * size, key_heads * shared_by, dim)
    return y[:, :length]


def decay_by_head(q: mx.array, k: mx.array, g: mx.array) -> Decayed:
    below, rest = _triangle(g.shape[-1])
    # Gates are multiplied, and no logarithms are added: then a gate of 0 needs no care, and no
    # small difference is taken of large sums.
    between = mx.cumprod(g[..., None] * below + rest, axis=-2)
    start = mx.cumprod(g, axis=-1)[..., None]
    products = (k @ k.swapaxes(-1, -2)) * between
    return Decayed(
        key_products=[products * level for level in levels(g.shape[-1])],
        query_products=(q @ k.swapaxes(-1, -2)) * (between * rest.T),
        queries=q * start,
        keys=k * start,
        keys_left=k * between[..., -1, :, None],
        whole=start[..., -1:, :],
    )


def _decay_by_key(q: mx.array, k: mx.array, g: mx.array) -> Decayed:
    products = products_by_key(
        mx.stack([k * g, q * g], axis=-3), k[..., None, :, :], g[..., None, :, :]
    )
    query_products = (q * k).sum(axis=-1, keepdims=True) * mx.eye(g.shape[-2])
    for part in products:
        query_products = query_products + part[..., 1, :, 0, :]
    start = mx.cumprod(g, axis=-2)
    return Decayed(
        key_products=[part[..., 0, :, 0, :] for part in products],
        query_products=query_products,
        queries=q * start,
        keys=k * start,
        keys_left=k * mx.cumprod(g, axis=-2, reverse=True, inclusive=False),
        whole=start[..., -1, :, None],
    )


def products_by_key(reads: mx.array, writes: mx.array, gates: mx.array) -> list[mx.array]:
    """Multiply vectors `reads` [..., R, size, D] with `writes` [..., W, size, D], for s < t.

    A product of t with s is decayed by the gates [..., 1, size, D] between them. The results are
    [..., R, size, W, size], in the parts that `levels` gives. The size is a power of 2.

    The decay from s to t is that from s to a point between them, times that from there to t. The
    point lies between the two blocks of a part. Both factors are products of gates, so they cannot
    overflow. A quotient of products from the start could.
    """
    size, dim = gates.shape[-2:]
    read_count, write_count = reads.shape[-3], writes.shape[-3]
    found = []
    for i, level in enumerate(levels(size)):
        pairs = (size >> i + 1, 2, 1 << i)
        blocks = gates.reshape(*gates.shape[:-2], *pairs, dim)
        first = writes.reshape(*writes.shape[:-2], *pairs, dim)[..., 0, :, :]
        second = reads.reshape(*reads.shape[:-2], *pairs, dim)[..., 1, :, :]
        if i:  # between a block of one token and the next there are no gates
            left = mx.cumprod(blocks, axis=-2, reverse=True, inclusive=False)
            entered = mx.cumprod(blocks, axis=-2, inclusive=False)
            first = first * left[..., 0, :, :]
            second = second * entered[..., 1, :, :]
        first = first.reshape(*first.shape[:-4], write_count * size // 2, dim)
        second = second.reshape(*second.shape[:-4], read_count * size // 2, dim)
        products = second @ first.swapaxes(-1, -2)
        lead = products.shape[:-2]
        one = (size >> i + 1, 1, 1 << i)
        products = products.reshape(*lead, read_count, *one, write_count, *one)
        to_second = [(0, 0), (1, 0), (0, 0)]
        to_first = [(0, 0), (0, 1), (0, 0)]
        none = [(0, 0)]
        products = mx.pad(products, none * (len(lead) + 1) + to_second + none + to_first)
        products = products.reshape(*lead, read_count, size, write_count, size)
        found.append(products * level[:, None])
    return found


def inverse(parts: Sequence[mx.array]) -> mx.array:
    """Give (I + A)^-1, where A is given in the parts of `levels`.

    The inverses of two diagonal blocks give that of both together with the block below them. The
    product (I - A)(I + A^2)(I + A^4)... takes as many multiplications. But where keys repeat, the
    powers of A are large numbers that cancel, and float32 is not exact enough for that.
    """
    found = mx.eye(parts[0].shape[-1]) - parts[0]
    for part in parts[1:]:
        found = mx.addmm(found, found @ part, found, alpha=-1)
    return found


@functools.cache
def _triangle(size: int) -> tuple[mx.array, mx.array]:
    """Make a matrix that is 1 below the diagonal and 0 elsewhere, and 1 minus that matrix."""
    below = np.tri(size, k=-1, dtype=np.float32)
    return mx.array(below), mx.array(1 - below)


@functools.cache
def levels(size: int) -> list[mx.array]:
    """Divide the places below the diagonal into parts, each given as a matrix of 0 and 1.

    The rows are cut into blocks of 1, 2, 4... rows, one size for each part. Neighbouring blocks
    form pairs. A part is 1 in the rows of the second block of a pair and the columns of the first.
    """
    place = np.arange(size)
    found = []
    for i in range(max(1, (size - 1).bit_length())):
        block = place >> i
        second_to_first = (block[:, None] ^ 1 == block) & (block[:, None] > block)
        found.append(mx.array(second_to_first.astype(np.float32)))
    return found
