"""No array outlives its request, however that ends, with the garbage collector off."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from rewarm.cache import PrefixCache
from rewarm.engine import Engine
from tests import zoo
from tests.engines import Collected, answer, ask, engine, settled
from tests.leaks import COMPILED, Surplus
from tests.runs import CHUNK, Counted, Prompt, joined, prompt
from tests.sets import SOAK

from .inside import running_requests

pytestmark = pytest.mark.usefixtures("uncollected")

SAMPLE = ["llama", "qwen3_5", "gpt_oss", "nemotron_h", "rwkv7", "deepseek_v41"]


class Breaking(Counted):
    """A model that fails once, in a chunk or a step of so many tokens."""

    breaks_at = 0

    def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
        out = super().__call__(tokens, **options)
        if tokens.size == self.breaks_at:
            self.breaks_at = 0
            raise RuntimeError("injected")
        return out


def hit(server: Engine, head: Prompt, tail: Prompt) -> None:
    answer(server, joined(head, tail), max_tokens=3)


def several_answers(server: Engine, head: Prompt, tail: Prompt) -> None:
    answer(server, joined(head, tail), max_tokens=3, n=3)


def burst(server: Engine, head: Prompt, tail: Prompt) -> None:
    asked = [ask(server, joined(head, tail[i:]), max_tokens=3 + i) for i in range(4)]
    for each in asked:
        each.over()


def cancelled_in_prefill(server: Engine, head: Prompt, tail: Prompt) -> None:
    asked = ask(server, joined(head, *[tail] * 12))
    asked.begun()
    server.core.cancel(running_requests(server)[0])
    asked.over()


def cancelled_while_decoding(server: Engine, head: Prompt, tail: Prompt) -> None:
    asked = ask(server, joined(head, tail), max_tokens=400)
    while not asked.tokens:
        pass
    server.core.cancel(running_requests(server)[0])
    asked.over()


def broken_in_prefill(server: Engine, head: Prompt, tail: Prompt) -> None:
    server.core.model.breaks_at = len(tail) - 1
    ask(server, joined(head, tail)).over()


def broken_while_decoding(server: Engine, head: Prompt, tail: Prompt) -> None:
    def break_next(_: Any) -> bool:
        server.core.model.breaks_at = 1
        return False

    ask(server, joined(head, tail), max_tokens=4, sink=Collected(break_next)).over()


ENDINGS = [
    hit,
    several_answers,
    burst,
    cancelled_in_prefill,
    cancelled_while_decoding,
    broken_in_prefill,
    broken_while_decoding,
]


@pytest.mark.parametrize("name", sorted(zoo.ARCHITECTURES) if SOAK else SAMPLE)
def test_however_a_request_ends_only_the_tree_is_left(name: str) -> None:
    model, vocabulary = Breaking(zoo.tiny(name)), zoo.vocabulary(name)
    cache = PrefixCache(model, memory="2MB", chunk=CHUNK)
    head = prompt(40, 1, vocabulary)
    with engine(model, cache=cache) as server:
        for ending in ENDINGS:  # what is compiled and kept once
            ending(server, head, prompt(33, 1, vocabulary))
            settled(server)
        surplus = Surplus(cache)
        for seed in range(2, 4):
            for ending in ENDINGS:
                ending(server, head, prompt(33, seed, vocabulary))
                settled(server)
                assert surplus.left_over_after_its_turn() <= COMPILED, ending.__name__
