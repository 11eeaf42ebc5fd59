"""The beginning of the next turn is prefilled in idle time."""

from __future__ import annotations

import time

import pytest

from rewarm.engine import PromptPath
from tests import zoo
from tests.engines import answer, engine, settled
from tests.runs import Counted, joined, prompt


def test_warm_ahead_that_cannot_be_stored_is_not_computed() -> None:
    with engine(zoo.tiny("llama"), memory="2MB") as server:
        for i in range(4):
            answer(server, prompt(150, seed=i), max_tokens=1)
        server.core.warm(PromptPath(prompt(6000, seed=9)))
        settled(server)
        assert server.core.stats().warm_tokens < 1000


@pytest.mark.parametrize("name", ["qwen3_5", "llama", "gpt_oss"])
def test_warm_ahead_prefills_what_comes_next(name: str) -> None:
    counted = Counted(zoo.tiny(name))
    turn, history = prompt(60), prompt(90, seed=1)
    ahead = joined(turn, history)
    with engine(counted) as server:
        answer(server, turn)
        server.core.warm(PromptPath(ahead))
        settled(server)
        stats = server.core.stats()
        assert stats.warm_tokens == 90 + (0 if name != "qwen3_5" else 1)
        next_turn = answer(server, joined(ahead, prompt(20, seed=2)))
        assert next_turn.prefilled_tokens == 20
        assert server.core.stats().warm_tokens == stats.warm_tokens


def test_warm_ahead_lets_a_request_pass_and_keeps_what_it_did() -> None:
    ahead = prompt(5000)
    with engine(zoo.tiny("qwen3_5")) as server:
        server.core.warm(PromptPath(ahead))
        while not server.core.stats().warm_tokens:
            time.sleep(0.0005)
        quick = answer(server, prompt(20, seed=1), max_tokens=2)
        assert quick.tokens
        taken = answer(server, joined(ahead, prompt(5)), max_tokens=1)
        warmed = server.core.stats().warm_tokens
        assert taken.report is not None
        assert 0 < taken.report.match.resume <= warmed
        settled(server)
        assert server.core.stats().warm_tokens + taken.prefilled_tokens <= 5005 + 32


def test_warm_ahead_evicts_nothing_but_warm_ahead() -> None:
    with engine(zoo.tiny("llama"), memory="3MB") as server:
        kept = [prompt(150, seed=i) for i in range(4)]
        for each in kept:
            answer(server, each, max_tokens=1)
        for i in range(20):
            server.core.warm(PromptPath(prompt(300, seed=100 + i)))
        settled(server)
        assert server.core.stats().warm_tokens > 3000
        for each in kept:
            assert answer(server, each, max_tokens=1).prefilled_tokens == 1
