"""A tier may be slow, lose things and lie: no answer changes, and no request waits for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from rewarm.cache import PrefixCache
from rewarm.cache.find import Query
from rewarm.cache.tiers import seal
from rewarm.cache.tiers.base import Found, Sealed, Take
from rewarm.cache.tiers.seal import LABEL, PathPayload, Unsealer
from rewarm.values import Match
from tests import zoo
from tests.cache.hostile_tier import HostileTier, Vice
from tests.cache.test_programs import LONGEST, STORED_CASES, Programs, half, run_programs
from tests.runs import CHUNK, Prompt, cold, divergence, joined, prompt, run
from tests.sets import SOAK

ARCHITECTURES = ("llama", "qwen3_5", "gpt_oss", "mamba", "deepseek_v3", "recurrent_gemma")
LIES: tuple[Vice, ...] = ("another key", "older", "damaged")


def cache_over(model: Any, *tiers: Any, reuse: Any = "fast", **options: Any) -> PrefixCache:
    options = {"memory": "64MB", "chunk": CHUNK, **options}
    return PrefixCache(model, reuse=reuse, tiers=tiers, **options)


def filled(name: str, tier: HostileTier, reuse: Any = "fast") -> tuple[Any, Prompt]:
    """Fill a tier with a prompt, one that continues it, and the same of an older model."""
    vocabulary = zoo.vocabulary(name)
    first = prompt(100, 1, vocabulary)
    for seed in (1, 0):
        model = zoo.tiny(name, seed=seed)
        cache = cache_over(model, tier, reuse=reuse)
        run(model, cache, first)
        run(model, cache, joined(first, prompt(40, 2, vocabulary)))
        run(model, cache, prompt(100, 3, vocabulary))
        cache.close()
    return model, joined(first, prompt(40, 2, vocabulary), prompt(30, 4, vocabulary))


def check_answer(model: Any, cache: PrefixCache, asked: Prompt) -> Match:
    got, expected = run(model, cache, asked), cold(model, asked, like=cache)
    if cache.reuse == "exact":
        assert np.array_equal(got.logits, expected.logits)
    else:
        assert divergence(expected.logits, got.logits) <= 1e-5
    cache.verify()
    return got.match


@pytest.mark.parametrize("reuse", ["fast", "exact"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_cache_goes_on_from_what_another_one_offered(name: str, reuse: str) -> None:
    tier = HostileTier("slow")
    model, asked = filled(name, tier, reuse)
    cache = cache_over(model, tier, reuse=reuse)
    promised = cache.match(asked)
    match = check_answer(model, cache, asked)
    assert match.tier == promised.tier == "hostile"
    assert match.resume == promised.resume == (139 if reuse == "fast" else 128)
    assert cache.match(asked).tier == "memory"
    cache.close()


VICIOUS = [
    (name, vice, reuse)
    for i, name in enumerate(ARCHITECTURES)
    for j, vice in enumerate(get_args(Vice))
    for k, reuse in enumerate(("fast", "exact"))
    if SOAK or (i + j) % 4 == 2 * k
]
"""Every model with every vice, in both modes. A sample has each vice in each mode."""


@pytest.mark.parametrize(("name", "vice", "reuse"), VICIOUS)
def test_whatever_a_tier_does_no_answer_changes(name: str, vice: Vice, reuse: str) -> None:
    tier = HostileTier(seed=3)
    model, asked = filled(name, tier, reuse)
    tier.vices = (vice, "slow")
    cache = cache_over(model, tier, reuse=reuse)
    for tokens in (asked, asked[:120], asked):
        match = check_answer(model, cache, tokens)
        assert vice not in LIES or match.tier != "hostile"
    cache.close()


def believing(unsealer: Unsealer, arrays: Sealed) -> PathPayload:
    """Accept every payload as the right one, without a check of its seal."""
    label = json.loads(arrays[LABEL].tobytes())
    unpack = seal.unpack_state if label["what"] == "state" else seal.unpack_rows
    value: Any = unpack(arrays, label["form"])
    ends = dict(label["ends"])
    return PathPayload(label["what"], label["start"], ends, value, label["kind"])


@pytest.mark.parametrize("lie", LIES)
def test_without_the_seal_every_lie_changes_an_answer(
    lie: Vice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unsealer, "piece", believing)
    tier = HostileTier(seed=1)
    model, asked = filled("qwen3_5", tier)
    tier.vices = (lie,)
    cache = cache_over(model, tier)
    got, expected = run(model, cache, asked), cold(model, asked, like=cache)
    assert got.match.tier == "hostile"
    assert divergence(expected.logits, got.logits) > 1e-5


class ProgramsOverATier(Programs):
    """Random programs with a tier that has one vice after another, and caches that get closed."""

    from_tier: ClassVar[int]
    examples = 2

    def make_cache(self, **options: Any) -> PrefixCache:
        if not hasattr(self, "tier"):
            self.tier = HostileTier()
        return super().make_cache(tiers=[self.tier])

    def compare_match(self, got: Match, expected: Match) -> None:
        type(self).from_tier += got.tier == "hostile"

    @rule()
    def flush(self) -> None:
        self.cache.flush()

    @rule(vices=st.lists(st.sampled_from(get_args(Vice)), max_size=2))
    def become(self, vices: list[Vice]) -> None:
        self.tier.vices = tuple(vices)

    @rule(back=st.integers(1, 3), more=st.integers(1, 20))
    def restart(self, back: int, more: int) -> None:
        """Go on, in another cache, from a prompt that this one has computed."""
        for lease, _ in self.leases:
            lease.release()
        self.leases.clear()
        known = self.prompts[-min(back, len(self.prompts))]
        self.ask(back, 0)
        self.cache.close()
        self.cache = self.make_cache()
        self.prompts.append(joined(known, prompt(more, 7))[:LONGEST])
        self.ask(1, 0)


@pytest.mark.parametrize(("name", "reuse"), half(STORED_CASES, 0))
def test_random_programs_over_a_hostile_tier_compute_what_a_cold_run_computes(
    name: str, reuse: str
) -> None:
    fields = {"name": name, "reuse": reuse, "hits": 0, "from_tier": 0, "expected": {}}
    machine: Any = type("Machine", (ProgramsOverATier,), fields)
    run_programs(machine, ("hits", 3), ("from_tier", 1))


class Gate(HostileTier):
    """A tier that gives nothing until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.asked = 0

    def find(self, query: Query) -> Future[Found | None]:
        self.asked += 1
        return super().find(query)

    def fetch(self, found: Found, take: Take) -> Future[None]:
        later: Future[None] = Future()

        def give() -> None:
            assert self.opened.wait(60)
            self._give(found.handle, take, later)

        threading.Thread(target=give).start()
        return later


@contextmanager
def behind_a_gate() -> Iterator[tuple[Any, PrefixCache, Gate, Prompt]]:
    gate = Gate()
    model, asked = filled("qwen3_5", gate)
    cache = cache_over(model, gate)
    try:
        yield model, cache, gate, asked
    finally:
        gate.opened.set()
        cache.close()


def test_while_something_is_fetched_everything_else_goes_on() -> None:
    with behind_a_gate() as (model, cache, gate, asked):
        fetch = cache.fetch(asked)
        assert not fetch.future.done()
        other = prompt(60, 9)
        assert run(model, cache, other, decode=4).match.resume == 0
        assert cache.match(other).resume == 59
        assert cache.acquire(asked, fetch=False).cost.match.resume == 0
        assert cache.stats().tokens > 60
        gate.opened.set()
        assert fetch.future.result(60)
        assert (fetch.tokens, fetch.tier) == (139, "hostile")
        assert fetch.progress.done > 0
        assert cache.take_in(fetch).resume == 139
        assert cache.stats().leases == 0


def test_a_lease_that_does_not_fetch_asks_no_tier() -> None:
    with behind_a_gate() as (_, cache, gate, asked):
        asked_before = gate.asked
        with cache.acquire(asked, fetch=False) as lease:
            assert lease.cost.match == Match(len(asked), reason="cold")
        assert cache.match(asked, tiers=False).resume == 0
        assert gate.asked == asked_before


def test_a_fetch_and_its_lease_are_one_step() -> None:
    with behind_a_gate() as (_, cache, gate, asked):
        gate.opened.set()
        fetch = cache.fetch(asked)
        fetch.wait(60)
        with cache.acquire(asked, fetch=fetch) as lease:
            assert (lease.cost.match.resume, lease.cost.match.tier) == (139, "hostile")


def test_a_fetch_of_another_tenant_gives_nothing() -> None:
    with behind_a_gate() as (_, cache, gate, asked):
        gate.opened.set()
        fetch = cache.fetch(asked)
        fetch.wait(60)
        with cache.acquire(asked, salt="theirs", fetch=fetch) as lease:
            assert lease.cost.match == Match(len(asked), reason="cold")
        cache.verify()
        assert cache.match(asked, tiers=False).resume == 139


def test_a_cancelled_fetch_is_over_at_once_and_leaves_nothing() -> None:
    with behind_a_gate() as (_, cache, gate, asked):
        done: list[bool] = []
        fetch = cache.fetch(asked)
        fetch.on_done(lambda fetch: done.append(fetch.future.result()))
        fetch.cancel()
        assert done == [False]
        gate.opened.set()
        assert cache.take_in(fetch).resume == 0
        assert cache.stats().leases == 0


def test_what_is_not_worth_it_is_not_fetched() -> None:
    with behind_a_gate() as (_, cache, gate, asked):
        gate.opened.set()
        said: list[tuple[int, int]] = []

        def worth(tokens: int, nbytes: int) -> bool:
            said.append((tokens, nbytes))
            return False

        assert not cache.fetch(asked, worth=worth).future.result(60)
        assert said == [(139, 1 << 20)]


def test_what_memory_has_is_pinned_while_the_rest_is_fetched() -> None:
    with behind_a_gate() as (model, cache, gate, asked):
        run(model, cache, asked[:80])
        fetch = cache.fetch(asked)
        cache.memory.ledger.budget = 0
        with cache._lock:
            cache.memory.evictor.make_room()
        assert cache.match(asked, tiers=False).shared == 79
        cache.resize("64MB")
        gate.opened.set()
        fetch.future.result(60)
        assert cache.take_in(fetch).resume == 139
        cache.verify()


def test_a_forgotten_fetch_pins_nothing() -> None:
    with behind_a_gate() as (model, cache, gate, asked):
        run(model, cache, asked[:80])
        fetch = cache.fetch(asked)
        gate.opened.set()
        fetch.future.result(60)
        assert cache.stats().leases == 1
        del fetch
        assert cache.stats().leases == 0
        cache.verify()


def test_what_was_fetched_before_a_clear_is_not_taken_in() -> None:
    with behind_a_gate() as (_, cache, gate, asked):
        gate.opened.set()
        fetch = cache.fetch(asked)
        fetch.future.result(60)
        cache.clear()
        assert cache.take_in(fetch).resume == 0
        assert cache.stats().entries == 0


def test_a_tier_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewarm.cache.prefix.SILENCE", 0.1)
    with behind_a_gate() as (model, cache, _, asked):
        assert check_answer(model, cache, asked).resume == 0


@pytest.mark.parametrize("call", ["find", "fetch", "offer", "flush"])
def test_a_tier_that_raises_costs_a_miss(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("this tier is broken")

    tier = HostileTier()
    model, asked = filled("llama", tier)
    monkeypatch.setattr(tier, call, broken)
    cache = cache_over(model, tier)
    assert check_answer(model, cache, asked).resume == (0 if call in ("find", "fetch") else 139)
    assert cache.flush() == (call not in ("offer", "flush"))
    cache.close()


def test_the_fastest_of_several_tiers_gives_what_all_have() -> None:
    fast, slow = HostileTier(), HostileTier("slow")
    fast.name = "fast"
    model, asked = filled("llama", slow)
    fast.kept = {data: kept for data, kept in slow.kept.items() if len(data) < 480}
    cache = cache_over(model, fast, slow)
    assert run(model, cache, asked[:120]).match.tier == "fast"
    assert run(model, cache, asked).match.tier == "hostile"
    fast.vices = ("damaged",)
    other = cache_over(model, fast, slow)
    assert run(model, other, asked[:120]).match.tier == "hostile"
    cache.close()
    other.close()


def test_the_tier_of_the_docs_works() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cache.md").read_text()
    example = text.partition("### Adding a tier")[2].split("```python\n")[1].split("```")[0]
    made: dict[str, Any] = {}
    exec(example, made)
    for reuse in ("fast", "exact"):
        tier = made["DictTier"]()
        model, asked = filled("qwen3_5", tier, reuse)
        cache = cache_over(model, tier, reuse=reuse)
        assert check_answer(model, cache, asked).tier == "dict"
        cache.close()
