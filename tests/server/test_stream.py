"""An answer goes from the engine's thread to a stream, without a server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from rewarm.generate.generation import (
    Choice,
    Delta,
    Ended,
    Event,
    Prefilled,
    PromptOver,
    PromptRun,
)
from rewarm.generate.options import GenerationOptions
from rewarm.prompt.chat import Chat
from rewarm.prompt.parse.answer import Answer
from rewarm.prompt.parse.texts import TokenTexts
from rewarm.prompt.render.renderer import Prompt
from rewarm.server.anthropic.parse import MessagesRequest
from rewarm.server.anthropic.reply import MessagesDialect
from rewarm.server.exchange import Exchange, Work, data
from rewarm.server.openai.parse import ChatRequest
from rewarm.server.openai.reply import ChatDialect, finite
from rewarm.values import Cost, Match, Sampled
from tests.tiny import tool_tokenizer

TOKENIZER = tool_tokenizer()
COST = Cost(Match(10, 6, 4, "diverged", "memory"), "user", 6, 1.0, 1.0, 1.0, 1.0, 4.0)
BODY = b'{"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello?"}]}'


class Nobody:
    """A backend that notes which work was cancelled."""

    def __init__(self) -> None:
        self.generator = self
        self.cancelled: list[Work] = []

    def cancel(self, work: Work) -> None:
        self.cancelled.append(work)

    def note_run(self, work: Work, run: PromptRun) -> None: ...


def token(text: str) -> Sampled:
    (found,) = TOKENIZER.encode(text, add_special_tokens=False)
    return Sampled(found, -0.5)


async def no_send(message: Any) -> None: ...


def work_of(**options: Any) -> tuple[Work, PromptRun, Nobody]:
    nobody = Nobody()
    exchange = Exchange("r", "chat", no_send, lambda exchange, status: None)
    given = GenerationOptions(stream=True, **options)
    chat = Chat([{"role": "user", "content": "Hello?"}])
    work = Work(chat, given, exchange=exchange, backend=nobody)  # type: ignore[arg-type]
    prompt = Prompt(np.array(TOKENIZER.encode("Hello?"), dtype=np.int32))
    choice = Choice(Answer(TOKENIZER, prompt.tokens, stop=given.stop))
    run = PromptRun(0, prompt, [choice], given, work.send, lambda seconds: None)
    work.runs.append(run)
    work.pending.add(0)
    return work, run, nobody


async def events_of(work: Work) -> list[Event]:
    return [event async for batch in work.batches(1.0) for event in batch]


def test_tokens_become_events_in_order() -> None:
    async def run() -> list[Event]:
        work, sink, _ = work_of(stop=("zz",))
        sink.prefilled(4, 10)
        sink.prefilled(4, 10)
        for text in "ab":
            assert not sink.token(0, token(text))
        assert not sink.token(0, token("z"))
        assert sink.token(0, token("z"))
        sink.ended(0, "stop")
        sink.done(COST)
        return await events_of(work)

    events = asyncio.run(run())
    assert [type(e) for e in events] == [Prefilled, Delta, Delta, Ended, PromptOver]
    assert "".join(p.text for e in events if isinstance(e, Delta) for p in e.parts) == "ab"


def test_an_answer_that_cannot_be_read_to_its_end_fails_its_request() -> None:
    async def run() -> PromptRun:
        work, sink, _ = work_of()
        sink.choices[0].answer.finish = None  # type: ignore[assignment, method-assign]
        sink.ended(0, "stop")  # nothing was raised
        sink.done(COST)
        assert isinstance((await events_of(work))[-1], PromptOver)
        return sink

    failed = asyncio.run(run())
    assert failed.error is not None
    assert failed.cost is None


def test_a_closed_event_loop_is_survived() -> None:
    async def run() -> PromptRun:
        return work_of()[1]

    sink = asyncio.run(run())
    sink.prefilled(1, 2)
    sink.token(0, token("a"))
    sink.ended(0, "stop")
    sink.done(COST)
    assert (sink.choices[0].finish, sink.cost) == ("stop", COST)
    sink.failed(ValueError("late"))


def test_silence_is_told_and_leaving_cancels() -> None:
    async def run() -> None:
        work, sink, nobody = work_of()
        batches = work.batches(0.01)
        assert await anext(batches) == []
        work.abandon()
        assert nobody.cancelled == [work]
        assert work.abandoned
        sink.ended(0, "cancelled")
        sink.done(COST)
        assert [type(e) for e in await anext(batches)] == [Ended, PromptOver]
        with pytest.raises(StopAsyncIteration):
            await anext(batches)

    asyncio.run(run())


def test_each_api_has_its_own_sign_of_life() -> None:
    async def run() -> None:
        work, _, _ = work_of()
        texts = TokenTexts(TOKENIZER)
        chat = ChatDialect(ChatRequest.model_validate_json(BODY), work, "m", texts)
        assert chat.idle() == ": keep-alive\n\n"
        assert chat.events([Prefilled(0, 4, 10)]) == ": prefill 4/10\n\n"
        assert chat.idle() == ": prefill 4/10\n\n"
        message = MessagesDialect(MessagesRequest.model_validate_json(BODY), work, "m", texts)
        # Before the message has started, a comment is the only line that every client skips.
        assert message.idle() == ": keep-alive\n\n"
        assert message.events([Prefilled(0, 4, 10)]).startswith("event: message_start\n")
        assert message.idle().startswith("event: ping\n")

    asyncio.run(run())


def test_an_event_is_one_line_for_every_reader() -> None:
    text = "a\u2028b\u2029c\x85d\r\ne"
    line = data({"text": text}).removesuffix("\n\n")
    assert len(line.splitlines()) == 1
    assert json.loads(line.removeprefix("data: ")) == {"text": text}


def test_a_reply_never_holds_what_json_cannot() -> None:
    infinity = float("inf")
    assert [finite(x) for x in (-1.5, -infinity, float("nan"), None)] == [-1.5, *[-9999.0] * 3]


def test_parts_of_a_character_have_their_bytes() -> None:
    texts = TokenTexts(TOKENIZER)
    parts = [texts.of(t) for t in TOKENIZER.encode("é", add_special_tokens=False)]
    assert [p.bytes for p in parts] == [[0xC3], [0xA9]]
    assert texts.of(TOKENIZER.encode("a")[0]) == ("a", [97])
