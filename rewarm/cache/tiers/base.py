"""The contract of the tiers below memory.

A tier keeps payloads and gives them back. It may be slow, lose payloads, or give back wrong ones:
each payload is checked against its seal (`seal.py`) before it is used. So a fault of a tier costs
a miss, and never changes an answer.

A new tier is a subclass of `Tier` with a name, `find`, `fetch` and `offer`:
`PrefixCache(model, tiers=[MyTier(...)])`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy.typing as npt

from rewarm.values import Kind, Namespace, Reason, Tokens

from ..find import Parting, Query
from ..tree import Node, Tree

T = TypeVar("T")

Sealed = dict[str, npt.NDArray[Any]]
"""A payload as a tier keeps it: named arrays, with its label and its seal among them. A tier gives
back the same names, shapes, dtypes and bytes, and need not know what they mean."""

Take = Callable[[Sealed], bool]
"""Receives one payload. It returns False where the payload is damaged, or is not what was asked
for: the tier should forget it then. It raises `FetchCancelled` once the rest is not needed."""


class FetchCancelled(Exception):
    """The rest of a fetch is not needed any more."""


@dataclass(frozen=True)
class Found:
    """An answer of a tier: it says how much of a prompt the tier could give back.

    It is an estimate. What really comes may be less, and is then used as far as it goes."""

    resume: int
    """The position that the model can go on from once all of it is in memory."""
    nbytes: int
    """The bytes that a fetch brings: payloads beyond `query.known`."""
    handle: Any = None
    """The tier's own note of what to fetch."""
    kind: Kind | None = None
    """The kind of the checkpoint at `resume`; None leaves it to the label of the payload."""
    hint: float = 1.0
    shared: int = 0
    """The tokens of the prompt that the tier knows, where these are more than `resume`. This and
    the next three fields explain why not more is reused; a tier may leave them out."""
    junction: int = 0
    reason: Reason | None = None
    parting: Parting | None = None
    tier: str = ""
    """The tier's name. The cache fills it in."""


@dataclass(frozen=True, eq=False)
class Receipt:
    """The cache's note of what an offer was made of. A tier must not look into it: it changes."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Offer:
    """A path that memory has, from the first token on. Its last node is offered. A tier that lacks
    the nodes before it finds them here, too."""

    namespace: Namespace
    path: tuple[Node, ...]
    """Copies of memory's nodes without parents or children. What they hold never changes."""
    cuts: tuple[int, ...]
    """The cuts of the path in `exact`; none in `fast`."""
    receipt: Receipt = field(repr=False)
    """`Tier.offer` returns it for an offer that is to be made again. Keep this and not the offer,
    which holds its payloads in memory."""

    @property
    def data(self) -> bytes:
        """The tokens of the path as a key."""
        return b"".join(node.key for node in self.path)

    @property
    def nbytes(self) -> int:
        """The bytes of its last node."""
        return self.path[-1].nbytes


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
    thread that this tier has for itself: one at a time, in the order of the cache's calls. It is
    never the model's thread, and the cache's lock is not held. A slow call delays only the next
    calls of the same tier. An exception is logged, and is a miss.

    A tier must never call the cache. It must never change an array that it was given, or that it
    gave back.
    """

    name: str
    """The name in replies, metrics and views."""

    @abstractmethod
    def find(self, query: Query) -> Future[Found | None]:
        """Say what could be fetched for a prompt; None where there is nothing of it.

        The future may be resolved later, on any thread. This loads no payload and leaves no trace:
        a prompt that is only asked for is not stored. What was offered before is found, unless the
        tier refused it or let go of it."""

    @abstractmethod
    def fetch(self, found: Found, take: Take) -> Future[None]:
        """Give each payload that was found to `take`, in any order and on any threads, even several
        at once.

        The future is resolved when nothing more comes. A payload that is gone is left out. Payloads
        up to `query.known` are not needed, and do no harm."""

    @abstractmethod
    def offer(self, offers: Sequence[Offer]) -> Sequence[Receipt]:
        """Take offers, or refuse them. This must not wait for anything slow: write later, on
        another thread. `seal.sealed(offer)` makes the payloads to keep.

        Returns the receipts of the offers that are to be made again: those refused now, and those
        that an earlier call took and that could not be kept. It is also called without offers, to
        ask for the latter."""

    def flush(self, deadline: float | None) -> bool:
        """Wait until everything that was taken outlives this process, at most until
        `time.monotonic()` is `deadline`. Returns False where it does not by then."""
        return True

    def forget(self, weights: Collection[str]) -> None:
        """Delete everything that was computed with these weights (`Namespace.weights`), of every
        salt. When this returns, nothing of it can be found again."""

    def verify(self) -> None:
        """Check everything that is kept, however long it takes. Raises `BrokenInvariant`."""

    def foreign(self, prompt: Tokens, salt: str | None) -> int:
        """Return the number of tokens of a prompt that the tier has, under the same salt, of other
        models or in another form."""
        return 0

    def close(self) -> None:
        """Close files and connections. No other call comes after it."""

    # Called on any thread

    def stats(self) -> TierStats:
        """Return the figures of this moment. This must not wait for anything slow."""
        return TierStats()

    def browse(self) -> Browsed:
        """Return the trees that the tier can show, and the lock to read them under."""
        return Browsed()


@dataclass(frozen=True)
class Browsed:
    trees: Mapping[Namespace, Tree] = field(default_factory=dict)
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """The cache's lock may be taken under this one, but never the other way round."""
    version: tuple[int, ...] = ()
    """It differs whenever the trees may have changed."""
    second: int = 1
    """Ticks of the trees' clock in a second; it counts from 1970."""


def resolved(value: T) -> Future[T]:
    """Return a future that has its result already, for tiers that answer at once."""
    future: Future[T] = Future()
    future.set_result(value)
    return future
