"""Memory: the trees of one cache, and what keeps them within their budget."""

from __future__ import annotations

import secrets
from dataclasses import replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from rewarm.accel.device import device_buffers, device_bytes
from rewarm.options import SMALLEST
from rewarm.values import Namespace, Origin, Tokens

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

CAPACITY = 1 << 15
"""The number of marks that are kept. Each takes 16 bytes."""
GRAIN = 64
"""Tokens between two marks inside a span: they show that a prompt shares a part of it."""
ROUNDS = 3
"""The number of multiplications that mix a token with its position."""

Hashes = npt.NDArray[np.uint64]


class Memory:
    """The trees of one cache, with its ledger, pins and evictor. Use it under the cache's lock."""

    def __init__(self, layout: Layout, budget: int, policy: Retention, *, chunked: bool) -> None:
        # Running requests need buffers as well.
        self.ledger = Ledger(budget, device_buffers() // 2)
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
                self.trees = {n: t for n, t in self.trees.items() if t.root.children or t in used}
                self._most = 2 * len(self.trees) + MOST_EMPTY
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


class EvictedIndex:
    """Keeps a mark of each resume point that was evicted, in bounded space, to explain misses. New
    marks overwrite the oldest.

    A mark is the hash of a prefix: a sum over its tokens, each mixed with its position. So one pass
    over a prompt gives the hashes of all its prefixes. A node's hash is its parent's plus that of
    its span.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._hash = np.zeros(capacity, np.uint64)
        self._position = np.zeros(capacity, np.int64)
        self._count = 0
        # Each process draws new ones, so no client can make two prompts look alike.
        self._secrets = [np.uint64(secrets.randbits(64) | 1) for _ in range(ROUNDS)]

    def note(self, item: Item, *, resumable: bool) -> None:
        """Mark an item that is about to be evicted. `resumable` says that a prompt could resume at
        any position of its span."""
        node = item.node
        if item.what == "leaf" and resumable and node.parent is not None:
            inside = range(node.start // GRAIN * GRAIN + GRAIN, node.end, GRAIN)
            positions = np.array([*inside, node.end], np.int64)
            hashes = self._prefixes(node.tokens(), self._end(node.parent), node.start)
            self._add(hashes[positions - node.start - 1], positions)
        elif item.what != "leaf" or node.checkpoint is not None:
            self._add(np.array([self._end(node)], np.uint64), np.array([node.end], np.int64))

    def look(self, prompt: Tokens, node: Node) -> int:
        """Find the last position beyond a node on its path at which a prompt could have resumed,
        before something was evicted; 0 where there is none."""
        start = node.end
        position = self._position[: min(self._count, len(self._hash))]
        within = np.flatnonzero((position > start) & (position <= len(prompt)))
        if not within.size:
            return 0
        hashes = self._prefixes(prompt[start:], self._end(node), start)
        alike = within[hashes[position[within] - start - 1] == self._hash[within]]
        return int(position[alike].max(initial=0))

    def clear(self) -> None:
        self._count = 0

    def _add(self, hashes: Hashes, positions: npt.NDArray[np.int64]) -> None:
        at = (self._count + np.arange(len(hashes))) % len(self._hash)
        self._hash[at] = hashes
        self._position[at] = positions
        self._count += len(hashes)

    def _end(self, node: Node) -> int:
        """Return the hash of the path to a node's end, and keep it in the node."""
        unknown = [node]
        while unknown[-1].digest is None and unknown[-1].parent is not None:
            unknown.append(unknown[-1].parent)
        digest = unknown.pop().digest or 0
        for each in reversed(unknown):
            digest = each.digest = int(self._prefixes(each.tokens(), digest, each.start)[-1])
        return digest

    def _prefixes(self, tokens: Tokens, before: int, start: int) -> Hashes:
        """Return the hash of every prefix that ends with one of the tokens. They begin at `start`.

        `before` is the hash of the tokens before them. Numbers wrap around on purpose."""
        positions = np.arange(start, start + len(tokens), dtype=np.uint64)
        mixed = positions << np.uint64(32) | tokens.astype(np.uint64)
        for secret in self._secrets:
            mixed *= secret
            mixed ^= mixed >> np.uint64(32)
        return np.asarray(np.cumsum(mixed) + np.uint64(before), np.uint64)


def auto_size() -> int:
    """Return the size of a cache in bytes: a share of the memory that is free now."""
    return max(int((device_bytes() - mx.get_active_memory()) * AUTO_SHARE), 64 * SMALLEST)
