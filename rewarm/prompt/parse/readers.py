"""Split generated text into parts, by the formats in which models answer.

mlx-lm's parsers know most formats. To add a tool-call format that they do not know, write a
`Reader` such as `HarmonyReader` here, and choose it in `reader_of`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from mlx_lm.generate import TextStateMachine, make_text_state_machine

from rewarm.values import Tokens

from ..messages import Call, Part


class Reader(Protocol):
    def feed(self, text: str) -> list[Part]:
        """Take more text, and give the parts that are certain now, in order."""

    def finish(self) -> list[Part]:
        """Give the rest, after the last text."""


class PlainReader:
    """A reader that reads everything as text."""

    def feed(self, text: str) -> list[Part]:
        return [Part("text", text)]

    def finish(self) -> list[Part]:
        return []


class MlxReader:
    """A reader with mlx-lm's state machine and the model's tool parser.

    The newlines around thinking belong to neither the thinking nor the answer: the template writes
    them there again."""

    def __init__(self, tokenizer: Any, prompt: Tokens, tools: list[Any] | None) -> None:
        self._tools = tools
        self._parse = tokenizer.tool_parser or (lambda text, tools: json.loads(text))
        self._markers = (tokenizer.tool_call_start or "", tokenizer.tool_call_end or "")
        initial = initial_state(tokenizer, prompt)
        self._state: Any = make_text_state_machine(tokenizer).make_state(initial)
        self._was: str | None = initial
        self._call = ""
        self._newlines = ""
        """The newlines at the end of the thinking so far."""
        self._between = initial == "reasoning"
        """Only newlines came since thinking began or ended."""

    def feed(self, text: str) -> list[Part]:
        self._state, segments = TextStateMachine.split(self._state, text)
        return [part for segment in segments for part in self._read(*segment)]

    def finish(self) -> list[Part]:
        self._state, rest, name = TextStateMachine.flush(self._state)
        parts = self._read(name, rest)
        if self._was == "tool":
            parts += self._take_call(closed=False)
        return parts

    def _read(self, name: str | None, text: str) -> list[Part]:
        parts = []
        if name != self._was:
            if self._was == "tool":
                parts += self._take_call(closed=True)
            if "reasoning" in (name, self._was):
                self._newlines, self._between = "", True
        self._was = name
        if name == "tool":
            self._call += text
        elif name == "reasoning":
            parts.append(Part("thinking", self._thinking(text)))
        elif name == "normal":
            parts.append(Part("text", self._without_newlines(text)))
        return parts  # other states belong to a format, such as the headers of messages

    def _thinking(self, text: str) -> str:
        text = self._newlines + self._without_newlines(text)
        kept = text.rstrip("\n")
        self._newlines = text[len(kept) :]
        return kept

    def _without_newlines(self, text: str) -> str:
        if self._between:
            text = text.lstrip("\n")
            self._between = not text
        return text

    def _take_call(self, *, closed: bool) -> list[Part]:
        """Give the calls that were just written, or their text where it cannot be parsed."""
        text, self._call = self._call, ""
        if not text.strip():
            return []
        try:
            parsed = self._parse(text, self._tools)
            calls = [call_of(c) for c in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception:  # a parser may raise any error on what a model writes
            start, stop = self._markers
            return [Part("text", start + text + (stop if closed else ""))]
        return [Part("call", call=call) for call in calls]


class HarmonyReader:
    """A reader for GPT-OSS: messages with a header that names their channel and their recipient.

    mlx-lm has no parser for them, and the template refuses an answer that comes back unparsed.
    """

    MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
    OPENINGS = ("<|channel|>", "<|constrain|>", "<|start|>", "to=", "assistant")
    MACHINE = TextStateMachine(
        {
            "header": [("<|message|>", "body"), ("<|start|>", "header")],
            "body": [(m, "header") for m in ("<|end|>", "<|call|>", "<|return|>", "<|start|>")],
        }
    )

    def __init__(self, header: str = "", begun: bool = False) -> None:
        """`header` is the header of the message that the prompt ends in; `begun` says that its body
        has begun."""
        self._header = header
        self._body = ""
        self._was = "body" if begun else "header"
        self._state: Any = self.MACHINE.make_state(self._was)
        self._first = not begun

    def feed(self, text: str) -> list[Part]:
        self._state, segments = TextStateMachine.split(self._state, text)
        parts = [part for segment in segments for part in self._read(*segment)]
        if self._first and self._was == "header" and not self._is_header():
            return parts + self._as_text()
        return parts

    def finish(self) -> list[Part]:
        self._state, rest, name = TextStateMachine.flush(self._state)
        parts = self._read(name, rest)
        if self._was == "body":
            parts += self._end_body()
        elif self._first:
            parts.append(Part("text", self._header))
        self._header = ""
        self._first = False
        return parts

    def _read(self, name: str, text: str) -> list[Part]:
        parts = []
        if name == "header":
            if self._was == "body":
                parts += self._end_body()
                self._header = ""
            self._header += text
        else:
            self._first = False
            if self._recipient():
                self._body += text
            else:
                parts.append(Part("thinking" if "analysis" in self._header else "text", text))
        self._was = name
        return parts

    def _recipient(self) -> str:
        _, to, rest = self._header.partition("to=")
        name = rest.split("<|")[0].split()[0] if to and rest.split("<|")[0].split() else ""
        return name.removeprefix("functions.")

    def _end_body(self) -> list[Part]:
        name, text = self._recipient(), self._body
        self._body = ""
        if not name:
            return []
        try:
            call = call_of({"name": name, "arguments": json.loads(text)})
        except Exception:  # what a model writes need not be JSON
            return [Part("text", text)]
        return [Part("call", call=call)]

    def _is_header(self) -> bool:
        header = self._header.lstrip()
        return any(o.startswith(header[: len(o)]) for o in self.OPENINGS)

    def _as_text(self) -> list[Part]:
        """Read the rest as text, since the model does not keep to the format."""
        text, self._header = self._header, ""
        held = self._state[3]
        self._first = False
        self._was = "body"
        self._state = self.MACHINE.make_state("body")
        return self.feed(text + held)


def reader_of(tokenizer: Any, prompt: Tokens, tools: list[Any] | None) -> Reader:
    if not (tokenizer.has_thinking or tokenizer.has_tool_calling or tokenizer.response_transitions):
        named = _numbers(tokenizer, HarmonyReader.MARKERS)
        if len(named) == len(HarmonyReader.MARKERS):
            return HarmonyReader(*_open_message(tokenizer, prompt, named))
    return MlxReader(tokenizer, prompt, tools)


def call_of(parsed: Any) -> Call:
    """Write a parsed call in OpenAI's shape. Raises an error where it is none."""
    if not isinstance(parsed["name"], str) or not parsed["name"]:
        raise ValueError("a call needs a name")
    arguments = parsed.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": str(parsed.get("id") or f"call_{uuid.uuid4().hex[:24]}"),
        "type": "function",
        "function": {"name": parsed["name"], "arguments": arguments},
    }


def initial_state(tokenizer: Any, prompt: Tokens) -> str:
    """Find the state in which the answer begins: the template may have opened the thinking."""
    found: str | None = tokenizer.response_initial_state
    if found:
        return found
    if tokenizer.has_thinking:
        opened = _last(prompt, tokenizer.think_start_tokens)
        if opened > _last(prompt, tokenizer.think_end_tokens):
            return "reasoning"
    return "normal"


def _last(prompt: Tokens, wanted: tuple[int, ...]) -> int:
    """Find the last place of a sequence, or -1. mlx-lm's own search is slow in long prompts."""
    for at in reversed(np.flatnonzero(prompt == wanted[0]).tolist()):
        if tuple(prompt[at : at + len(wanted)].tolist()) == wanted:
            return int(at)
    return -1


def _numbers(tokenizer: Any, tokens: Iterable[str]) -> dict[str, int]:
    """Find the ids of those tokens that the vocabulary has. Asking for the whole vocabulary is
    slow."""
    found = ((t, tokenizer.convert_tokens_to_ids(t)) for t in tokens)
    return {t: n for t, n in found if n is not None and n != tokenizer.unk_token_id}


def _open_message(tokenizer: Any, prompt: Tokens, named: dict[str, int]) -> tuple[str, bool]:
    """Find the header of the message that the prompt ends in; true where its body has begun."""
    others = [n for marker, n in named.items() if marker not in ("<|message|>", "<|channel|>")]
    outside = np.flatnonzero(np.isin(prompt, others))
    message = prompt[int(outside[-1]) + 1 if len(outside) else 0 :]
    begins = np.flatnonzero(message == named["<|message|>"])
    if not len(begins):
        return "", False
    return str(tokenizer.decode(message[: int(begins[0])].tolist())), True
