"""Leases, and the pins that keep paths in use from being evicted."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rewarm.values import Cost, Cut, Tokens

from .find import Query, ResumePoint
from .tree import Checkpoint, Node, Tree, encode

if TYPE_CHECKING:
    import mlx.core as mx

    from .prefix import PrefixCache


@dataclass(eq=False)
class Pin:
    """Keeps a path, and the checkpoints it restored or took, from being evicted until `drop`."""

    tree: Tree
    node: Node
    checkpoints: list[Checkpoint] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The bytes of the path's rows and windows in the tree, and of these checkpoints."""
        payloads = [p for node in self.node.path() for p in (node.rows, node.window)]
        return sum(p.nbytes for p in (*payloads, *self.checkpoints) if p is not None)

    def __post_init__(self) -> None:
        for node in self.node.path():
            node.pins += 1

    def drop(self) -> None:
        for node in self.node.path():
            node.pins -= 1
        for checkpoint in self.checkpoints:
            checkpoint.pins -= 1

    def hold(self, checkpoint: Checkpoint) -> None:
        checkpoint.pins += 1
        self.checkpoints.append(checkpoint)

    def down(self, child: Node) -> None:
        """Extend the pin to a child."""
        child.pins += 1
        self.node = child

    def up_to(self, position: int) -> None:
        """Shorten the pin to the path up to `position`.

        Another request may have split the node meanwhile: the lower half is then released.
        """
        while self.node.parent is not None and self.node.start >= position:
            self.node.pins -= 1
            self.node = self.node.parent


class Pins:
    """All pins of a cache, and the numbers of its hits and misses."""

    def __init__(self) -> None:
        self.live: set[Pin] = set()
        """The pins that are not dropped yet, of trees that are still there."""
        self.dropped: deque[Pin] = deque()
        """Pins of leases and fetches that nothing refers to any more. A finalizer may run at any
        moment in any thread, so it only adds the pin here."""
        self.hits = self.misses = 0

    def hold(self, tree: Tree, node: Node) -> Pin:
        """Pin a path without refreshing it."""
        pin = Pin(tree, node)
        self.live.add(pin)
        return pin

    def take(self, tree: Tree, found: ResumePoint, now: int, *, warm: bool, hint: float) -> Pin:
        """Pin the path of a match, and refresh only what the match uses."""
        node, pin = found.node, self.hold(tree, found.node)
        if node.checkpoint is not None and found.at == node.end:
            pin.hold(node.checkpoint)
        if warm:
            return pin
        for each in node.path():
            each.touch(now)
        for checkpoint in pin.checkpoints:
            checkpoint.touch(now)
            checkpoint.hint = max(checkpoint.hint, hint)
        self.hits += found.at > 0
        self.misses += found.at == 0
        return pin

    def drop(self, pin: Pin) -> None:
        if pin in self.live:
            self.live.remove(pin)
            pin.drop()

    def forget(self) -> None:
        """Drop all pins of trees that are gone: there is nothing left to unpin."""
        for pin in self.live:
            pin.checkpoints.clear()
        self.live.clear()


class Lease:
    """A running request's hold on its path, and the caches it computes with.

    Prefill goes through `cuts`: compute up to each, then `cache.commit(lease, cut.stop,
    checkpoint=cut.checkpoint)`. The path is unpinned when the lease ends in any way: by `release`,
    at the end of its `with` block, or when nothing refers to it any more.
    """

    def __init__(
        self,
        cache: PrefixCache,
        query: Query,
        caches: list[Any],
        pin: Pin,
        cuts: list[Cut],
        cost: Cost,
        *,
        warm: bool,
        hint: float,
    ) -> None:
        self.cache = cache
        self.tokens: Tokens = np.frombuffer(query.data, "<i4")
        self.data = query.data
        self.caches = caches
        self.logits: mx.array | None = None
        """The logits after the last token, where prefill computed that, too."""
        self.cost = cost
        """The match, and what it took to find and restore it."""
        self.position = cost.match.resume
        self.stored = cost.match.resume
        """The position up to which the tree holds this path for the lease."""
        self.stopped_storing = False
        """True once something did not fit or failed: nothing after it can be stored either."""
        self.cuts = cuts
        self.pin = pin
        self.hint = hint
        self.warm = warm
        """True for warm-ahead: no request has asked for this yet, and it evicts only warm-ahead."""
        # The finalizer may run at any moment in any thread, so it only notes the pin.
        self._finalizer = weakref.finalize(self, cache.memory.pins.dropped.append, pin)

    def extend(self, tokens: list[int] | Tokens) -> None:
        """Add tokens that were decoded after the prompt."""
        more = np.asarray(tokens, dtype=np.int32)
        self.tokens = np.concatenate([self.tokens, more])
        self.data += encode(more)

    def release(self) -> None:
        if self._finalizer.detach() is not None:
            with self.cache._lock:
                self.cache.memory.release(self.pin)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
