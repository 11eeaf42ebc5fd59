"""A restart loses no state, and no wrong state is used."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_128

from rewarm.cache import PrefixCache
from rewarm.cache.tiers import seal
from rewarm.values import Boundary
from tests import zoo
from tests.cache.disk.caches import disk_of
from tests.cache.inside import evict
from tests.runs import CHUNK, Prompt, cold, divergence, joined, prompt, run
from tests.sets import SOAK

from .caches import ARCHITECTURES, Failing, cache_on


def turn(model: Any, cache: PrefixCache, history: Prompt, number: int, vocabulary: int) -> Prompt:
    """Run a turn of a chat whose thinking is stripped: decoded tokens do not come back."""
    asked = joined(history, prompt(11 + number % 7, 100 + number, vocabulary))
    boundary = [Boundary(len(history), "turn"), Boundary(len(asked), "user")]
    full = joined(asked, prompt(3, 7, vocabulary))
    run(model, cache, full, decode=6, boundaries=[b for b in boundary if b.position])
    return joined(asked, prompt(9, 200 + number, vocabulary))


@pytest.mark.parametrize(
    ("name", "reuse"),
    [
        (name, reuse)
        for i, name in enumerate(ARCHITECTURES)
        for j, reuse in enumerate(("fast", "exact"))
        if SOAK or i % 2 == j
    ],
)
def test_a_restart_costs_nothing(name: str, reuse: Any, tmp_path: Path) -> None:
    model, vocabulary = zoo.tiny(name), zoo.vocabulary(name)
    restarted = cache_on(tmp_path, model, reuse=reuse)
    kept = PrefixCache(model, memory="64MB", chunk=CHUNK, reuse=reuse)
    history = prompt(70, 1, vocabulary)
    for number in range(40 if SOAK else 6):
        turn(model, kept, history, number, vocabulary)
        history = turn(model, restarted, history, number, vocabulary)
    restarted.close()

    model = zoo.tiny(name)
    restarted = cache_on(tmp_path, model, reuse=reuse)
    asked = joined(history, prompt(20, 99, vocabulary))
    boundary = [Boundary(len(history), "turn")]
    before = kept.match(asked, boundaries=boundary)
    again = run(model, restarted, asked, decode=4, boundaries=boundary)
    assert before.resume > 0
    assert again.match.resume == before.resume
    assert again.match.tier == "disk"
    alone = cold(model, asked, decode=4, like=restarted, boundaries=boundary)
    if reuse == "exact":
        assert np.array_equal(again.logits, alone.logits)
    else:
        assert divergence(again.logits, alone.logits) <= 1e-5
    assert again.tokens == alone.tokens
    restarted.verify()
    restarted.close()


def test_what_memory_evicts_comes_back_from_disk(tmp_path: Path) -> None:
    model, vocabulary = zoo.tiny("qwen3_5"), zoo.vocabulary("qwen3_5")
    cache = cache_on(tmp_path, model, memory="1MB")
    prompts = [prompt(200, seed, vocabulary) for seed in range(12)]
    for each in prompts:
        run(model, cache, each)
    assert cache.stats().evictions
    tiers = []
    for each in prompts:
        ran = run(model, cache, each)
        tiers.append(ran.match.tier)
        assert ran.match.resume == len(each) - 1
        assert divergence(ran.logits, cold(model, each, like=cache).logits) <= 1e-5
        cache.verify()
    assert "disk" in tiers
    cache.close()


def test_another_model_never_matches(tmp_path: Path) -> None:
    vocabulary = zoo.vocabulary("llama")
    asked = prompt(100, 1, vocabulary)
    first = cache_on(tmp_path, zoo.tiny("llama", seed=0))
    run(zoo.tiny("llama", seed=0), first, asked)
    first.close()
    for other in (
        {"model": zoo.tiny("llama", seed=1)},
        {"model": zoo.tiny("llama", seed=0), "kv_bits": 8, "kv_group_size": 32},
        {"model": zoo.tiny("llama", seed=0), "reuse": "exact"},
    ):
        cache = cache_on(tmp_path, other.pop("model"), **other)
        assert cache.match(asked).shared == 0
        cache.close()
    same = cache_on(tmp_path, zoo.tiny("llama", seed=0))
    assert same.match(asked).resume == 99
    assert same.match(asked, salt="tenant").shared == 0
    same.close()


def test_a_second_process_goes_on_without_a_disk_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = zoo.tiny("llama")
    holder = cache_on(tmp_path, model)
    with caplog.at_level(logging.WARNING, "rewarm"):
        second = cache_on(tmp_path, model)
    assert not second.tiers
    assert str(os.getpid()) in caplog.text
    holder.close()
    second.close()


def test_clear_forgets_the_disk_too(tmp_path: Path) -> None:
    model, asked = zoo.tiny("llama"), prompt(100)
    cache = cache_on(tmp_path, model)
    run(model, cache, asked)
    cache.flush()
    cache.clear()
    assert cache.match(asked).shared == 0
    cache.close()
    cache = cache_on(tmp_path, model)
    assert cache.match(asked).shared == 0
    assert not list(tmp_path.rglob("*.safetensors"))
    cache.close()


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "missing"])
def test_damaged_files_cost_a_miss_and_nothing_else(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, vocabulary = zoo.tiny("qwen3_5"), zoo.vocabulary("qwen3_5")
    asked = prompt(150, 1, vocabulary)
    cache = cache_on(tmp_path, model)
    run(model, cache, asked)
    cache.close()
    for path in tmp_path.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        if damage == "flip":
            data[len(data) // 2] ^= 1
        path.write_bytes(data[: len(data) // 2] if damage == "truncate" else data)
        if damage == "empty":
            path.write_bytes(b"")
        if damage == "missing":
            path.unlink()
    cache = cache_on(tmp_path, model)
    with caplog.at_level(logging.WARNING, "rewarm"):
        again = run(model, cache, asked)
    assert again.match.resume == 0
    assert "rewarm" in {record.name for record in caplog.records}
    assert np.array_equal(again.logits, cold(model, asked, like=cache).logits)
    cache.verify()
    cache.close()
    cache = cache_on(tmp_path, model)
    assert cache.match(asked).resume == len(asked) - 1  # computed and stored again
    cache.close()


def test_the_form_of_the_caches_is_part_of_what_must_be_equal(tmp_path: Path) -> None:
    model, vocabulary = zoo.tiny("qwen3"), zoo.vocabulary("qwen3")
    asked = prompt(100, 1, vocabulary)
    for size in (48, 64, None):
        cache = cache_on(tmp_path, model, max_kv_size=size)
        assert cache.match(asked).shared == 0
        run(model, cache, asked)
        cache.close()
        cache = cache_on(tmp_path, model, max_kv_size=size)
        assert cache.match(asked).resume == 99
        cache.close()


def test_a_window_that_memory_let_go_of_comes_back_with_what_follows_it(tmp_path: Path) -> None:
    model = zoo.tiny("gpt_oss")
    cache = PrefixCache(model, memory="64MB", disk=str(tmp_path), chunk=128)
    asked = prompt(129, 1)
    run(model, cache, asked)
    cache.flush()
    run(model, cache, joined(asked[:124], prompt(60, 7)))  # splits the node in memory, not on disk
    evict(cache, "leaf", at=128)
    evict(cache, "window", at=124)
    assert cache.match(asked).resume == 128
    lease = cache.acquire(asked)
    assert (lease.cost.match.resume, lease.cost.match.tier) == (128, "disk")
    lease.release()
    cache.verify()
    cache.close()


def test_a_disk_that_goes_away_costs_nothing_but_itself(tmp_path: Path) -> None:
    model, asked = zoo.tiny("llama"), prompt(100)
    cache = cache_on(tmp_path / "disk", model)
    run(model, cache, asked)
    shutil.rmtree(tmp_path / "disk")
    cache.flush(wait=False)
    cache.stats()
    assert run(model, cache, asked).match.resume == 99
    cache.close()


def test_what_cannot_be_read_now_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = zoo.tiny("llama"), prompt(100)
    cache = cache_on(tmp_path, model)
    run(model, cache, asked)
    cache.close()
    cache = cache_on(tmp_path, model)
    store = disk_of(cache).store
    monkeypatch.setattr(store, "read", Failing(store.read, times=1000))
    assert run(model, cache, asked[:50]).match.resume == 0
    monkeypatch.undo()
    assert cache.match(asked).resume == 99
    cache.close()


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_what_the_disk_knows_and_cannot_resume_at_is_replayed(name: str, tmp_path: Path) -> None:
    model, vocabulary = zoo.tiny(name), zoo.vocabulary(name)
    first = prompt(120, 1, vocabulary)
    asked = joined(first[:100], prompt(20, 2, vocabulary))
    cache = cache_on(tmp_path, model)
    ends = [Boundary(40, "system")]
    run(model, cache, first, boundaries=ends)
    before = cache.match(asked, boundaries=ends)
    assert before.shared == 100
    cache.close()
    cache = cache_on(tmp_path, model)
    for tier in ("disk", "memory"):  # the second time memory has it
        found = cache.match(asked, boundaries=ends)
        with cache.acquire(asked, boundaries=ends) as lease:
            assert lease.cost.match == found
        assert (found.shared, found.resume, found.reason) == (100, before.resume, before.reason)
        assert found.tier == (tier if found.resume else None)
    again = run(model, cache, asked, boundaries=ends)
    assert again.match.replay == before.replay
    assert cache.match(joined(asked[:100], prompt(9, 3, vocabulary))).resume == 100
    cache.close()


def test_asking_leaves_no_trace_on_disk(tmp_path: Path) -> None:
    model = zoo.tiny("llama")
    cache = cache_on(tmp_path, model)
    for number in range(5):
        cache.match(prompt(50), salt=f"tenant {number}")
    assert disk_of(cache).store.index.namespaces() == []
    cache.close()


LIES = (
    "UPDATE node SET key = (SELECT key FROM node n WHERE length(n.key) = length(node.key)"
    " ORDER BY n.id DESC LIMIT 1)",
    "UPDATE node SET key = zeroblob(length(key))",
    "UPDATE node SET rows_file = (SELECT MAX(rows_file) FROM node)",
    "UPDATE node SET state_file = (SELECT MIN(state_file) FROM node)",
    "UPDATE node SET window_file = (SELECT MIN(rows_file) FROM node)",
    "UPDATE node SET window_file = rows_file, rows_file = window_file",
    "UPDATE node SET parent = NULL",
    "UPDATE node SET kind = 'user', hint = 100.0, hits = 7, origin = 'decode'",
    "UPDATE node SET namespace = (SELECT MAX(id) FROM namespace)",
    "UPDATE file SET start = start + 1",
    "UPDATE file SET start = 0, stop = 5",
    "UPDATE file SET nbytes = 0",
)


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        (name, lie)
        for j, name in enumerate(("qwen3_5", "gpt_oss"))
        for i, lie in enumerate(LIES)
        if SOAK or i % 2 == j
    ],
)
def test_whatever_the_index_says_no_answer_changes(name: str, lie: str, tmp_path: Path) -> None:
    model, vocabulary = zoo.tiny(name), zoo.vocabulary(name)
    first = prompt(120, 1, vocabulary)
    prompts = [first, joined(first[:70], prompt(50, 2, vocabulary)), prompt(120, 3, vocabulary)]
    longer = [joined(each, prompt(9, 4, vocabulary)) for each in prompts]
    cache = cache_on(tmp_path, model)
    for salt in (None, "tenant"):
        for each in prompts:
            run(model, cache, each, salt=salt)
    cache.close()
    with sqlite3.connect(tmp_path / "index.sqlite") as db:
        db.execute(lie)
    db.close()
    cache = cache_on(tmp_path, model)
    for salt in (None, "tenant"):
        for asked in longer:
            alone = cold(model, asked, like=cache)
            assert divergence(run(model, cache, asked, salt=salt).logits, alone.logits) <= 1e-5
    cache.verify()
    cache.close()
    cache = cache_on(tmp_path, model)  # changed files are gone, and are written again
    assert all(cache.match(asked).resume == len(asked) - 1 for asked in longer)
    cache.verify(tiers=True)
    cache.close()


class CountingHash:
    """A hash that counts the bytes it is given."""

    seen = 0

    def __init__(self) -> None:
        self.real = xxh3_128()

    def update(self, data: Any) -> None:
        CountingHash.seen += len(data)
        self.real.update(data)

    def digest(self) -> bytes:
        return self.real.digest()


def test_each_byte_from_disk_is_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = zoo.tiny("qwen3_5"), prompt(300)
    cache = cache_on(tmp_path, model)
    run(model, cache, asked)
    monkeypatch.setattr(seal, "xxhash", SimpleNamespace(xxh3_128=CountingHash))
    CountingHash.seen = 0
    cache.close()
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert 0.9 * size < CountingHash.seen < 1.1 * size
    cache = cache_on(tmp_path, model)
    CountingHash.seen = 0
    assert run(model, cache, asked).match.tier == "disk"
    assert 0.9 * size < CountingHash.seen < 1.1 * size
    cache.close()
