"""The gated delta rule in chunks, where mlx-lm goes token by token (docs/accel.md).

For a head with state S [Dv, Dk], a token does S = S g, d = beta (v - S k), S = S + d k', y = S q.
Over a chunk, with D[t, s] the product of the gates after s up to t and G[t] that of all up to t,

    (I + A) d = beta (v - G k S'),   A[t, s] = beta[t] D[t, s] k[t] k[s]   for s < t
    y = G q S' + P d,                P[t, s] = D[t, s] q[t] k[s]           for s <= t

so all is matrix products, but for S that goes from chunk to chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from . import cuda, is_off
from .replace import check_parameters, say_once

Rule = Callable[..., tuple[mx.array, mx.array]]

PARAMETERS = ("q", "k", "v", "g", "beta", "state", "mask")  # of the function that is replaced
GPU_CHUNK = 64  # where launches cost more than work
CPU_CHUNK = 32
SMALL_CPU_CHUNK = 16
# OpenBLAS splits larger products (m * n * k) among threads. Thousands of small ones then wait for
# one another, and on cores that other programs use a wait is a time slice.
ONE_THREAD = 2**18
# Where a chunk overtakes the loop: tokens on a GPU, tokens times the state's size on a CPU.
GPU_PAYS = 8
CPU_PAYS = 2**17

_stock: Rule | None = None


class Decayed(NamedTuple):
    """A chunk's keys and queries with the gates multiplied in."""

    key_products: list[mx.array]
    """k[t] k[s] for s < t in parts, as `levels` has them."""
    query_products: mx.array
    """q[t] k[s] for s <= t, else 0."""
    queries: mx.array
    """Decayed from the chunk's start; meets the state before the chunk."""
    keys: mx.array
    """The same for the keys."""
    keys_left: mx.array
    """Decayed to the chunk's end: what the state after the chunk has of each key."""
    whole: mx.array
    """The decay of the state over the chunk."""


def install() -> bool:
    """Make mlx-lm's gated delta layers run in chunks; says whether they do.

    On Metal mlx-lm has a kernel of its own, and nothing is done.
    """
    global _stock
    if is_off() or mx.metal.is_available():
        return False
    try:
        from mlx_lm.models import gated_delta

        found: Rule = gated_delta.gated_delta_ops
        if found is _installed:
            return True
        check_parameters(found, PARAMETERS)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        say_once("gated delta layers run token by token", str(error))
        return False
    _stock = found
    gated_delta.gated_delta_ops = _installed
    return True


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


def rule_for(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, mask: mx.array | None
) -> Rule:
    """The fastest there is for these shapes on the device at hand."""
    if cuda.fits(q, k, v, g, beta) and cuda.agrees(chunked, cuda.kind_of(q, v, g, beta, mask)):
        return cuda.by_token
    return chunked if _stock is None or _pays(q, v) else _stock


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
    """Outputs [B, T, Hv, Dv] and the state [B, Hv, Dv, Dk] after the last token.

    q and k are [B, T, Hk, Dk], v is [B, T, Hv, Dv] with Hv a multiple of Hk, g is [B, T, Hv] or
    [B, T, Hv, Dk], beta is [B, T, Hv]. A token that `mask` [B, T] has as false leaves the state as
    it is; its output means nothing.
    """
    batch, length, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[-2:]
    if mask is not None:
        beta = mx.where(mask[..., None], beta, 0)
        g = mx.where(mask[..., None] if g.ndim == 3 else mask[..., None, None], g, 1)

    longest = longest_chunk(key_dim, value_dim, by_key=g.ndim == 4)
    count = -(-length // longest)
    cut = functools.partial(in_chunks, longest=longest, key_heads=key_heads)
    keys, values, writes = cut(k), cut(v), cut(beta)
    decay = decay_by_head if g.ndim == 3 else _decay_by_key
    decayed = decay(cut(q), keys, cut(g, padding=1))

    solved = inverse([writes[..., None] * part for part in decayed.key_products])
    solved = solved * writes[..., None, :]
    deltas_alone = solved @ values  # the deltas from a state of zeros
    reads = solved @ decayed.keys  # what the state takes from them

    if state is None:
        state = mx.zeros((batch, heads, value_dim, key_dim))
    state = state.astype(mx.float32).reshape(batch, key_heads, -1, value_dim, key_dim)
    seen, deltas = [], []
    for n in range(count):
        before = state.swapaxes(-1, -2)
        delta = mx.addmm(deltas_alone[:, :, :, n], reads[:, :, :, n], before, alpha=-1)
        # Here, and not for all chunks at once: their states together are too much memory.
        seen.append(decayed.queries[:, :, :, n] @ before)
        deltas.append(delta)
        state = mx.addmm(
            state * decayed.whole[:, :, :, n], delta.swapaxes(-1, -2), decayed.keys_left[:, :, :, n]
        )

    y = mx.addmm(mx.stack(seen, axis=3), decayed.query_products, mx.stack(deltas, axis=3))
    y = out_of_chunks(y, length).astype(q.dtype)
    return y, state.reshape(batch, heads, value_dim, key_dim)


def in_chunks(x: mx.array, longest: int, key_heads: int, padding: int = 0) -> mx.array:
    """[B, T, H, ...] as float32 [B, Hk, H / Hk, count, size, ...]"""
    batch, length, heads = x.shape[:3]
    count = -(-length // longest)
    size = -(-length // count)  # alike, so that the last one is not mostly padding
    missing = count * size - length
    if missing:
        x = mx.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=padding)
    x = x.astype(mx.float32)
    x = x.reshape(batch, count, size, key_heads, heads // key_heads, *x.shape[3:])
    return mx.contiguous(x.transpose(0, 3, 4, 1, 2, *range(5, x.ndim)))


def out_of_chunks(y: mx.array, length: int) -> mx.array:
    """[B, Hk, H / Hk, count, size, D] as [B, T, H, D]"""
    batch, key_heads, shared_by, count, size, dim = y.shape
    y = y.transpose(0, 3, 4, 1, 2, 5).reshape(batch, count * size, key_heads * shared_by, dim)
    return y[:, :length]


def longest_chunk(key_dim: int, value_dim: int, by_key: bool) -> int:
    """A chunk's length, at most: a token's work grows with it, the number of steps falls."""
    if mx.default_device() != mx.cpu:
        return GPU_CHUNK
    if by_key or CPU_CHUNK * key_dim * value_dim > ONE_THREAD:
        return SMALL_CPU_CHUNK
    return CPU_CHUNK


def decay_by_head(q: mx.array, k: mx.array, g: mx.array) -> Decayed:
    below, rest = _triangle(g.shape[-1])
    # Products of gates and no sums of logarithms: a gate of 0 is one like any other, and nothing is
    # taken apart again from a long sum.
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
    """The decay from s to t as that from s to a point between, and on to t.

    Every pair has such a point: between the two blocks where `levels` parts them. Both factors are
    products of gates, so neither overflows, as a quotient of products from the start would.
    """
    size, key_dim = g.shape[-2:]
    parting = levels(size)
    missing = 2 ** len(parting) - size
    padded = mx.pad(g, [(0, 0)] * (g.ndim - 2) + [(0, missing), (0, 0)]) if missing else g
    key_products = []
    query_products = (q * k).sum(axis=-1, keepdims=True) * mx.eye(size)
    for i, level in enumerate(parting):
        entered, left_keys = g, k.swapaxes(-1, -2)
        if i:  # a block of one token has nothing but that token's gate
            blocks = padded.reshape(*g.shape[:-2], -1, 2**i, key_dim)
            entered = mx.cumprod(blocks, axis=-2).reshape(padded.shape)[..., :size, :]
            left = mx.cumprod(blocks, axis=-2, reverse=True, inclusive=False)
            left_keys = (k * left.reshape(padded.shape)[..., :size, :]).swapaxes(-1, -2)
        key_products.append(((k * entered) @ left_keys) * level)
        query_products = query_products + ((q * entered) @ left_keys) * level
    start = mx.cumprod(g, axis=-2)
    return Decayed(
        key_products=key_products,
        query_products=query_products,
        queries=q * start,
        keys=k * start,
        keys_left=k * mx.cumprod(g, axis=-2, reverse=True, inclusive=False),
        whole=start[..., -1:, :],
    )


def inverse(parts: Sequence[mx.array]) -> mx.array:
    """(I + A)^-1, with A given as its parts by `levels`.

    From the inverses of two diagonal blocks comes that of both with the block below them. The
    product (I - A)(I + A^2)(I + A^4)... is as many multiplications, but where keys repeat the
    powers of A are large, and float32 does not survive their cancelling.
    """
    found = mx.eye(parts[0].shape[-1]) - parts[0]
    for part in parts[1:]:
        found = mx.addmm(found, found @ part, found, alpha=-1)
    return found


@functools.cache
def _triangle(size: int) -> tuple[mx.array, mx.array]:
    """1 below the diagonal, else 0; and 1 minus that."""
    below = np.tri(size, k=-1, dtype=np.float32)
    return mx.array(below), mx.array(1 - below)


@functools.cache
def levels(size: int) -> list[mx.array]:
    """What is below the diagonal, in parts: of blocks of 1, 2, 4... rows, two and two are joined,
    and a part is 1 in the rows of the second and the columns of the first."""
    place = np.arange(size)
    found = []
    for i in range(max(1, (size - 1).bit_length())):
        block = place >> i
        second_to_first = (block[:, None] ^ 1 == block) & (block[:, None] > block)
        found.append(mx.array(second_to_first.astype(np.float32)))
    return found
