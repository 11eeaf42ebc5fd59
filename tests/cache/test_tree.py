"""The radix tree agrees with a plain list of what was inserted."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarm.cache.tree import WIDTH, Checkpoint, ChunkTree, Node, Tree, agreement, encode


@dataclass(frozen=True)
class Span:
    """A payload that only knows its start and stop."""

    start: int
    stop: int
    nbytes: int = 0
    buffers: int = 0

    def split(self, at: int) -> tuple[Span | None, Span | None]:
        before = Span(self.start, min(at, self.stop)) if self.start < at else None
        after = Span(max(at, self.start), self.stop) if at < self.stop else None
        return before, after


def key(*tokens: int) -> bytes:
    return encode(np.array(tokens, dtype=np.int32))


def insert(tree: Tree, data: bytes) -> Node:
    walk = tree.walk(data)
    node = walk.node
    if walk.shared < node.end:
        node = tree.split(node, walk.shared)
    if walk.shared * WIDTH == len(data):
        return node
    leaf = tree.add(node, data[walk.shared * WIDTH :], "prefill")
    leaf.rows = Span(leaf.start, leaf.end)
    return leaf


token_lists = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), max_size=12)


@given(token_lists, st.lists(st.integers(0, 3), min_size=1, max_size=14))
def test_a_walk_finds_the_longest_common_prefix_of_everything_inserted(
    prompts: list[list[int]], asked: list[int]
) -> None:
    tree = Tree()
    for tokens in prompts:
        insert(tree, key(*tokens))
    expected = 0
    for tokens in prompts:
        same = 0
        while same < min(len(tokens), len(asked)) and tokens[same] == asked[same]:
            same += 1
        expected = max(expected, same)
    assert tree.walk(key(*asked)).shared == expected


@given(token_lists)
def test_spans_are_contiguous_and_hold_their_own_rows_after_any_splits(
    prompts: list[list[int]],
) -> None:
    tree = Tree()
    for tokens in prompts:
        insert(tree, key(*tokens))
    for node in tree.nodes():
        assert node.parent is not None
        assert node.start == node.parent.end
        assert isinstance(node.rows, Span)
        assert (node.rows.start, node.rows.stop) == (node.start, node.end)
    firsts = [[c.key[:WIDTH] for c in n.children.values()] for n in [tree.root, *tree.nodes()]]
    assert all(len(set(first)) == len(first) for first in firsts)


def test_a_split_keeps_the_lower_half_as_the_same_object() -> None:
    tree = Tree()
    leaf = insert(tree, key(1, 2, 3, 4))
    leaf.pins = 2
    upper = tree.split(leaf, 3)
    assert (leaf.start, leaf.end, leaf.parent) == (3, 4, upper)
    assert (upper.start, upper.end, upper.pins) == (0, 3, 2)
    assert tree.walk(key(1, 2, 3, 4)).node is leaf


@pytest.mark.parametrize("at", [0, 4, 5])
def test_a_split_outside_the_span_is_refused(at: int) -> None:
    tree = Tree()
    leaf = insert(tree, key(1, 2, 3, 4))
    with pytest.raises(ValueError, match="cannot split"):
        tree.split(leaf, at)


def test_only_leaves_can_be_removed() -> None:
    tree = Tree()
    first = insert(tree, key(1, 2))
    second = insert(tree, key(1, 2, 3))
    with pytest.raises(ValueError, match="leaf"):
        tree.remove(first)
    second.checkpoint = Checkpoint("turn", None, last_used=0)
    tree.remove(second)
    assert second.checkpoint is None  # a reference to it keeps no payload alive
    tree.remove(first)
    assert not tree.root.children


def test_a_chunk_of_another_length_is_another_node() -> None:
    tree = ChunkTree()
    tree.add(tree.root, key(1, 2, 3), "prefill")
    tree.add(tree.root, key(1, 2, 3, 4), "prefill")
    assert len(tree.root.children) == 2
    assert tree.walk(key(1, 2, 3, 4), [3, 4]).node.end == 3
    assert tree.walk(key(1, 2, 3, 4), [4]).node.end == 4


def test_a_chunk_tree_says_how_far_tokens_agree_beyond_its_chunks() -> None:
    tree = ChunkTree()
    tree.add(tree.root, key(1, 2, 3, 4), "prefill")
    walk = tree.walk(key(1, 2, 3, 9), [4])
    assert (walk.node, walk.shared) == (tree.root, 3)


def test_agreement_counts_whole_tokens() -> None:
    # 1 and 257 share their first byte.
    assert agreement(key(5, 1), key(5, 257)) == 1
    assert agreement(key(5, 1), key(5)) == 1


def test_the_index_takes_under_16_bytes_a_token_in_nodes_of_64() -> None:
    tokens = np.random.default_rng(0).integers(0, 150_000, 100_000, dtype=np.int32)
    data = encode(tokens)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tree = Tree()
    node = tree.root
    for at in range(0, len(data), 64 * WIDTH):
        node = tree.add(node, data[at : at + 64 * WIDTH], "prefill")
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / len(tokens) < 16
    counted = sum(n.index_bytes for n in tree.nodes())
    assert counted >= after - before, "the budget counts less than the index takes"
    assert tree.walk(data).shared == len(tokens)
