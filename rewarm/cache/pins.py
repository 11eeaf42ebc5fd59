"""Pins keep paths in use from being evicted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .tree import Checkpoint, Node, Tree


@dataclass(eq=False)
class Pin:
    """Keeps a path, and the checkpoints it restored or took, from being evicted."""

    tree: Tree
    node: Node
    checkpoints: list[Checkpoint] = field(default_factory=list)
    live: bool = True

    @property
    def nbytes(self) -> int:
        """The bytes of the path's rows and windows in the tree, and of these checkpoints."""
        payloads = [p for node in self.node.path() for p in (node.rows, node.window)]
        return sum(p.nbytes for p in (*payloads, *self.checkpoints) if p is not None)

    def take(self) -> None:
        for node in self.node.path():
            node.pins += 1

    def drop(self) -> None:
        if not self.live:
            return
        self.live = False
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
        self.held: set[Pin] = set()
        self.dropped: deque[Pin] = deque()
        """Pins of leases and fetches that nothing refers to any more. A finalizer may run at any
        moment in any thread, so it only adds the pin here."""
        self.hits = self.misses = 0

    def hold(self, tree: Tree, node: Node) -> Pin:
        """Pin a path without refreshing it."""
        pin = Pin(tree, node)
        pin.take()
        self.held.add(pin)
        return pin

    def take(
        self, tree: Tree, node: Node, resume: int, *, warm: bool, hint: float, now: int
    ) -> Pin:
        """Pin the path of a match, and refresh only what the match uses."""
        pin = self.hold(tree, node)
        if node.checkpoint is not None and resume == node.end:
            pin.hold(node.checkpoint)
        if warm:
            return pin
        for each in node.path():
            each.touch(now)
        for checkpoint in pin.checkpoints:
            checkpoint.touch(now)
            checkpoint.hint = max(checkpoint.hint, hint)
        self.hits += resume > 0
        self.misses += resume == 0
        return pin

    def drop(self, pin: Pin) -> None:
        pin.drop()
        self.held.discard(pin)

    def forget(self) -> None:
        """Drop all pins of trees that are gone: there is nothing left to unpin."""
        for pin in self.held:
            pin.live = False
            pin.checkpoints.clear()
        self.held.clear()
