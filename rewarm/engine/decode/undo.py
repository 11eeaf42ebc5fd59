"""Take back what was appended to a prompt cache.

Where a layer replaces its arrays, as recurrent layers do, the old arrays are unchanged. Two things
change in place:

- New rows are written into the free part at the end. The rows before them are unchanged, so the old
  length is enough to undo this.
- A full ring overwrites its oldest rows. These are copied first.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache, CacheList, RotatingKVCache

ROWS = ("keys", "values")


class Before:
    """The state of a running prompt cache, of one sequence or a batch, at this moment.

    It remembers everything that `tokens` more tokens could change, appended at once or one by one.
    All sequences of a batch go back equally far, since their rows lie side by side.
    """

    def __init__(self, caches: Sequence[Any], tokens: int) -> None:
        self._caches = [_Layer(cache, tokens) for cache in caches]

    def restored(self) -> list[Any]:
        """Give caches in the remembered state. They share arrays with the caches that went on: only
        one of the two may go on from here, and the other one may only be read."""
        return [layer.restored() for layer in self._caches]


class _Layer:
    def __init__(self, cache: Any, tokens: int) -> None:
        self._type: Any = type(cache)
        self._inner: list[_Layer] | None = None
        if isinstance(cache, CacheList):
            self._inner = [_Layer(each, tokens) for each in cache.caches]
            return
        self._values = _copied(vars(cache))
        self._overwritten: list[tuple[int, int, dict[str, mx.array]]] = []
        if isinstance(cache, (RotatingKVCache, BatchRotatingKVCache)) and cache.keys is not None:
            for start, stop in _about_to_go(cache, tokens):
                rows = {n: mx.contiguous(getattr(cache, n)[..., start:stop, :]) for n in ROWS}
                mx.eval(rows)  # else the whole ring would be kept for them
                self._overwritten.append((start, stop, rows))

    def restored(self) -> Any:
        if self._inner is not None:
            return CacheList(*(each.restored() for each in self._inner))
        cache = self._type.__new__(self._type)
        vars(cache).update(_copied(self._values))
        for name in ROWS if self._overwritten else ():
            ring = getattr(cache, name)[...]
            for start, stop, rows in self._overwritten:
                ring[..., start:stop, :] = rows[name]
            setattr(cache, name, ring)
        return cache


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Copy the attributes of a cache. Its rows need no copy, since only the free part at their end
    is written in place. Copies of other arrays share their memory."""
    return {name: v if name in ROWS else copy.deepcopy(v) for name, v in values.items()}


def _about_to_go(cache: Any, tokens: int) -> list[tuple[int, int]]:
    """Give the rows of a ring that so many single steps would overwrite in place. Other changes
    make a new array: those of a ring longer or shorter than its window, and of a longer pass."""
    length, place = cache.keys.shape[2], cache._idx
    if length != cache.max_size:
        return []
    first = getattr(cache, "keep", 0)
    wraps = tokens - (length - place)
    spans = [(place, min(place + tokens, length)), (first, min(first + wraps, length))]
    return [(start, stop) for start, stop in spans if start < stop]
