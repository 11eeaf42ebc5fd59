"""A payload of the disk tier: a file, or what is still to be one."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..payload import PackedState, Rows
from .codec import Arrays, Meta, unpack_rows, unpack_state
from .records import StoredPayload
from .store import Store

LARGEST_SCRATCH = 64 << 20
HEADER = 1024
"""About what a file takes beside its arrays, and for each of them."""
HEADER_PER_ARRAY = 128

_threads = threading.local()


def _scratch(nbytes: int) -> npt.NDArray[np.uint8] | None:
    """Memory of this thread's to read a file into: it is copied from there at once, and new memory
    costs more than the copy."""
    if nbytes > LARGEST_SCRATCH:
        return None
    known: npt.NDArray[np.uint8] | None = getattr(_threads, "scratch", None)
    if known is None or len(known) < nbytes:
        known = _threads.scratch = np.empty(nbytes, np.uint8)
    return known


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
        arrays = store.read(stored, _scratch(stored.nbytes)) if stored is not None else None
        if stored is None or arrays is None:
            return None
        return unpack_rows(arrays) if "span" in stored.meta else unpack_state(arrays)


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

    def load(self, store: Store) -> Rows | PackedState | None:
        found = self.source.load(store)
        if isinstance(found, Rows):
            if self.start > found.start:
                found = found.split(self.start)[1]
            if found is not None and self.stop < found.stop:
                found = found.split(self.stop)[0]
        return found
