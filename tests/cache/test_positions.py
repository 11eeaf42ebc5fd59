"""A position module that changes with a sequence's length is found, and worked around.

mlx-lm has one such module, dynamic NTK. Beyond its limit a token's keys depend on where their chunk
ends: `fast` stores nothing there, and `exact` reuses whole chunks as always.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import internlm3
from mlx_lm.models.hunyuan import DynamicNTKAlphaRoPE
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE, SuScaledRoPE, initialize_rope

from rewarm import PrefixCache, Session
from rewarm.cache import core, positions
from rewarm.cache.identity import Description
from rewarm.cache.positions import FAR, position_limit
from tests import zoo
from tests.runs import CHUNK, Counted, Prompt, Ran, cold, divergence, joined, prompt, run
from tests.sets import SOAK
from tests.tiny import tiny_tokenizer

LIMIT = 100
HEADS = 4

RESCALED = ["internlm2", "internlm3", "llama", "qwen3_next", "falcon_h1", "exaone4"]
"""Models with rows alone, with recurrent state, and with windows. A sample has one of each."""


def rescaled(name: str, **changes: Any) -> Any:
    return zoo.tiny(name, **zoo.DYNAMIC_NTK, max_position_embeddings=LIMIT, **changes)


class Holder(nn.Module):
    """A model that is nothing but its position modules."""

    def __init__(self, *modules: nn.Module, **args: Any) -> None:
        super().__init__()
        self.layers = list(modules)
        self.args = {"num_attention_heads": HEADS, **args}


class Switching(nn.Module):
    """LongRoPE as published: a sequence beyond the trained length has other frequencies."""

    def __init__(self, trained: int) -> None:
        super().__init__()
        self.short = nn.RoPE(16)
        self.long = SuScaledRoPE(16, 1e4, 4 * trained, trained, long_factor=[3.0] * 8)
        self.trained = trained

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        rope = self.long if x.shape[-2] + offset > self.trained else self.short
        result: mx.array = rope(x, offset=offset)
        return result


class Remembering(nn.Module):
    """A module with a table as long as the longest sequence that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0
        self.table = mx.zeros((0,))

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        stop = offset + x.shape[-2]
        if stop > self.longest:
            self.longest, self.table = stop, mx.arange(stop) / 1e4
        return x * self.table[offset:stop, None]


class Picky(nn.Module):
    """A module that refuses every array that a probe may call it with."""

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        raise TypeError("not with this")


@pytest.mark.parametrize("trained", [48, 100, 2048, 4000, 32768, 1_000_000])
@pytest.mark.parametrize("factor", [1.0, 2.0, 6.0])
def test_dynamic_ntk_is_found_at_the_trained_length(trained: int, factor: float) -> None:
    module = DynamicNTKScalingRoPE(64, trained, False, 1e4, factor)
    assert position_limit(Holder(module)) == trained
    # mlx-lm's older module adds the number of heads, not the chunk's length, to its beginning.
    older = internlm3.DynamicNTKScalingRoPE(64, trained, False, 1e4, factor)
    assert position_limit(Holder(older)) == trained - HEADS + 1


def test_a_switch_of_frequencies_is_found_where_it_happens() -> None:
    assert position_limit(Holder(Switching(2500))) == 2500


def test_the_lowest_limit_of_all_layers_counts() -> None:
    modules = [DynamicNTKScalingRoPE(64, n, False, 1e4, 2.0) for n in (900, 300, 600)]
    assert position_limit(Holder(nn.RoPE(64), *modules)) == 300


SCALINGS: dict[str, dict[str, Any]] = {
    "none": {"type": "default"},
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 256},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "longrope": {
        "type": "longrope",
        "original_max_position_embeddings": 256,
        "short_factor": [1.0] * 32,
        "long_factor": [4.0] * 32,
    },
    "proportional": {"type": "proportional", "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_other_scalings_have_no_limit(scaling: str) -> None:
    rope = initialize_rope(64, 1e4, False, SCALINGS[scaling], max_position_embeddings=1024)
    # A length that the model's arguments hold is looked at, too.
    assert position_limit(Holder(rope, max_position_embeddings=1024)) == FAR


def test_alpha_scaling_has_no_limit() -> None:
    assert position_limit(Holder(DynamicNTKAlphaRoPE(64, scaling_alpha=1000.0))) == FAR


@pytest.mark.parametrize("name", zoo.SAMPLE)
def test_no_architecture_has_a_limit_by_itself(name: str) -> None:
    """The search neither runs the model nor changes anything in it."""
    model = zoo.tiny(name)
    before = Description.of(model).text
    cache = PrefixCache(counted := Counted(model), memory="64MB")
    assert cache.limit == FAR
    assert counted.passes == 0
    assert Description.of(model).text == before


@pytest.mark.parametrize("name", ["llama", "llama4", "qwen3_5", "gemma4_text", "minicpm3"])
def test_position_modules_are_found_in_real_models(name: str) -> None:
    """The test above would also pass if no position module was found."""
    found = positions.position_modules(zoo.tiny(name))
    assert found
    assert {type(m).__name__ for m in found} <= {"RoPE", "ProportionalRoPE", "SuScaledRoPE"}


def test_a_module_that_remembers_is_left_as_it_was() -> None:
    model = Holder(module := Remembering())
    before = Description.of(model).text
    assert position_limit(model) == FAR
    assert module.longest == 0
    assert Description.of(model).text == before


Compare = Callable[[str, Ran, Ran], None]


def programme() -> dict[str, Prompt]:
    """Make prompts that extend, branch and repeat, below the limit, across it and beyond."""
    long = prompt(230, 1)
    return {
        "below": long[:70],
        "below again": long[:70],
        "crosses in decode": long[:97],
        "ends at the limit": long[:LIMIT],
        "one token beyond": long[: LIMIT + 1],
        "crosses": long[:150],
        "crosses again": long[:150],
        "extends beyond": long,
        "branches beyond": joined(long[:130], prompt(60, 2)),
        "branches below": joined(long[:60], prompt(90, 3)),
        "branches below again": joined(long[:60], prompt(95, 3)),
        "cut short": long[:80],
    }


def check(model: Any, cache: PrefixCache, compare: Compare) -> dict[str, int]:
    resumed = {}
    for name, tokens in programme().items():
        got = run(model, cache, tokens, decode=8)
        compare(name, got, cold(model, tokens, decode=8, like=cache))
        cache.verify()
        resumed[name] = got.match.resume
    return resumed


def same_answer(step: str, got: Ran, expected: Ran) -> None:
    assert divergence(expected.logits, got.logits) <= 1e-5, step
    assert got.tokens == expected.tokens, step


def same_bits(step: str, got: Ran, expected: Ran) -> None:
    assert np.array_equal(got.logits, expected.logits), step
    assert got.tokens == expected.tokens, step


@pytest.mark.parametrize("name", RESCALED if SOAK else RESCALED[1::2])
def test_fast_reuses_what_lies_below_the_limit_and_nothing_beyond(name: str) -> None:
    model = rescaled(name)
    cache = PrefixCache(model, memory="64MB", chunk=CHUNK)
    assert cache.limit == LIMIT
    resumed = check(model, cache, same_answer)
    assert all(node.end <= LIMIT for node in cache.nodes())
    # An answer that crosses the limit is not stored. A model with recurrent state resumes at
    # checkpoints: where prompts end, and where they left the tree.
    state = cache.layout.has_state
    assert resumed == {
        "below": 0,
        "below again": 69,
        "crosses in decode": 69 if state else 70,
        "ends at the limit": 96,
        "one token beyond": 99,
        "crosses": 100,
        "crosses again": 100,
        "extends beyond": 100,
        "branches beyond": 100,
        "branches below": 0 if state else 60,
        "branches below again": 100,
        "cut short": 69 if state else 79,
    }


@pytest.mark.parametrize("name", RESCALED if SOAK else RESCALED[1::2])
def test_exact_reuses_whole_chunks_beyond_the_limit_too(name: str) -> None:
    model = rescaled(name)
    cache = PrefixCache(model, memory="64MB", chunk=CHUNK, reuse="exact")
    resumed = check(model, cache, same_bits)
    state = cache.layout.has_state
    assert resumed == {
        "below": 0,
        "below again": 69,
        "crosses in decode": 64,
        "ends at the limit": 96,
        "one token beyond": 96,
        "crosses": 96,
        "crosses again": 149,
        "extends beyond": 128,
        "branches beyond": 128,
        "branches below": 0 if state else 32,
        "branches below again": 128,
        "cut short": 64,
    }


def test_without_a_limit_the_answers_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the comparison of `fast` sees rows that were scaled otherwise."""
    monkeypatch.setattr(core, "position_limit", lambda model: FAR)
    model = rescaled("internlm2")
    cache = PrefixCache(model, memory="64MB", chunk=CHUNK)
    apart = []

    def compare(step: str, got: Ran, expected: Ran) -> None:
        apart.append(divergence(expected.logits, got.logits))

    check(model, cache, compare)
    assert max(apart) > 1e-3


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_a_session_answers_as_a_fresh_one_does(name: str) -> None:
    """It runs the runner's own pieces, and stores answers while they cross the limit."""
    model, tokenizer = rescaled(name, vocab_size=260), tiny_tokenizer()

    def session() -> Session:
        return Session(model, tokenizer, PrefixCache(model, memory="64MB", chunk=CHUNK))

    warm = session()
    tokens = prompt(140, 1, vocabulary=256)
    cached = []
    for length in (80, 90, 99, 100, 101, 102, 120, 140, 101):
        got = warm.generate(tokens[:length], max_tokens=16, logprobs=True)
        expected = session().generate(tokens[:length], max_tokens=16, logprobs=True)
        assert got.tokens == expected.tokens
        assert got.logprobs is not None
        assert expected.logprobs is not None
        assert np.allclose(got.logprobs, expected.logprobs, atol=1e-3)
        cached.append(got.usage.cached_tokens)
    assert cached[-3:] == [100, 100, 100]
    assert min(cached[1:]) >= 79


def test_nobody_waits_for_a_checkpoint_beyond_the_limit() -> None:
    """A request that runs alone would not have a cut there."""
    cache = PrefixCache(rescaled("internlm2"), memory="64MB", chunk=CHUNK)
    with cache.acquire(prompt(180)) as lease:
        cache.mark(lease, 140)
        assert [cut.stop for cut in lease.cuts] == [32, 64, 96, 100, 132, 164, 179]
        cache.mark(lease, 90)
        assert [cut.stop for cut in lease.cuts] == [32, 64, 90, 96, 100, 132, 164, 179]


def test_a_limit_that_changes_is_noticed() -> None:
    model = rescaled("internlm2")
    cache = PrefixCache(model, memory="64MB", chunk=CHUNK)
    run(model, cache, prompt(120))
    for layer in model.layers:
        layer.attention.rope.max_position_embeddings = 64
    assert run(model, cache, prompt(120)).match.resume == 0
    assert cache.limit == 64
    assert run(model, cache, prompt(120)).match.resume == 64


def test_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    positions._warn.cache_clear()
    model = rescaled("internlm2")
    with caplog.at_level(logging.WARNING, "rewarm"):
        for _ in range(2):
            PrefixCache(model, memory="64MB")
    (said,) = [r.getMessage() for r in caplog.records]
    assert "internlm2: DynamicNTKScalingRoPE" in said
    assert f"more than {LIMIT} tokens" in said


def test_nothing_is_said_where_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    positions._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "rewarm"):
        PrefixCache(rescaled("internlm2"), memory="64MB", reuse="exact")
        PrefixCache(zoo.tiny("internlm2"), memory="64MB")
    assert not caplog.records


def test_a_position_module_that_cannot_be_called_stops_reuse(
    caplog: pytest.LogCaptureFixture,
) -> None:
    positions._warn.cache_clear()
    model = zoo.tiny("llama")
    model.layers[0].self_attn.picky = Picky()
    with caplog.at_level(logging.WARNING, "rewarm"):
        cache = PrefixCache(model, memory="64MB", chunk=CHUNK)
    assert "Picky" in caplog.text
    for _ in range(2):
        assert run(model, cache, prompt(70)).match.resume == 0
