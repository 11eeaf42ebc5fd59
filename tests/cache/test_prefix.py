"""Acquire, commit, leases, cancelling, placement and the guarantees of the tree's contents."""

from __future__ import annotations

import gc
import logging
import threading

import mlx.core as mx
import numpy as np
import pytest

from rewarm.cache import PrefixCache
from rewarm.cache.payload import Rows
from rewarm.cache.placement import SPARSE, Point, points
from rewarm.errors import BrokenInvariant, InvalidOption
from rewarm.values import Boundary
from tests import zoo
from tests.cache.inside import held_bytes
from tests.runs import CHUNK, Counted, advance, cold, divergence, finish, joined, prompt, run


def cache_of(name: str = "llama", **options: object) -> PrefixCache:
    options = {"memory": "64MB", "chunk": CHUNK, **options}
    return PrefixCache(zoo.tiny(name), **options)


@pytest.mark.parametrize("reuse", ["fast", "exact"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss", "rwkv7", "deepseek_v41"])
def test_an_exact_repeat_replays_one_token(name: str, reuse: str) -> None:
    cache = cache_of(name, reuse=reuse)
    counted = Counted(cache.model)
    tokens = prompt(100)
    first = run(counted, cache, tokens)
    assert counted.computed == 100
    again = run(counted, cache, tokens)
    assert counted.computed == 101
    assert again.match.resume == 99
    assert np.array_equal(again.logits, first.logits)


def test_a_prompt_of_one_token_runs() -> None:
    cache = cache_of()
    assert run(cache.model, cache, prompt(1)).match.resume == 0
    assert run(cache.model, cache, prompt(1)).match.resume == 0
    cache.verify()


def test_match_changes_nothing() -> None:
    cache = cache_of("qwen3_5")
    run(cache.model, cache, prompt(100))
    before = cache.stats()
    match = cache.match(joined(prompt(100), prompt(10, 1)))
    assert (match.shared, match.resume, match.replay, match.tier) == (99, 99, 0, "memory")
    assert cache.stats() == before


def test_a_miss_says_why() -> None:
    cache = cache_of("qwen3_5")
    tokens = prompt(100)
    assert cache.match(tokens).reason == "cold"
    run(cache.model, cache, tokens)
    assert cache.match(tokens).reason is None
    assert cache.match(joined(tokens, prompt(5))).reason is None  # it only continues
    assert cache.match(joined(tokens[:50], prompt(80, 9))).reason == "diverged"
    assert cache.match(joined(tokens[:50], prompt(5, 9))).reason == "no_checkpoint"
    exact = cache_of("llama", reuse="exact")
    run(exact.model, exact, tokens)
    assert exact.match(joined(tokens[:50], prompt(5, 9))).reason == "exact_mode"


def test_salts_share_nothing() -> None:
    cache = cache_of()
    tokens = prompt(100)
    run(cache.model, cache, tokens, salt="one")
    assert cache.match(tokens, salt="one").resume == 99
    assert cache.match(tokens, salt="two").shared == 0
    assert cache.match(tokens).shared == 0


# -- what is stored --


def test_a_hundred_prompts_hold_their_common_prefix_once() -> None:
    cache = cache_of(chunk=512)
    prefix = prompt(2000)
    for i in range(100):
        run(cache.model, cache, joined(prefix, prompt(8, 100 + i)))
    # The last prompt token is computed by the first decode step, and not stored here.
    suffixes = [tuple(prompt(8, 100 + i)[:7]) for i in range(100)]
    distinct = 2000 + len({s[:n] for s in suffixes for n in range(1, 8)})
    assert cache.stats().tokens == distinct
    assert cache.stats().bytes["memory"]["rows"] == rows_per_token(cache) * distinct
    cache.verify()


def rows_per_token(cache: PrefixCache) -> int:
    node = cache.nodes()[0]
    assert isinstance(node.rows, Rows)
    return node.rows.nbytes // node.length


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_5"])
def test_nothing_the_tree_holds_changes_while_requests_run(name: str) -> None:
    cache = cache_of(name)
    tokens = prompt(120)
    run(cache.model, cache, tokens, decode=4)
    before = held_bytes(cache)  # this keeps the payloads alive, so no identity is used again
    for i in range(4):
        run(cache.model, cache, joined(tokens[: 30 * (i + 1)], prompt(20, i)), decode=40)
    after = held_bytes(cache)
    kept = before.keys() & after.keys()
    assert kept
    for key in kept:
        assert before[key] == after[key]


def test_two_leases_on_one_path_do_not_see_each_other() -> None:
    cache = cache_of("qwen3_5")
    tokens = prompt(100)
    expected = run(cache.model, cache, tokens)
    one, two = cache.acquire(tokens), cache.acquire(tokens)
    assert one.position == two.position == 99
    # One lease goes far ahead; the other must keep the state that was restored.
    cache.model(mx.array(prompt(60, 5))[None], cache=one.caches)
    mx.eval([c.state for c in one.caches])
    assert np.array_equal(finish(cache.model, two), expected.logits)
    one.release()
    two.release()
    cache.verify()


def test_decoded_spans_are_reused_in_fast_and_not_stored_in_exact() -> None:
    for reuse, resume in (("fast", 106), ("exact", 96)):
        cache = cache_of(reuse=reuse)
        tokens = prompt(100)
        answer = run(cache.model, cache, tokens, decode=6).tokens[:6]
        more = joined(tokens, np.array(answer, dtype=np.int32), prompt(20, 3))
        assert cache.match(more).resume == resume
        origins = {n.origin for n in cache.nodes()}
        assert origins == ({"prefill", "decode"} if reuse == "fast" else {"prefill"})


def test_a_sliding_window_resumes_where_a_branch_leaves_a_message() -> None:
    cache = cache_of("gpt_oss")
    tokens = prompt(200)
    run(cache.model, cache, tokens)
    for at in (33, 77, 150, 191):
        branch = joined(tokens[:at], prompt(30, at))
        assert cache.match(branch).resume == at
        got, expected = run(cache.model, cache, branch), cold(cache.model, branch, like=cache)
        assert divergence(expected.logits, got.logits) <= 1e-5
    exact = cache_of("gpt_oss", reuse="exact")
    run(exact.model, exact, tokens)
    assert exact.match(joined(tokens[:150], prompt(30, 1))).resume == 128


def test_a_window_with_a_hole_resumes_before_it() -> None:
    """A long answer leaves the rows of its last window only."""
    cache = cache_of("gpt_oss")  # its windows are 32 tokens
    tokens = prompt(64)
    answer = np.array(run(cache.model, cache, tokens, decode=100).tokens[:100], dtype=np.int32)
    whole = joined(tokens, answer)
    assert cache.match(joined(whole, prompt(5))).resume == 164
    assert cache.match(joined(whole[:120], prompt(5, 1))).resume == 63
    got = run(cache.model, cache, joined(whole[:120], prompt(5, 1)))
    expected = cold(cache.model, joined(whole[:120], prompt(5, 1)), like=cache)
    assert divergence(expected.logits, got.logits) <= 1e-5
    cache.verify()


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3_text", "llama4"])
@pytest.mark.parametrize("tail", [1, 5, 20])
def test_a_hole_in_a_window_heals_once_it_was_computed_again(name: str, tail: int) -> None:
    cache = cache_of(name)
    tokens = prompt(64)
    answer = np.array(run(cache.model, cache, tokens, decode=100).tokens[:100], dtype=np.int32)
    branch = joined(tokens, answer[:60], prompt(tail, 1))
    run(cache.model, cache, branch)
    again = run(cache.model, cache, branch)
    assert again.match.resume == len(branch) - 1
    expected = cold(cache.model, branch, like=cache)
    assert divergence(expected.logits, again.logits) <= 1e-5
    cache.verify()


def test_windows_that_were_evicted_are_filled_again() -> None:
    cache = cache_of("gpt_oss")
    tokens = prompt(160)
    run(cache.model, cache, tokens)
    for tree in cache.memory.trees.values():
        for node in tree.nodes():
            cache.memory.ledger.put_window(node, None)
    assert cache.match(tokens).resume == 0
    run(cache.model, cache, tokens)
    assert cache.match(tokens).resume == 159
    cache.verify()


# -- placement --


def test_the_third_prompt_over_an_unmarked_prefix_resumes_at_the_junction() -> None:
    cache = cache_of("nemotron_h")
    prefix = prompt(90)
    resumed = [
        run(cache.model, cache, joined(prefix, prompt(30, i))).match.resume for i in range(1, 5)
    ]
    assert resumed == [0, 0, 90, 90]


def test_checkpoints_are_taken_at_boundaries_and_marks() -> None:
    cache = cache_of("qwen3_5")
    run(
        cache.model,
        cache,
        prompt(200),
        boundaries=[Boundary(40, "system"), Boundary(120, "turn"), Boundary(180, "user")],
        marks=[77],
    )
    taken = {n.end: n.checkpoint.kind for n in cache.nodes() if n.checkpoint}
    assert taken == {40: "system", 77: "mark", 120: "turn", 180: "user", 199: "end"}


def test_points_closer_than_a_few_tokens_are_one_and_the_end_is_its_own() -> None:
    ends = [Point(50, "turn"), Point(53, "user"), Point(97, "user")]
    assert points(0, 100, ends) == [
        Point(50, "turn"),
        Point(97, "user"),
        Point(100, "end"),
    ]


def test_a_long_prompt_has_sparse_points_and_none_before_the_resume_point() -> None:
    assert points(150, 20_000, [Point(90, "system")]) == [
        Point(150 + SPARSE, "sparse"),
        Point(150 + 2 * SPARSE, "sparse"),
        Point(20_000, "end"),
    ]


# -- leases --


def test_a_cancelled_prefill_keeps_what_it_has() -> None:
    cache = cache_of()
    tokens = prompt(200)
    with cache.acquire(tokens) as lease:
        advance(cache.model, cache, lease, cuts=3)
    assert cache.match(tokens).resume == 3 * CHUNK
    got, expected = run(cache.model, cache, tokens), cold(cache.model, tokens, like=cache)
    assert divergence(expected.logits, got.logits) <= 1e-5


@pytest.mark.parametrize("how", ["release", "exception", "forgotten", "other thread"])
def test_a_lease_that_is_dropped_in_any_way_unpins(how: str) -> None:
    cache = cache_of("qwen3_5")
    tokens = prompt(100)
    run(cache.model, cache, tokens)
    lease = cache.acquire(tokens)
    assert cache.stats().leases == 1
    if how == "release":
        lease.release()
        lease.release()
    elif how == "exception":
        with pytest.raises(RuntimeError, match="boom"), lease:
            raise RuntimeError("boom")
    elif how == "forgotten":
        del lease
        gc.collect()
    else:
        thread = threading.Thread(target=lease.release)
        thread.start()
        thread.join()
    assert cache.stats().leases == 0
    assert all(n.pins == 0 for n in cache.nodes())
    cache.verify()


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss"])
def test_what_is_leased_is_never_evicted(name: str) -> None:
    cache = cache_of(name)
    tokens = prompt(300)
    run(cache.model, cache, tokens)
    other = run(cache.model, cache, prompt(300, 1))
    lease = cache.acquire(tokens)
    cache.memory.ledger.budget = 1
    cache.memory.evictor.make_room()
    cache.verify()
    assert cache.match(tokens).resume == 299
    assert cache.match(prompt(300, 1)).resume == 0
    assert other.match.resume == 0
    lease.release()
    cache.memory.evictor.make_room()
    assert cache.stats().held == 0


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_request_goes_on_storing_after_another_split_its_node(name: str) -> None:
    cache = cache_of(name, chunk=128)
    tokens = prompt(120)
    run(cache.model, cache, tokens)
    mine = joined(tokens[:50], prompt(70, 1))
    one = cache.acquire(mine)
    assert one.position == 50
    run(cache.model, cache, joined(tokens[:80], prompt(30, 2)))  # splits behind the lease
    run(cache.model, cache, joined(tokens[:30], prompt(30, 3)))  # and before it
    advance(cache.model, cache, one)
    one.release()
    cache.verify()
    again = run(cache.model, cache, mine)
    assert again.match.resume == 119
    expected = cold(cache.model, mine, like=cache)
    assert divergence(expected.logits, again.logits) <= 1e-5


def test_a_commit_at_the_very_start_stores_nothing() -> None:
    cache = cache_of("qwen3_5")
    with cache.acquire(prompt(50)) as lease:
        cache.commit(lease, 0, checkpoint="end")
    cache.verify()
    assert cache.stats().checkpoints == 0


def test_caches_that_do_not_stand_at_the_position_are_not_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = cache_of()
    tokens = prompt(200)
    with cache.acquire(tokens) as lease, caplog.at_level(logging.CRITICAL, logger="rewarm"):
        advance(cache.model, cache, lease, cuts=2)
        cache.commit(lease, 128)  # computed up to 64 only
    cache.verify()
    assert cache.match(tokens).shared == 64


def test_a_refused_boundary_leaves_no_lease_behind() -> None:
    cache = cache_of()
    with pytest.raises(InvalidOption, match="assistant"):
        cache.acquire(prompt(50), boundaries=[Boundary(10, "assistant")])
    assert cache.stats().leases == 0


def test_salts_that_stored_nothing_do_not_pile_up() -> None:
    cache = cache_of()
    kept = cache.acquire(prompt(10), salt="kept")
    for i in range(500):
        cache.acquire(prompt(10), salt=str(i)).release()
    assert len(cache.memory.trees) < 100
    advance(cache.model, cache, kept)
    kept.release()
    assert cache.match(prompt(10), salt="kept").resume == 9


def test_a_split_under_two_leases_keeps_both_pinned() -> None:
    cache = cache_of(chunk=128)
    tokens = prompt(120)
    run(cache.model, cache, tokens)
    outer = cache.acquire(tokens)
    inner = cache.acquire(joined(tokens[:50], prompt(70, 1)))
    advance(cache.model, cache, inner)  # splits the node that both hold
    cache.verify()
    outer.release()
    cache.verify()
    inner.release()
    cache.verify()
    assert all(n.pins == 0 for n in cache.nodes())


# -- failing closed --


def test_a_payload_that_is_missing_or_of_another_form_costs_a_miss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = cache_of()
    tokens = prompt(100)
    expected = run(cache.model, cache, tokens)
    for how in ("missing", "too short"):
        nodes = cache.nodes()
        rows = nodes[1].rows
        assert isinstance(rows, Rows)
        cut = rows.segments[0].cut(rows.start, rows.stop - 3)
        cache.memory.ledger.count(nodes[1], -1)
        nodes[1].rows = None if how == "missing" else Rows(rows.packing, (cut,))
        cache.memory.ledger.count(nodes[1])
        with caplog.at_level(logging.CRITICAL, logger="rewarm"):
            got = run(cache.model, cache, tokens)
        # The hit is as long as what can still be restored, and the tree heals.
        assert got.match.resume == CHUNK
        assert np.array_equal(got.logits, expected.logits)
        cache.verify()
        assert run(cache.model, cache, tokens).match.resume == 99


def test_an_error_while_storing_costs_a_miss_and_never_the_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = cache_of("qwen3_5")
    tokens = prompt(100)
    expected = cold(cache.model, tokens, like=cache)

    def fails(*_: object) -> None:
        raise MemoryError("no room on the device")

    monkeypatch.setattr(type(cache.layout), "pack", fails)
    with caplog.at_level(logging.CRITICAL, logger="rewarm"):
        got = run(cache.model, cache, tokens)
    assert np.array_equal(got.logits, expected.logits)
    cache.verify()
    monkeypatch.undo()
    assert run(cache.model, cache, tokens).match.resume == 0
    assert run(cache.model, cache, tokens).match.resume == 99


def test_clearing_while_a_request_runs_lets_it_finish() -> None:
    cache = cache_of()
    tokens = prompt(100)
    lease = cache.acquire(tokens)
    advance(cache.model, cache, lease, cuts=2)
    cache.clear()
    advance(cache.model, cache, lease)
    logits = finish(cache.model, lease)
    lease.release()
    cache.verify()
    assert cache.stats().entries == 0
    assert np.array_equal(logits, cold(cache.model, tokens, like=cache).logits)


def test_verify_sees_a_broken_account_and_a_broken_span() -> None:
    cache = cache_of()
    run(cache.model, cache, prompt(100))
    cache.memory.ledger.held.kinds["rows"] += 1
    with pytest.raises(BrokenInvariant, match="account"):
        cache.verify()
    cache.memory.ledger.held.kinds["rows"] -= 1
    cache.verify()
    node = cache.nodes()[0]
    node.start += 1
    with pytest.raises(BrokenInvariant):
        cache.verify()


def test_threads_can_share_a_cache() -> None:
    cache = cache_of("llama")
    tokens = prompt(150)
    expected = cold(cache.model, tokens, like=cache)
    wrong: list[object] = []

    def work(i: int) -> None:
        try:
            mx.set_default_device(mx.cpu)
            for j in range(5):
                run(cache.model, cache, joined(tokens[: 20 * j + 20], prompt(30, i * 10 + j)))
                got = run(cache.model, cache, tokens)
                if divergence(expected.logits, got.logits) > 1e-5:
                    wrong.append(got.match)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    cache.verify()
