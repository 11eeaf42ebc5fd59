"""A hit changes no answer of trained models: Pocket, and tiny ones that others published."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import rewarm
from rewarm import PrefixCache, Session
from rewarm.cache import PrefixCache as Cache
from tests.runs import Counted, cold, run
from tests.sets import shared

TEXT = (
    '"in the beginning there was a harbour, and the harbour had a keeper, who knew every boat by '
    "its bell and every tide by its smell; and when the fog came in he rang the great bell himself."
)


PUBLISHED = "fixtures/rwkv7-tiny"
MODELS = ("pocket", pytest.param(PUBLISHED, marks=pytest.mark.integration))


def loaded(name: str) -> tuple[Any, Any]:
    """Return a model and its tokenizer."""
    model, tokenizer = rewarm.load(name if name == "pocket" else shared(name))
    return model, tokenizer


def tokens_of(text: str) -> Any:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)  # one byte is one token


@pytest.mark.integration
@pytest.mark.parametrize("reuse", ["fast", "exact"])
def test_cached_logits_are_the_published_ones(reuse: Any) -> None:
    """The model's authors published the logits after the bytes `"in`."""
    model, _ = loaded(PUBLISHED)
    published = np.fromfile(shared(f"{PUBLISHED}/expected-logits-7v0-834K.bin"), dtype=np.float32)
    cache = PrefixCache(model, memory="64MB", reuse=reuse, chunk=16)
    prompt = tokens_of('"in')
    uncached = np.array(model(mx.array(prompt)[None])[0, -1])
    first, again = run(model, cache, prompt), run(model, cache, prompt)
    assert again.match.resume == 2
    for logits in (uncached, first.logits, again.logits):
        assert abs(float((logits - published).sum())) <= 1e-3
    assert np.array_equal(first.logits, again.logits)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("reuse", ["fast", "exact"])
def test_cached_and_uncached_log_probabilities_are_equal(reuse: Any, name: str) -> None:
    model, tokenizer = loaded(name)
    cache = Cache(model, memory="64MB", reuse=reuse, chunk=16)
    tokens = tokens_of(TEXT) if name == PUBLISHED else np.array(tokenizer.encode(TEXT), np.int32)
    for share in (3, 6, 4, 9, 6):
        prompt = tokens[: len(tokens) * share // 9]
        got, expected = run(model, cache, prompt), cold(model, prompt, like=cache)
        if reuse == "exact":
            assert np.array_equal(got.logits, expected.logits)
        else:
            assert np.allclose(log_softmax(got.logits), log_softmax(expected.logits), atol=2e-5)
    assert cache.stats().hits >= 3


def log_softmax(logits: Any) -> Any:
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


@pytest.mark.integration
def test_a_story_goes_on_the_same_from_the_cache() -> None:
    model, tokenizer = rewarm.load(shared("fixtures/stories260k"))
    counted = Counted(model)
    session = Session(counted, tokenizer, PrefixCache(counted, memory="64MB", chunk=32))
    opening = "Once upon a time, there was a little girl named Lily. She loved to play outside."
    first = session.generate(opening, max_tokens=40, logprobs=True)
    again = session.generate(opening, max_tokens=40, logprobs=True)
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
    assert again.text == first.text
    assert "Lily" in first.text or "She" in first.text
    longer = session.generate(opening + first.text + " One day", max_tokens=10)
    assert longer.usage.cached_tokens >= first.usage.prompt_tokens
