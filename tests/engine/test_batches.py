"""Sequences are decoded together where the model allows it, and otherwise one at a time."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache

from rewarm.cache import PrefixCache
from rewarm.engine.trial import CHECK_STEPS, decodes_in_batches
from tests import zoo
from tests.engines import answer, ask, burst, engine
from tests.runs import Counted, prompt


def test_sequences_of_very_different_length_do_not_pad_each_other() -> None:
    widths: set[int] = set()

    class Watched(Counted):
        def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
            widths.add(tokens.shape[0])
            return super().__call__(tokens, **options)

    with engine(Watched(zoo.tiny("llama")), chunk=2048) as server:
        widths.clear()
        long = ask(server, prompt(6000), max_tokens=40)
        long.begun()
        short = burst(server, [prompt(20, seed=i) for i in range(4)], max_tokens=40)
        assert len(long.over().tokens) == 40
        assert [len(s.tokens) for s in short] == [40] * 4
    assert widths <= {1, 2, 3, 4}


@pytest.mark.parametrize("name", ["afm7", "gemma2", "llama4"])
def test_models_that_are_wrong_in_a_batch_decode_one_at_a_time(name: str) -> None:
    widths: list[int] = []

    class Watched(Counted):
        def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
            widths.append(tokens.shape[0])
            return super().__call__(tokens, **options)

    model = zoo.tiny(name)
    prompts = [prompt(20 + 7 * i, seed=i) for i in range(4)]
    expected = []
    for each in prompts:
        with engine(model) as fresh:
            expected.append(answer(fresh, each, max_tokens=20).tokens)
    with engine(Watched(model)) as server:
        widths.clear()
        assert [a.tokens for a in burst(server, prompts, max_tokens=20)] == expected
    assert set(widths) == {1}


def test_a_model_that_takes_no_batch_decodes_one_sequence_at_a_time() -> None:
    """Dynamic NTK needs one position, and a batch has one for each sequence."""
    model = zoo.tiny("internlm2", **zoo.DYNAMIC_NTK, max_position_embeddings=100)
    prompts = [prompt(20 + 7 * i, seed=i) for i in range(4)]
    expected = []
    for each in prompts:
        with engine(model) as fresh:
            expected.append(answer(fresh, each, max_tokens=20).tokens)
    with engine(model) as server:
        assert [a.tokens for a in burst(server, prompts, max_tokens=20)] == expected


def test_the_batch_check_finds_wrong_logits() -> None:
    class Wrong(Counted):
        def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
            logits = super().__call__(tokens, **options)
            return logits if tokens.shape[0] == 1 else logits[::-1]

    model = zoo.tiny("llama")
    blank = PrefixCache(model, memory="16MB").blank
    assert decodes_in_batches(model, blank, zoo.VOCABULARY)
    assert not decodes_in_batches(Wrong(model), blank, zoo.VOCABULARY)
    quantised = PrefixCache(model, memory="16MB", kv_bits=8, kv_group_size=32).blank
    assert not decodes_in_batches(model, quantised, zoo.VOCABULARY)


@pytest.mark.parametrize(
    ("scale", "wrong", "batched"), [(0.0, 0.06, False), (0.06, 0.06, True), (0.5, 0.17, False)]
)
def test_the_batch_check_allows_for_as_much_rounding_as_a_sequence_alone_has(
    scale: float, wrong: float, batched: bool
) -> None:
    class Rounds(Counted):
        def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
            logits = super().__call__(tokens, **options)
            rows, length = tokens.shape
            off = wrong if rows > 1 else scale if 1 < length == CHECK_STEPS else 0.0
            return logits + off * mx.abs(logits).max() * (-1.0) ** mx.arange(logits.shape[-1])

    model = zoo.tiny("llama")
    blank = PrefixCache(model, memory="16MB").blank
    assert decodes_in_batches(Rounds(model), blank, zoo.VOCABULARY) is batched


def test_what_is_ready_at_the_same_time_joins_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    merges: list[int] = []
    merge = BatchKVCache.merge

    def counted(caches: list[Any]) -> Any:
        merges.append(len(caches))
        return merge(caches)

    prompts = [prompt(20 + i, seed=i) for i in range(5)]
    with engine(zoo.tiny("llama")) as server:
        expected = [answer(server, each, max_tokens=6).tokens for each in prompts]
        layers = len(zoo.tiny("llama").layers)
        monkeypatch.setattr(BatchKVCache, "merge", counted)
        with server.core._inbox.changed:  # so the engine sees all five at once
            asked = [ask(server, each, max_tokens=6) for each in prompts]
        assert [each.over().tokens for each in asked] == expected
    assert merges == [5] * layers
