"""The engine on real models: shared prefill, batches, turns, cancels, failures, warm-ahead."""

from __future__ import annotations

import time
import weakref
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache

from rewarm.cache import PrefixCache, restore
from rewarm.cache.model import context_size
from rewarm.engine import Engine, Loaded, Request, rehearsal, runner
from rewarm.engine import engine as engine_module
from rewarm.engine.decode.batch import Batch
from rewarm.engine.decode.check import CHECK_STEPS, decodes_in_batches
from rewarm.engine.decode.sampling import make_processors, make_sampler
from rewarm.engine.loop import Loop
from rewarm.engine.runner import Runner
from rewarm.engine.running import Running
from rewarm.engine.scheduler import Piece
from rewarm.errors import (
    ContextExceeded,
    EngineFault,
    InvalidOption,
    InvalidPrompt,
    NotReady,
    QueueFull,
)
from rewarm.values import Boundary, Sampled, Sampling
from tests import zoo
from tests.conftest import SOAK
from tests.serving import Collected, answer, ask, engine, settled
from tests.support import Counted, joined, prompt, run

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


def burst(server: Engine, prompts: list[Any], **options: Any) -> list[Collected]:
    asked = [ask(server, p, **options) for p in prompts]
    return [a.over() for a in asked]


@pytest.mark.parametrize("name", SAMPLE)
def test_parallel_answers_are_those_of_a_fresh_server_asked_one_by_one(name: str) -> None:
    model = zoo.tiny(name)
    head = prompt(70)
    prompts = [joined(head, prompt(5 + 9 * i, seed=i + 1)) for i in range(8)]
    expected = []
    for each in prompts:
        with engine(model) as fresh:
            expected.append(answer(fresh, each).tokens)
    counted = Counted(model)
    with engine(counted, max_batch=8) as server:
        counted.computed = 0
        for _ in range(3):
            answers = burst(server, prompts)
            assert [a.tokens for a in answers] == expected
        decoded = sum(len(a.tokens) for a in answers) * 3
        assert counted.computed == server.stats().prefilled_tokens + decoded
        # Once each, and one token again for every repeat.
        distinct = 70 + sum(len(p) - 70 for p in prompts)
        assert server.stats().prefilled_tokens <= distinct + 2 * len(prompts) + 16


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


def test_logits_that_wait_for_a_place_in_the_batch_are_those_of_one_token() -> None:
    model = zoo.tiny("llama")
    cache = PrefixCache(model, memory="64MB")
    ready = Runner(model, cache, cache.vocabulary)
    request = Request(prompt(20), Collected(), 4)
    sequence = Running(0, request.tokens, request, max_tokens=4)
    ready.start(sequence)
    before = mx.get_active_memory()
    ready.prefill(sequence, Piece(0, 0, 20, None, True))
    assert sequence.lease is not None
    assert sequence.lease.logits is not None
    rows = sum(c.nbytes for c in sequence.lease.caches) + cache.stats().held
    grown = mx.get_active_memory() - before - rows
    assert grown < 4 * sequence.lease.logits.nbytes
    ready.leave([sequence])


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
        server.cancel(_request_of(server, slow))
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
        server.cancel(request)
        server.cancel(request)
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
        server.cancel(_request_of(server, first))
        made = first.over().tokens
        again = answer(server, joined(tokens, np.array(made, np.int32), prompt(5)), max_tokens=1)
        assert again.report is not None
        assert again.report.match.resume == 50 + len(made)


def _request_of(server: Engine, sink: Collected) -> Request:
    for sequence in list(server.core._loop.running.values()):
        if sequence.request is not None and sequence.request.sink is sink:
            return sequence.request
    raise AssertionError("this request is over")


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request named after a number fails in the step before that many tokens are chosen."""

    def with_fuse(request: Request) -> list[Any]:
        processors = make_processors(request)
        if request.name:
            left = iter(range(int(request.name)))

            def burn(_: mx.array, logits: mx.array) -> mx.array:
                if next(left, None) is None:
                    raise RuntimeError("injected")
                return logits

            processors.append(burn)
        return processors

    monkeypatch.setattr(runner, "make_processors", with_fuse)


@pytest.mark.usefixtures("fault")
@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "afm7"])
@pytest.mark.parametrize("steps", [0, 1, 6])
def test_a_request_that_fails_inside_a_step_costs_its_neighbours_nothing(
    name: str, steps: int
) -> None:
    model = zoo.tiny(name)
    prompts = [prompt(30 + i, seed=i) for i in range(5)]
    with engine(model) as server:
        expected = [answer(server, p, max_tokens=30).tokens for p in prompts]
    with engine(model) as server:
        asked = [ask(server, p, max_tokens=30) for p in prompts[:4]]
        while not all(a.times for a in asked):
            time.sleep(0.001)
        bad = ask(server, prompts[4], max_tokens=30, name=str(steps))
        assert isinstance(bad.over().error, EngineFault)
        assert "injected" not in str(bad.error)
        assert [a.over().tokens for a in asked] == expected[:4]
        assert all(a.error is None and not a.calls_after_end for a in asked)
        assert answer(server, prompts[4], max_tokens=30).tokens == expected[4]
        assert (server.state, server.stats().restarts) == ("ready", 0)


def test_a_prompt_that_fails_in_prefill_fails_alone() -> None:
    class Fragile(Counted):
        def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
            if tokens.shape[1] == 31:
                raise RuntimeError("injected")
            return super().__call__(tokens, **options)

    with engine(Fragile(zoo.tiny("qwen3_5"))) as server:
        good = ask(server, prompt(50), max_tokens=40)
        bad = ask(server, prompt(32, seed=1))
        assert isinstance(bad.over().error, EngineFault)
        assert len(good.over().tokens) == 40
        assert answer(server, prompt(33, seed=1)).tokens


def test_a_sink_that_raises_ends_only_its_own_request() -> None:
    def refuse(_: Sampled) -> bool:
        raise ValueError("no more")

    with engine(zoo.tiny("llama")) as server:
        good = ask(server, prompt(20), max_tokens=40)
        bad = ask(server, prompt(20, seed=1), n=3, sink=Collected(refuse))
        assert isinstance(bad.over().error, EngineFault)
        assert len(good.over().tokens) == 40


def test_the_engine_starts_again_after_a_turn_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt(40 + i, seed=i) for i in range(3)]
    turn = Loop.turn
    fuse = ["not yet"]

    def fail_once(loop: Loop) -> None:
        turn(loop)
        if fuse and all(len(s.generated) > 3 for s in loop.running.values()):
            fuse.pop()
            raise RuntimeError("injected")

    with engine(zoo.tiny("qwen3_5")) as server:
        expected = [answer(server, p, max_tokens=20).tokens for p in prompts]
        monkeypatch.setattr(Loop, "turn", fail_once)
        asked = [ask(server, p, max_tokens=20) for p in prompts]
        assert [a.over().tokens for a in asked] == expected
        assert server.stats().restarts == 1
        assert server.state == "ready"


def test_requests_are_answered_even_where_every_turn_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(loop: Loop) -> None:
        raise RuntimeError("injected")

    with engine(zoo.tiny("llama")) as server:
        with monkeypatch.context() as patch:
            patch.setattr(Loop, "turn", fail)
            assert isinstance(ask(server, prompt(20)).over().error, EngineFault)
            assert server.state == "failing"
            assert "RuntimeError" in server.detail
        assert answer(server, prompt(20)).tokens
        assert server.state == "ready"


def test_an_answer_that_cannot_be_stored_is_still_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Batch, sequence: int) -> list[Any]:
        raise RuntimeError("injected")

    monkeypatch.setattr(Batch, "caches", refuse)
    with engine(zoo.tiny("llama")) as server:
        answers = burst(server, [prompt(20, seed=i) for i in range(3)], max_tokens=10)
        assert [len(a.tokens) for a in answers] == [10, 10, 10]
        assert server.stats().restarts == 0


def test_what_ended_stays_ended_when_the_engine_starts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fuse = ["not yet"]
    leave = Runner.leave

    def fail_once(self: Runner, sequences: Any, *, keep: bool = True) -> None:
        if keep and fuse and sequences:
            fuse.pop()
            raise RuntimeError("injected")
        leave(self, sequences, keep=keep)

    with engine(zoo.tiny("llama")) as server:
        expected = answer(server, prompt(20), max_tokens=10).tokens
        monkeypatch.setattr(Runner, "leave", fail_once)
        short, long = ask(server, prompt(20), max_tokens=10), ask(server, prompt(30), max_tokens=30)
        assert short.over().tokens == expected
        assert short.reasons == {0: "length"}
        assert len(long.over().tokens) == 30
        assert server.stats().restarts == 1


def test_a_newcomer_that_cannot_join_starts_over_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fuse = ["not yet"]
    join = Batch.join

    def fail_once(self: Batch, newcomers: list[Batch]) -> None:
        join(self, newcomers)
        if fuse:
            fuse.pop()
            raise RuntimeError("injected")

    with engine(zoo.tiny("qwen3_5")) as server:
        expected = [answer(server, prompt(20 + i, seed=i)).tokens for i in range(3)]
        monkeypatch.setattr(Batch, "join", fail_once)
        answers = burst(server, [prompt(20 + i, seed=i) for i in range(3)])
        assert [a.tokens for a in answers] == expected
        assert not fuse


def test_a_request_that_cannot_be_taken_in_fails_alone_and_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine(zoo.tiny("llama")) as server:
        match = server.cache.match
        fuse = ["not yet"] * 3

        def fail(*details: Any, **options: Any) -> Any:
            if fuse:
                fuse.pop()
                raise RuntimeError("injected")
            return match(*details, **options)

        monkeypatch.setattr(server.cache, "match", fail)
        bad = [ask(server, prompt(20, seed=i), n=2) for i in range(3)]
        assert all(isinstance(b.over().error, EngineFault) for b in bad)
        assert answer(server, prompt(20), n=2).reasons == {0: "length", 1: "length"}
        assert not any(b.sampled or b.calls_after_end for b in bad)
        assert not server.core._loop.has_requests


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


def test_a_leader_that_is_almost_there_is_still_waited_for() -> None:
    head = prompt(640)
    with engine(zoo.tiny("qwen3_5")) as server:
        first = ask(server, joined(head, prompt(8, seed=1), prompt(60, seed=2)))
        while not first.progress or first.progress[-1][0] < 600:
            time.sleep(0.0005)
        second = answer(server, joined(head, prompt(8, seed=1), prompt(20, seed=3)))
        assert first.over().prefilled_tokens + second.prefilled_tokens <= 640 + 8 + 80 + 32


def test_warm_ahead_that_cannot_be_stored_is_not_computed() -> None:
    with engine(zoo.tiny("llama"), memory="2MB") as server:
        for i in range(4):
            answer(server, prompt(150, seed=i), max_tokens=1)
        server.warm(prompt(6000, seed=9))
        settled(server)
        assert server.stats().warm_tokens < 1000


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
    """Dynamic NTK asks for one position, and a batch has one for each sequence."""
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
        with server.core._inbox.changed:  # it sees all five at once
            asked = [ask(server, each, max_tokens=6) for each in prompts]
        assert [each.over().tokens for each in asked] == expected
    assert merges == [5] * layers


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
        sampler = make_sampler(seeded, choice, since, 512)
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
        # Each of the others runs the last prompt token again.
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


@pytest.mark.parametrize("name", ["qwen3_5", "llama", "gpt_oss"])
def test_warm_ahead_prefills_what_comes_next(name: str) -> None:
    counted = Counted(zoo.tiny(name))
    turn, history = prompt(60), prompt(90, seed=1)
    ahead = joined(turn, history)
    with engine(counted) as server:
        answer(server, turn)
        server.warm(ahead)
        settled(server)
        stats = server.stats()
        assert stats.warm_tokens == 90 + (0 if name != "qwen3_5" else 1)
        next_turn = answer(server, joined(ahead, prompt(20, seed=2)))
        assert next_turn.prefilled_tokens == 20
        assert server.stats().warm_tokens == stats.warm_tokens


def test_warm_ahead_lets_a_request_pass_and_keeps_what_it_did() -> None:
    ahead = prompt(5000)
    with engine(zoo.tiny("qwen3_5")) as server:
        server.warm(ahead)
        while not server.stats().warm_tokens:
            time.sleep(0.0005)
        quick = answer(server, prompt(20, seed=1), max_tokens=2)
        assert quick.tokens
        taken = answer(server, joined(ahead, prompt(5)), max_tokens=1)
        warmed = server.stats().warm_tokens
        assert taken.report is not None
        assert 0 < taken.report.match.resume <= warmed
        settled(server)
        assert server.stats().warm_tokens + taken.prefilled_tokens <= 5005 + 32


def test_warm_ahead_evicts_nothing_but_warm_ahead() -> None:
    with engine(zoo.tiny("llama"), memory="3MB") as server:
        kept = [prompt(150, seed=i) for i in range(4)]
        for each in kept:
            answer(server, each, max_tokens=1)
        for i in range(20):
            server.warm(prompt(300, seed=100 + i))
        settled(server)
        assert server.stats().warm_tokens > 3000
        for each in kept:
            assert answer(server, each, max_tokens=1).prefilled_tokens == 1


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
    def load() -> Loaded:
        raise OSError("no such folder")

    server = Engine(load)
    assert server.state == "loading"
    with pytest.raises(NotReady, match="being loaded"):
        server.submit(Request(prompt(5), Collected(), 5))
    server.start()
    assert server.wait(10) == "failing"
    assert "no such folder" in server.detail
    server.stop()


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss"])
def test_prompts_are_tried_out_before_anybody_asks(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All that a request runs is compiled then, the restore of a hit too; nothing of it stays."""
    restored: list[int] = []
    used: weakref.WeakSet[PrefixCache] = weakref.WeakSet()
    built = PrefixCache.acquire

    def acquire(cache: PrefixCache, *given: Any, **options: Any) -> Any:
        lease = built(cache, *given, **options)
        restored.append(lease.cost.match.resume)
        used.add(cache)
        return lease

    monkeypatch.setattr(PrefixCache, "acquire", acquire)
    with engine(zoo.tiny(name), rehearse=True) as server:
        assert len(restored) == 3
        assert restored[0] == 0
        many, few = rehearsal.MANY, rehearsal.FEW
        longest = rehearsal.REHEARSED_ON_CPU
        assert longest - 2 * (many + few) <= restored[1] < longest - many
        assert longest - 2 * few <= restored[2] < longest - few
        assert server.stats().prefilled_tokens == 0
        assert server.cache.stats().held == 0
        assert not used
        assert answer(server, prompt(60)).prefilled_tokens == 60
    assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]


@pytest.mark.parametrize("where", ["__init__", "step", "join"])
def test_a_rehearsal_that_fails_is_logged(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no compiler")

    rehearse = rehearsal.rehearse

    def rehearsed(given: Runner) -> None:
        with monkeypatch.context() as during:
            during.setattr(Batch, where, fail)
            rehearse(given)

    monkeypatch.setattr(engine_module, "rehearse", rehearsed)
    with engine(zoo.tiny("llama"), rehearse=True) as server:
        assert answer(server, prompt(60)).prefilled_tokens == 60
    assert "no compiler" in caplog.text


@pytest.mark.parametrize(("cuda", "free", "clears"), [(0, 1, 1), (1, 9, 0), (1, 101, 1)])
def test_on_cuda_free_buffers_stay_up_to_a_share(
    cuda: bool, free: int, clears: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[bool] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(True))
    monkeypatch.setattr(mx, "get_cache_memory", lambda: free)
    monkeypatch.setattr(runner, "is_cuda", lambda: bool(cuda))
    monkeypatch.setattr(runner, "device_bytes", lambda: 800)
    model = zoo.tiny("llama")
    alone = Runner(model, PrefixCache(model, memory="64MB"), 100)
    alone._computed(runner.CLEAR_AFTER - 1)
    assert not cleared
    alone._computed(1)
    assert bool(cleared) is bool(clears)


def test_on_cuda_a_restored_cache_is_as_long_as_one_that_grew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that it can have the buffer that such a one leaves."""
    model = zoo.tiny("llama")
    cache = PrefixCache(model, memory="64MB")
    run(model, cache, prompt(300))
    lengths = []
    for cuda in (True, False):
        monkeypatch.setattr(restore, "is_cuda", lambda cuda=cuda: cuda)
        with cache.acquire(joined(prompt(300), prompt(20, seed=1)), headroom=5) as lease:
            lengths.append(lease.caches[0].keys.shape[2])
    assert lengths == [512, 325]


def test_a_model_says_how_long_a_sequence_may_be() -> None:
    assert context_size(SimpleNamespace(args={"n_positions": 1024})) == 1024
    assert context_size(zoo.tiny("llama")) > 400
