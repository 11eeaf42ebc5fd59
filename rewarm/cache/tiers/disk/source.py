"""A payload of the disk tier: a file, or what is still to be one."""

from __future__ import annotations

from ...payload import PackedState, Rows
from .codec import Receiver, pack_rows, pack_state, unpack_rows, unpack_state
from .files import Arrays
from .records import Span, StoredPayload
from .store import Store

HEADER = 1024
"""About what a file takes beside its arrays, and for each of them."""
HEADER_PER_ARRAY = 128


class Source:
    """One payload. `waiting` until it is written, `stored` from then on."""

    __slots__ = ("nbytes", "packed", "span", "stored", "users", "waiting")

    def __init__(
        self,
        span: Span | None,
        stored: StoredPayload | None = None,
        waiting: Rows | PackedState | None = None,
        packed: Arrays | None = None,
    ) -> None:
        self.span = span
        self.stored = stored
        self.waiting = waiting
        self.packed = packed
        self.users = 0
        """Parts of the tree that are in it: nodes may share a file."""
        if stored is not None:
            self.nbytes = stored.written.nbytes
        else:
            arrays = packed.values() if packed is not None else ()
            # Never changes, so that what was counted in is counted out; the file may differ.
            self.nbytes = HEADER + sum(a.nbytes + HEADER_PER_ARRAY for a in arrays)

    @staticmethod
    def of_rows(rows: Rows) -> Source:
        return Source((rows.start, rows.stop), waiting=rows, packed=pack_rows(rows))

    @staticmethod
    def of_state(state: PackedState) -> Source:
        return Source(None, waiting=state, packed=pack_state(state))

    def load(self, store: Store) -> Rows | PackedState | None:
        """From where it waits, or from its file; None where that is damaged or gone."""
        waiting, stored = self.waiting, self.stored
        if waiting is not None:
            return waiting
        received = Receiver()
        arrays = store.read(stored, received.new) if stored is not None else None
        if stored is None or arrays is None:
            return None
        if self.span is not None:
            return unpack_rows(arrays, received)
        return unpack_state(arrays, received)


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

    def of(self, payload: Rows | PackedState | None) -> Rows | PackedState | None:
        """This part of what its source loaded."""
        return payload.part(self.start, self.stop) if isinstance(payload, Rows) else payload
