"""Retention: what goes first when the budget is full.

Everything that can go is kept in an index: in buckets of like worth, by age inside each. So what is
worth least now is the oldest of some bucket, and finding it looks at one item a bucket, however
many there are. Items are not told when they are used or when something near them changes their
worth: what is found is appraised again, and put where it belongs now.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .memory import MemoryTier
from .tree import Node, Tree
from .worth import (
    FARTHEST,
    LRU,
    Appraiser,
    Item,
    Retention,
    What,
    WorkPerByte,
    checkpoint_above,
    checkpoints_below,
    left_behind_leaf,
)

__all__ = ["LRU", "Evictor", "Item", "Retention", "WorkPerByte"]

STEPS = 2
"""Buckets for each doubling of worth."""


AT_ONCE = 256
"""Nodes that may wait to be taken into the index: all of them at the end would take a second."""


class Bucket(NamedTuple):
    warm: bool
    step: int
    behind: float


class Entry(NamedTuple):
    """An item as it was when it was put into the index."""

    node: Node
    what: What
    bucket: Bucket
    worth: float
    since: float


@dataclass
class Evictor:
    """Makes room in a tier by a policy. Nothing that is leased goes."""

    policy: Retention
    memory: MemoryTier
    reach: int = 0
    stateful: bool = False
    on_evict: Callable[[Item], None] | None = None
    """Told of an item that is about to go, with all it holds."""
    by_request: bool = True
    """Whether its clock counts requests. Where it counts time, a crowd is no age."""
    unit: int = 1
    """Ticks of its clock in one of what a policy counts ages in."""
    fresh: int = 0
    """Ticks for which what was used is left alone while there is anything older. Where there is
    not, the oldest goes, whatever it is worth."""
    evicted: Counter[str] = field(default_factory=Counter)
    """How often each kind of item went."""
    _trees: dict[Node, Tree] = field(default_factory=dict)
    _heaps: dict[Bucket, list[tuple[float, int]]] = field(default_factory=dict)
    _entries: dict[int, Entry] = field(default_factory=dict)
    """Heaps hold numbers only: what has gone must not be kept alive by them."""
    _numbers: dict[Node, dict[What, int]] = field(default_factory=dict)
    _next: itertools.count[int] = field(default_factory=itertools.count)
    _filed: int = 0
    _leased: list[int] = field(default_factory=list)
    _leaves: set[Node] = field(default_factory=set)
    _chats: int = 0
    _count_again: int = 0

    @property
    def evictions(self) -> int:
        return self.evicted.total()

    def __post_init__(self) -> None:
        self._appraiser = Appraiser(self.reach, self.stateful)

    def make_room(
        self, trees: Iterable[Tree], nbytes: int, buffers: int, now: int, only_warm: bool = False
    ) -> bool:
        """`only_warm`: at the cost of warm-ahead alone."""
        memory = self.memory
        trees = list(trees)
        if len(memory.noted) >= AT_ONCE:
            self._look(trees)
        if memory.fits(nbytes, buffers):
            return True
        if nbytes > memory.budget or buffers > memory.max_buffers:
            return False
        for number in self._leased:  # leases may have ended
            self._put_again(number)
        self._leased.clear()
        self._look(trees)
        while not memory.fits(nbytes, buffers):
            item = self._worst(now, only_warm)
            if item is None:
                return False
            self._evict(item)
            self._look(trees)
        return True

    def let_wait(self, node: Node) -> None:
        """The chat that ends at a node waits for a person."""
        for each in node.path():
            each.waits = True
            if each in self._trees:
                # Only this has changed: what is around it need not be looked at again.
                self._look_at(self._trees[each], each)

    def forget(self) -> None:
        """The trees are gone."""
        self.memory.noted.clear()
        for each in (self._trees, self._heaps, self._entries, self._numbers, self._leaves):
            each.clear()
        self._leased.clear()
        self._filed = self._chats = self._count_again = 0

    def _look(self, trees: list[Tree]) -> None:
        """Take what is new into the index, and what is gone out of it."""
        noted = self.memory.noted
        while noted:
            node, _ = noted.popitem()
            if node.parent is None:
                self._drop(node)
                continue
            self._leaves.discard(node.parent)
            if not node.children:
                self._leaves.add(node)
            tree = self._tree(node, trees)
            had_checkpoint = "checkpoint" in self._numbers.get(node, ())
            for what in self._appraiser.kinds(node):
                self._file(self._appraiser.item(tree, node, what))
            # What goes on from a checkpoint decides what it is worth.
            self._look_at(tree, checkpoint_above(node))
            if not had_checkpoint and "checkpoint" in self._numbers.get(node, ()):
                for below in checkpoints_below(node):  # it has changed what they save
                    self._look_at(tree, below)
            if self.reach:
                self._look_at_windows(tree, node)

    def _look_at_windows(self, tree: Tree, node: Node) -> None:
        """What is new or gone here was, or is, what the windows before it are for."""
        for above in node.path():
            if above.end <= node.end - self.reach:
                break
            filed = above is not node and "window" in self._numbers.get(above, ())
            if filed and above.window is not None and above.children:
                self._file(self._appraiser.item(tree, above, "window"))

    def _look_at(self, tree: Tree, node: Node | None) -> None:
        if node is not None:
            for what in list(self._numbers.get(node, ())):
                if what in self._appraiser.kinds(node):
                    self._file(self._appraiser.item(tree, node, what))

    def _tree(self, node: Node, trees: list[Tree]) -> Tree:
        known = self._trees.get(node)
        if known is None:
            above = node
            while above.parent is not None and known is None:
                above = above.parent
                known = self._trees.get(above)
            if known is None:
                known = next(t for t in trees if t.root is above)
            self._trees[node] = known
        return known

    def _file(self, item: Item) -> None:
        numbers = self._numbers.setdefault(item.node, {})
        before = numbers.get(item.what)
        if before is not None:
            self._entries.pop(before, None)
        number = numbers[item.what] = next(self._next)
        entry = self._entry(item)
        self._entries[number] = entry
        heapq.heappush(self._heaps.setdefault(entry.bucket, []), (entry.since, number))
        self._filed += 1
        if self._filed > 4 * len(self._entries) + 256:
            self._tidy()

    def _tidy(self) -> None:
        """Numbers that mean nothing any more go. Where there are windows everything is appraised
        again: they may have lost worth to something far from them."""
        if not self.reach:
            for heap in self._heaps.values():
                heap[:] = [each for each in heap if each[1] in self._entries]
                heapq.heapify(heap)
            self._filed = sum(map(len, self._heaps.values()))
            return
        known = list(self._entries.items())
        self._heaps.clear()
        for number, entry in known:
            node, what = entry.node, entry.what
            if node.parent is None or what not in self._appraiser.kinds(node):
                self._unfile(node, what)
                continue
            now = self._entry(self._appraiser.item(self._trees[node], node, what))
            self._entries[number] = now
            self._heaps.setdefault(now.bucket, []).append((now.since, number))
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._leased.clear()
        self._filed = len(self._entries)

    def _entry(self, item: Item) -> Entry:
        worth = self.policy.worth(item)
        step = round(STEPS * math.log2(worth)) if worth > 0 else -(1 << 20)
        bucket = Bucket(item.warm, step, self.policy.behind(item))
        return Entry(item.node, item.what, bucket, worth, self.policy.since(item))

    def _put_again(self, number: int) -> None:
        entry = self._entries.get(number)
        if entry is not None:
            heapq.heappush(self._heaps.setdefault(entry.bucket, []), (entry.since, number))

    def _worst(self, now: int, only_warm: bool) -> Item | None:
        """What is worth least now, of what is not leased."""
        crowd = self._crowd()
        while True:
            least, found = (True, math.inf), None
            for bucket, heap in list(self._heaps.items()):
                while heap and heap[0][1] not in self._entries:
                    heapq.heappop(heap)
                if not heap:
                    del self._heaps[bucket]
                    continue
                if only_warm and not bucket.warm:
                    continue
                entry = self._entries[heap[0][1]]
                # A clock may be set back.
                ticks = max(now - entry.since, 0)
                age = ticks / self.unit + bucket.behind * crowd
                score = entry.worth / (1 + crowd / 2 + age)
                is_fresh = ticks < self.fresh
                rank = (is_fresh, entry.since if is_fresh else score)
                if rank < least:
                    least, found = rank, bucket
            if found is None:
                return None
            _, number = heapq.heappop(self._heaps[found])
            entry = self._entries[number]
            item = self._current(number, entry)
            if item is not None:
                return item

    def _crowd(self) -> int:
        """How many chats there are. Counted now and then: it need not be exact."""
        if not self.by_request:
            return 0
        if self.evictions >= self._count_again:
            self._chats = sum(not left_behind_leaf(leaf) for leaf in self._leaves)
            self._count_again = self.evictions + 16 + len(self._leaves) // 8
        return self._chats

    def _current(self, number: int, entry: Entry) -> Item | None:
        """The item of an entry, where it may go and is what it was when it was filed."""
        node, what = entry.node, entry.what
        if node.parent is None or what not in self._appraiser.kinds(node):
            self._unfile(node, what)
            return None
        if self._appraiser.leased(node, what):
            self._leased.append(number)
            return None
        item = self._appraiser.item(self._trees[node], node, what)
        again = self._entry(item)
        if again.bucket == entry.bucket and again.since == entry.since:
            return item
        self._file(item)
        return None

    def _unfile(self, node: Node, what: What) -> None:
        number = self._numbers.get(node, {}).pop(what, None)
        if number is not None:
            self._entries.pop(number, None)

    def _drop(self, node: Node) -> None:
        for number in self._numbers.pop(node, {}).values():
            self._entries.pop(number, None)
        self._trees.pop(node, None)
        self._leaves.discard(node)

    def _evict(self, item: Item) -> None:
        node = item.node
        if self.on_evict is not None:
            self.on_evict(item)
        if item.what == "leaf":
            self.memory.count(node, -1)
            item.tree.remove(node)
        elif item.what == "checkpoint":
            self.memory.put_checkpoint(node, None)
            self._unfile(node, "checkpoint")
        else:
            self.memory.put_window(node, None)
            self._unfile(node, "window")
            # Half a window is worth nothing: neither is the rest of it.
            below = [node]
            for each in below:
                if len(below) < FARTHEST:
                    ends = node.end + self.reach
                    below += [c for c in each.children.values() if c.start < ends]
            self.memory.noted.update(dict.fromkeys(below))
        self.evicted[item.what] += 1
