"""Text becomes text, on an engine with a thread and on one that the caller turns."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rewarm import PrefixCache
from rewarm.engine import Core, EngineParts, PromptPath
from rewarm.errors import InvalidOption
from rewarm.generate.generation import Delta, Ended, Event, Prefilled, PromptOver
from rewarm.generate.generator import Generator
from rewarm.generate.options import GenerationOptions
from rewarm.options import EngineOptions
from rewarm.prompt.chat import Chat, Text
from tests.engines import ScriptedEngine, started_engine
from tests.tiny import END, tiny_model, tool_tokenizer

CHAT = Chat([{"role": "user", "content": "Where is the boat?"}])


@contextmanager
def waiting() -> Iterator[Generator]:
    engine, _ = started_engine()
    try:
        assert engine.wait(60) == "ready", engine.detail
        yield Generator(engine)
    finally:
        engine.stop()


@contextmanager
def turning() -> Iterator[Generator]:
    model = tiny_model()
    loaded = EngineParts(model, tool_tokenizer(), PrefixCache(model, memory="64MB", chunk=64))
    core = Core(loaded, EngineOptions(max_batch=2))
    yield Generator(core)
    core.close()


def answered(generator: Generator, max_tokens: int) -> list[Event]:
    options = GenerationOptions(max_tokens=max_tokens, stream=True)
    return list(generator.events(generator.start(CHAT, options)))


HOWS = pytest.mark.parametrize("how", [waiting, turning])


@HOWS
def test_events_come_in_order_and_end_with_the_cost(how: Any) -> None:
    with how() as generator:
        generation = generator.start(CHAT, GenerationOptions(max_tokens=5, stream=True))
        kinds = [type(event) for event in generator.events(generation)]
        assert kinds[0] is Prefilled
        assert kinds[-2:] == [Ended, PromptOver]
        assert kinds == sorted(kinds, key=[Prefilled, Delta, Ended, PromptOver].index)
        (cost,) = generation.costs
        assert cost.match.resume + cost.prefilled == cost.match.tokens


@HOWS
def test_both_ways_to_turn_the_engine_give_the_same_answer(how: Any) -> None:
    def text(generator: Generator) -> str:
        events = answered(generator, max_tokens=12)
        return "".join(e.reasoning + e.text for e in events if isinstance(e, Delta))

    with how() as generator, waiting() as other:
        assert text(generator) == text(other) != ""


@HOWS
def test_closing_the_events_stops_the_work_and_keeps_what_was_computed(how: Any) -> None:
    with how() as generator:
        generation = generator.start(CHAT, GenerationOptions(max_tokens=10_000, stream=True))
        events = generator.events(generation)
        while not isinstance(next(events), Delta):
            pass
        events.close()
        assert generation.over
        assert generator.core.cache.stats().leases == 0
        tokens = generation.runs[0].prompt.tokens
        assert generator.core.cache.match(tokens).resume == len(tokens) - 1


@HOWS
def test_texts_are_answered_together_or_not_at_all(how: Any) -> None:
    with how() as generator:
        options = GenerationOptions(stream=True)
        generation = generator.start(Text(["Once", "Twice"], echo=True), options)
        for _ in generator.events(generation):
            if any(choice.tokens > 2 for choice in generation.choices):
                generator.cancel(generation)
        assert [run.echo for run in generation.runs] == ["Once", "Twice"]
        assert len(generation.costs) == 2
        many = GenerationOptions(n=200)
        with pytest.raises(InvalidOption, match="400 answers at once: the queue takes 256"):
            generator.start(Text(["a", "b"]), many)


@HOWS
def test_a_generation_that_is_over_is_freed_without_a_collector(how: Any) -> None:
    """Runs, requests and answers form no cycle of references."""
    with how() as generator:
        gc.collect()
        gc.disable()
        try:
            generation = generator.start(CHAT, GenerationOptions(max_tokens=4, stream=True))
            assert list(generator.events(generation))
            held = [weakref.ref(generation), weakref.ref(generation.runs[0])]
            del generation
            # The engine drops a request at the end of the turn in which the request ended.
            answered(generator, max_tokens=1)
            if isinstance(generator.engine, ScriptedEngine):
                generator.engine.requests.clear()
            assert [ref() for ref in held] == [None, None]
        finally:
            gc.enable()


def test_the_next_turn_is_warmed_as_it_will_be_sent() -> None:
    with waiting() as generator:
        assert isinstance(generator.engine, ScriptedEngine)
        generator.engine.script = f"</think>At the pier.{END}"
        generation = generator.start(CHAT, GenerationOptions(max_tokens=60, stream=True))
        list(generator.events(generation))
        warmed: list[PromptPath] = []
        generator.core.warm = warmed.append  # type: ignore[method-assign]
        generator.answered(generation, generation.runs[0])
        (ahead,) = warmed
        said = generation.choices[0].answer.message()
        after = Chat([*CHAT.messages, said, {"role": "user", "content": "And the crane?"}])
        sent = generator.render(after).tokens
        assert sent[: len(ahead.tokens)].tolist() == ahead.tokens.tolist()
        assert len(ahead.tokens) > len(generation.runs[0].prompt.tokens)
