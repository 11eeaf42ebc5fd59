"""The evictor and its policies, over trees whose payloads only have sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rewarm.bench.profiles import Profile
from rewarm.bench.sized import sized_cache
from rewarm.cache import LRU, WorkPerByte
from rewarm.cache.retention import Evictor
from rewarm.values import Boundary
from tests.runs import prompt

ATTENTION = Profile("attention", 1000, 0, 0, 0, 2e9, 1e5, 0)
HYBRID = Profile("hybrid", 1000, 0, 0, 200_000, 2e9, 1e5, 0)
WINDOW = Profile("window", 500, 500, 128, 0, 2e9, 5e4, 5e4)


def test_a_chat_whose_end_had_to_go_goes_on_from_where_it_was_before() -> None:
    """Two chats take turns where one and a half fit. A checkpoint on the way leaves half of a chat;
    without one, only its beginning would be left."""
    large = Profile("large", 1000, 0, 0, 2_000_000, 2e9, 1e5, 0)
    chats = [prompt(60_000, seed) for seed in (1, 2)]
    cache = sized_cache(large, 115 * 10**6, WorkPerByte())
    for length in range(52_000, 60_000, 2000):
        for chat in chats:
            fill(cache, chat[:length])
    assert cache.stats().evictions
    assert cache.match(chats[1]).resume > 50_000
    assert cache.match(chats[0]).resume > 20_000


def fill(cache: Any, *prompts: Any) -> None:
    for tokens in prompts:
        with cache.acquire(tokens, boundaries=[Boundary(len(tokens) - 20, "user")]) as lease:
            for cut in lease.cuts:
                cache.commit(lease, cut.stop, checkpoint=cut.checkpoint)
    cache.verify()


@pytest.mark.parametrize("profile", [ATTENTION, HYBRID, WINDOW], ids=lambda p: p.name)
def test_a_chat_that_waits_for_a_person_goes_before_one_that_waits_for_a_tool(
    profile: Profile,
) -> None:
    cache = sized_cache(profile, 10**9, WorkPerByte(), chunk=512)
    person, tool = prompt(1000, 1), prompt(1000, 2)
    fill(cache, tool, person)  # the chat that waits for a person is newer
    cache.mark_idle(person)
    cache.resize(cache.memory.ledger.held.total * 2 // 3)
    cache.verify()
    assert cache.match(tool).resume > cache.match(person).resume


@pytest.mark.parametrize("profile", [ATTENTION, HYBRID], ids=lambda p: p.name)
def test_a_chat_that_came_back_outlives_newcomers(profile: Profile) -> None:
    cache = sized_cache(profile, 10**9, WorkPerByte(), chunk=512)
    known, new = prompt(1000, 1), prompt(1000, 2)
    fill(cache, known, known, new)
    cache.resize(cache.memory.ledger.held.total * 2 // 3)
    assert cache.match(known).resume > cache.match(new).resume


@pytest.mark.parametrize("profile", [ATTENTION, HYBRID], ids=lambda p: p.name)
def test_what_one_request_used_goes_from_its_end_on(profile: Profile) -> None:
    """A path without its beginning is worth nothing, and one without its end nearly all."""
    cache = sized_cache(profile, 10**9, LRU(), chunk=512)
    marks = [Boundary(at, "user") for at in range(400, 4000, 400)]
    for tokens in (prompt(4000, 1), prompt(4000, 1)):
        with cache.acquire(tokens, boundaries=marks) as lease:
            for cut in lease.cuts:
                cache.commit(lease, cut.stop, checkpoint=cut.checkpoint)
    points = [*range(400, 4000, 400)]
    while cache.memory.ledger.held.total > 1.2 * 10**6:
        cache.resize(int(cache.memory.ledger.held.total * 0.9))
        found = [cache.match(prompt(4000, 1)[: at + 1]).resume for at in points]
        assert found == [min(at, found[-1]) for at in points]


def check_that_nothing_hides(evictor: Evictor) -> None:
    """Check that no item is filed too high, where it would not be found."""
    for entry in [entry for filed in evictor._filed.values() for entry in filed.values()]:
        assert entry.node is not None
        if entry.node.parent is not None and entry.what in evictor.appraiser.kinds(entry.node):
            now = evictor._as_filed(evictor.appraiser.item(entry.node, entry.what))
            discount = evictor.policy.abandoned_discount(0)
            before, after = (
                e.turn.worth * (discount if e.bucket.abandoned else 1) for e in (entry, now)
            )
            assert before <= after * 2**0.5 + 1e-12, entry
            assert entry.turn.last_used <= now.turn.last_used


def test_a_leaf_that_is_left_alone_is_worth_less_for_the_rows_that_go_with_it() -> None:
    cache = sized_cache(HYBRID, 10**9, WorkPerByte(), chunk=512)
    system = prompt(2000, 1)
    fill(cache, *(np.concatenate([system, prompt(200, i)]) for i in (2, 3)))
    evictor = cache.memory.evictor
    for node in cache.nodes():
        if node.children:
            cache.memory.ledger.put_checkpoint(node, None)
    evictor.take_in()
    leaf: Any = next(node for node in cache.nodes() if not node.children)
    while not leaf.children:
        above = leaf.parent
        evictor._evict(evictor.appraiser.item(leaf, "leaf"))
        evictor.take_in()
        leaf = above
    check_that_nothing_hides(evictor)


@pytest.mark.parametrize("policy", [WorkPerByte(), LRU()], ids=["work per byte", "lru"])
@pytest.mark.parametrize("profile", [ATTENTION, HYBRID, WINDOW], ids=lambda p: p.name)
def test_the_index_finds_what_a_look_at_everything_finds(profile: Profile, policy: Any) -> None:
    """The index's choice is within its step of the best, after many changes and uses."""
    draw = np.random.default_rng(3)
    cache = sized_cache(profile, 10**9, policy, chunk=256)
    roots = [prompt(900, i) for i in range(16)]
    chosen = 0
    for i in range(240):
        root = roots[draw.integers(len(roots))]
        tokens = np.concatenate([root[: draw.integers(200, 900)], prompt(200, 100 + i)])
        fill(cache, tokens)
        if i % 7 == 3:
            cache.mark_idle(tokens)
        evictor = cache.memory.evictor
        evictor.take_in()
        crowd = evictor._crowd()

        def score(item: Any, crowd: int = crowd) -> float:
            age = (
                max(cache.memory.clock - policy.last_used(item), 0)
                + policy.age_penalty(item) * crowd
            )
            discount = policy.abandoned_discount(crowd) if item.abandoned else 1.0
            return float(policy.worth(item) * discount / (1 + crowd / 2 + age))

        every = [
            score(evictor.appraiser.item(node, what))
            for node in cache.nodes()
            for what in evictor.appraiser.kinds(node)
        ]
        check_that_nothing_hides(evictor)
        before = evictor._worst()
        assert before is not None
        assert score(before) <= min(every) * 2**0.5 + 1e-12
        evictor._file(before)
        chosen += 1
        cache.resize(max(int(cache.memory.ledger.held.total * 0.97), 10**6))
        cache.verify()
        cache.memory.ledger.budget = 10**9
    assert chosen == 240


def test_what_was_cleared_is_not_kept_alive_by_the_index() -> None:
    cache = sized_cache(HYBRID, 10**6, chunk=256)
    fill(cache, *(prompt(600, i) for i in range(5)))
    assert cache.stats().evictions
    cache.clear()
    assert not any(cache.memory.evictor._filed.values())
    assert not cache.memory.ledger.noted
    fill(cache, prompt(600, 9))
