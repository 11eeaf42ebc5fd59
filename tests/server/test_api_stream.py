"""The way of an answer from the engine's thread to a stream, without a server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from rewarm.engine.request import Request
from rewarm.generate.collect import Choice, Collector, Delta, Done, Ended, Event, Failed, Progress
from rewarm.prompt.parse.answer import Answer
from rewarm.prompt.render.renderer import Prompt
from rewarm.server.anthropic.stream import Head as AnthropicHead
from rewarm.server.anthropic.stream import MessageStream
from rewarm.server.openai.reply import Head, finite
from rewarm.server.openai.stream import ChatStream
from rewarm.server.sse import data
from rewarm.server.texts import TokenTexts
from rewarm.server.work import Run, Work
from rewarm.values import Cost, Match, Sampled
from tests.support_server import tool_tokenizer

TOKENIZER = tool_tokenizer()
REPORT = Cost(Match(10, 6, 4, "diverged", "memory"), "user", 6, 1.0, 1.0, 1.0, 1.0, 4.0)


def token(text: str) -> Sampled:
    (found,) = TOKENIZER.encode(text, add_special_tokens=False)
    return Sampled(found, -0.5)


def work_of(stream: bool = True, **options: Any) -> tuple[Work, Collector, list[Run]]:
    cancelled: list[Run] = []
    work = Work(cancelled.append, lambda run: None)
    prompt = Prompt(np.array(TOKENIZER.encode("Hello?"), dtype=np.int32))
    choice = Choice(Answer(TOKENIZER, prompt.tokens, stop=options.pop("stop", ())))
    collector = Collector(
        [choice], work.deliver, asyncio.get_running_loop(), stream=stream, **options
    )
    work.runs.append(Run(Request(prompt.tokens, collector, 5), prompt, collector))
    return work, collector, cancelled


async def events_of(work: Work) -> list[Event]:
    return [event async for batch in work.batches(1.0) for event in batch]


def test_tokens_become_events_in_order() -> None:
    async def run() -> list[Event]:
        work, sink, _ = work_of(stop=["zz"])
        sink.prefilled(4, 10)
        sink.prefilled(4, 10)
        for text in "ab":
            assert not sink.token(0, token(text))
        assert not sink.token(0, token("z"))
        assert sink.token(0, token("z"))
        sink.ended(0, "stop")
        sink.done(REPORT)
        return await events_of(work)

    events = asyncio.run(run())
    assert [type(e) for e in events] == [Progress, Delta, Delta, Ended, Done]
    assert "".join(e.text for e in events if isinstance(e, Delta)) == "ab"


def test_an_answer_that_cannot_be_read_fails_its_request_and_nobody_else() -> None:
    async def run() -> list[Event]:
        work, sink, _ = work_of()
        sink.choices[0].answer.add = None  # type: ignore[assignment, method-assign]
        assert sink.token(0, token("a"))  # the choice ends here, and nothing was raised
        sink.ended(0, "stop")
        sink.done(REPORT)
        return await events_of(work)

    assert isinstance(asyncio.run(run())[-1], Failed)


def test_a_closed_event_loop_is_survived() -> None:
    async def run() -> Collector:
        return work_of()[1]

    sink = asyncio.run(run())
    sink.prefilled(1, 2)
    sink.token(0, token("a"))
    sink.ended(0, "stop")
    sink.done(REPORT)
    sink.failed(ValueError("late"))
    assert (sink.choices[0].finish, sink.error) == ("stop", None)


def test_silence_is_told_and_leaving_cancels() -> None:
    async def run() -> None:
        work, sink, cancelled = work_of()
        batches = work.batches(0.01)
        assert await anext(batches) == []
        work.abandon()
        assert cancelled == work.runs
        assert work.abandoned
        sink.ended(0, "cancelled")
        sink.done(REPORT)
        assert [type(e) for e in await anext(batches)] == [Ended, Done]
        with pytest.raises(StopAsyncIteration):
            await anext(batches)

    asyncio.run(run())


def test_each_api_has_its_own_sign_of_life() -> None:
    async def run() -> None:
        work, _, _ = work_of()
        chat = ChatStream(
            Head("i", "chat.completion", "m", TokenTexts(TOKENIZER)), work, False, False
        )
        assert chat.idle() == ": keep-alive\n\n"
        assert chat.events([Progress(0, 4, 10)]) == ": prefill 4/10\n\n"
        assert chat.idle() == ": prefill 4/10\n\n"
        message = MessageStream(AnthropicHead("i", "m", "r", False), work)
        # Before the message has started, only a comment is certain to be skipped.
        assert message.idle() == ": keep-alive\n\n"
        assert message.events([Progress(0, 4, 10)]).startswith("event: message_start\n")
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
