"""Retention: what goes first when the budget is full."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from .memory import MemoryTier
from .placement import WEIGHTS
from .tree import Node, Tree

UNMARKED_WINDOW = 0.05
"""How likely a window outside every checkpoint is asked for, against one inside."""


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


class Retention(Protocol):
    def score(self, item: Item, now: int) -> float:
        """How much an item is worth; the lowest goes first."""


class WorkPerByte:
    """Work saved per byte, times how likely it is asked for: recency, frequency, kind."""

    def score(self, item: Item, now: int) -> float:
        likelihood = item.weight * math.sqrt(1 + item.hits) / (1 + now - item.last_used)
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
    evictions: int = 0

    def make_room(self, trees: Iterable[Tree], nbytes: int, buffers: int, now: int) -> bool:
        memory = self.memory
        if memory.fits(nbytes, buffers):
            return True
        if nbytes > memory.budget or buffers > memory.max_buffers:
            return False
        # One scan is shared by the next few calls: go a little further than asked.
        slack = memory.budget // 128
        queue = [
            (self.policy.score(item, now), i, item)
            for i, item in enumerate(item for tree in trees for item in self._items(tree))
        ]
        heapq.heapify(queue)
        order = len(queue)
        while queue and not memory.fits(nbytes + slack, buffers):
            _, _, item = heapq.heappop(queue)
            parent = item.node.parent
            if self._evict(item) and parent is not None and parent.parent is not None:
                # A parent that became a leaf can go next.
                for exposed in self._leaf(item.tree, parent, _resume_before(parent)):
                    order += 1
                    heapq.heappush(queue, (self.policy.score(exposed, now), order, exposed))
        return memory.fits(nbytes, buffers)

    def _items(self, tree: Tree) -> Iterator[Item]:
        marked = self._inside_windows(tree) if self.reach else set()
        stack = [(child, 0) for child in tree.root.children.values()]
        while stack:
            node, resume = stack.pop()
            yield from self._leaf(tree, node, resume)
            checkpoint = node.checkpoint
            if checkpoint is not None:
                # A leaf that is not leased goes as a whole.
                stays = node.children or node.pins
                if stays and not checkpoint.pins and checkpoint.nbytes:
                    yield Item(
                        "checkpoint",
                        tree,
                        node,
                        saves=node.end - resume,
                        weight=WEIGHTS[checkpoint.kind],
                        nbytes=checkpoint.nbytes,
                        hits=checkpoint.hits,
                        last_used=checkpoint.last_used,
                    )
                resume = node.end
            if node.window is not None and node.children and not node.pins:
                yield Item(
                    "window",
                    tree,
                    node,
                    saves=min(self.reach, node.end),
                    weight=1.0 if node in marked else UNMARKED_WINDOW,
                    nbytes=node.window.nbytes,
                    hits=node.hits,
                    last_used=node.last_used,
                )
            stack.extend((child, resume) for child in node.children.values())

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
            weight=WEIGHTS[checkpoint.kind] if checkpoint is not None else 1.0,
            nbytes=sum(held) + node.index_bytes,
            hits=max(node.hits, checkpoint.hits if checkpoint is not None else 0),
            last_used=max(node.last_used, checkpoint.last_used if checkpoint is not None else 0),
        )

    def _inside_windows(self, tree: Tree) -> set[Node]:
        marked: set[Node] = set()
        for node in tree.nodes():
            if node.checkpoint is None:
                continue
            for above in node.path():
                if above.end <= node.end - self.reach:
                    break
                marked.add(above)
        return marked

    def _evict(self, item: Item) -> bool:
        """Whether a leaf went. Items may have been overtaken by an eviction before them."""
        node = item.node
        if node.parent is None:
            return False
        if item.what == "leaf":
            if node.children:
                return False
            self.memory.count(node, -1)
            item.tree.remove(node)
        elif item.what == "checkpoint":
            self.memory.put_checkpoint(node, None)
        elif node.window is not None:
            self.memory.put_window(node, None)
        self.evictions += 1
        return item.what == "leaf"


def _resume_before(node: Node) -> int:
    """The last checkpoint above a node."""
    above = node.parent
    while above is not None and above.parent is not None:
        if above.checkpoint is not None:
            return above.end
        above = above.parent
    return 0
