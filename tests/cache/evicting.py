"""Evict something chosen from a cache, or all of it."""

from __future__ import annotations

from rewarm.cache import PrefixCache
from rewarm.cache.worth import What


def evict_all(cache: PrefixCache) -> None:
    """Evict to the last item, as a full budget does."""
    budget, cache.memory.budget = cache.memory.budget, 0
    with cache._lock:
        cache._evictor.make_room(cache._trees.values(), 0, 0, cache._clock)
    cache.memory.budget = budget
    assert not cache.stats().entries


def evict(cache: PrefixCache, what: What, at: int) -> None:
    """Evict one item that retention did not choose."""
    with cache._lock:
        appraiser = cache._evictor._appraiser
        for tree in cache._trees.values():
            for node in tree.nodes():
                if node.end == at and what in appraiser.kinds(node):
                    cache._evictor._evict(appraiser.item(tree, node, what))
                    return
    raise AssertionError(f"no {what} at {at}")
