"""Memory: the trees of one cache, and what keeps them within their budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx

from rewarm.accel.device import device_bytes
from rewarm.options import SMALLEST
from rewarm.values import Namespace, Origin

from .evicted import EvictedIndex
from .layout import Layout
from .ledger import Held, Ledger
from .pins import Pin, Pins
from .retention import Evictor
from .tiers.lower import Lower
from .tree import NODE_BYTES, ChunkTree, Node, Payload, Tree
from .worth import Appraiser, Item, Retention

AUTO_SHARE = 0.4
"""A cache's share of the memory that is free once the model is loaded; running requests need the
rest."""

MOST_EMPTY = 16
"""The number of trees from which on empty ones are dropped."""

SPARE_BUFFERS = 4
"""Buffers to reserve where the number is known only afterwards: a state takes one per dtype."""


class Memory:
    """The trees of one cache, with its ledger, pins and evictor. Use it under the cache's lock."""

    def __init__(self, layout: Layout, budget: int, policy: Retention, *, chunked: bool) -> None:
        self.ledger = Ledger(budget, most_buffers())
        self.lower = Lower(layout)
        """The tiers below. They are told what changes here."""
        self.trees: dict[Namespace, Tree] = {}
        self.pins = Pins()
        self.evicted = EvictedIndex()
        self.clock = 0
        """The number of prompts that were acquired."""
        self.evictor = Evictor(
            policy,
            self.ledger,
            lambda: self.clock,
            Appraiser(layout.longest_window, layout.has_state),
            on_evict=self._evicting,
        )
        self._tree_kind = ChunkTree if chunked else Tree
        self._most = MOST_EMPTY

    def tree(self, namespace: Namespace, *, keep: bool = True) -> Tree:
        """Return the tree of a namespace, or a new empty one, which `keep` adds to the trees.

        Empty trees that no pin uses are dropped now and then: else each salt would leave one."""
        found = self.trees.get(namespace) or self._tree_kind(namespace)
        if keep and namespace not in self.trees:
            if len(self.trees) >= self._most:
                used = {pin.tree for pin in self.pins.live}
                kept = {n: t for n, t in self.trees.items() if t.root.children or t in used}
                self.trees = kept
                self._most = 2 * len(kept) + MOST_EMPTY
            self.trees[namespace] = found
        return found

    def nodes(self) -> list[Node]:
        """List every node of every tree."""
        return [node for tree in self.trees.values() for node in tree.nodes()]

    def rename(self, base: str) -> None:
        """Put another identity of what computes into the namespaces of all trees."""
        for tree in self.trees.values():
            tree.namespace = replace(tree.namespace, base=base)
        self.trees = {tree.namespace: tree for tree in self.trees.values()}

    def forget(self) -> None:
        """Free at once what all trees hold. Lower tiers keep what they have."""
        self.pins.forget()
        for tree in self.trees.values():
            tree.clear()
        self.trees.clear()
        self.evicted.clear()
        self.ledger.held = Held()
        self.evictor.forget()

    def release(self, pin: Pin) -> None:
        self.pins.drop(pin)
        # What was leased can be evicted now, where the budget was lowered meanwhile.
        self.evictor.make_room()

    def drain(self) -> None:
        """Release the pins of leases and fetches that nothing refers to any more."""
        while self.pins.dropped:
            self.release(self.pins.dropped.popleft())

    def split(self, pin: Pin, at: int, *, only_warm: bool = False) -> bool:
        """Split a pinned node where there is room for it; the upper half stays pinned."""
        node = pin.node
        if not self.evictor.make_room(NODE_BYTES, SPARE_BUFFERS, only_warm=only_warm):
            return False
        self.ledger.count(node, -1)
        try:
            self.ledger.count(pin.tree.split(node, at))
        finally:
            self.ledger.count(node)
        pin.up_to(at)
        return True

    def grow(
        self, pin: Pin, key: bytes, origin: Origin, rows: Payload | None, window: Payload | None
    ) -> Node:
        """Add a leaf below a pinned node, and pin it. Make room for it first."""
        node = pin.tree.add(pin.node, key, origin)
        node.rows, node.window, node.last_used = rows, window, self.clock
        self.ledger.count(node)
        pin.down(node)
        return node

    def discard(self, tree: Tree, node: Node) -> bool:
        """Remove a node and all below it. Returns False where one of them is in use."""
        below = node.subtree()
        if any(n.pins or (n.checkpoint and n.checkpoint.pins) for n in below):
            return False
        for each in reversed(below):
            self.ledger.count(each, -1)
            tree.remove(each)
            self.lower.gone(each)
        return True

    def _evicting(self, item: Item) -> None:
        self.evicted.note(item, resumable=not self.evictor.appraiser.stateful)
        self.lower.evicting(item)


def auto_size() -> int:
    """Return the size of a cache in bytes: a share of the memory that is free now."""
    return max(int((device_bytes() - mx.get_active_memory()) * AUTO_SHARE), 64 * SMALLEST)


def most_buffers() -> int:
    """Return half of the buffers that the device allows: running requests need some as well."""
    limit: Any = dict(mx.device_info()).get("resource_limit", 499_000)
    return int(limit) // 2
