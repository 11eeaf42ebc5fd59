"""A payload of the disk tier: a file, or what is still to be one."""

from __future__ import annotations

from collections.abc import Sequence

from ..base import Sealed
from ..codec import Received
from .files import Entry
from .records import StoredPayload, TokenSpan
from .store import Store

HEADER = 1024
"""About what a file takes beside its arrays, and for each of them."""
HEADER_PER_ARRAY = 128


class Source:
    """One payload. It has `arrays` until it is written, and is `stored` from then on."""

    __slots__ = ("arrays", "nbytes", "span", "stored", "users")

    def __init__(
        self,
        span: TokenSpan | None,
        stored: StoredPayload | None = None,
        arrays: Sealed | None = None,
    ) -> None:
        self.span = span
        self.stored = stored
        self.arrays = arrays
        self.users = 0
        """Parts of the tree that are in it: nodes may share a file."""
        if stored is not None:
            self.nbytes = stored.written.nbytes
        else:
            parts = arrays.values() if arrays is not None else ()
            # Never changes, so that what was counted in is counted out; the file may differ.
            self.nbytes = HEADER + sum(a.nbytes + HEADER_PER_ARRAY for a in parts)

    def load(self, store: Store) -> Sealed | None:
        """The payload from where it waits, or from its file; None where that is damaged or gone."""
        arrays, stored = self.arrays, self.stored
        if arrays is not None or stored is None:
            return arrays
        return store.read(stored, _received)


def _received(entries: Sequence[Entry]) -> Sealed:
    return Received((entry.name, entry.shape, entry.dtype) for entry in entries)


class OnDisk:
    """The part of a payload that a node of the disk's tree has."""

    __slots__ = ("nbytes", "source", "start", "stop")
    buffers = 0

    def __init__(self, source: Source, start: int, stop: int) -> None:
        self.source = source
        self.start = start
        self.stop = stop
        self.nbytes = source.nbytes
        span = source.span
        if span is not None and span != (start, stop) and span[0] < span[1]:
            self.nbytes = source.nbytes * (stop - start) // (span[1] - span[0])
        source.users += 1

    def split(self, at: int) -> tuple[OnDisk | None, OnDisk | None]:
        """Two parts of the same file."""
        self.source.users -= 1
        upper = OnDisk(self.source, self.start, min(at, self.stop)) if self.start < at else None
        lower = OnDisk(self.source, max(at, self.start), self.stop) if self.stop > at else None
        return upper, lower
