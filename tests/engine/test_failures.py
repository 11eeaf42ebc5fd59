"""A request that fails costs its neighbours nothing, and the engine goes on."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import pytest

from rewarm.engine import Request
from rewarm.engine.decode import batch
from rewarm.engine.decode.batch import Batch
from rewarm.engine.decode.sampling import make_processors
from rewarm.engine.loop import Loop
from rewarm.engine.runner import Runner
from rewarm.errors import (
    EngineFault,
)
from rewarm.values import Sampled
from tests import zoo
from tests.engines import Collected, answer, ask, burst, engine
from tests.runs import Counted, prompt
from tests.sets import SOAK


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

    monkeypatch.setattr(batch, "make_processors", with_fuse)


@pytest.mark.usefixtures("fault")
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *(("qwen3_5", steps) for steps in (0, 1, 6)),
        *((name, steps) for name in ("gpt_oss", "afm7") for steps in ((0, 1, 6) if SOAK else (1,))),
    ],
)
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
        assert (server.state, server.core.stats().restarts) == ("ready", 0)


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
        if fuse and all(len(s.generated) > 3 for s in loop.scheduler.jobs.values()):
            fuse.pop()
            raise RuntimeError("injected")

    with engine(zoo.tiny("qwen3_5")) as server:
        expected = [answer(server, p, max_tokens=20).tokens for p in prompts]
        monkeypatch.setattr(Loop, "turn", fail_once)
        asked = [ask(server, p, max_tokens=20) for p in prompts]
        assert [a.over().tokens for a in asked] == expected
        assert server.core.stats().restarts == 1
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
        assert server.core.stats().restarts == 0


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
        assert server.core.stats().restarts == 1


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
        match = server.core.cache.match
        fuse = ["not yet"] * 3

        def fail(*details: Any, **options: Any) -> Any:
            if fuse:
                fuse.pop()
                raise RuntimeError("injected")
            return match(*details, **options)

        monkeypatch.setattr(server.core.cache, "match", fail)
        bad = [ask(server, prompt(20, seed=i), n=2) for i in range(3)]
        assert all(isinstance(b.over().error, EngineFault) for b in bad)
        assert answer(server, prompt(20), n=2).reasons == {0: "length", 1: "length"}
        assert not any(b.sampled or b.calls_after_end for b in bad)
        assert not server.core.has_requests
