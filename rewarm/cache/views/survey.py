"""A survey of the trees: what every node holds, looked at while requests go on.

The lock is held for a few nodes at a time. So a survey does not show one instant: a node is as it
was when it was looked at, and one that is split or removed meanwhile is seen before or after that,
never in between. Memory's tree and that of the first tier that has trees are walked together: where
both know a span, it is one row.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rewarm.values import Namespace

from ..find import MEMORY
from ..placement import WEIGHTS
from ..tiers.base import Browsed, Tier
from ..tiers.lower import Entered
from ..tree import WIDTH, Node, Root, Tree, agreement

Column = npt.NDArray[np.int64]

SLICE = 512
"""Nodes that are looked at while the lock is held: about two milliseconds."""
PAUSE = 2e-4
"""Seconds without the lock after each slice: otherwise other threads would not get it."""

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
"""`part` is the number of tokens of its node that lie before a row: a node that the other tree
knows in part has several rows. `last_used` is the cache's clock, and seconds since 1970 where only
the lower tier has the span. `upper` is memory."""
PACKED = Struct(f"{len(COLUMNS)}q").pack
"""Packs the cells of a row."""

Trees = Mapping[Namespace, Tree]


@dataclass(frozen=True)
class Survey:
    """Rows, parents first; all below a row follow it directly. Row 0 stands for everything, and has
    a row for each namespace below it."""

    cells: Column
    size: Column
    """The number of rows that a row and all below it take."""
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
        """Return the name of a row, which stays from one survey to the next."""
        number, part = self.cells[row, 1:3].tolist()
        return f"{number}.{part}" if part else str(number)

    def find(self, name: str) -> int | None:
        """Return the row of that name, if it is still there."""
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
        """The sums over a row and all below it, in the columns of `SUMMED`."""
        nodes, checkpoints = np.ones(len(self.keys), np.int64), self.column("kind") > 0
        nodes[[0, *self.owners]] = 0
        nbytes = self.cells[:, -2 * len(BYTES) :]
        own = np.column_stack([nodes, self.column("tokens"), checkpoints, nbytes])
        upto = np.concatenate([np.zeros_like(own[:1]), own.cumsum(axis=0)])
        found: Column = upto[np.arange(len(own)) + self.size] - upto[:-1]
        return found

    def children(self, row: int) -> Column:
        """Return the rows right below a row, those with the most tokens first."""
        first, stop = np.searchsorted(self._parents, [row, row + 1])
        return self._by_parent[first:stop]

    @cached_property
    def _by_parent(self) -> Column:
        tokens = self.sums[:, SUMMED.index("tokens")]
        return np.lexsort((-tokens, self.column("parent")))[1:]  # row 0 has no parent

    @cached_property
    def _parents(self) -> Column:
        return self.column("parent")[self._by_parent]


SUMMED = ("nodes", "tokens", "checkpoints", *COLUMNS[-6:])


class Branch(NamedTuple):
    """A branch that is still to be looked at: the nodes of both trees that begin alike."""

    row: int
    at: int
    memory: Node | None
    lower: Node | None


@dataclass
class Surveyor:
    """Takes one survey. It can be used once."""

    entered: Entered
    memory: Trees
    below: Browsed = field(default_factory=Browsed)
    tier: str = ""
    """The name of the tier whose trees are `below`."""
    cells: bytearray = field(default_factory=bytearray)
    keys: list[bytes] = field(default_factory=list)

    def take(self, clock: int) -> Survey:
        owners: dict[int, Namespace] = {}
        self._note(Branch(-1, 0, None, None), b"")
        for namespace in {**self.memory, **self.below.trees}:
            known = [trees.get(namespace) for trees in (self.memory, self.below.trees)]
            roots = [tree.root if tree and tree.root.children else None for tree in known]
            if any(roots):
                owners[len(self.keys)] = namespace
                whole = any(tree and not tree.splits for tree in known)
                self._walk(Branch(0, 0, *roots), whole)
        cells = np.frombuffer(self.cells, np.int64).reshape(-1, len(COLUMNS))
        sizes = _sizes(cells[:, 0].tolist())
        return Survey(cells, sizes, self.keys, owners, clock, (MEMORY, self.tier))

    def _walk(self, root: Branch, whole: bool) -> None:
        todo = [root]
        while todo:
            with self.below.lock, self.entered():
                for _ in range(min(SLICE, len(todo))):
                    self._look(todo, whole)
            time.sleep(PAUSE)

    def _look(self, todo: list[Branch], whole: bool) -> None:
        """Note the last branch, as far as both trees agree, and put what follows in its place.

        The branches of two trees form a pair where they begin alike: with the same token, or, where
        nodes are `whole` chunks, with the same chunk."""
        above, at, memory, lower = todo.pop()
        memory, lower = _covering(memory, at), _covering(lower, at)
        keys = [node.key[(at - node.start) * WIDTH :] for node in (memory, lower) if node]
        if not keys:
            return
        key = keys[0] if keys[0] == keys[-1] else keys[0][: agreement(*keys) * WIDTH]
        row = self._note(Branch(above, at, memory, lower), key)
        at += len(key) // WIDTH

        def edge(node: Node) -> bytes:
            following = node.key[max(at - node.start, 0) * WIDTH :]
            return following if whole else following[:WIDTH]

        below = {edge(node): node for node in _after(lower, at)}
        for node in _after(memory, at):
            todo.append(Branch(row, at, node, below.pop(edge(node), None) if below else None))
        todo += [Branch(row, at, None, node) for node in below.values()]

    def _note(self, branch: Branch, key: bytes) -> int:
        """Add a row that begins a branch. Returns its number."""
        parent, at, memory, lower = branch
        tokens = len(key) // WIDTH
        number = part = kind = hits = last_used = 0
        # Memory's node comes last, and counts.
        for node, second in ((lower, self.below.second), (memory, 1)):
            if node is not None:
                number, part = node.number, at - node.start
                hits, last_used = node.hits, node.last_used // second
                if node.checkpoint is not None and node.end == at + tokens:
                    kind = KIND[node.checkpoint.kind]
        upper, below = (_bytes_of(node, at, at + tokens) for node in (memory, lower))
        seen = (number, part, at, tokens, kind, hits, last_used)
        self.cells += PACKED(parent, *seen, *upper, *below)
        self.keys.append(key)
        return len(self.keys) - 1


def _sizes(parents: list[int]) -> Column:
    """Count the rows below each row, with itself. Parents come first."""
    sizes = [1] * len(parents)
    for row in range(len(parents) - 1, 0, -1):
        sizes[parents[row]] += sizes[row]
    return np.array(sizes, np.int64)


def _covering(node: Node | None, at: int) -> Node | None:
    """Return the node that now has the tokens from `at` on. `node` had them when it was noted, but
    it may have been split or removed since."""
    while node is not None and node.start > at:
        node = node.parent
    is_there = node is not None and (node.parent is not None or isinstance(node, Root))
    return node if is_there else None


def _after(node: Node | None, at: int) -> Collection[Node]:
    """Return the nodes that follow a position of a node."""
    if node is None:
        return []
    return [node] if node.end > at else node.children.values()


def _bytes_of(node: Node | None, start: int, stop: int) -> tuple[int, int, int]:
    """Return the bytes of a node by kind, or a share of them where a row is only a part of it."""
    if node is None:
        return 0, 0, 0
    rows = node.rows.nbytes if node.rows is not None else 0
    window = node.window.nbytes if node.window is not None else 0
    if stop - start != node.length:
        rows, window = (n * (stop - start) // node.length for n in (rows, window))
    state = node.checkpoint if node.end == stop else None
    return rows, window, state.nbytes if state is not None else 0


def survey_of(entered: Entered, memory: Trees, clock: int, tiers: Sequence[Tier]) -> Survey:
    """Take a survey of memory, and of the first tier that has trees to look at."""
    for tier in tiers:
        below = tier.browse()
        if below.trees:
            return Surveyor(entered, memory, below, tier.name).take(clock)
    return Surveyor(entered, memory).take(clock)
