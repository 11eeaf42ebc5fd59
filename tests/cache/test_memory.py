"""The tree keeps to its budget, reports what it really holds, and evicts the right things first."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest

from rewarm.cache import LRU, PrefixCache, Retention, WorkPerByte
from rewarm.cache.memory import auto_size
from rewarm.cache.worth import Item
from rewarm.errors import InvalidOption
from rewarm.options import parse_size
from rewarm.values import Boundary
from tests import zoo
from tests.runs import CHUNK, cold, divergence, joined, prompt, run
from tests.sets import SOAK


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss", "deepseek_v41"])
def test_a_long_chat_holds_its_rows_once_and_what_is_reported_is_really_held(name: str) -> None:
    model = zoo.tiny(name)
    cache = PrefixCache(model, memory="512MB", chunk=64)
    limit = mx.set_cache_limit(0)
    try:
        mx.eval(model.parameters())
        run(model, PrefixCache(model, memory="64MB"), prompt(600))  # lazy constants of the model
        gc.collect()
        before = mx.get_active_memory()
        chat = prompt(40)
        for turn in range(40 if SOAK else 16):
            chat = joined(chat, prompt(80, turn + 1))
            got = run(model, cache, chat, boundaries=[Boundary(len(chat) - 4, "user")])
            if turn:
                assert got.match.resume >= len(chat) - 86
        stats = cache.stats()
        gc.collect()
        grown = mx.get_active_memory() - before
    finally:
        mx.set_cache_limit(limit)
    cache.verify()
    held = stats.bytes["memory"]
    assert abs(stats.held - grown) <= 0.05 * grown
    one = PrefixCache(model, memory="512MB", chunk=512)
    run(model, one, chat)
    once = one.stats().bytes["memory"]
    assert held["rows"] <= 1.05 * once["rows"]
    assert held["window"] <= 1.05 * once["window"]
    if cache.layout.has_rows:
        assert held["rows"] > 0


@pytest.mark.parametrize(
    ("budget", "retention"),
    [
        (budget, retention)
        for i, budget in enumerate((1_000_000, 2_500_000))
        for j, retention in enumerate((WorkPerByte(), LRU()))
        if SOAK or i == j
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss", "mamba", "recurrent_gemma"])
def test_the_tree_is_never_above_its_budget(name: str, budget: int, retention: object) -> None:
    model = zoo.tiny(name)
    cache = PrefixCache(model, memory=budget, chunk=64, retention=retention)
    vocabulary = zoo.vocabulary(name)
    for i in range(16 if SOAK or budget > 1_000_000 else 8):
        tokens = joined(prompt(60, i % 3, vocabulary), prompt(300, i, vocabulary))
        with cache.acquire(tokens) as lease:
            for cut in lease.cuts:
                model(mx.array(lease.tokens[lease.position : cut.stop])[None], cache=lease.caches)
                mx.eval([c.state for c in lease.caches])
                cache.commit(lease, cut.stop, checkpoint=cut.checkpoint)
                cache.verify()
                assert cache.memory.ledger.held.total <= budget
    assert cache.stats().held > 0
    if cache.layout.has_rows:
        assert cache.stats().evictions


@pytest.mark.parametrize("reuse", ["fast", "exact"])
@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "recurrent_gemma"])
def test_a_prompt_larger_than_the_budget_leaves_a_hybrid_something_to_resume(
    name: str, reuse: Any
) -> None:
    model = zoo.tiny(name)
    cache = PrefixCache(model, memory="1MB", chunk=64, reuse=reuse)
    tokens = prompt(3000)
    boundaries = [Boundary(200, "system")]
    run(model, cache, tokens, boundaries=boundaries)
    cache.verify()
    fits = 1_000_000 * cache.stats().tokens // cache.memory.ledger.held.total
    again = cache.match(tokens, boundaries=boundaries)
    assert again.resume >= min(0.6 * fits, 2999)
    assert cache.match(joined(tokens[:210], prompt(50, 1)), boundaries=boundaries).resume >= 192


@pytest.mark.parametrize("name", ["gpt_oss", "gear", "baichuan_m1"])
@pytest.mark.parametrize("share", [0.4, 0.5, 0.6] if SOAK else [0.5])
def test_work_per_byte_keeps_windows_with_the_checkpoints_they_serve(
    name: str, share: float
) -> None:
    """A checkpoint without all of its window saves nothing."""
    kept = []
    for retention in (WorkPerByte(), LRU()):
        model = zoo.tiny(name)
        cache = PrefixCache(model, memory="64MB", chunk=64, retention=retention)
        prompts = [prompt(300, i) for i in range(8)]
        for tokens in prompts:
            run(model, cache, tokens, boundaries=[Boundary(100, "system"), Boundary(280, "user")])
        cache.memory.ledger.budget = int(cache.memory.ledger.held.total * share)
        cache.memory.evictor.make_room()
        cache.verify()
        kept.append(sum(cache.match(tokens).resume for tokens in prompts))
    assert kept[0] >= 0.95 * kept[1]


def test_a_prompt_larger_than_the_budget_runs_and_the_prefix_that_fits_is_kept() -> None:
    model = zoo.tiny("llama")
    cache = PrefixCache(model, memory="1MB", chunk=64)
    tokens = prompt(900)
    got, expected = run(model, cache, tokens), cold(model, tokens, like=cache)
    assert divergence(expected.logits, got.logits) <= 1e-5
    cache.verify()
    again = run(model, cache, tokens)
    row = cache.memory.ledger.held.kinds["rows"] / cache.stats().tokens
    # The rest is the cost of one chunk's node and of the slack for the next one.
    assert again.match.resume * row >= 0.95 * 1_000_000
    assert divergence(expected.logits, again.logits) <= 1e-5


def test_the_number_of_buffers_is_limited_too() -> None:
    model = zoo.tiny("qwen3_5")
    cache = PrefixCache(model, memory="64MB", chunk=32)
    cache.memory.ledger.max_buffers = 40
    for i in range(10):
        run(model, cache, prompt(150, i))
        cache.verify()
        assert cache.stats().buffers <= 40
    assert cache.stats().evictions


def test_a_system_prompt_outlives_the_chats_over_it() -> None:
    model = zoo.tiny("qwen3_5")
    cache = PrefixCache(model, memory="2MB", chunk=64)
    system = prompt(100)
    for i in range(30):
        run(
            model,
            cache,
            joined(system, prompt(120, i + 1)),
            boundaries=[Boundary(100, "system"), Boundary(200, "user")],
        )
    assert cache.stats().evictions
    assert cache.match(joined(system, prompt(9, 99))).resume == 100


def test_lru_forgets_what_was_used_longest_ago() -> None:
    model = zoo.tiny("llama")
    cache = PrefixCache(model, memory="2MB", chunk=512, retention=LRU())
    for i in range(3):
        run(model, cache, prompt(200, i))
    run(model, cache, prompt(200, 0))
    run(model, cache, prompt(500, 7))
    assert cache.match(prompt(200, 0)).resume == 199
    assert cache.match(prompt(200, 1)).resume == 0


def test_rows_behind_the_last_checkpoint_go_before_those_that_can_be_resumed() -> None:
    model = zoo.tiny("qwen3_5")
    cache = PrefixCache(model, memory="64MB", chunk=CHUNK)
    useful = prompt(96)
    run(model, cache, useful)
    with cache.acquire(prompt(96, 1)) as lease:  # cancelled: rows and no checkpoint
        for cut in lease.cuts[:2]:
            model(mx.array(lease.tokens[lease.position : cut.stop])[None], cache=lease.caches)
            cache.commit(lease, cut.stop)
    cache.memory.ledger.budget = cache.memory.ledger.held.total - 1
    cache.memory.evictor.make_room()
    assert cache.match(useful).resume == 95
    assert cache.match(prompt(96, 1)).shared < 64


def test_only_what_a_hit_used_is_refreshed() -> None:
    model = zoo.tiny("llama")
    cache = PrefixCache(model, memory="64MB", chunk=CHUNK)
    run(model, cache, prompt(96))
    nodes = sorted((n for n in cache.nodes()), key=lambda n: n.start)
    run(model, cache, joined(prompt(96)[:40], prompt(5, 1)))
    assert nodes[0].hits == 1
    assert nodes[-1].hits == 0


@pytest.mark.parametrize(
    ("size", "expected"),
    [("2GB", 2 * 10**9), ("1.5 MB", 1_500_000), ("2MiB", 2 << 20), (5_000_000, 5_000_000)],
)
def test_sizes_are_read_as_people_write_them(size: int | str, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", [0, -1, "0", "", "lots", "12 parsecs", "1KB", 3.5, None, True])
def test_a_budget_that_means_nothing_is_a_clear_error(size: object) -> None:
    with pytest.raises(InvalidOption, match="memory="):
        parse_size(size)


def test_auto_takes_a_share_of_what_is_free() -> None:
    assert 64_000_000 <= auto_size() < 1 << 44
    assert PrefixCache(zoo.tiny("llama")).stats().budget > 64_000_000


def test_what_is_said_to_be_asked_for_again_stays_longer() -> None:
    model = zoo.tiny("nemotron_h")

    def kept(hint: float) -> list[bool]:
        cache = PrefixCache(model, memory="64MB", chunk=512)
        older, newer = prompt(2400), prompt(2400, seed=1)
        run(model, cache, older, hint=hint)
        run(model, cache, newer)
        cache.resize(cache.stats().held * 2 // 3)
        return [cache.match(p).resume > 0 for p in (older, newer)]

    assert kept(1.0) == [False, True]
    assert kept(4.0) == [True, False]


@pytest.mark.parametrize("reuse", ["fast", "exact"])
def test_what_waits_for_a_person_goes_first_in_both_modes(reuse: str) -> None:
    model = zoo.tiny("qwen3_5")
    cache = PrefixCache(model, memory="64MB", chunk=64, reuse=reuse)
    tool, person = prompt(2400, 1), prompt(2400, 2)
    marks = [Boundary(300, "user", durable=True)]
    for tokens in (tool, person):
        run(model, cache, tokens, boundaries=marks)
    cache.mark_idle(person, boundaries=marks)
    cache.resize(cache.stats().held * 2 // 3)
    cache.verify()
    kept = {id(t): cache.match(t, boundaries=marks).resume for t in (tool, person)}
    assert kept[id(tool)] > kept[id(person)]


def test_trimming_evicts_down_to_so_many_bytes_and_keeps_the_budget() -> None:
    model = zoo.tiny("qwen3_5")
    cache = PrefixCache(model, memory="64MB", chunk=64)
    for i in range(6):
        run(model, cache, prompt(200, i))
    before = sum(cache.stats().memory.kinds.values())
    cache.trim(before // 2)
    cache.verify()
    assert 0 < sum(cache.stats().memory.kinds.values()) <= before // 2
    assert cache.stats().budget == 64_000_000
    assert [cache.match(prompt(200, i)).resume for i in (0, 5)] == [0, 199]
    with cache.acquire(prompt(200, 5)):
        cache.trim(0)
        assert cache.match(prompt(200, 5)).resume == 199
        assert {node.pins for node in cache.nodes()} == {1}
    cache.trim(0)
    assert not cache.nodes()


def test_a_policy_of_ones_own_says_only_what_is_other() -> None:
    class Newest(Retention):
        """The item that was used last goes first."""

        def last_used(self, item: Item) -> float:
            return -item.last_used

    model = zoo.tiny("llama")
    cache = PrefixCache(model, memory="64MB", chunk=64, retention=Newest())
    for i in range(3):
        run(model, cache, prompt(200, i))
    cache.trim(cache.stats().memory.held - 1)
    cache.verify()
    assert [cache.match(prompt(200, i)).resume for i in range(3)][:2] == [199, 199]
    assert cache.match(prompt(200, 2)).resume < 199
