"""The cache says why it could not reuse more, and names the true first difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rewarm.cache import PrefixCache, memory
from rewarm.cache.find import GLIMPSE
from rewarm.cache.memory import GRAIN, EvictedIndex
from rewarm.values import Miss
from tests import zoo
from tests.cache.inside import evict, evict_all
from tests.runs import CHUNK, Prompt, joined, prompt, run


def cache_of(name: str, **options: Any) -> PrefixCache:
    return PrefixCache(zoo.tiny(name), **{"memory": "64MB", "chunk": CHUNK, **options})


def missed(cache: PrefixCache, tokens: Prompt, **options: Any) -> Miss:
    miss = cache.miss(tokens, **options).miss
    assert miss is not None
    return miss


def common(a: Prompt, b: Prompt) -> int:
    """Count the equal tokens one by one."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_the_position_is_the_true_first_difference(name: str) -> None:
    cache = cache_of(name)
    rng = np.random.default_rng(0)
    # Few tokens, so that prompts share much, and part in the middle of spans.
    stored = [prompt(int(rng.integers(40, 160)), int(i) % 3, 3) for i in range(4)]
    for _ in range(12):
        base = stored[int(rng.integers(len(stored)))]
        cut = int(rng.integers(1, len(base)))
        stored.append(joined(base[:cut], prompt(int(rng.integers(8, 90)), int(rng.integers(99)))))
    held = [tokens[:-1] for tokens in stored]  # the last token of a prompt is not stored
    for tokens in stored:
        run(cache.model, cache, tokens)
    seen = set()
    for seed in range(60):
        base = stored[seed % len(stored)]
        cut = int(rng.integers(1, len(base)))
        asked = joined(base[:cut], prompt(int(rng.integers(2, 120)), 1000 + seed))
        truth = max(common(asked, tokens) for tokens in held)
        found = cache.miss(asked)
        assert found.match.shared == truth
        if found.miss is None:
            continue
        seen.add(found.miss.reason)
        assert found.miss.shared == truth
        if found.miss.reason == "diverged":
            # The tokens shown in its place are those of a stored prompt, from that position on.
            other = found.miss.other
            assert other[0] != asked[truth]
            glimpses = [t[truth : truth + GLIMPSE] for t in held if common(asked, t) == truth]
            assert any(common(other, g) == min(len(other), len(g)) > 0 for g in glimpses)
    assert "diverged" in seen


def test_a_prompt_that_only_goes_on_has_missed_nothing() -> None:
    for reuse in ("fast", "exact"):
        cache = cache_of("llama", reuse=reuse)
        tokens = prompt(CHUNK * 3 + 1)
        run(cache.model, cache, tokens)
        assert cache.miss(joined(tokens, prompt(40, 5))).miss is None


def test_nothing_known_is_cold() -> None:
    cache = cache_of("qwen3_5")
    miss = missed(cache, prompt(50))
    assert (miss.reason, miss.shared, miss.resume) == ("cold", 0, 0)


def test_no_checkpoint_was_ever_taken_there() -> None:
    cache = cache_of("qwen3_5")
    run(cache.model, cache, prompt(120))
    miss = missed(cache, joined(prompt(100), prompt(9, 1)))
    assert (miss.reason, miss.why, miss.shared, miss.resume) == (
        "no_checkpoint",
        "never_taken",
        100,
        0,
    )


def test_no_checkpoint_inside_what_was_decoded() -> None:
    cache = cache_of("qwen3_5")
    tokens = prompt(40)
    ran = run(cache.model, cache, tokens, decode=60)
    half = joined(tokens, np.array(ran.tokens[:50], np.int32), prompt(3, 7))
    miss = missed(cache, half)
    assert (miss.reason, miss.why, miss.resume) == ("no_checkpoint", "other_origin", 39)
    assert miss.shared >= 90


def test_a_checkpoint_that_was_evicted_is_told_from_one_never_taken() -> None:
    cache = cache_of("qwen3_5")
    tokens = prompt(100)
    run(cache.model, cache, tokens, marks=[60])
    run(cache.model, cache, joined(tokens[:60], prompt(60, 3)))
    assert cache.miss(joined(tokens[:60], prompt(3, 8))).match.resume == 60
    evict(cache, "checkpoint", at=60)
    miss = missed(cache, joined(tokens[:60], prompt(3, 8)))
    assert (miss.reason, miss.why, miss.shared, miss.resume) == ("no_checkpoint", "evicted", 60, 0)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_what_was_evicted_is_said_and_how_far_it_went(name: str) -> None:
    cache = cache_of(name)
    tokens = prompt(200)
    run(cache.model, cache, tokens)
    evict_all(cache)
    assert cache.match(tokens).shared == 0
    miss = missed(cache, tokens)
    assert (miss.reason, miss.held) == ("evicted", 199)
    # For a prompt that shares a part, `held` is right to within a few tokens. A hybrid model
    # needs a state to resume there.
    other = joined(tokens[:150], prompt(50, 77))
    if name == "llama":
        assert 150 - GRAIN < missed(cache, other).held <= 150
    else:
        assert missed(cache, other).reason == "cold"
    assert missed(cache, prompt(200, 12345)).reason == "cold"


def test_an_eviction_is_said_where_the_rest_of_the_path_only_goes_on() -> None:
    cache = cache_of("llama")
    tokens = prompt(200)
    run(cache.model, cache, tokens)
    evict(cache, "leaf", at=199)
    match, miss = cache.miss(joined(tokens, prompt(20, 3)))
    assert match.reason is None  # the tree ends there
    assert match.shared < 199
    assert miss is not None
    assert (miss.reason, miss.held) == ("evicted", 199)


def test_the_first_difference_is_found_on_disk_too(tmp_path: Path) -> None:
    tokens = prompt(200)
    other = joined(tokens[:150], prompt(200, 9))
    for name in ("llama", "qwen3_5"):
        cache = cache_of(name, disk=str(tmp_path / name))
        run(cache.model, cache, tokens, marks=[60])
        cache.close()
        cache = cache_of(name, disk=str(tmp_path / name))
        asked = missed(cache, other)
        assert (asked.reason, asked.shared) == ("diverged", 150)
        assert asked.other.tolist() == tokens[150 : 150 + GLIMPSE].tolist()
        with cache.acquire(other) as lease:
            assert lease.cost.miss is not None
            assert (lease.cost.miss.reason, lease.cost.miss.shared) == ("diverged", 150)
            seen = lease.cost.miss.other  # only the part that was fetched
            assert seen.tolist() == tokens[150 : 150 + len(seen)].tolist() != []
        cache.close()


def test_evictions_are_told_to_their_own_tenant_only() -> None:
    cache = cache_of("llama")
    tokens = prompt(200)
    run(cache.model, cache, tokens, salt="a")
    evict_all(cache)
    assert missed(cache, tokens, salt="a").reason == "evicted"
    for salt in ("b", None):
        assert missed(cache, tokens, salt=salt).reason == "cold"


def test_another_salt_is_said_only_where_the_caller_names_it() -> None:
    cache = cache_of("qwen3_5")
    tokens = prompt(100)
    run(cache.model, cache, tokens, salt="a")
    for salt in ("b", None):
        assert missed(cache, tokens, salt=salt).reason == "cold"
    # A caller who knows the other salt could have sent it.
    named = missed(cache, tokens, salt="b", other_salts=["a"])
    assert (named.reason, named.held, named.resume) == ("salt", 99, 0)
    # Prompts without a salt are not mentioned to other salts, either.
    run(cache.model, cache, tokens)
    for salt in ("b", "c"):
        assert missed(cache, tokens, salt=salt).reason == "cold"
    assert missed(cache, tokens, salt="b", other_salts=[""]).reason == "salt"


def test_exact_mode_gives_whole_chunks_only() -> None:
    cache = cache_of("llama", reuse="exact")
    tokens = prompt(CHUNK * 3)
    run(cache.model, cache, tokens)
    miss = missed(cache, joined(tokens[: CHUNK + 20], prompt(4, 9)))
    assert (miss.reason, miss.shared, miss.resume) == ("exact_mode", CHUNK + 20, CHUNK)


def test_a_miss_is_told_by_the_lease_as_it_was_before_the_request_ran() -> None:
    cache = cache_of("qwen3_5")
    run(cache.model, cache, prompt(100))
    asked = joined(prompt(60), prompt(90, 4))
    expected = missed(cache, asked)
    with cache.acquire(asked) as lease:
        assert lease.cost.miss is not None
        assert lease.cost.miss.reason == expected.reason == "diverged"
        assert lease.cost.miss.shared == expected.shared == 60
        assert lease.cost.miss.other.tolist() == expected.other.tolist()
    with cache.acquire(asked, warm=True) as lease:
        assert lease.cost.miss is None


def test_the_memory_of_evictions_is_bounded_and_forgets_the_oldest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "EvictedIndex", lambda: EvictedIndex(capacity=16))
    cache = cache_of("llama")
    size = cache.memory.evicted._hash.size
    tokens = prompt(200)
    run(cache.model, cache, tokens)
    evict_all(cache)
    assert missed(cache, tokens).reason == "evicted"
    run(cache.model, cache, prompt(64 * 20, 5))
    evict_all(cache)
    assert cache.memory.evicted._hash.size == size
    assert missed(cache, tokens).reason == "cold"


def test_a_cleared_cache_remembers_no_evictions() -> None:
    cache = cache_of("llama")
    run(cache.model, cache, prompt(200))
    evict_all(cache)
    cache.clear()
    assert missed(cache, prompt(200)).reason == "cold"


def test_a_hash_is_of_the_tokens_and_not_of_where_spans_were_split() -> None:
    """Evicted leaf by leaf after splits, a path is still recognised as a whole."""
    cache = cache_of("llama")
    tokens = prompt(300)
    run(cache.model, cache, tokens)
    for cut in (250, 33, 120, 121, 200):
        run(cache.model, cache, joined(tokens[:cut], prompt(5, cut)))
    evict_all(cache)
    assert missed(cache, tokens).held == 299
