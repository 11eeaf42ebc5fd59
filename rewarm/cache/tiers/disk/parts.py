"""A payload file of the disk tier, and the parts of it that nodes have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...tree import Node
from ..base import Receipt, Sealed

HEADER, HEADER_PER_ARRAY = 1024, 128
"""An estimate of the bytes that a file takes beside its arrays."""


@dataclass(eq=False, slots=True)
class File:
    """One payload file. It has `arrays` until it is written, and a `size` from then on."""

    id: int
    namespace: int
    span: tuple[int, int] | None
    """The tokens whose rows it holds. A checkpoint's file has none."""
    nbytes: int
    """The bytes that are counted for it. They never change: the size may be a little different."""
    size: int | None = None
    arrays: Sealed | None = None
    receipt: Receipt | None = None
    """The offer to be made again where the file cannot be written."""
    number: int = 0
    """Its place in the order of changes."""
    nodes: set[Node] = field(default_factory=set)
    """The nodes that have a part of it."""

    def overlaps(self, start: int, stop: int) -> bool:
        return self.span is not None and self.span[0] < stop and start < self.span[1]


class FilePart:
    """The part of a file that is one node's rows, window or state."""

    __slots__ = ("file", "nbytes", "start", "stop")
    buffers = 0

    def __init__(self, file: File, start: int, stop: int) -> None:
        first, last = file.span or (start, stop)
        self.file = file
        self.start, self.stop = max(start, first), min(stop, last)
        self.nbytes = file.nbytes
        if self.stop - self.start < last - first:
            self.nbytes = file.nbytes * (self.stop - self.start) // (last - first)

    def split(self, at: int) -> tuple[FilePart | None, FilePart | None]:
        """Return two parts of the same file."""
        upper = FilePart(self.file, self.start, at) if self.start < at else None
        lower = FilePart(self.file, at, self.stop) if self.stop > at else None
        return upper, lower


def parts_of(node: Node) -> list[FilePart]:
    """List the parts of files that a node has."""
    state = node.checkpoint.state if node.checkpoint is not None else None
    return [part for part in (node.rows, node.window, state) if isinstance(part, FilePart)]


def written_id(part: Any) -> int | None:
    """Return the number of a part's file, once that is complete."""
    return part.file.id if isinstance(part, FilePart) and part.file.size is not None else None


def nbytes_of(arrays: Sealed) -> int:
    """Estimate the size of a payload's file."""
    return HEADER + sum(array.nbytes + HEADER_PER_ARRAY for array in arrays.values())
