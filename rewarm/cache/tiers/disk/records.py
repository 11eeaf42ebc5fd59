"""What a store holds, what can be asked of it, and what it says when it cannot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rewarm.errors import RewarmError

from .files import Written

TokenSpan = tuple[int, int]
"""The tokens whose rows a payload holds; a checkpoint has none."""


class StoreError(RewarmError, OSError):
    """What a store could not do."""


class StoreHeld(StoreError):
    """A folder that another process has open."""


class StoreUnusable(StoreError):
    """A folder in which no store can be kept."""


class StoreBroken(StoreError):
    """A store whose index turned out to be damaged: it says nothing more, so nothing wrong."""


class StoredPayload(NamedTuple):
    """One file."""

    id: int
    written: Written
    span: TokenSpan | None = None

    @property
    def nbytes(self) -> int:
        return self.written.nbytes


@dataclass(slots=True)
class StoredNode:
    """One row of the index."""

    id: int
    parent: int | None
    """None: a child of the root."""
    start: int
    key: bytes
    """The span's tokens, little-endian int32."""
    origin: str
    kind: str | None
    """Of its checkpoint; None: it has none."""
    hits: int
    used: float
    """`time.time()` of the last use."""
    hint: float
    rows: int | None
    """A payload, as are `window` and `state`. Where rows hold everything, `state` is None."""
    window: int | None
    state: int | None


@dataclass(frozen=True)
class NamespaceInfo:
    id: int
    digest: str
    about: dict[str, Any]
    nodes: int
    payloads: int
    bytes: int
    used: float


@dataclass
class NamespaceRows:
    """The intact part of a namespace, parents before children, and what is not part of it."""

    nodes: list[StoredNode] = field(default_factory=list)
    payloads: dict[int, StoredPayload] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    """Nodes that are damaged, lack a payload, or hang on a node that does."""
    damaged: list[int] = field(default_factory=list)
    """Payloads whose row is."""
    unused: list[int] = field(default_factory=list)
    """Payloads of no node that is left."""


@dataclass(frozen=True)
class PayloadRow:
    id: int
    namespace: int
    written: Written
    span: TokenSpan | None
    intact: bool = True
    """Whether its seal is whole."""


@dataclass(frozen=True)
class AddNode:
    node: StoredNode


@dataclass(frozen=True)
class UpdateNode:
    """All columns. A node that is not there, because it was damaged, stays away."""

    node: StoredNode


@dataclass(frozen=True)
class RemoveNode:
    id: int


@dataclass(frozen=True)
class AddPayload:
    """Make a file known that `put_payload` wrote."""

    payload: StoredPayload


@dataclass(frozen=True)
class RemovePayload:
    id: int


Change = AddNode | UpdateNode | RemoveNode | AddPayload | RemovePayload


@dataclass(frozen=True)
class Verified:
    """What is intact, and what was not."""

    nodes: int
    payloads: int
    bytes: int
    damaged: int
    """Payloads whose file or row is not what was written."""
    dropped: int
    """Nodes that are damaged or need what is."""
    orphans: int
    """Files that no row knows, and payloads of no node."""

    @property
    def clean(self) -> bool:
        return not (self.damaged or self.dropped or self.orphans)
