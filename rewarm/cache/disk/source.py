"""A payload of the disk tier: a file, or what is still to be one."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..payload import PackedState, Rows
from .codec import Meta, Receiver, unpack_rows, unpack_state
from .files import Arrays
from .records import StoredPayload
from .store import Store

HEADER = 1024
"""About what a file takes beside its arrays, and for each of them."""
HEADER_PER_ARRAY = 128


@dataclass(eq=False)
class Source:
    """One payload. `waiting` until it is written, `stored` from then on."""

    stored: StoredPayload | None = None
    waiting: Rows | PackedState | None = None
    packed: tuple[Arrays, Meta] | None = None
    users: int = 0
    """Parts of the tree that are in it: a node that splits shares its file."""
    nbytes: int = field(init=False)
    """Never changes, so that what was counted in is counted out; the file may differ a little."""

    def __post_init__(self) -> None:
        if self.stored is not None:
            self.nbytes = self.stored.nbytes
        else:
            arrays = self.packed[0].values() if self.packed is not None else ()
            self.nbytes = HEADER + sum(a.nbytes + HEADER_PER_ARRAY for a in arrays)

    @property
    def span(self) -> tuple[int, int] | None:
        """The tokens of its rows; None for a checkpoint."""
        meta = (
            self.stored.meta if self.stored is not None else self.packed[1] if self.packed else {}
        )
        span = meta.get("span")
        return (span[0], span[1]) if span else None

    def load(self, store: Store) -> Rows | PackedState | None:
        """From where it waits, or from its file; None where that is damaged or gone."""
        waiting, stored = self.waiting, self.stored
        if waiting is not None:
            return waiting
        received = Receiver()
        arrays = store.read(stored, received.new) if stored is not None else None
        if stored is None or arrays is None:
            return None
        if "span" in stored.meta:
            return unpack_rows(arrays, received)
        return unpack_state(arrays, received)


class OnDisk:
    """The part of a payload that a node of the disk's tree has: all, until the node splits."""

    __slots__ = ("source", "start", "stop")

    def __init__(self, source: Source, start: int, stop: int) -> None:
        self.source = source
        self.start = start
        self.stop = stop
        source.users += 1

    @property
    def nbytes(self) -> int:
        span = self.source.span
        if span is None or span[0] == span[1]:
            return self.source.nbytes
        return self.source.nbytes * (self.stop - self.start) // (span[1] - span[0])

    @property
    def buffers(self) -> int:
        return 0

    def split(self, at: int) -> tuple[OnDisk | None, OnDisk | None]:
        """Two parts of the same file."""
        self.source.users -= 1
        upper = OnDisk(self.source, self.start, min(at, self.stop)) if self.start < at else None
        lower = OnDisk(self.source, max(at, self.start), self.stop) if self.stop > at else None
        return upper, lower

    def of(self, payload: Rows | PackedState | None) -> Rows | PackedState | None:
        """This part of what its source loaded."""
        return payload.part(self.start, self.stop) if isinstance(payload, Rows) else payload
