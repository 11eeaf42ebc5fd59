"""The trees on disk: what their nodes hold is parts of payload files."""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from rewarm.values import Namespace

from ...tree import Node, Payload, State, Tree
from ..base import Receipt, Sealed
from ..seal import FORMAT
from .index import NamespaceInfo, NodeRow

SECOND = 1000
"""Ticks of the clock in a second. Many things are written in one, and their order matters."""
HEADER, HEADER_PER_ARRAY = 1024, 128
"""An estimate of the bytes that a file takes beside its arrays."""


def clock() -> int:
    return int(time.time() * SECOND)


@dataclass(eq=False)
class DiskTree:
    """A namespace's tree. `number` of each node is the id of its row in the index."""

    tree: Tree
    info: NamespaceInfo

    def row(self, node: Node) -> NodeRow:
        """Make the row of a node. It names only files that are complete."""
        checkpoint = node.checkpoint
        is_whole = node.state is None or written_id(node.state) is not None
        last_used = max(node.last_used, checkpoint.last_used if checkpoint else 0)
        return NodeRow(
            id=node.number,
            namespace=self.info.id,
            parent=node.parent.number if node.parent is not None and node.start else None,
            origin=node.origin,
            kind=checkpoint.kind if checkpoint is not None and is_whole else None,
            hits=node.hits,
            used=last_used / SECOND,
            hint=float(checkpoint.hint) if checkpoint is not None else 1.0,
            rows_file=written_id(node.rows),
            window_file=written_id(node.window),
            state_file=written_id(node.state),
            key=node.key,
        )


@dataclass(eq=False, slots=True)
class File:
    """One payload file. It has `arrays` until it is written, and a `size` from then on."""

    id: int
    own: DiskTree
    span: tuple[int, int] | None
    """The tokens whose rows it holds. A checkpoint's file has none."""
    nbytes: int
    """The bytes that are counted for it. They never change: the size may be a little different."""
    size: int | None = None
    arrays: Sealed | None = None
    receipt: Receipt | None = None
    """The offer to be made again where the file cannot be written."""
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


def file_of(payload: Payload | State | None) -> File | None:
    return payload.file if isinstance(payload, FilePart) else None


def files_of(node: Node) -> list[File]:
    """List the files that a node has a part of."""
    files = (file_of(payload) for payload in (node.rows, node.window, node.state))
    return [file for file in files if file is not None]


def written_id(payload: Payload | State | None) -> int | None:
    """Return the number of a payload's file, once that is complete."""
    file = file_of(payload)
    return file.id if file is not None and file.size is not None else None


def nbytes_of(arrays: Sealed) -> int:
    """Estimate the size of a payload's file."""
    return HEADER + sum(array.nbytes + HEADER_PER_ARRAY for array in arrays.values())


def about_of(namespace: Namespace) -> dict[str, Any]:
    """Describe a namespace for the index, with a digest instead of the salt."""
    own = {**asdict(namespace), "weights": namespace.weights, "format": FORMAT}
    return {**own, "salt": salt_digest(namespace.salt)}


def salt_digest(salt: str | None) -> str:
    """Return the digest by which the index tells a salt from others."""
    return hashlib.sha256(salt.encode()).hexdigest()[:16] if salt else ""
