"""Takes back what was appended to a prompt cache.

Arrays of MLX are values: where a layer replaces its arrays, as recurrent layers do, the old ones
are still what they were. Two things change in place:

- rows are written into room at the end. What lies before them is untouched, so an older length is
  enough to be rid of them.
- a ring that is full overwrites its oldest rows. These are copied before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache, CacheList, RotatingKVCache

ROWS = ("keys", "values")


class Before:
    """The state of a running prompt cache, of one sequence or a batch, at this moment.

    It remembers everything that `tokens` more tokens could change, appended at once or one by one.
    All sequences of a batch go back equally far: their rows lie side by side.
    """

    def __init__(self, caches: Sequence[Any], tokens: int) -> None:
        self._caches = [_Layer(cache, tokens) for cache in caches]

    def restored(self) -> list[Any]:
        """Give caches that stand where these stood. They share arrays with those that went on: only
        one of both may go on from here, and the other one may be read."""
        return [layer.restored() for layer in self._caches]


class _Layer:
    def __init__(self, cache: Any, tokens: int) -> None:
        self._type: Any = type(cache)
        self._inner: list[_Layer] | None = None
        if isinstance(cache, CacheList):
            self._inner = [_Layer(each, tokens) for each in cache.caches]
            return
        self._values = {
            # Only the room at their end is written in place: they need no copy.
            name: value if name in ROWS else _held(value)
            for name, value in vars(cache).items()
        }
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
        vars(cache).update({n: v if n in ROWS else _held(v) for n, v in self._values.items()})
        for name in ROWS if self._overwritten else ():
            ring = getattr(cache, name)[...]
            for start, stop, rows in self._overwritten:
                ring[..., start:stop, :] = rows[name]
            setattr(cache, name, ring)
        return cache


def _about_to_go(cache: Any, tokens: int) -> list[tuple[int, int]]:
    """Give the rows of a ring that so many single steps would overwrite in place. A ring that is
    longer or shorter than its window, and a pass over several tokens, make a new array first."""
    length, place = cache.keys.shape[2], cache._idx
    if length != cache.max_size:
        return []
    first = getattr(cache, "keep", 0)
    wraps = tokens - (length - place)
    spans = [(place, min(place + tokens, length)), (first, min(first + wraps, length))]
    return [(start, stop) for start, stop in spans if start < stop]


def _held(value: Any) -> Any:
    """Copy a value's containers and array handles: the cache may change its own in place."""
    if isinstance(value, mx.array):
        return value[...]
    if isinstance(value, dict):
        return {key: _held(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_held(each) for each in value)
    return value
