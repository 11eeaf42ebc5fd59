"""On every template, boundaries hold for all that may follow, and lie as far on as possible.

They are compared with the tokens of `apply_chat_template` for many continuations of a chat.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rewarm.errors import InvalidPrompt
from rewarm.prompt.render import probes
from rewarm.prompt.render.renderer import ChatRenderer, Prompt
from rewarm.values import Message
from tests import corpus
from tests.chats import (
    TOKENIZERS,
    TOOLS,
    assistant,
    call,
    result,
    system,
    tokenizer_of,
    user,
)
from tests.sets import SOAK

pytestmark = pytest.mark.corpus

NEXT = "jklmnopqr"

NEAR = 4
"""The number of tokens that a boundary may lie before the best point."""

ODD = (
    "Thanks. And now?",
    "A question? Yes.",
    "1",
    "12 boats",
    "\n\nWell",
    "  two spaces",
    "\ttab",
    "évidemment",
    "中文",
    "😀 hm",
    "\u0301combining",
    ".",
    "...and",
    "'s",
    '"quoted"',
    '{"a": 1}',
    "[1]",
    "<b>",
    "<|im_end|>",
    "\\n",
    "#",
    "- a",
    "/x",
    "",
)
SCENARIOS = ("plain", "thinking", "tools", "loop")


def history(scenario: str) -> list[Message]:
    thought = {"reasoning_content": "It is a small port."} if scenario != "plain" else {}
    chat = [
        system(),
        user("When is the tide?"),
        assistant("At noon.", **thought),
        user("And tomorrow, at Ullapool?"),
    ]
    if scenario == "tools":
        chat[2:3] = [call("Ayr"), result("12:00"), assistant("At noon, in Ayr.")]
    if scenario == "loop":
        chat += [call() | thought, result("13:10")]
    return chat


def options_of(scenario: str, tokenizer: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"enable_thinking": True} if scenario == "thinking" else {}
    # A tokenizer of another model may lack what the template takes from it.
    return options | {k: "" for k in ("bos_token", "eos_token") if not getattr(tokenizer, k)}


def before_users() -> list[list[Message]]:
    """List the messages that may follow where it is the user's turn."""
    return [
        *([user(text)] for text in ODD),
        [user("One"), assistant("Two"), user("Three")],
        [user("One"), user("Two")],
        [user("X"), assistant("Y"), user("Z"), assistant("\n"), user("W")],
    ]


def after_users(tools: bool) -> list[list[Message]]:
    answers = [[assistant(text), user("Hm?")] for text in ODD if text]
    answers += [
        [assistant("Two", reasoning_content="Hm."), user("Three")],
        [assistant("Two"), user("Three"), assistant("Four"), user("Five")],
        [user("Another")],
    ]
    if tools:
        answers += [
            [call("Oban", NEXT), result("14:00", NEXT)],
            [call("Oban", NEXT), result("14:00", NEXT), assistant("At two."), user("Good.")],
            [call("Oban", NEXT, "Let me see."), result('{"at": 2}', NEXT)],
        ]
    return answers


def after_steps() -> list[list[Message]]:
    texts = ("14:00", "", "{}", '"x"', "\n", "é", "A result")
    thoughts = ({}, *({"reasoning_content": t} for t in ("Hm", "\n", "1", "é", ".")))
    return [[call("Oban", NEXT) | t, result(x, NEXT)] for t in thoughts for x in texts]


class Judge:
    """The template's own tokens of a chat; None where it refuses."""

    def __init__(self, tokenizer: Any, tools: Any, options: dict[str, Any], parts: bool) -> None:
        self.tokenizer, self.tools, self.options, self.parts = tokenizer, tools, options, parts

    def tokens(self, chat: list[Message]) -> Any:
        chat = [
            {**m, "reasoning": m["reasoning_content"]} if "reasoning_content" in m else m
            for m in chat
        ]
        plain = [{**m, "tool_calls": _parsed(m)} if "tool_calls" in m else m for m in chat]
        if self.parts:
            plain = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in plain]
        try:
            tokens = self.tokenizer.apply_chat_template(
                plain, tools=self.tools, add_generation_prompt=True, **self.options
            )
        except Exception:
            return None
        return np.asarray(tokens, np.int32)

    def common(
        self, prompt: Prompt, chat: list[Message], endings: list[list[Message]]
    ) -> tuple[int, int]:
        """Count the tokens that the prompt and all continuations begin with, and the continuations
        that the template takes."""
        renders = [self.tokens([*chat, *ending]) for ending in endings]
        accepted = [r for r in renders if r is not None]
        return min((_agree(prompt.tokens, r) for r in accepted), default=0), len(accepted)


def _parsed(message: Message) -> Any:
    return [
        {**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}}
        for c in message["tool_calls"]
    ]


def _agree(a: Any, b: Any) -> int:
    most = min(len(a), len(b))
    same = a[:most] == b[:most]
    return most if same.all() else int(np.argmin(same))


def cases() -> list[tuple[str, str, str]]:
    """List every template in every scenario that it renders, each with one tokenizer. Recorded
    templates run in every second scenario. A soak has all combinations."""
    chosen = []
    for i, template in enumerate(corpus.template_names()):
        for j, scenario in enumerate(SCENARIOS):
            if scenario in ("tools", "loop") and template in corpus.NO_TOOLS:
                continue
            for k, tokenizer in enumerate(TOKENIZERS):
                sample = (i // 2 + j) % len(TOKENIZERS) == k
                if SOAK or (sample and ((i + j) % 2 == 0 or not corpus.RECORDED)):
                    chosen.append((template, scenario, tokenizer))
    return chosen


@dataclass(frozen=True)
class Case:
    """A template with a tokenizer, and a chat that it renders."""

    renderer: ChatRenderer
    judge: Judge
    chat: list[Message]
    tools: Any
    options: dict[str, Any]

    def render(self, *more: Message, **options: Any) -> Prompt:
        return self.renderer.render([*self.chat, *more], self.tools, **options, **self.options)


def case_of(template: str, scenario: str, name: str) -> Case:
    tokenizer = tokenizer_of(name, template)
    tools = TOOLS if scenario in ("tools", "loop") else None
    options = options_of(scenario, tokenizer)
    judge = Judge(tokenizer, tools, options, template in corpus.TAKES_PARTS)
    renderer = ChatRenderer(tokenizer)
    # Some templates take no system message.
    for chat in (history(scenario), history(scenario)[1:]):
        if judge.tokens(chat) is not None:
            return Case(renderer, judge, chat, tools, options)
    pytest.skip("the template does not render this chat")


@pytest.mark.parametrize(("template", "scenario", "name"), cases())
def test_boundaries_hold_and_are_the_furthest_that_do(
    template: str, scenario: str, name: str
) -> None:
    case = case_of(template, scenario, name)
    chat, judge, prompt = case.chat, case.judge, case.render()
    assert np.array_equal(prompt.tokens, judge.tokens(chat))
    last = max(i for i, m in enumerate(chat) if m["role"] == "user")
    leading = 1 if chat[0]["role"] == "system" else 0
    places = {
        "turn": (chat[:last], before_users()),
        "user": (chat[: last + 1], after_users(bool(case.tools))),
    }
    if leading or case.tools:
        places["system"] = (chat[:leading], before_users())
    for kind, (prefix, endings) in places.items():
        best, accepted = judge.common(prompt, prefix, endings)
        assert accepted >= 20
        for boundary in prompt.boundaries:
            if boundary.kind == kind and boundary.durable:
                assert boundary.position <= best, f"{kind} holds up to {best} only"
        # Where two boundaries lie at one position, either name is right.
        durable = [b.position for b in prompt.boundaries if b.durable and b.position <= best]
        furthest = max(durable, default=0)
        assert furthest >= min(best, len(prompt.tokens) - 1) - NEAR, f"{kind} at {best} is missing"
    if scenario == "loop":
        best, _ = judge.common(prompt, chat, after_steps())
        loop = [b.position for b in prompt.boundaries if not b.durable and b.kind == "turn"]
        assert all(position <= best for position in loop)
        furthest = max(b.position for b in prompt.boundaries)
        assert furthest >= min(best, len(prompt.tokens) - 1) - NEAR
    check_the_grid(case)


def check_the_grid(case: Case) -> None:
    """`exact` needs this: a later turn gives the same places again, in the same tokens."""
    now = case.render(every_turn=True)
    try:
        later = case.render(assistant("\nDone. "), user("é"), every_turn=True)
    except InvalidPrompt:
        return
    places = [b.position for b in now.boundaries if b.durable]
    assert [b.position for b in later.boundaries if b.durable][: len(places)] == places
    last = max(places, default=0)
    assert np.array_equal(now.tokens[:last], later.tokens[:last])


def long_chats(scenario: str) -> list[list[Message]]:
    """Make chats with more turns before the last question, and more steps after it, than an end."""
    first, *chat = history(scenario)
    last = max(i for i, m in enumerate(chat) if m["role"] == "user")
    turn, question, loop = chat[:last], chat[last], chat[last + 1 :]
    turns = [
        {**m, "content": f"{m['content']} {i}" if m["content"] else ""}
        for i in range(6)
        for m in turn
    ]
    plain = [m for i in range(6) for m in (user(f"And at {i}?"), assistant(f"Then at {i}."))]
    again = [m for i in range(8) for m in (assistant(f"Step {i}."), user("Go on."))]
    return [
        [first, *turns, *turn, question, *loop * 8],
        [first, question, *loop * 8],
        [first, *turn, *turn, *plain, question, *loop],
        [first, user("Go on."), *again, *loop],
    ]


@pytest.mark.parametrize(
    ("template", "name"),
    [(t, TOKENIZERS[i % len(TOKENIZERS)]) for i, t in enumerate(corpus.template_names())],
)
def test_what_the_end_of_a_long_chat_shows_is_what_all_of_it_shows(
    template: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of(name, template)
    for scenario in SCENARIOS if SOAK else SCENARIOS[2:]:
        tools = TOOLS if scenario in ("tools", "loop") else None
        options = options_of(scenario, tokenizer)
        judge = Judge(tokenizer, tools, options, template in corpus.TAKES_PARTS)
        longs = long_chats(scenario)
        for long in longs if SOAK else longs[:2] if scenario == "loop" else longs[2:]:
            chat = next((c for c in (long, long[1:]) if judge.tokens(c) is not None), None)
            if chat is None:
                continue
            asked = max(i for i, m in enumerate(chat) if m["role"] == "user") + 1
            prompts = []
            for short in (True, False):
                with monkeypatch.context() as patch:
                    if not short:
                        patch.setattr(probes, "shortened", lambda whole, *_: whole)
                    # A server sees a loop's question before its steps, unless it was just started.
                    new, known = ChatRenderer(tokenizer), ChatRenderer(tokenizer)
                    parts = ((known, chat[:asked]), (known, chat), (new, chat))
                    prompts.append([r.render(part, tools, **options) for r, part in parts])
            for ends, whole in zip(*prompts, strict=True):
                assert ends.boundaries == whole.boundaries
                assert ends.generation == whole.generation
