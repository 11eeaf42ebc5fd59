"""The engine on real models: shared prefill, turns, cancels, limits, its start and end."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from rewarm.cache import PrefixCache
from rewarm.cache.model import context_size
from rewarm.engine import Core, Engine, EngineParts, Request, runner
from rewarm.errors import (
    ContextExceeded,
    InvalidPrompt,
    NotReady,
    QueueFull,
)
from rewarm.values import Boundary, Sampled, Sampling
from tests import zoo
from tests.engine.inside import running_requests
from tests.engines import Collected, answer, ask, burst, engine
from tests.runs import Counted, joined, prompt
from tests.sets import SOAK

PADDING_HURTS = [
    "nemotron_h",
    "mamba",
    "jamba",
    "rwkv7",
    "recurrent_gemma",
    "olmo_hybrid",
    "bailing_moe_linear",
    "baichuan_m1",
]
SAMPLE = sorted(
    set(zoo.ARCHITECTURES) - zoo.CUT_DEPENDENT
    if SOAK
    else {*PADDING_HURTS, "llama", "qwen3_5", "gpt_oss", "gemma3_text", "nemotron-nas"}
)


@pytest.mark.parametrize("name", SAMPLE)
def test_parallel_answers_are_those_of_a_fresh_server_asked_one_by_one(name: str) -> None:
    model = zoo.tiny(name)
    head = prompt(70)
    prompts = [joined(head, prompt(5 + 9 * i, seed=i + 1)) for i in range(8)]
    rounds = 3 if SOAK else 2
    expected = []
    with engine(model) as fresh:
        for each in prompts:
            expected.append(answer(fresh, each).tokens)
            fresh.core.clear().result()
    counted = Counted(model)
    with engine(counted, max_batch=8) as server:
        counted.computed = 0
        for _ in range(rounds):
            answers = burst(server, prompts)
            assert [a.tokens for a in answers] == expected
        decoded = sum(len(a.tokens) for a in answers) * rounds
        assert counted.computed == server.core.stats().prefilled_tokens + decoded
        # Once each, and one token again for every repeat.
        distinct = 70 + sum(len(p) - 70 for p in prompts)
        assert server.core.stats().prefilled_tokens <= distinct + 2 * len(prompts) + 16


@pytest.mark.parametrize("name", ["qwen3_5", "llama", "gpt_oss"])
@pytest.mark.parametrize("reuse", ["fast", "exact"])
@pytest.mark.parametrize("boundary", [True, False])
def test_a_cold_burst_computes_what_it_shares_once(name: str, reuse: str, boundary: bool) -> None:
    counted = Counted(zoo.tiny(name))
    head = prompt(160)
    boundaries = [Boundary(160, "system")] if boundary else []
    prompts = [joined(head, prompt(20, seed=i + 1)) for i in range(8)]
    with engine(counted, reuse=reuse) as server:
        counted.computed = 0
        answers = burst(server, prompts, boundaries=boundaries, max_tokens=2)
        computed = counted.computed - sum(len(a.tokens) for a in answers)
        assert computed == sum(a.prefilled_tokens for a in answers)
        again = 0 if reuse == "fast" or boundary else 7 * 32
        assert computed <= 160 + 8 * 20 + again


def test_a_request_that_comes_late_waits_for_the_prefix_that_is_being_computed() -> None:
    head = prompt(400)
    with engine(zoo.tiny("qwen3_5")) as server:
        first = ask(server, joined(head, prompt(30, seed=1)))
        first.begun()
        second = answer(server, joined(head, prompt(30, seed=2)))
        assert first.over().prefilled_tokens + second.prefilled_tokens == 460


@pytest.mark.parametrize("name", ["qwen3_5", "llama", "gpt_oss"])
def test_a_first_token_does_not_wait_for_the_pass_after_it(name: str) -> None:
    counted, tokens = Counted(zoo.tiny(name)), prompt(50)
    seen: list[int] = []

    def on_token(sampled: Sampled) -> bool:
        seen.append(counted.computed)
        return False

    with engine(counted) as server:
        counted.computed = 0
        answer(server, tokens, max_tokens=4, sink=Collected(on_token))
    assert seen == [50, 52, 53, 54]


@pytest.mark.parametrize(
    ("name", "reuse", "new", "passes"),
    [
        ("llama", "fast", 20, 1),
        ("llama", "fast", 33, 2),  # the logits of so many are not worth it
        ("llama", "exact", 20, 2),  # where the grid says what is computed together
        ("qwen3_5", "fast", 20, 2),  # else its state before the last token would be lost
        ("gpt_oss", "fast", 20, 2),
    ],
)
def test_a_short_message_to_an_attention_model_is_one_pass(
    name: str, reuse: str, new: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "CUDA_ONE_PASS", runner.ONE_PASS)
    counted, head = Counted(zoo.tiny(name)), prompt(65)
    with engine(counted, reuse=reuse) as server:
        answer(server, head, max_tokens=1)
        counted.computed = counted.passes = 0
        got = answer(server, joined(head, prompt(new, seed=1)), max_tokens=1)
        again = answer(server, joined(head, prompt(new, seed=1)), max_tokens=1)
    assert counted.passes == passes + 1
    assert counted.computed == got.prefilled_tokens + again.prefilled_tokens
    assert again.prefilled_tokens == 1
    assert again.tokens == got.tokens


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0, seed=7),
        Sampling(repetition_penalty=1.3, logit_bias={3: 2.0}),
    ],
    ids=["greedy", "seeded", "processors"],
)
@pytest.mark.parametrize("kv_bits", [None, 8])
def test_the_last_token_of_a_prompt_gives_the_same_alone_and_with_those_before_it(
    sampling: Sampling, kv_bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, model = prompt(64), zoo.tiny("llama")
    options = {"sampling": sampling, "top_logprobs": 3, "max_tokens": 6}
    found = []
    for most in (0, runner.ONE_PASS):
        monkeypatch.setattr(runner, "ONE_PASS", most)
        monkeypatch.setattr(runner, "CUDA_ONE_PASS", most)
        cache = PrefixCache(model, memory="64MB", kv_bits=kv_bits, kv_group_size=32)
        with engine(model, cache=cache) as server:
            answer(server, head, max_tokens=1)
            found.append(answer(server, joined(head, prompt(20, seed=1)), **options))
    alone, together = found
    assert together.tokens == alone.tokens
    for a, b in zip(alone.sampled[0], together.sampled[0], strict=True):
        assert b.logprob == pytest.approx(a.logprob, abs=1e-4)
        assert [x.token for x in b.top] == [x.token for x in a.top]


@pytest.mark.parametrize("name", ["qwen3_5", "llama", "gpt_oss"])
def test_an_answer_of_one_token_is_stored_as_far_as_it_was_computed(name: str) -> None:
    counted, tokens = Counted(zoo.tiny(name)), prompt(50)
    with engine(counted) as server:
        counted.computed = 0
        short = answer(server, tokens, max_tokens=1)
        assert (len(short.tokens), short.reasons) == (1, {0: "length"})
        assert counted.computed == 50
        longer = joined(tokens, np.array(short.tokens, np.int32), prompt(9, seed=1))
        continued = answer(server, longer)
        assert continued.prefilled_tokens == len(longer) - 50
    with engine(zoo.tiny(name)) as fresh:
        assert answer(fresh, longer).tokens == continued.tokens


def test_the_parts_of_the_wait_for_a_first_token_add_up_to_it() -> None:
    head = prompt(300)
    with engine(zoo.tiny("qwen3_5")) as server:
        answer(server, head)
        report = answer(server, joined(head, prompt(9, seed=1))).report
    assert report is not None
    assert report.restore_ms > 0
    parts = (report.queued_ms, report.match_ms, report.restore_ms, report.prefill_ms)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(report.ttft_ms)


def test_no_wait_and_no_hit_crosses_two_salts() -> None:
    both = prompt(300)
    with engine(zoo.tiny("qwen3_5")) as server:
        answers = [ask(server, both, salt=s) for s in ("a", "b", "a")]
        prefilled = [a.over().prefilled_tokens for a in answers]
    assert prefilled == [300, 300, 1]


def test_a_long_prefill_lets_others_stream_and_a_short_prompt_pass() -> None:
    chunk = 256
    long, short = prompt(20_000), prompt(40, seed=1)
    between = [0]
    """Prompt tokens computed between two steps of the batch."""

    class Watched(Counted):
        def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
            if tokens.shape[1] == 1:
                between.append(0)
            else:
                between[-1] += tokens.shape[1]
            return super().__call__(tokens, **options)

    with engine(Watched(zoo.tiny("llama")), chunk=chunk) as server:
        streaming = ask(server, prompt(20, seed=3), max_tokens=24)
        while not streaming.times:
            time.sleep(0.001)
        slow = ask(server, long, max_tokens=1)
        slow.begun()
        between[:] = [0]
        passed = answer(server, short, max_tokens=4)
        streaming.over()
        while_streaming = between[:20]
        assert slow.report is None, "the short prompt waited for the long one"
        assert passed.tokens
        server.core.cancel(_request_of(server, slow))
        slow.over()
    assert sum(n > 0 for n in while_streaming) > 5
    assert max(while_streaming) <= chunk


@pytest.mark.parametrize("name", ["qwen3_5", "llama", "gpt_oss"])
def test_what_a_cancelled_request_computed_is_kept(name: str) -> None:
    tokens = prompt(4000)
    with engine(zoo.tiny(name)) as server:
        first = ask(server, tokens, max_tokens=500)
        first.begun()
        request = _request_of(server, first)
        server.core.cancel(request)
        server.core.cancel(request)
        first.over()
        assert first.reasons == {0: "cancelled"}
        assert first.report is not None
        done = first.report.match.resume + first.report.prefilled
        assert done < 4000
        second = answer(server, tokens, max_tokens=1)
        assert second.report is not None
        assert second.report.match.resume == done


def test_a_cancelled_answer_stays_in_the_tree() -> None:
    tokens = prompt(50)
    with engine(zoo.tiny("qwen3_5")) as server:
        first = ask(server, tokens, max_tokens=10_000)
        while len(first.times) < 20:
            time.sleep(0.001)
        server.core.cancel(_request_of(server, first))
        made = first.over().tokens
        again = answer(server, joined(tokens, np.array(made, np.int32), prompt(5)), max_tokens=1)
        assert again.report is not None
        assert again.report.match.resume == 50 + len(made)


def _request_of(server: Engine, sink: Collected) -> Request:
    (request,) = (r for r in running_requests(server) if r.sink is sink)
    return request


def test_a_leader_that_is_almost_there_is_still_waited_for() -> None:
    head = prompt(640)
    cache = PrefixCache(zoo.tiny("qwen3_5"), memory="64MB", chunk=32)
    core = Core(EngineParts(cache.model, None, cache))
    first, second = Collected(), Collected()
    core.submit(Request(joined(head, prompt(8, seed=1), prompt(60, seed=2)), first, 4))
    while not first.progress or first.progress[-1][0] < 600:
        core.turn()
    assert first.progress[-1][0] < 640
    core.submit(Request(joined(head, prompt(8, seed=1), prompt(20, seed=3)), second, 4))
    while core.wait(0):
        core.turn()
    core.close()
    assert first.prefilled_tokens + second.prefilled_tokens <= 640 + 8 + 80 + 32


def test_limits_are_kept() -> None:
    with engine(zoo.tiny("llama"), context=100, max_queue=3) as server:
        with pytest.raises(ContextExceeded, match=r"150 tokens.*100"):
            ask(server, prompt(150))
        assert len(answer(server, prompt(90), max_tokens=500).tokens) == 10
        with pytest.raises(InvalidPrompt):
            ask(server, np.array([512]))
        with pytest.raises(InvalidPrompt):
            ask(server, np.array([], np.int32))
        assert len(answer(server, np.array([5]), max_tokens=3).tokens) == 3
        with pytest.raises(QueueFull) as full:
            ask(server, prompt(90), n=4)
        assert full.value.retry_after >= 1


def test_stopping_ends_what_runs_and_refuses_what_comes() -> None:
    with engine(zoo.tiny("llama")) as server:
        running = ask(server, prompt(20), max_tokens=100_000)
        while not running.times:
            time.sleep(0.001)
        server.stop(grace=0.1)
        assert running.over().reasons == {0: "cancelled"}
        assert server.state == "stopped"
        with pytest.raises(NotReady):
            ask(server, prompt(20))


def test_a_model_that_does_not_load_is_said_to_fail() -> None:
    def load() -> EngineParts:
        raise OSError("no such folder")

    server = Engine(load)
    assert server.state == "loading"
    with pytest.raises(NotReady, match="being loaded"):
        server.core.submit(Request(prompt(5), Collected(), 5))
    server.start()
    assert server.wait(10) == "failing"
    assert "no such folder" in server.detail
    server.stop()


def test_a_model_says_how_long_a_sequence_may_be() -> None:
    assert context_size(SimpleNamespace(args={"n_positions": 1024})) == 1024
    assert context_size(zoo.tiny("llama")) > 400
