"""Retention: evict what is worth least when the budget is full.

An index keeps everything that can be evicted in buckets of similar worth, sorted by age. So the
item that is worth least now is the oldest of some bucket, and a search looks at one item of each
bucket. The index is not told when an item is used, or when a change near it changes its worth. So
an item that is found is appraised again, and filed again where its figures have changed.
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
from .tree import Node, Tree, tree_of
from .worth import FARTHEST, Appraiser, Item, Retention, What, is_left_behind_leaf, leaves_below

STEPS = 2
"""The number of buckets for each doubling of worth."""

AT_ONCE = 256
"""The number of nodes that may wait to be filed: thousands at once would take a second."""


class Bucket(NamedTuple):
    warm: bool
    step: int
    age_penalty: float
    abandoned: bool


class Turn(NamedTuple):
    """The order in a bucket. Items that one request used have the same age: of these, the one that
    is worth least goes first, and the end of a path goes before what lies above it."""

    last_used: float
    worth: float
    up: int
    number: int
    """No two items have the same."""


@dataclass(slots=True, eq=False)
class Filed:
    """An item as it was when it was put into the index."""

    node: Node | None
    """None once the item has gone, or was filed again: a heap must not keep a node alive."""
    what: What
    bucket: Bucket
    turn: Turn


@dataclass
class Evictor:
    """Makes room for trees by a policy. Nothing that is leased is evicted."""

    policy: Retention
    ledger: Ledger
    clock: Callable[[], int]
    appraiser: Appraiser
    on_evict: Callable[[Item], None] | None = None
    """It is called with each item that is about to be evicted, with all its payloads."""
    by_request: bool = True
    """True where the clock counts requests. Where it counts time, there are no crowds."""
    unit: int = 1
    """Ticks of the clock in one unit of the ages that a policy counts."""
    fresh: int = 0
    """Ticks after its last use in which an item is kept while there is an older one. Where all
    items are so fresh, the oldest goes, whatever it is worth."""
    evicted: Counter[str] = field(default_factory=Counter)
    """The number of evictions, by kind of item."""
    _heaps: dict[Bucket, list[tuple[Turn, Filed]]] = field(default_factory=dict)
    _filed: dict[What, dict[Node, Filed]] = field(
        default_factory=lambda: {"leaf": {}, "window": {}, "checkpoint": {}}
    )
    _leased: list[Filed] = field(default_factory=list)
    """Items that could not go when they were found."""
    _marked: set[Node] = field(default_factory=set)
    """The nodes with a checkpoint."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _pushed: int = 0
    _chats: int = 0
    _count_again: int = 0

    @property
    def evictions(self) -> int:
        return self.evicted.total()

    def make_room(self, nbytes: int = 0, buffers: int = 0, *, only_warm: bool = False) -> bool:
        """Evict until so much more fits. Returns False where it does not. `only_warm` evicts only
        warm-ahead."""
        ledger = self.ledger
        if len(ledger.noted) >= AT_ONCE:
            self.take_in()
        if ledger.fits(nbytes, buffers):
            return True
        if nbytes > ledger.budget or buffers > ledger.max_buffers:
            return False
        return self._evict_until(lambda: ledger.fits(nbytes, buffers), only_warm)

    def trim(self, nbytes: int) -> bool:
        """Evict until no more than so much is held. False where all that is left is leased."""
        return self._evict_until(lambda: self.ledger.held.total <= nbytes)

    def mark_idle(self, node: Node) -> None:
        """Note that the chat that ends at a node waits for a person."""
        for each in node.path():
            each.waits = True
            # Only this node has changed, so the nodes near it need not be appraised again.
            self._look_at(each)

    def verify(self, trees: Iterable[Tree]) -> None:
        """Check that the index has everything that can be evicted, and nothing that has gone."""
        noted = self.ledger.noted
        live = {node for tree in trees for node in tree.nodes()}
        found = {id(filed) for heap in self._heaps.values() for _, filed in heap}
        found.update(map(id, self._leased))
        for node in live - noted.keys():
            for what in self.appraiser.kinds(node):
                if id(self._filed[what].get(node)) not in found:
                    raise BrokenInvariant(f"{what} {node.start} to {node.end} can never go")
        for node in {*self._marked, *itertools.chain(*self._filed.values())} - live - noted.keys():
            raise BrokenInvariant(f"node {node.start} to {node.end} has gone, and is still known")

    def forget(self) -> None:
        """Empty the index: the trees are gone."""
        for filed in self._filed.values():
            filed.clear()
        for known in (self.ledger.noted, self._heaps, self._leased, self._marked):
            known.clear()
        self._pushed = self._chats = self._count_again = 0

    def take_in(self, most: int | None = None) -> None:
        """File what is new, drop what is gone, and appraise again, once each, the items whose worth
        this changes. `most` limits the nodes of one call. Later calls take the rest."""
        noted = self.ledger.noted
        near: dict[Node, None] = {}
        for _ in range(min(len(noted), most or len(noted))):
            node, _ = noted.popitem()
            if node.parent is None:  # it has gone, or is a root
                near[node] = None
                self._marked.discard(node)
                continue
            # The worth of a checkpoint depends on what goes on from it.
            above = node.checkpoint_above()
            near.update(dict.fromkeys([node] if above is None else [node, above]))
            near.update(dict.fromkeys(leaves_below(node)))
            if node.checkpoint is None:
                self._marked.discard(node)
            elif node not in self._marked:
                self._marked.add(node)
                # It has changed what these save.
                near.update(dict.fromkeys(node.checkpoints_below()))
        if self.appraiser.reach:
            for node in [*near]:
                near.update(dict.fromkeys(self._windows_before(node)))
        checkpoints: dict[Node, Item] = {}
        for node in near:
            self._look_at(node, checkpoints)

    def _windows_before(self, node: Node) -> list[Node]:
        """Return the nodes with the windows that a checkpoint at a node needs, or needed."""
        near = itertools.takewhile(lambda n: n.end > node.end - self.appraiser.reach, node.path())
        return [above for above in near if above.window is not None]

    def _look_at(self, node: Node, checkpoints: dict[Node, Item] | None = None) -> None:
        """File what a node has now. `checkpoints` holds what this pass has appraised."""
        if node in self.ledger.noted:  # it will be taken in
            return
        kinds = self.appraiser.kinds(node)
        for what in self._filed:
            if what in kinds:
                self._file(self.appraiser.item(node, what, checkpoints))
            else:
                self._unfile(node, what)

    def _file(self, item: Item) -> None:
        self._unfile(item.node, item.what)
        filed = self._filed[item.what][item.node] = self._as_filed(item)
        self._push(filed)
        entries = sum(map(len, self._filed.values()))
        if self._pushed > 4 * entries + 256:
            for heap in self._heaps.values():
                heap[:] = [entry for entry in heap if entry[1].node is not None]
                heapq.heapify(heap)
            self._pushed = sum(map(len, self._heaps.values()))

    def _as_filed(self, item: Item) -> Filed:
        worth = self.policy.worth(item)
        step = round(STEPS * math.log2(worth)) if worth > 0 else -(1 << 20)
        bucket = Bucket(item.is_warm, step, self.policy.age_penalty(item), item.abandoned)
        last_used, number = self.policy.last_used(item), next(self._numbers)
        return Filed(item.node, item.what, bucket, Turn(last_used, worth, -item.node.end, number))

    def _push(self, filed: Filed) -> None:
        if filed.node is not None:
            heapq.heappush(self._heaps.setdefault(filed.bucket, []), (filed.turn, filed))
            self._pushed += 1

    def _unfile(self, node: Node, what: What) -> None:
        filed = self._filed[what].pop(node, None)
        if filed is not None:
            filed.node = None

    def _evict_until(self, is_enough: Callable[[], bool], only_warm: bool = False) -> bool:
        for filed in self._leased:  # leases may have ended
            self._push(filed)
        self._leased.clear()
        self.take_in()
        while not is_enough():
            item = self._worst(only_warm)
            if item is None:
                return False
            self._evict(item)
            self.take_in()
        return True

    def _worst(self, only_warm: bool = False) -> Item | None:
        """Find the item that is worth least now, of those that are not leased."""
        now, crowd = self.clock(), self._crowd()
        discount = self.policy.abandoned_discount(crowd)
        while True:
            least, found = (True, math.inf), None
            for bucket, heap in list(self._heaps.items()):
                while heap and heap[0][1].node is None:
                    heapq.heappop(heap)
                if not heap:
                    del self._heaps[bucket]
                    continue
                if only_warm and not bucket.warm:
                    continue
                turn, _ = heap[0]
                # A clock may be set back.
                ticks = max(now - turn.last_used, 0)
                age = ticks / self.unit + bucket.age_penalty * crowd
                worth = turn.worth * discount if bucket.abandoned else turn.worth
                score = worth / (1 + crowd / 2 + age)
                is_fresh = ticks < self.fresh
                rank = (is_fresh, turn.last_used if is_fresh else score)
                if rank < least:
                    least, found = rank, bucket
            if found is None:
                return None
            _, filed = heapq.heappop(self._heaps[found])
            item = self._current(filed)
            if item is not None:
                return item

    def _crowd(self) -> int:
        """Return the number of chats. It need not be exact, so it is counted only now and then."""
        if not self.by_request:
            return 0
        if self.evictions >= self._count_again:
            leaves = self._filed["leaf"]
            self._chats = sum(not is_left_behind_leaf(leaf) for leaf in leaves)
            self._count_again = self.evictions + 16 + len(leaves) // 8
        return self._chats

    def _current(self, filed: Filed) -> Item | None:
        """Return the item where it can be evicted and has not changed since it was filed."""
        node, what = filed.node, filed.what
        assert node is not None
        if what not in self.appraiser.kinds(node):
            self._unfile(node, what)
            return None
        if self.appraiser.is_leased(node, what):
            self._leased.append(filed)
            return None
        item = self.appraiser.item(node, what)
        again = self._as_filed(item)
        if (again.bucket, again.turn.last_used) == (filed.bucket, filed.turn.last_used):
            return item
        self._file(item)
        return None

    def _evict(self, item: Item) -> None:
        node = item.node
        if self.on_evict is not None:
            self.on_evict(item)
        if item.what == "leaf":
            self.ledger.count(node, -1)
            tree_of(node).remove(node)
        elif item.what == "checkpoint":
            self.ledger.put_checkpoint(node, None)
        else:
            self.ledger.put_window(node, None)
            # A part of a window is worth nothing, so what is left of it is appraised again.
            below = [node]
            for each in below:
                if len(below) < FARTHEST:
                    ends = node.end + self.appraiser.reach
                    below += [c for c in each.children.values() if c.start < ends]
            self.ledger.noted.update(dict.fromkeys(below))
        self.evicted[item.what] += 1
