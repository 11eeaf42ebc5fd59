"""Evict something chosen from a cache, or all of it, and read the bytes that it holds."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from rewarm.cache import PrefixCache
from rewarm.cache.payload import PackedState, Rows
from rewarm.cache.worth import What


def evict_all(cache: PrefixCache) -> None:
    """Evict every item, as a full budget does."""
    cache.trim(0)
    assert not cache.stats().entries


def evict(cache: PrefixCache, what: What, at: int) -> None:
    """Evict one item, whatever its worth."""
    evictor = cache.memory.evictor
    for node in cache.nodes():
        if node.end == at and what in evictor.appraiser.kinds(node):
            evictor._evict(evictor.appraiser.item(node, what))
            return
    raise AssertionError(f"no {what} at {at}")


def held_bytes(cache: PrefixCache) -> dict[int, tuple[Any, bytes]]:
    """Copy the bytes of every payload of the trees, by identity."""
    found = {}
    for node in cache.nodes():
        for rows in (node.rows, node.window):
            if isinstance(rows, Rows):
                for segment in rows.segments:
                    found[id(segment)] = (segment, b"".join(_raw(a) for a in segment.arrays))
        if node.checkpoint and isinstance(node.checkpoint.state, PackedState):
            state = node.checkpoint.state
            found[id(state)] = (state, b"".join(_raw(a) for a in state.arrays))
    return found


def _raw(array: mx.array) -> bytes:
    return np.array(array.view(mx.uint8)).tobytes()
