"""A survey of the trees: what every node holds, looked at while requests go on.

The lock is held for a few nodes at a time, and let go in between. So a survey is no instant's
picture: a node is as it was when it was looked at, and one that is split or removed meanwhile is
seen before or after that, never in between. Memory's tree and that of the first tier that has trees
are walked together: where both know a span, it is one row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from struct import Struct

import numpy as np
import numpy.typing as npt

from rewarm.values import Namespace

from ..find import MEMORY
from ..placement import WEIGHTS
from ..tiers.base import Browsed, Tier
from ..tree import WIDTH, Node, Tree, agreement

Column = npt.NDArray[np.int64]

SLICE = 2048
"""Nodes that are looked at while the lock is held: about three milliseconds."""
PAUSE = 2e-4
"""Seconds in which whoever waits for the lock gets it: one that is taken back at once would not
be given to others."""

KINDS: tuple[str | None, ...] = (None, *WEIGHTS)
KIND = {kind: code for code, kind in enumerate(KINDS)}
BYTES = ("rows", "window", "checkpoint")
COLUMNS = (
    "parent",
    "number",
    "part",
    "start",
    "tokens",
    "kind",
    "hits",
    "last_used",
    *(f"{level} {kind}" for level in ("upper", "lower") for kind in BYTES),
)
"""`part` is how many tokens of its node lie before a row: a node that the other tree knows in part
has several rows. `last_used` is the cache's clock, and seconds since 1970 where only the lower tier
has the span. `upper` is memory."""
PACKED, UPPER, LOWER = (Struct(row).pack for row in (f"{len(COLUMNS)}q", "11q24x", "8q24x3q"))
"""A row's cells; padding is zeros, for the tier that has nothing."""

Trees = Mapping[Namespace, Tree]


@dataclass(frozen=True)
class Survey:
    """Rows, parents first; all below a row follow it directly. Row 0 stands for everything, and has
    a row for each namespace below it."""

    cells: Column
    size: Column
    """How many rows a row and all below it are."""
    keys: list[bytes]
    owners: dict[int, Namespace]
    """The namespaces' own rows."""
    clock: int
    tiers: tuple[str, str] = (MEMORY, "")
    """The names of the upper and the lower tree's tiers."""

    def column(self, name: str) -> Column:
        found: Column = self.cells[:, COLUMNS.index(name)]
        return found

    def name(self, row: int) -> str:
        """What a row is called from one survey to the next."""
        number, part = self.cells[row, 1:3].tolist()
        return f"{number}.{part}" if part else str(number)

    def find(self, name: str) -> int | None:
        """The row of that name, if it is still there."""
        number, _, part = name.partition(".")
        same = (self.column("number") == int(number)) & (self.column("part") == int(part or 0))
        rows = np.flatnonzero(same)
        return int(rows[0]) if rows.size else None

    def owner(self, row: int) -> Namespace | None:
        parent = self.column("parent")
        while row > 0 and row not in self.owners:
            row = int(parent[row])
        return self.owners.get(row)

    @cached_property
    def sums(self) -> Column:
        """What a row and all below it have together, in the columns of `SUMMED`."""
        own = np.stack([np.ones(len(self.keys), np.int64), *self._summed()])
        own[0, [0, *self.owners]] = 0
        upto = _upto(own)
        found: Column = upto[:, np.arange(len(self.keys)) + self.size] - upto[:, :-1]
        return found.T

    def _summed(self) -> list[Column]:
        held = [self.cells[:, COLUMNS.index(f"upper {BYTES[0]}") + i] for i in range(6)]
        return [self.column("tokens"), (self.column("kind") > 0).astype(np.int64), *held]

    @cached_property
    def children(self) -> Children:
        return Children.of(self)


SUMMED = ("nodes", "tokens", "checkpoints", *COLUMNS[-6:])


@dataclass(frozen=True)
class Children:
    """The rows below each row, those with the most tokens first."""

    rows: Column
    first: Column
    """Where a row's own begin in `rows`; one more than there are rows."""
    upto: Column
    """The sums of all before each of `rows`."""

    @staticmethod
    def of(survey: Survey) -> Children:
        parent, sums = survey.column("parent"), survey.sums
        rows = np.lexsort((-sums[:, SUMMED.index("tokens")], parent))[1:]  # not row 0: nobody's
        first = np.searchsorted(parent[rows], np.arange(len(parent) + 1))
        return Children(rows, first, _upto(sums.T[:, rows]).T)

    def span(self, row: int) -> tuple[int, int]:
        return int(self.first[row]), int(self.first[row + 1])

    def together(self, start: int, stop: int) -> list[int]:
        found: list[int] = (self.upto[stop] - self.upto[start]).tolist()
        return found


@dataclass(slots=True)
class _Branching:
    """A position at a row's end, and the branches that are still to be looked at there."""

    row: int
    at: int
    memory: list[Node]
    lower: list[Node]
    met: dict[bytes, Node] | None = None
    """The lower tree's, by what they begin with, while memory's are compared with them."""


@dataclass
class Surveyor:
    """Takes one survey."""

    entered: Callable[[], AbstractContextManager[None]]
    memory: Trees
    below: Browsed = field(default_factory=Browsed)
    tier: str = ""
    """The name of the tier whose trees are `below`."""
    cells: bytearray = field(default_factory=bytearray)
    keys: list[bytes] = field(default_factory=list)

    def take(self, clock: Callable[[], int]) -> Survey:
        owners: dict[int, Namespace] = {}
        self._note(-1, b"", 0)
        with self._entered():
            now = clock()
            namespaces = list({**self.memory, **self.below.trees})
        for namespace in namespaces:
            with self._entered():
                known = [
                    tiers[namespace]
                    for tiers in (self.memory, self.below.trees)
                    if namespace in tiers
                ]
                trees = [tree for tree in known if tree.root.children]
                first = self._root(owners, namespace, trees) if trees else None
            if first is not None:
                self._walk(first, whole=not trees[0].splits)
        cells = np.frombuffer(self.cells, np.int64).reshape(-1, len(COLUMNS))
        sizes = _sizes(cells[:, 0].tolist())
        return Survey(cells, sizes, self.keys, owners, now, (MEMORY, self.tier))

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with self.below.lock, self.entered():
            yield

    def _root(
        self, owners: dict[int, Namespace], namespace: Namespace, trees: list[Tree]
    ) -> _Branching:
        row = self._note(0, b"", 0, trees[0].root)
        owners[row] = namespace
        memory, lower = self.memory.get(namespace), self.below.trees.get(namespace)
        branches = [_after(tree.root, 0) if tree is not None else [] for tree in (memory, lower)]
        return _Branching(row, 0, memory=branches[0], lower=branches[1])

    def _walk(self, first: _Branching, whole: bool) -> None:
        places = [first]
        while places:
            with self._entered():
                upto = len(self.keys) + SLICE
                while places and len(self.keys) < upto:
                    if places[-1].memory and places[-1].lower:
                        self._together(places, whole)
                    else:
                        self._alone(places, upto)
            time.sleep(PAUSE)

    def _together(self, places: list[_Branching], whole: bool) -> None:
        """Memory's next branch, and the lower tree's that begins like it: what is one span in both
        is a row."""
        place = places[-1]
        at, memory = place.at, _covering(place.memory.pop(), place.at)
        if place.met is None:
            found = (_covering(node, at) for node in place.lower)
            place.met = {_edge(node, at, whole): node for node in found if node is not None}
        met = place.met.pop(_edge(memory, at, whole), None) if memory is not None else None
        if not (place.memory and place.met):
            place.lower, place.met = list(place.met.values()), None
        if memory is None:
            return
        lower = _covering(met, at) if met is not None else None
        key = _from(memory, at)
        if lower is not None:
            other = _from(lower, at)
            if key != other:
                key = key[: agreement(key, other) * WIDTH]
        row = self._note(place.row, key, at, memory, lower)
        end = at + len(key) // WIDTH
        further, below = _after(memory, end), _after(lower, end)
        if further or below:
            places.append(_Branching(row, end, further, below))

    def _alone(self, places: list[_Branching], upto: int) -> None:
        """Note what one tree goes on with alone: most nodes pass here, so next to nothing is called
        for each."""
        place, keys, cells = places[-1], self.keys, self.cells
        is_lower = not place.memory
        nodes, pack = (place.lower, LOWER) if is_lower else (place.memory, UPPER)
        while nodes and len(keys) < upto:
            row, at, node = place.row, place.at, nodes.pop()
            while True:  # down to where it parts
                key = node.key
                if node.start != at or node.parent is None:
                    # Split or removed meanwhile, or the other tier has only its beginning.
                    found = _covering(node, at)
                    if found is None:
                        break
                    node, key = found, _from(found, at)
                    row = self._note(row, key, at, *((None, node) if is_lower else (node, None)))
                else:
                    rows, window, checkpoint = node.rows, node.window, node.checkpoint
                    cells += pack(
                        row,
                        node.number,
                        0,
                        at,
                        len(key) // WIDTH,
                        KIND[checkpoint.kind] if checkpoint is not None else 0,
                        node.hits,
                        node.last_used,
                        rows.nbytes if rows is not None else 0,
                        window.nbytes if window is not None else 0,
                        checkpoint.nbytes if checkpoint is not None else 0,
                    )
                    row = len(keys)
                    keys.append(key)
                at += len(key) // WIDTH
                if node.only is None or len(keys) >= upto:
                    break
                node = node.only
            if node.parent is not None and node.children:
                further = list(node.children.values())
                places.append(_Branching(row, at, *(([], further) if is_lower else (further, []))))
                return
        if not nodes:
            places.pop()

    def _note(
        self,
        parent: int,
        key: bytes,
        at: int,
        memory: Node | None = None,
        lower: Node | None = None,
    ) -> int:
        tokens = len(key) // WIDTH
        end = at + tokens
        node = memory or lower
        kind, name, seen = 0, (0, 0), (0, 0)
        if node is not None:
            used = node.last_used if memory is not None else node.last_used // self.below.second
            name, seen = (node.number, at - node.start), (node.hits, used)
            if node.checkpoint is not None and node.end == end:
                kind = KIND[node.checkpoint.kind]
            elif lower is not None and lower.checkpoint is not None and lower.end == end:
                kind = KIND[lower.checkpoint.kind]
        held = _held(memory, at, end) + _held(lower, at, end)
        self.cells += PACKED(parent, *name, at, tokens, kind, *seen, *held)
        self.keys.append(key)
        return len(self.keys) - 1


def _upto(columns: Column) -> Column:
    """The sum of all before each, and of all."""
    found: Column = np.zeros((columns.shape[0], columns.shape[1] + 1), np.int64)
    columns.cumsum(axis=1, out=found[:, 1:])
    return found


def _sizes(parents: list[int]) -> Column:
    """How many rows each has below it, with itself: parents come first."""
    sizes = [1] * len(parents)
    for row in range(len(parents) - 1, 0, -1):
        sizes[parents[row]] += sizes[row]
    return np.array(sizes, np.int64)


def _covering(node: Node, at: int) -> Node | None:
    """The node that has the tokens from `at` on, where `node` did when it was put aside."""
    found: Node | None = node
    while found is not None and found.start > at:
        found = found.parent
    return found if found is not None and found.parent is not None else None


def _from(node: Node, at: int) -> bytes:
    return node.key[(at - node.start) * WIDTH :] if at > node.start else node.key


def _edge(node: Node, at: int, whole: bool) -> bytes:
    """What tells branches apart: chunks are whole, spans begin with different tokens."""
    key = _from(node, at)
    return key if whole else key[:WIDTH]


def _after(node: Node | None, at: int) -> list[Node]:
    """What follows a position of a node."""
    if node is None:
        return []
    return [node] if node.end > at else list(node.children.values())


def _held(node: Node | None, start: int, stop: int) -> tuple[int, int, int]:
    """Bytes of a node by kind; its share where a row is only a part of it."""
    if node is None:
        return 0, 0, 0
    rows = node.rows.nbytes if node.rows is not None else 0
    window = node.window.nbytes if node.window is not None else 0
    if stop - start != node.length:
        rows, window = (n * (stop - start) // node.length for n in (rows, window))
    checkpoint = node.checkpoint
    at_end = checkpoint is not None and node.end == stop
    return rows, window, checkpoint.nbytes if checkpoint is not None and at_end else 0


def survey_of(
    entered: Callable[[], AbstractContextManager[None]],
    memory: Trees,
    tiers: Sequence[Tier],
    clock: Callable[[], int],
) -> Survey:
    """A survey of memory, and of the first tier that has trees to look at."""
    for tier in tiers:
        below = tier.browse()
        if below.trees:
            return Surveyor(entered, memory, below, tier.name).take(clock)
    return Surveyor(entered, memory).take(clock)
