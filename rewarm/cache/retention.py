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

from rewarm.errors import BrokenInvariant

from .ledger import Ledger
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
    leaves_below,
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
    age_penalty: float
    abandoned: bool


class Entry(NamedTuple):
    """An item as it was when it was put into the index."""

    node: Node
    what: What
    bucket: Bucket
    worth: float
    last_used: float


class Place(NamedTuple):
    """Where an item stands in its bucket. What one request used is of one age: of that, what is
    worth least goes first, and the end of a path before what lies above it."""

    last_used: float
    worth: float
    up: int
    number: int


@dataclass
class Evictor:
    """Makes room in a tier by a policy. Nothing that is leased goes."""

    policy: Retention
    ledger: Ledger
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
    _heaps: dict[Bucket, list[Place]] = field(default_factory=dict)
    _entries: dict[int, Entry] = field(default_factory=dict)
    """Heaps hold numbers only: what has gone must not be kept alive by them."""
    _numbers: dict[Node, dict[What, int]] = field(default_factory=dict)
    _next: itertools.count[int] = field(default_factory=itertools.count)
    _filed: int = 0
    _leased: list[int] = field(default_factory=list)
    _leaves: set[Node] = field(default_factory=set)
    _marked: set[Node] = field(default_factory=set)
    """Those with a checkpoint."""
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
        ledger = self.ledger
        trees = list(trees)
        if len(ledger.noted) >= AT_ONCE:
            self.take_in(trees)
        if ledger.fits(nbytes, buffers):
            return True
        if nbytes > ledger.budget or buffers > ledger.max_buffers:
            return False
        for number in self._leased:  # leases may have ended
            self._put_again(number)
        self._leased.clear()
        self.take_in(trees)
        while not ledger.fits(nbytes, buffers):
            item = self._worst(now, only_warm)
            if item is None:
                return False
            self._evict(item)
            self.take_in(trees)
        return True

    def mark_idle(self, node: Node) -> None:
        """The chat that ends at a node waits for a person."""
        for each in node.path():
            each.waits = True
            # Only this has changed: what is around it need not be looked at again.
            self._look_at(each)

    def verify(self, trees: Iterable[Tree]) -> None:
        """The index has everything that can go, and nothing that has gone."""
        noted = self.ledger.noted
        live = {node for tree in trees for node in tree.nodes()}
        in_heaps = {place.number for heap in self._heaps.values() for place in heap}
        in_heaps.update(self._leased)
        for node in live - noted.keys():
            for what in self._appraiser.kinds(node):
                number = self._numbers.get(node, {}).get(what)
                if number not in self._entries or number not in in_heaps:
                    raise BrokenInvariant(f"{what} {node.start} to {node.end} can never go")
        known = {*self._trees, *self._numbers, *self._leaves, *self._marked}
        known.update(entry.node for entry in self._entries.values())
        for node in known - live - noted.keys():
            raise BrokenInvariant(f"node {node.start} to {node.end} has gone, and is still known")

    def forget(self) -> None:
        """The trees are gone."""
        self.ledger.noted.clear()
        for each in (self._trees, self._heaps, self._entries, self._numbers):
            each.clear()
        self._leaves.clear()
        self._marked.clear()
        self._leased.clear()
        self._filed = self._chats = self._count_again = 0

    def take_in(self, trees: list[Tree], most: int | None = None) -> None:
        """Take what is new into the index, what is gone out of it, and appraise again, once each,
        whatever is worth more or less for it. `most`: so many nodes, and the rest another time."""
        noted = self.ledger.noted
        near: dict[Node | None, None] = {}
        for _ in range(min(len(noted), most or len(noted))):
            node, _ = noted.popitem()
            if node.parent is None:
                self._drop(node)
                continue
            self._leaves.discard(node.parent)
            if not node.children:
                self._leaves.add(node)
            self._tree(node, trees)
            near[node] = None
            # What goes on from a checkpoint decides what it is worth.
            near[checkpoint_above(node)] = None
            near.update(dict.fromkeys(leaves_below(node)))
            if node.checkpoint is None:
                self._marked.discard(node)
            elif node not in self._marked:
                self._marked.add(node)
                near.update(dict.fromkeys(checkpoints_below(node)))  # it has changed what they save
        if self.reach:
            for each in [*near]:
                near.update(dict.fromkeys(self._windows_before(each) if each else ()))
        checkpoints: dict[Node, Item] = {}
        for each in near:
            if each is not None:
                self._look_at(each, checkpoints)

    def _windows_before(self, node: Node) -> list[Node]:
        """The nodes with the windows that what is at a node needs, or needed."""
        found = []
        for above in node.path():
            if above.end <= node.end - self.reach:
                break
            if above is not node and above.window is not None:
                found.append(above)
        return found

    def _look_at(self, node: Node, checkpoints: dict[Node, Item] | None = None) -> None:
        """`checkpoints`: as appraised since the tree last changed."""
        tree = self._trees.get(node)
        if tree is None:  # noted, and not taken in yet
            return
        kinds = self._appraiser.kinds(node)
        for what in [what for what in self._numbers.get(node, ()) if what not in kinds]:
            self._unfile(node, what)
        for what in kinds:
            self._file(self._appraiser.item(tree, node, what, checkpoints))

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
        self._push(number, entry)
        self._filed += 1
        if self._filed > 4 * len(self._entries) + 256:
            self._tidy()

    def _tidy(self) -> None:
        """Numbers that mean nothing any more go."""
        for heap in self._heaps.values():
            heap[:] = [place for place in heap if place.number in self._entries]
            heapq.heapify(heap)
        self._filed = sum(map(len, self._heaps.values()))

    def _entry(self, item: Item) -> Entry:
        worth = self.policy.worth(item)
        step = round(STEPS * math.log2(worth)) if worth > 0 else -(1 << 20)
        bucket = Bucket(item.warm, step, self.policy.age_penalty(item), item.abandoned)
        return Entry(item.node, item.what, bucket, worth, self.policy.last_used(item))

    def _put_again(self, number: int) -> None:
        entry = self._entries.get(number)
        if entry is not None:
            self._push(number, entry)

    def _push(self, number: int, entry: Entry) -> None:
        place = Place(entry.last_used, entry.worth, -entry.node.end, number)
        heapq.heappush(self._heaps.setdefault(entry.bucket, []), place)

    def _worst(self, now: int, only_warm: bool) -> Item | None:
        """What is worth least now, of what is not leased."""
        crowd = self._crowd()
        discount = self.policy.abandoned_discount(crowd)
        while True:
            least, found = (True, math.inf), None
            for bucket, heap in list(self._heaps.items()):
                while heap and heap[0].number not in self._entries:
                    heapq.heappop(heap)
                if not heap:
                    del self._heaps[bucket]
                    continue
                if only_warm and not bucket.warm:
                    continue
                entry = self._entries[heap[0].number]
                # A clock may be set back.
                ticks = max(now - entry.last_used, 0)
                age = ticks / self.unit + bucket.age_penalty * crowd
                worth = entry.worth * discount if bucket.abandoned else entry.worth
                score = worth / (1 + crowd / 2 + age)
                is_fresh = ticks < self.fresh
                rank = (is_fresh, entry.last_used if is_fresh else score)
                if rank < least:
                    least, found = rank, bucket
            if found is None:
                return None
            number = heapq.heappop(self._heaps[found]).number
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
        if again.bucket == entry.bucket and again.last_used == entry.last_used:
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
        self._marked.discard(node)

    def _evict(self, item: Item) -> None:
        node = item.node
        if self.on_evict is not None:
            self.on_evict(item)
        if item.what == "leaf":
            self.ledger.count(node, -1)
            item.tree.remove(node)
        elif item.what == "checkpoint":
            self.ledger.put_checkpoint(node, None)
            self._unfile(node, "checkpoint")
        else:
            self.ledger.put_window(node, None)
            self._unfile(node, "window")
            # Half a window is worth nothing: neither is the rest of it.
            below = [node]
            for each in below:
                if len(below) < FARTHEST:
                    ends = node.end + self.reach
                    below += [c for c in each.children.values() if c.start < ends]
            self.ledger.noted.update(dict.fromkeys(below))
        self.evicted[item.what] += 1
