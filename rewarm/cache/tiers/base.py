"""The contract of what lies below memory.

A tier keeps payloads and gives them back. It may be slow, lose what it has, or give back something
else: what it gives is checked against its seal (`seal.py`) before anybody uses it, so whatever a
tier does costs a miss and never an answer.

A new tier is a subclass of `Tier` with a name, `find`, `fetch` and `offer`:
`PrefixCache(model, tiers=[MyTier(...)])`.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy.typing as npt

from rewarm.values import Kind, Namespace, Origin, Reason, Tokens

from ..find import Parting, Query
from ..payload import PackedState, Rows
from ..tree import WIDTH, Node, Tree

T = TypeVar("T")

Sealed = dict[str, npt.NDArray[Any]]
"""A payload on its way down or up: named arrays, its label and its seal among them. To a tier they
are just arrays that belong together; it gives back the same names, shapes, dtypes and bytes."""

Take = Callable[[Sealed], bool]
"""Receives one payload. False says that it is damaged, or not what was asked for: a tier that can
forgets it. It raises `FetchCancelled` once nobody waits for the rest."""


class FetchCancelled(Exception):
    """Nobody waits for what is being fetched any more."""


@dataclass(frozen=True)
class Found:
    """An answer of a tier: it could give back so much of a prompt. Nothing relies on it."""

    resume: int
    """The position that the model can go on from once all of it is in memory."""
    nbytes: int
    """The bytes that a fetch brings: payloads beyond `query.known`."""
    handle: Any = None
    """For the tier itself."""
    kind: Kind | None = None
    """The kind of the checkpoint at `resume`; None leaves it to the label of the payload."""
    hint: float = 1.0
    shared: int = 0
    """The tokens of the prompt that the tier knows, where these are more than `resume`. This and
    what follows serve for saying why not more was reused; a tier may leave them out."""
    junction: int = 0
    reason: Reason | None = None
    parting: Parting | None = None


@dataclass(frozen=True)
class Span:
    """A node of memory's tree as it was when it was offered. Its payloads never change."""

    start: int
    key: bytes
    origin: Origin
    hits: int
    rows: Rows | None
    window: Rows | None
    state: PackedState | None
    kind: Kind | None
    """The kind of the checkpoint at its end, which has no `state` where rows hold everything."""
    hint: float = 1.0

    @property
    def end(self) -> int:
        return self.start + len(self.key) // WIDTH


@dataclass(frozen=True, eq=False)
class Receipt:
    """The cache's note of what an offer was made of. A tier must not look into it: it changes."""

    tree: Tree
    nodes: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Offer:
    """A path that memory has, from the first token on. What is offered is its last span; those
    before it are there for a tier that lacks them."""

    namespace: Namespace
    path: tuple[Span, ...]
    exact: bool
    receipt: Receipt = field(repr=False)
    """For `Tier.offer` to return. Whoever keeps the offer keeps its payloads in memory."""

    @property
    def data(self) -> bytes:
        """The tokens of the path as a key."""
        return b"".join(span.key for span in self.path)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The cuts of the path in `exact`; none in `fast`."""
        stops = itertools.accumulate(len(span.key) // WIDTH for span in self.path)
        return tuple(stops) if self.exact else ()

    @property
    def nbytes(self) -> int:
        """The bytes of its last span."""
        span = self.path[-1]
        return sum(p.nbytes for p in (span.rows, span.window, span.state) if p is not None)


@dataclass(frozen=True)
class TierStats:
    """The figures of a tier, or of memory, for metrics and views."""

    budget: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)
    """Bytes held, by kind."""
    evictions: Mapping[str, int] = field(default_factory=dict)
    """The number of evictions, by kind."""
    reads: int = 0
    """Spans that were brought up to memory since the start."""
    written: int = 0
    """Bytes written since the start."""
    unwritten: int = 0
    """Bytes that wait to be written."""
    paused: bool = False
    """The tier refused a write a moment ago."""

    @property
    def held(self) -> int:
        return sum(self.kinds.values())


class Tier(Protocol):
    """A store of payloads below memory.

    `find`, `fetch`, `offer`, `flush`, `forget`, `verify`, `foreign` and `close` are called on one
    thread that this tier has for itself, one at a time, in the order of the cache's calls: what was
    offered can be found. It is never the model's thread, and the cache's lock is not held. A call
    that takes its time delays only what comes after it on the same tier. What they raise is logged,
    and is a miss.

    A tier must never call the cache, nor change an array that it was given or gave back.
    """

    name: str
    """The name in replies, metrics and views."""

    @abstractmethod
    def find(self, query: Query) -> Future[Found | None]:
        """Say what could be fetched for a prompt. Loads no payload, and leaves no trace."""

    @abstractmethod
    def fetch(self, found: Found, take: Take) -> Future[None]:
        """Give each payload that was found to `take`, in any order, from any threads at once.

        The future is resolved when all of them were given. What is gone is left out."""

    @abstractmethod
    def offer(self, offers: Sequence[Offer]) -> Sequence[Receipt]:
        """Take them or not, and do not wait for anything slow: write later, on another thread.

        Returns the receipts of those that are to be offered another time: what was not taken now,
        and what an earlier call took and could not keep. It may be called with none, to ask for
        the latter."""

    def flush(self, deadline: float | None) -> bool:
        """Wait until what was taken outlives this process, at most until `time.monotonic()` is
        `deadline`. False where it does not yet."""
        return True

    def forget(self, weights: Collection[str]) -> None:
        """Delete all that was computed with these weights (`Namespace.weights`), whatever the
        salt. Returns when nothing of it can be found again."""
        return None

    def verify(self) -> None:
        """Check everything that is kept, however long it takes; raises `BrokenInvariant`."""
        return None

    def foreign(self, prompt: Tokens, salt: str | None) -> int:
        """The number of tokens of a prompt that the tier has, under the same salt, of other models
        or in another form."""
        return 0

    def close(self) -> None:
        """Let go of files and connections. Nothing is called after it."""
        return None

    # Called on any thread

    def stats(self) -> TierStats:
        """Its figures of now. It waits for nothing slow."""
        return TierStats()

    def browse(self) -> Browsed:
        """The trees that can be shown, where there are any, and the lock to read them under."""
        return Browsed()


@dataclass(frozen=True)
class Browsed:
    trees: Mapping[Namespace, Tree] = field(default_factory=dict)
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """Whoever has it may take the cache's lock as well, but never the other way round."""
    version: tuple[int, ...] = ()
    """Another one wherever the trees may have changed."""
    second: int = 1
    """Ticks of the trees' clock in a second; it counts from 1970."""


def resolved(value: T) -> Future[T]:
    """A future whose result is there already, for tiers that do not need one."""
    future: Future[T] = Future()
    future.set_result(value)
    return future
