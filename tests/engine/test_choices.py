"""Tokens are chosen by seeds, penalties and biases, and given with their log probabilities."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from rewarm.cache import PrefixCache
from rewarm.engine.decode.sampling import make_sampler
from rewarm.errors import (
    InvalidOption,
)
from rewarm.values import Sampling
from tests import zoo
from tests.engines import answer, ask, burst, engine
from tests.runs import Counted, joined, prompt


def test_the_smallest_temperature_is_greedy() -> None:
    with engine(zoo.tiny("llama")) as server:
        greedy = answer(server, prompt(30)).tokens
        for sampling in (
            Sampling(temperature=1e-40),
            Sampling(temperature=1e-5),
            Sampling(temperature=1.0, top_p=0.0),
            Sampling(temperature=1.0, top_k=1),
        ):
            assert answer(server, prompt(30), sampling=sampling).tokens == greedy


def test_a_seed_gives_the_same_answer_alone_in_a_batch_and_from_the_cache() -> None:
    tokens = prompt(60)
    warm = Sampling(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, seed=11)
    with engine(zoo.tiny("qwen3_5")) as server:
        alone = answer(server, tokens, sampling=warm, max_tokens=24).tokens
        asked = [ask(server, prompt(30, seed=i), max_tokens=60) for i in range(3)]
        in_batch = answer(server, tokens, sampling=warm, max_tokens=24)
        assert in_batch.tokens == alone
        assert in_batch.prefilled_tokens == 1
        other = answer(server, tokens, sampling=Sampling(temperature=1.0, seed=12), max_tokens=24)
        assert other.tokens != alone
        unseeded = [Sampling(temperature=1.0)] * 2
        first, second = (answer(server, tokens, sampling=s, max_tokens=24) for s in unseeded)
        assert first.tokens != second.tokens
        for each in asked:
            each.over()


def test_each_position_of_a_seed_draws_anew_and_can_be_taken_up_anywhere() -> None:
    flat = mx.zeros((1, 512))
    seeded = Sampling(temperature=1.0, seed=11)

    def drawn(choice: int, since: int) -> list[int]:
        sampler = make_sampler(seeded, choice, since)
        return [int(sampler(flat).item()) for _ in range(since, 12)]

    first = drawn(0, 0)
    assert len(set(first)) > 8
    assert drawn(0, 5) == first[5:]
    assert drawn(1, 0) != first


def test_several_answers_to_one_prompt_take_one_prefill() -> None:
    counted = Counted(zoo.tiny("qwen3_5"))
    with engine(counted) as server:
        counted.computed = 0
        many = answer(
            server, prompt(200), n=4, sampling=Sampling(temperature=1.0, seed=3), max_tokens=8
        )
        answers = [many.tokens_of(i) for i in range(4)]
        assert [len(a) for a in answers] == [8, 8, 8, 8]
        assert len({tuple(a) for a in answers}) == 4
        assert many.reasons == dict.fromkeys(range(4), "length")
        # Each of the other three answers computes the last prompt token again.
        assert counted.computed == 200 + 3 + 4 * 8


def test_each_request_has_its_own_logprobs() -> None:
    model = zoo.tiny("qwen3_5")
    tokens = prompt(40)
    with engine(model) as server:
        answers = burst(server, [tokens] * 3, max_tokens=5)
        three = ask(server, tokens, max_tokens=5, top_logprobs=3)
        none = ask(server, tokens, max_tokens=5, top_logprobs=0)
        for collected in (three.over(), none.over()):
            assert collected.tokens == answers[0].tokens
        assert all(len(s.top) == 3 for s in three.sampled[0])
        assert all(s.top == () and s.logprob is not None for s in none.sampled[0])
        assert all(s.logprob is None for s in answers[0].sampled[0])
        for s, other in zip(three.sampled[0], none.sampled[0], strict=True):
            assert s.top[0].token == s.token
            assert s.top[0].logprob == s.logprob == pytest.approx(other.logprob, abs=1e-4)
    caches = PrefixCache(model, memory="16MB").blank()
    logits = model(mx.array(tokens)[None], cache=caches)[0, -1]
    expected = logits - mx.logsumexp(logits)
    first = three.sampled[0][0]
    assert first.logprob == pytest.approx(float(expected.max()), abs=1e-4)


def test_penalties_and_bias_change_the_choice() -> None:
    tokens = prompt(40)
    with engine(zoo.tiny("llama")) as server:
        plain = answer(server, tokens, max_tokens=8).tokens
        banned = Sampling(logit_bias={plain[0]: -1000.0})
        assert plain[0] not in answer(server, tokens, max_tokens=8, sampling=banned).tokens
        wanted = Sampling(logit_bias={7: 1000.0})
        assert answer(server, tokens, max_tokens=4, sampling=wanted).tokens == [7] * 4
        once = Sampling(logit_bias={7: 50.0}, frequency_penalty=100.0)
        assert answer(server, tokens, max_tokens=4, sampling=once).tokens.count(7) == 1
        once = Sampling(logit_bias={7: 50.0}, presence_penalty=100.0)
        assert answer(server, tokens, max_tokens=4, sampling=once).tokens.count(7) == 1
        repeated = joined(tokens, np.full(3, 7, np.int32))
        fewer = Sampling(logit_bias={7: 60.0}, repetition_penalty=100.0)
        assert answer(server, repeated, max_tokens=1, sampling=fewer).tokens != [7]
        opened = answer(server, tokens, max_tokens=4, opening=(3, 4)).tokens
        assert opened[:2] == [3, 4]
        later = answer(server, tokens, max_tokens=6, opening=(3, 4), opens_after=(plain[1],)).tokens
        assert later[:4] == [*plain[:2], 3, 4]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Sampling(temperature=-1.0), "temperature"),
        (Sampling(temperature=float("nan")), "temperature"),
        (Sampling(top_p=1.5), "top_p"),
        (Sampling(top_k=-3), "top_k"),
        (Sampling(min_p=2.0), "min_p"),
        (Sampling(repetition_penalty=0.0), "repetition_penalty"),
        (Sampling(presence_penalty=float("inf")), "presence_penalty"),
        (Sampling(logit_bias={512: 1.0}), "logit_bias"),
        (Sampling(logit_bias={-1: 1.0}), "logit_bias"),
        (Sampling(logit_bias={3: float("nan")}), "logit_bias"),
        (Sampling(logit_bias={3: 10**400}), "logit_bias"),
        (Sampling(seed=1.5), "seed"),  # type: ignore[arg-type]
    ],
)
def test_sampling_values_are_checked_before_admission(value: Sampling, named: str) -> None:
    with engine(zoo.tiny("llama")) as server:
        with pytest.raises(InvalidOption, match=named):
            ask(server, prompt(10), sampling=value)
        assert answer(server, prompt(10)).tokens
