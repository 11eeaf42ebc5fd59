"""A survey shows what the trees hold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarm.cache.tiers.base import Browsed
from rewarm.cache.tree import WIDTH, Checkpoint, ChunkTree, Tree
from rewarm.cache.views import survey as module
from rewarm.cache.views.survey import COLUMNS, SUMMED, Survey, Surveyor
from rewarm.values import Namespace
from tests.cache.test_tree import Span, insert, key

OURS = Namespace("model")
THEIRS = Namespace("model", salt="salt")
prompts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), max_size=12)


def weighed(start: int, stop: int) -> Span:
    """Make a payload with one byte for each token."""
    return Span(start, stop, nbytes=stop - start)


def tree_of(*inserted: list[int]) -> Tree:
    tree = Tree()
    for tokens in inserted:
        insert(tree, key(*tokens))
    for node in tree.nodes():
        node.rows = weighed(node.start, node.end)
    return tree


def surveyed(memory: Tree, disk: Tree | None = None) -> Survey:
    below = Browsed({OURS: disk} if disk is not None else {})
    return Surveyor(nullcontext, {OURS: memory}, below).take(7)


def path_of(survey: Survey, row: int) -> bytes:
    keys = []
    while row > 0:
        keys.append(survey.keys[row])
        row = int(survey.column("parent")[row])
    return b"".join(reversed(keys))


def check_shape(survey: Survey) -> None:
    """Check that parents come first, that a row's subtree follows it, and that spans are joined."""
    parent, start, tokens = (survey.column(name) for name in ("parent", "start", "tokens"))
    for row in range(1, len(survey.keys)):
        above = int(parent[row])
        assert above < row < above + survey.size[above]
        assert start[row] == start[above] + tokens[above]
        assert tokens[row] == len(survey.keys[row]) // WIDTH
    below = [int((parent == row).sum()) for row in range(len(survey.keys))]
    assert sum(below) == len(survey.keys) - 1


@given(prompts, prompts)
def test_a_span_that_both_tiers_know_is_one_row(
    held: list[list[int]], stored: list[list[int]]
) -> None:
    memory, disk = tree_of(*held), tree_of(*stored)
    survey = surveyed(memory, disk)
    check_shape(survey)
    in_memory, on_disk = survey.column("upper rows"), survey.column("lower rows")
    for row in range(1, len(survey.keys)):
        path, tokens = path_of(survey, row), len(survey.keys[row]) // WIDTH
        for tree, nbytes in ((memory, in_memory), (disk, on_disk)):
            knows = tree.walk(path).shared == len(path) // WIDTH
            assert nbytes[row] == (tokens if knows else 0)
    assert in_memory.sum() == sum(n.length for n in memory.nodes())
    assert on_disk.sum() == sum(n.length for n in disk.nodes())
    names = [survey.name(row) for row in range(len(survey.keys))]
    assert len(set(names)) == len(names)
    assert all(survey.find(name) == row for row, name in enumerate(names))


@given(prompts)
def test_the_children_of_a_row_are_everything_below_it(held: list[list[int]]) -> None:
    survey = surveyed(tree_of(*held))
    tokens = SUMMED.index("tokens")
    for row in range(len(survey.keys)):
        children = survey.children(row)
        assert all(survey.column("parent")[children] == row)
        own = int(survey.column("tokens")[row])
        below = [int(n) for n in survey.sums[children, tokens]]
        assert own + sum(below) == survey.sums[row, tokens]
        assert below == sorted(below, reverse=True)


def test_a_checkpoint_belongs_to_the_row_that_ends_where_it_is() -> None:
    memory, disk = tree_of([1, 2, 3, 4]), tree_of([1, 2])
    leaf = memory.walk(key(1, 2, 3, 4)).node
    leaf.checkpoint = Checkpoint("user", None, 0)
    survey = surveyed(memory, disk)
    kinds = [module.KINDS[code] for code in survey.column("kind")]
    assert [len(k) // WIDTH for k in survey.keys] == [0, 0, 2, 2]
    assert kinds == [None, None, None, "user"]


def test_chunks_of_other_lengths_stay_apart() -> None:
    memory, disk = ChunkTree(), ChunkTree()
    for tree, chunk in ((memory, key(1, 2, 3)), (disk, key(1, 2, 3)), (disk, key(1, 2, 3, 4))):
        tree.add(tree.root, chunk, "prefill").rows = weighed(0, len(chunk) // WIDTH)
    survey = surveyed(memory, disk)
    rows = sorted(survey.cells[2:, COLUMNS.index("tokens")].tolist())
    assert rows == [3, 4]
    assert survey.column("upper rows").tolist().count(3) == 1
    assert sorted(survey.column("lower rows")[2:].tolist()) == [3, 4]


def test_tenants_have_rows_of_their_own() -> None:
    trees = {OURS: tree_of([1, 2]), THEIRS: tree_of([1, 3])}
    survey = Surveyor(nullcontext, trees).take(0)
    owners = {survey.owner(row) for row in range(1, len(survey.keys))}
    assert owners == {OURS, THEIRS}
    assert survey.owner(0) is None
    assert survey.sums[0, SUMMED.index("nodes")] == 2


@pytest.mark.parametrize("seed", range(100))
def test_a_tree_that_changes_meanwhile_is_seen_before_or_after(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE", 1)
    monkeypatch.setattr(module, "PAUSE", 0)
    draw = random.Random(seed)
    known: set[bytes] = set()
    trees = (Tree(), Tree())

    def add(tree: Tree) -> None:
        data = key(*(draw.randrange(3) for _ in range(draw.randint(1, 14))))
        known.add(data)
        insert(tree, data).rows = None

    def change() -> None:
        tree = draw.choice(trees)
        if draw.random() < 0.5:
            add(tree)
        leaves = [n for n in tree.nodes() if not n.children]
        if leaves and draw.random() < 0.4:
            tree.remove(draw.choice(leaves))

    @contextmanager
    def entered() -> Iterator[None]:
        yield
        change()

    for _ in range(8):
        for tree in trees:
            add(tree)
    survey = Surveyor(entered, {OURS: trees[0]}, Browsed({OURS: trees[1]})).take(0)
    check_shape(survey)
    paths = [path_of(survey, row) for row in range(2, len(survey.keys))]
    assert all(any(data.startswith(path) for data in known) for path in paths)
    assert len(set(paths)) == len(paths)


def test_the_lock_is_let_go_of_every_few_hundred_nodes() -> None:
    tree = Tree()
    node = tree.root
    for i in range(10_000):
        node = tree.add(tree.root if i % 2 else node, key(i, i), "prefill")
    held: list[int] = []

    @contextmanager
    def entered() -> Iterator[None]:
        before = len(surveyor.keys)
        yield
        held.append(len(surveyor.keys) - before)

    surveyor = Surveyor(entered, {OURS: tree})
    survey = surveyor.take(0)
    assert survey.sums[0, SUMMED.index("nodes")] == 10_000
    assert max(held) <= module.SLICE
    assert isinstance(survey.cells, np.ndarray)
