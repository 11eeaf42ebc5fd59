"""The digest says what a cache knows, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rewarm.cache import PrefixCache
from rewarm.cache.tree import Node
from rewarm.values import Boundary
from tests import zoo
from tests.runs import CHUNK, joined, prompt, run

FIRST, SECOND = prompt(100, 1), prompt(80, 2)
BRANCH = joined(FIRST[:60], prompt(30, 3))


def cache_of(name: str = "qwen3_5", **options: Any) -> PrefixCache:
    return PrefixCache(zoo.tiny(name), memory="64MB", chunk=CHUNK, **options)


def filled(*prompts: Any, reuse: Any = "fast") -> PrefixCache:
    cache = cache_of(reuse=reuse)
    for tokens in prompts:
        run(cache.model, cache, tokens, decode=3, boundaries=[Boundary(40, "user")])
    return cache


@pytest.mark.parametrize("reuse", ["fast", "exact"])
def test_the_same_calls_give_the_same_digest(reuse: str) -> None:
    digests = {filled(FIRST, BRANCH, SECOND, FIRST, reuse=reuse).digest() for _ in range(3)}
    assert len(digests) == 1


def test_the_order_in_which_branches_came_does_not_matter() -> None:
    one, other = cache_of("llama"), cache_of("llama")
    for tokens in (FIRST, SECOND):
        run(one.model, one, tokens)
    for tokens in (SECOND, FIRST):
        run(other.model, other, tokens)
    assert one.digest() == other.digest()
    run(one.model, one, FIRST, salt="a")
    assert one.digest() != other.digest()
    run(other.model, other, FIRST, salt="b")
    assert one.digest() != other.digest()


def test_a_use_changes_nothing() -> None:
    cache = filled(FIRST)
    before = cache.digest()
    assert cache.match(BRANCH).shared == 60
    with cache.acquire(FIRST):
        assert cache.digest() == before
    assert cache.digest() == before


def last(cache: PrefixCache) -> Node:
    (tree,) = cache.memory.trees.values()
    return max((n for n in tree.nodes() if n.checkpoint), key=lambda n: (n.end, n.key))


def another_origin(cache: PrefixCache) -> None:
    node = last(cache)
    node.origin = "prefill" if node.origin == "decode" else "decode"


def another_kind(cache: PrefixCache) -> None:
    checkpoint = last(cache).checkpoint
    assert checkpoint is not None
    checkpoint.kind = "mark"


def no_checkpoint(cache: PrefixCache) -> None:
    last(cache).checkpoint = None


def another_token(cache: PrefixCache) -> None:
    node = last(cache)
    node.key = node.key[:-4] + bytes(4)


def another_cut(cache: PrefixCache) -> None:
    (tree,) = cache.memory.trees.values()
    node = last(cache)
    tree.split(node, node.end - 1)


def one_node_less(cache: PrefixCache) -> None:
    (tree,) = cache.memory.trees.values()
    tree.remove(next(n for n in tree.nodes() if not n.children))


def one_prompt_more(cache: PrefixCache) -> None:
    run(cache.model, cache, prompt(50, 9))


@pytest.mark.parametrize(
    "change",
    [
        another_origin,
        another_kind,
        no_checkpoint,
        another_token,
        another_cut,
        one_node_less,
        one_prompt_more,
    ],
)
def test_each_change_gives_another_digest(change: Callable[[PrefixCache], None]) -> None:
    cache = filled(FIRST, BRANCH)
    before = cache.digest()
    change(cache)
    assert cache.digest() != before


def test_payloads_are_no_part_of_it() -> None:
    one, other = cache_of("llama"), PrefixCache(zoo.tiny("llama", seed=1), chunk=CHUNK)
    for cache in (one, other):
        run(cache.model, cache, FIRST)
    assert one.digest() == other.digest()
