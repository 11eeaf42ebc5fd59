"""A survey of the trees: what every node holds, looked at while requests go on.

The lock is held for a few nodes at a time, and let go in between. So a survey is no instant's
picture: a node is as it was when it was looked at, and one that is split or removed meanwhile is
seen before or after that, never in between. Memory's tree and the disk's are walked together: where
both know a span, it is one row.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .disk.trees import SECOND
from .model import Namespace
from .placement import WEIGHTS
from .tree import WIDTH, Node, Tree, agreement

Column = npt.NDArray[np.int64]

SLICE = 2048
"""Nodes that are looked at while the lock is held: a few milliseconds."""
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
    *(f"{tier} {kind}" for tier in ("memory", "disk") for kind in BYTES),
)
"""`part` is how many tokens of its node lie before a row: a node that the other tier knows in part
has several rows. `last_used` is the cache's clock, and seconds since 1970 where only the disk has
the span."""

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
        own = np.stack([np.ones(len(self.keys), np.int64), *self._summed()], axis=1)
        own[[0, *self.owners], 0] = 0
        upto = np.vstack([np.zeros((1, own.shape[1]), np.int64), own.cumsum(axis=0)])
        rows = np.arange(len(self.keys))
        found: Column = upto[rows + self.size] - upto[rows]
        return found

    def _summed(self) -> list[Column]:
        held = [self.cells[:, COLUMNS.index(f"memory {BYTES[0]}") + i] for i in range(6)]
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
        upto = np.vstack([np.zeros((1, sums.shape[1]), np.int64), sums[rows].cumsum(axis=0)])
        return Children(rows, first, upto)

    def span(self, row: int) -> tuple[int, int]:
        return int(self.first[row]), int(self.first[row + 1])

    def together(self, start: int, stop: int) -> list[int]:
        found: list[int] = (self.upto[stop] - self.upto[start]).tolist()
        return found


@dataclass(slots=True)
class _Branches:
    """What goes on at a position, and is still to be looked at."""

    row: int
    at: int
    memory: list[Node]
    disk: list[Node]
    met: dict[bytes, Node] | None = None
    """The disk's, by what they begin with."""


@dataclass
class Surveyor:
    """Takes one survey."""

    entered: Callable[[], AbstractContextManager[None]]
    memory: Trees
    disk: Trees
    cells: array[int] = field(default_factory=lambda: array("q"))
    keys: list[bytes] = field(default_factory=list)

    def take(self, clock: Callable[[], int]) -> Survey:
        owners: dict[int, Namespace] = {}
        sizes: dict[int, int] = {}
        self._note(-1, b"", 0)
        with self.entered():
            now = clock()
            namespaces = list({**self.memory, **self.disk})
        for namespace in namespaces:
            with self.entered():
                known = [
                    tiers[namespace] for tiers in (self.memory, self.disk) if namespace in tiers
                ]
                trees = [tree for tree in known if tree.root.children]
                first = self._root(owners, namespace, trees) if trees else None
            if first is not None:
                self._walk(first, sizes, whole=not trees[0].splits)
        size = np.ones(len(self.keys), np.int64)
        size[list(sizes)] = list(sizes.values())
        size[0] = len(self.keys)
        cells = np.frombuffer(self.cells, np.int64).reshape(-1, len(COLUMNS))
        return Survey(cells, size, self.keys, owners, now)

    def _root(
        self, owners: dict[int, Namespace], namespace: Namespace, trees: list[Tree]
    ) -> _Branches:
        row = self._note(0, b"", 0, trees[0].root)
        owners[row] = namespace
        memory, disk = self.memory.get(namespace), self.disk.get(namespace)
        branches = [_after(tree.root, 0) if tree is not None else [] for tree in (memory, disk)]
        return _Branches(row, 0, memory=branches[0], disk=branches[1])

    def _walk(self, first: _Branches, sizes: dict[int, int], whole: bool) -> None:
        stack = [first]
        while stack:
            with self.entered():
                for _ in range(SLICE):
                    top = stack[-1]
                    if not (top.memory or top.disk):
                        sizes[top.row] = len(self.keys) - top.row
                        stack.pop()
                        if not stack:
                            break
                    elif (below := self._look(top, whole)) is not None:
                        stack.append(below)
            time.sleep(PAUSE)

    def _look(self, place: _Branches, whole: bool) -> _Branches | None:
        """Take the next branch of a place: a row for the part that is one span in both tiers."""
        at = place.at
        memory = disk = None
        if place.memory and not place.disk and place.memory[-1].start == at:
            return self._whole(place.row, place.memory.pop())
        if place.memory:
            memory = _covering(place.memory.pop(), at)
        elif place.met is not None:
            place.disk, place.met = list(place.met.values()), None
            return None
        else:
            disk = _covering(place.disk.pop(), at)
        if memory is not None and place.disk:
            if place.met is None:
                found = (_covering(node, at) for node in place.disk)
                place.met = {_edge(node, at, whole): node for node in found if node is not None}
            met = place.met.pop(_edge(memory, at, whole), None)
            disk = _covering(met, at) if met is not None else None
            if not place.met:
                place.disk = []
        node = memory or disk
        if node is None:
            return None  # gone meanwhile
        key = _from(node, at)
        if memory is not None and disk is not None:
            other = _from(disk, at)
            if key != other:
                key = key[: agreement(key, other) * WIDTH]
        row = self._note(place.row, key, at, memory, disk)
        end = at + len(key) // WIDTH
        goes_on, below = _after(memory, end), _after(disk, end)
        return _Branches(row, end, goes_on, below) if goes_on or below else None

    def _whole(self, parent: int, node: Node) -> _Branches | None:
        """A node that only memory has, as it is: the way of most, kept short."""
        if node.parent is None:
            return None
        checkpoint, end = node.checkpoint, node.end
        kind, state = (KIND[checkpoint.kind], checkpoint.nbytes) if checkpoint else (0, 0)
        rows = node.rows.nbytes if node.rows is not None else 0
        window = node.window.nbytes if node.window is not None else 0
        start, used = node.start, (node.hits, node.last_used)
        self.cells.extend(
            (parent, node.number, 0, start, end - start, kind, *used, rows, window, state, 0, 0, 0)
        )
        self.keys.append(node.key)
        if not node.children:
            return None
        return _Branches(len(self.keys) - 1, end, list(node.children.values()), [])

    def _note(
        self, parent: int, key: bytes, at: int, memory: Node | None = None, disk: Node | None = None
    ) -> int:
        tokens = len(key) // WIDTH
        end = at + tokens
        node = memory or disk
        kind, name, seen = 0, (0, 0), (0, 0)
        if node is not None:
            used = node.last_used if memory is not None else node.last_used // SECOND
            name, seen = (node.number, at - node.start), (node.hits, used)
            if node.checkpoint is not None and node.end == end:
                kind = KIND[node.checkpoint.kind]
            elif disk is not None and disk.checkpoint is not None and disk.end == end:
                kind = KIND[disk.checkpoint.kind]
        held = _held(memory, at, end) + _held(disk, at, end)
        self.cells.extend((parent, *name, at, tokens, kind, *seen, *held))
        self.keys.append(key)
        return len(self.keys) - 1


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
