"""Layer kinds: they cut, capture and rebuild mlx-lm's caches.

For a new cache class, add a kind here and to `KINDS`, or give your own kind to `register`.
Kinds match the exact class: a subclass may hold more than its parent does.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from .payload import PLAIN, items_of

Group = Literal["rows", "window", "state"]


class SpanKind(Protocol):
    """A layer whose state is one row per token. By default it needs all rows, and has them."""

    group: ClassVar[Group]
    kept: int = 0
    """The number of rows at the very start that every position needs."""

    def reach(self, position: int) -> int:
        """Return the first row needed to go on from `position`, besides the `kept` ones."""
        return 0

    def first_row(self, cache: Any, position: int) -> int:
        """Return the first row from which `cache` holds all up to `position`, besides `kept`."""
        return 0

    def read(self, cache: Any, start: int, stop: int) -> list[mx.array]:
        """Return views of the rows `start` to `stop`."""

    def load(self, cache: Any, rows: list[mx.array], position: int) -> Any:
        """Load the rows (`kept` ones first), in temporal order, into a cache at `position`."""


class StateKind(Protocol):
    """A layer whose state exists only where it was captured."""

    group: ClassVar[Group]

    def capture(self, cache: Any) -> Any: ...
    def load(self, cache: Any, value: Any) -> Any: ...


class RowsKind(SpanKind):
    """Full attention: any position can be resumed."""

    group: ClassVar[Group] = "rows"

    @classmethod
    def of(cls, cache: Any) -> RowsKind | None:
        known = (mlx_cache.KVCache, mlx_cache.QuantizedKVCache, mlx_cache.ConcatenateKVCache)
        return cls() if type(cache) in known else None

    def read(self, cache: Any, start: int, stop: int) -> list[mx.array]:
        return [a[:, :, start:stop] for a in _flat(cache.keys) + _flat(cache.values)]

    def load(self, cache: Any, rows: list[mx.array], position: int) -> Any:
        half = len(rows) // 2
        quantized = isinstance(cache, mlx_cache.QuantizedKVCache)
        cache.keys, cache.values = (
            (tuple(rows[:half]), tuple(rows[half:])) if quantized else (rows[0], rows[1])
        )
        if isinstance(cache, mlx_cache.ConcatenateKVCache):
            # It takes its length from the arrays: nothing is left free at the end.
            cache.keys, cache.values = (a[:, :, :position] for a in rows)
        cache.offset = position
        return cache


class Rotating(SpanKind):
    """A sliding window in a ring, with the first `keep` rows never overwritten."""

    group: ClassVar[Group] = "window"

    def __init__(self, size: int, keep: int) -> None:
        self.size = size
        self.kept = keep

    @classmethod
    def of(cls, cache: Any) -> Rotating | None:
        if type(cache) is not mlx_cache.RotatingKVCache:
            return None
        return cls(cache.max_size, cache.keep)

    def reach(self, position: int) -> int:
        # One row less is enough for a chunk, but breaks a single step: the ring must be full.
        return max(0, position - (self.size - self.kept))

    def first_row(self, cache: Any, position: int) -> int:
        length = self._length(cache)
        return 0 if length >= position else position - (length - self.kept)

    def read(self, cache: Any, start: int, stop: int) -> list[mx.array]:
        # In temporal order the last row is the newest, whatever was dropped in between.
        length, offset = self._length(cache), cache.offset
        ordered = [cache._temporal_order(a) for a in (cache.keys, cache.values)]
        shift = 0 if stop <= self.kept else length - offset
        return [a[:, :, start + shift : stop + shift] for a in ordered]

    def load(self, cache: Any, rows: list[mx.array], position: int) -> Any:
        cache.keys, cache.values = rows
        cache.offset = position
        cache._idx = rows[0].shape[2]
        return cache

    def settle(self, cache: Any) -> None:
        """Put the ring into the order that a restored one has.

        A chunk of one token turns the ring, and a sum in another order has other bits.
        """
        if cache.keys is not None and cache._idx != cache.keys.shape[2]:
            cache.keys, cache.values = (
                cache._temporal_order(a) for a in (cache.keys, cache.values)
            )
            cache._idx = cache.keys.shape[2]

    def _length(self, cache: Any) -> int:
        """Count the rows in the ring, without the unused end of its buffer."""
        return min(int(cache.offset), int(cache.keys.shape[2]))


class Chunked(SpanKind):
    """Attention inside blocks of `size` tokens (Llama 4)."""

    group: ClassVar[Group] = "window"

    def __init__(self, size: int) -> None:
        self.size = size

    @classmethod
    def of(cls, cache: Any) -> Chunked | None:
        return cls(cache.chunk_size) if type(cache) is mlx_cache.ChunkedKVCache else None

    def reach(self, position: int) -> int:
        # The rows of the open block are enough for a right answer. But a cold run holds `size` of
        # them, and only the same shapes give the same bits.
        return max(0, position - self.size)

    def first_row(self, cache: Any, position: int) -> int:
        return int(cache.start_position)

    def read(self, cache: Any, start: int, stop: int) -> list[mx.array]:
        a, b = start - cache.start_position, stop - cache.start_position
        return [cache.keys[:, :, a:b], cache.values[:, :, a:b]]

    def load(self, cache: Any, rows: list[mx.array], position: int) -> Any:
        cache.keys, cache.values = rows
        cache.offset = position
        cache.start_position = position - rows[0].shape[2]
        return cache


class Recurrent:
    """A layer whose arrays sum up all tokens so far."""

    group: ClassVar[Group] = "state"

    @classmethod
    def of(cls, cache: Any) -> Recurrent | None:
        return cls() if type(cache) is mlx_cache.ArraysCache else None

    def capture(self, cache: Any) -> Any:
        if cache.left_padding is not None or cache.lengths is not None:
            raise ValueError("the state of a padded sequence is not kept")
        return list(cache.cache)

    def load(self, cache: Any, value: Any) -> Any:
        cache.cache = value
        return cache


class Opaque:
    """Any other cache. It is kept as its attributes, or as its `state` where those cannot be."""

    group: ClassVar[Group] = "state"

    def __init__(self, *, by_attributes: bool) -> None:
        self.by_attributes = by_attributes

    @classmethod
    def of(cls, cache: Any) -> Opaque | None:
        if hasattr(cache, "__dict__") and _is_plain(vars(cache)):
            return cls(by_attributes=True)
        if hasattr(type(cache), "from_state") and _is_plain(getattr(cache, "state", object())):
            return cls(by_attributes=False)
        return None

    def capture(self, cache: Any) -> Any:
        return dict(vars(cache)) if self.by_attributes else cache.state

    def load(self, cache: Any, value: Any) -> Any:
        if not self.by_attributes:
            return type(cache).from_state(value)
        vars(cache).update(value)
        return cache


class LayerKind(Protocol):
    """The class of a kind. It knows the caches that it can take."""

    @staticmethod
    def of(cache: Any) -> SpanKind | StateKind | None:
        """Return the kind of a cache, or None where this class does not take it."""


KINDS: list[LayerKind] = [RowsKind, Rotating, Chunked, Recurrent, Opaque]


def register(kind: LayerKind) -> None:
    """Add a kind. Every `PrefixCache` made from now on asks it before all others.

    It decides what is stored for a layer, and how that is restored: `docs/cache.md` says what a
    kind promises."""
    KINDS.insert(0, kind)


def kind_of(cache: Any) -> SpanKind | StateKind | None:
    """Return the kind of a single cache, or None where no kind takes it."""
    found = (kind.of(cache) for kind in KINDS)
    return next((kind for kind in found if kind is not None), None)


def leaves(caches: Any) -> list[Any]:
    """Return the single caches of a prompt cache in order, with composites taken apart."""
    if isinstance(caches, (list, tuple)):
        return [leaf for c in caches for leaf in leaves(c)]
    if type(caches) is mlx_cache.CacheList:
        return leaves(caches.caches)
    return [caches]


def replaced(caches: Any, new: list[Any]) -> Any:
    """Replace the single caches of a prompt cache by those taken from the front of `new`."""
    if isinstance(caches, (list, tuple)):
        return [replaced(c, new) for c in caches]
    if type(caches) is mlx_cache.CacheList:
        return mlx_cache.CacheList(*(replaced(c, new) for c in caches.caches))
    return new.pop(0)


def _flat(rows: Any) -> list[mx.array]:
    """List the arrays of rows: quantised ones have three, plain ones have one."""
    return list(rows) if isinstance(rows, (list, tuple)) else [rows]


def _is_plain(value: Any) -> bool:
    """True where a checkpoint can keep all of a value."""
    return all(isinstance(item, PLAIN) for item in items_of(value))
