"""Retention: what goes first when the budget is full."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from .memory import MemoryTier
from .placement import WEIGHTS
from .tree import Checkpoint, Node, Payload, Tree

UNMARKED_WINDOW = 0.05
"""How likely a window outside every checkpoint is asked for, against one inside."""


SLACK = 128
"""One part in this many of the budget is freed beyond what is asked for."""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that can be evicted: a leaf with all it holds, a checkpoint, or a window."""

    what: Literal["leaf", "checkpoint", "window"]
    tree: Tree
    node: Node
    saves: int
    """Tokens that a hit would have to compute again without it."""
    weight: float
    nbytes: int
    hits: int
    last_used: int

    @property
    def warm(self) -> bool:
        """Whether nobody has asked for it yet."""
        checkpoint = self.node.checkpoint
        if self.what == "leaf":
            return self.node.warm and (checkpoint is None or checkpoint.warm)
        return self.what == "checkpoint" and checkpoint is not None and checkpoint.warm


class Retention(Protocol):
    def score(self, item: Item, now: int) -> float:
        """How much an item is worth; the lowest goes first."""


class WorkPerByte:
    """Work saved per byte, times how likely it is asked for: recency, frequency, kind."""

    def score(self, item: Item, now: int) -> float:
        age = max(now - item.last_used, 0)  # a clock may be set back
        likelihood = item.weight * math.sqrt(1 + item.hits) / (1 + age)
        return item.saves * likelihood / max(item.nbytes, 1)


class LRU:
    """The baseline: least recently used first."""

    def score(self, item: Item, now: int) -> float:
        return item.last_used


@dataclass
class Evictor:
    """Makes room in a tier by a policy. Nothing that is leased goes."""

    policy: Retention
    memory: MemoryTier
    reach: int = 0
    """Tokens before a checkpoint whose window rows it needs."""
    stateful: bool = False
    """Whether the model resumes at checkpoints only."""
    on_evict: Callable[[Item], None] | None = None
    """Told of an item that is about to go, with all it holds."""
    evicted: Counter[str] = field(default_factory=Counter)
    """How often each kind of item went."""

    @property
    def evictions(self) -> int:
        return self.evicted.total()

    def make_room(
        self, trees: Iterable[Tree], nbytes: int, buffers: int, now: int, only_warm: bool = False
    ) -> bool:
        """`only_warm`: at the cost of warm-ahead alone."""
        memory = self.memory
        if memory.fits(nbytes, buffers):
            return True
        if nbytes > memory.budget or buffers > memory.max_buffers:
            return False
        # One look at everything serves the next few calls too: go a little further than asked.
        nbytes_wanted = nbytes + memory.budget // SLACK
        buffers_wanted = buffers + memory.max_buffers // SLACK
        queue = [
            (self.policy.score(item, now), i, item)
            for i, item in enumerate(item for tree in trees for item in self._items(tree))
            if not only_warm or item.warm
        ]
        heapq.heapify(queue)
        order = len(queue)
        while queue and not memory.fits(nbytes_wanted, buffers_wanted):
            _, _, item = heapq.heappop(queue)
            parent = item.node.parent
            if self._evict(item) and parent is not None and parent.parent is not None:
                # A parent that became a leaf can go next.
                resume = _resume_before(parent) if self.stateful else 0
                for exposed in self._leaf(item.tree, parent, resume):
                    if only_warm and not exposed.warm:
                        continue
                    order += 1
                    heapq.heappush(queue, (self.policy.score(exposed, now), order, exposed))
        return memory.fits(nbytes, buffers)

    def _items(self, tree: Tree) -> Iterator[Item]:
        visited: list[tuple[Node, int]] = []
        serves: dict[Node, Item] = {}
        stack = [(child, 0) for child in tree.root.children.values()]
        while stack:
            node, resume = stack.pop()
            visited.append((node, resume))
            if node.checkpoint is not None:
                if self.reach:
                    item = self._checkpoint(tree, node, node.checkpoint, resume)
                    for above in self._windows_of(node) or ():
                        best = serves.get(above)
                        if best is None or item.weight * item.saves > best.weight * best.saves:
                            serves[above] = item
                resume = node.end
            stack.extend((child, resume) for child in node.children.values())
        for node, resume in visited:
            yield from self._leaf(tree, node, resume)
            checkpoint = node.checkpoint
            # A leaf that is not leased goes as a whole.
            stays = node.children or node.pins
            if checkpoint is not None and checkpoint.nbytes and stays and not checkpoint.pins:
                yield self._checkpoint(tree, node, checkpoint, resume)
            if node.window is not None and node.children and not node.pins:
                yield self._window(tree, node, node.window, serves.get(node))

    def _checkpoint(self, tree: Tree, node: Node, checkpoint: Checkpoint, resume: int) -> Item:
        """A checkpoint is worth its windows too, and nothing where one of them is gone."""
        windows = self._windows_of(node)
        return Item(
            "checkpoint",
            tree,
            node,
            saves=node.end - resume if windows is not None else 0,
            weight=WEIGHTS[checkpoint.kind] * checkpoint.hint,
            nbytes=checkpoint.nbytes + sum(n.window.nbytes for n in windows or () if n.window),
            hits=checkpoint.hits,
            last_used=checkpoint.last_used,
        )

    def _window(self, tree: Tree, node: Node, window: Payload, served: Item | None) -> Item:
        """A window is worth the best checkpoint that needs it; outside all of them, little."""
        if served is not None:
            return replace(served, what="window", node=node)
        return Item(
            "window",
            tree,
            node,
            saves=min(self.reach, node.end),
            weight=UNMARKED_WINDOW,
            nbytes=window.nbytes,
            hits=node.hits,
            last_used=node.last_used,
        )

    def _windows_of(self, node: Node) -> list[Node] | None:
        """The nodes whose windows the end of a node needs; None where one is missing."""
        found: list[Node] = []
        if self.reach:
            first = max(node.end - self.reach, 0)
            for above in node.path():
                if above.end <= first:
                    break
                if above.window is None or above.window.start > max(above.start, first):
                    return None
                found.append(above)
        return found

    def _leaf(self, tree: Tree, node: Node, resume: int) -> Iterator[Item]:
        checkpoint = node.checkpoint
        if node.children or node.pins or (checkpoint is not None and checkpoint.pins):
            return
        held = [p.nbytes for p in (node.rows, node.window, checkpoint) if p is not None]
        if self.stateful:
            # Rows behind the last checkpoint help nobody.
            saves = node.end - resume if checkpoint is not None else 0
        else:
            saves = node.length
        yield Item(
            "leaf",
            tree,
            node,
            saves=saves,
            weight=WEIGHTS[checkpoint.kind] * checkpoint.hint if checkpoint is not None else 1.0,
            nbytes=sum(held) + node.index_bytes,
            hits=max(node.hits, checkpoint.hits if checkpoint is not None else 0),
            last_used=max(node.last_used, checkpoint.last_used if checkpoint is not None else 0),
        )

    def _evict(self, item: Item) -> bool:
        """Whether a leaf went. Items may have been overtaken by an eviction before them."""
        node = item.node
        if node.parent is None:
            return False
        if item.what == "leaf" and node.children:
            return False
        if self.on_evict is not None:
            self.on_evict(item)
        if item.what == "leaf":
            self.memory.count(node, -1)
            item.tree.remove(node)
        elif item.what == "checkpoint":
            self.memory.put_checkpoint(node, None)
        elif node.window is not None:
            self.memory.put_window(node, None)
        self.evicted[item.what] += 1
        return item.what == "leaf"


def _resume_before(node: Node) -> int:
    """The last checkpoint above a node."""
    above = node.parent
    while above is not None and above.parent is not None:
        if above.checkpoint is not None:
            return above.end
        above = above.parent
    return 0
