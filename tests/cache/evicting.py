"""Evict something chosen from a cache, or all of it."""

from __future__ import annotations

from rewarm.cache import PrefixCache
from rewarm.cache.worth import What


def evict_all(cache: PrefixCache) -> None:
    """Evict to the last item, as a full budget does."""
    cache.trim(0)
    assert not cache.stats().entries


def evict(cache: PrefixCache, what: What, at: int) -> None:
    """Evict one item that retention did not choose."""
    evictor = cache.memory.evictor
    for node in cache.nodes():
        if node.end == at and what in evictor._appraiser.kinds(node):
            evictor._evict(evictor._appraiser.item(node, what))
            return
    raise AssertionError(f"no {what} at {at}")
