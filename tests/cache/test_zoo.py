"""A hit never changes an answer: every architecture, cached against recomputed.

`exact` is compared bit for bit, `fast` by its distribution and its greedy tokens. The hits are
asserted: a cache that never hits fails. The negative control at the end shows that the comparison
can fail at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import CacheList, ConcatenateKVCache, make_prompt_cache

from rewarm.accel import blas
from rewarm.cache import PrefixCache
from rewarm.values import Boundary
from tests import zoo
from tests.runs import CHUNK, Prompt, Ran, cold, divergence, joined, prompt, run
from tests.sets import SOAK

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3, kept rows": ("qwen3", {"max_kv_size": 48}),
    "llama, 8-bit KV": ("llama", {"kv_bits": 8, "kv_group_size": 32}),
    "qwen3_5, 4-bit KV": ("qwen3_5", {"kv_bits": 4, "kv_group_size": 32}),
    "llama, concatenating": (
        "llama",
        {"make_cache": lambda: [ConcatenateKVCache() for _ in range(4)]},
    ),
}
NAMES = [*zoo.ARCHITECTURES, *VARIANTS]


def in_one_mode(names: Iterable[str], first: int) -> list[str]:
    """Take a half of the names, and the variants. A soak takes all."""
    given = list(names)
    return [name for i, name in enumerate(given) if SOAK or i % 2 == first or name in VARIANTS]


def build(name: str) -> tuple[Any, dict[str, Any]]:
    arch, options = VARIANTS.get(name, (name, {}))
    return zoo.tiny(arch), options


def programme(vocabulary: int) -> dict[str, Prompt]:
    """Make prompts that extend, branch, repeat or end earlier, inside chunks and at their ends."""
    first = prompt(150, 1, vocabulary)
    return {
        "first": first,
        "repeat": first,
        "extend": joined(first, prompt(45, 2, vocabulary)),
        "branch": joined(first[:101], prompt(30, 3, vocabulary)),
        "branch again": joined(first[:101], prompt(40, 4, vocabulary)),
        "cut short": first[:77],
        "extend again": joined(first, prompt(45, 2, vocabulary), prompt(20, 5, vocabulary)),
        "first again": first,
    }


AGAIN = ("first", "branch", "first again")
"""The steps that run again after an eviction, in a sample."""

Compare = Callable[[str, Ran, Ran], None]


def check(model: Any, cache: PrefixCache, compare: Compare, *, decode: int) -> dict[str, int]:
    """Run the programme, evict most of what is held, and run the programme again."""
    resumed: dict[str, int] = {}
    prompts = programme(zoo.VOCABULARY)
    alone: dict[bytes, Ran] = {}
    for tokens in prompts.values():
        if tokens.tobytes() not in alone:
            alone[tokens.tobytes()] = cold(model, tokens, decode=decode, like=cache)
    expected = {name: alone[tokens.tobytes()] for name, tokens in prompts.items()}
    for name, tokens in prompts.items():
        got = run(model, cache, tokens, decode=decode)
        compare(name, got, expected[name])
        resumed[name] = got.match.resume
        cache.verify()
    cache.memory.ledger.budget = max(cache.memory.ledger.held.total // 3, 1)
    cache.memory.evictor.make_room()
    cache.verify()
    assert cache.stats().evictions
    cache.memory.ledger.budget = 64_000_000
    for name, tokens in prompts.items():
        if name not in AGAIN and not SOAK:
            continue
        got = run(model, cache, tokens, decode=decode)
        compare(f"{name}, evicted", got, expected[name])
        cache.verify()
    assert got.match.resume == 149, "what was evicted is stored again"
    return resumed


@pytest.mark.parametrize("name", in_one_mode(NAMES, 0))
def test_exact_reuse_gives_the_bits_of_a_cold_run(name: str) -> None:
    model, options = build(name)
    cache = PrefixCache(model, memory="64MB", reuse="exact", chunk=CHUNK, **options)

    def compare(step: str, got: Ran, expected: Ran) -> None:
        assert np.array_equal(got.logits, expected.logits), step

    resumed = check(model, cache, compare, decode=0)
    # Whole chunks of 32 are reused, and a repeat reuses all its chunks. Recurrent layers resume at
    # a checkpoint: at the last whole chunk, or where an earlier prompt branched.
    junction = 96 if not cache.layout.has_state else 0
    assert resumed == {
        "first": 0,
        "repeat": 149,
        "extend": 128,
        "branch": junction,
        "branch again": 96,
        "cut short": junction and 64,
        "extend again": 192,
        "first again": 149,
    }


# mlx-lm's mask leaves out the rows that a ring keeps, so inside a chunk they are seen differently.
KEPT = "qwen3, kept rows"


@pytest.mark.parametrize(
    "name", [n for n in in_one_mode(NAMES, 1) if n not in {*zoo.CUT_DEPENDENT, KEPT}]
)
def test_fast_reuse_gives_the_answer_of_a_cold_run(name: str) -> None:
    model, options = build(name)
    cache = PrefixCache(model, memory="64MB", chunk=CHUNK, **options)

    def compare(step: str, got: Ran, expected: Ran) -> None:
        assert divergence(expected.logits, got.logits) <= 1e-5, step
        assert got.tokens == expected.tokens, step

    resumed = check(model, cache, compare, decode=4 if SOAK else 2)
    junction = 101 if not cache.layout.has_state else 0
    assert resumed == {
        "first": 0,
        "repeat": 149,
        "extend": 149 if cache.layout.has_state else 150,
        "branch": junction,
        "branch again": 101,
        "cut short": junction and 76,
        "extend again": 194 if cache.layout.has_state else 195,
        "first again": 149,
    }


@pytest.mark.parametrize("name", ["qwen3_5", "recurrent_gemma", "gpt_oss", "llama"])
def test_exact_resumes_a_chat_at_its_durable_boundaries(name: str) -> None:
    model, _ = build(name)
    cache = PrefixCache(model, memory="64MB", reuse="exact", chunk=CHUNK)
    first = prompt(90, 1)
    second = joined(first[:83], prompt(60, 2))
    boundaries = [Boundary(20, "system"), Boundary(83, "user")]
    more = [*boundaries, Boundary(120, "turn"), Boundary(137, "user")]
    for tokens, known in ((first, boundaries), (second, more)):
        got = run(model, cache, tokens, boundaries=known)
        expected = cold(model, tokens, like=cache, boundaries=known)
        assert np.array_equal(got.logits, expected.logits)
    assert got.match.resume == 83


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3_text", "recurrent_gemma", "qwen3, kept rows"])
def test_exact_keeps_its_bits_over_a_chunk_of_one_token(name: str) -> None:
    """A chunk of one token turns a ring in place, and a sum in another order has other bits."""
    model, options = build(name)
    cache = PrefixCache(model, memory="64MB", reuse="exact", chunk=CHUNK, **options)
    for length in (3 * CHUNK + 2, 4 * CHUNK + 2):  # one token after the last cut, and the last
        tokens = prompt(length, 1)
        first, again = run(model, cache, tokens), run(model, cache, tokens)
        assert again.match.resume == length - 1
        assert np.array_equal(first.logits, again.logits)


def test_the_zoo_holds_what_it_must() -> None:
    assert set(zoo.ARCHITECTURES) >= zoo.REQUIRED
    assert len(zoo.ARCHITECTURES) >= 30


@pytest.mark.parametrize("name", [*zoo.SAMPLE, *VARIANTS])
def test_no_layer_that_could_be_rows_or_window_is_opaque(name: str) -> None:
    """An opaque layer resumes at checkpoints only, and is stored again for each."""
    model, options = build(name)
    cache = PrefixCache(model, memory="64MB", chunk=CHUNK, **options)
    caches = options.get("make_cache", lambda: make_prompt_cache(model))()

    def flat(cache: Any) -> list[Any]:
        if isinstance(cache, CacheList):
            return [c for part in cache.caches for c in flat(part)]
        return [cache]

    singles = [c for part in caches for c in flat(part)]
    spans = [hasattr(c, "keys") and hasattr(c, "values") for c in singles]
    groups = [k.group if k is not None else None for k in cache.layout.kinds]
    assert len(groups) == len(singles)
    for is_span, group in zip(spans, groups, strict=True):
        assert (group in ("rows", "window")) == is_span
    assert cache.layout.reusable


def test_other_cuts_give_other_bits() -> None:
    """The negative control: the comparison of `exact` sees a state built in other chunks.

    MLX's reference BLAS would hide the difference.
    """
    if mx.default_device() == mx.cpu:
        assert "OpenBLAS" in blas.current().name or blas.current().name == "Accelerate"
    differ = []
    for name in sorted(zoo.REQUIRED):
        model = zoo.tiny(name)
        tokens = mx.array(prompt(150, 1, zoo.vocabulary(name)))
        results = []
        for chunk in (CHUNK, 48):
            caches = make_prompt_cache(model)
            for at in range(0, 149, chunk):
                model(tokens[at : min(at + chunk, 149)][None], cache=caches)
                mx.eval([c.state for c in caches])
            results.append(np.array(model(tokens[149:][None], cache=caches)[0, -1]))
        if not np.array_equal(*results):
            differ.append(name)
    assert len(differ) >= 20, f"only {differ} differ"
