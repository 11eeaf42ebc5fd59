"""Split generated text into parts, by the formats in which models answer.

mlx-lm's parsers know most formats. To add a tool-call format that they do not know, write a
`Reader` such as `HarmonyReader` here, and choose it in `reader_of`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
from mlx_lm.generate import TextStateMachine, make_text_state_machine

from rewarm.values import Tokens

from ..messages import Call, Part

END = ""
"""The state after the last text. No state machine has a state of this name."""


class Reader:
    """A reader that reads everything as text. Readers of formats are its subclasses."""

    def feed(self, text: str) -> list[Part]:
        """Take more text, and give the parts that are certain now, in order."""
        return [Part("text", text)]

    def finish(self) -> list[Part]:
        """Give the rest, after the last text."""
        return []


class MachineReader(Reader):
    """A reader with mlx-lm's state machine. Its subclasses read the text of each state."""

    def __init__(self, machine: TextStateMachine, initial: str) -> None:
        self._state: Any = machine.make_state(initial)
        self._was = initial
        self._call = ""

    def feed(self, text: str) -> list[Part]:
        self._state, segments = TextStateMachine.split(self._state, text)
        return [part for segment in segments for part in self._read(*segment)]

    def finish(self) -> list[Part]:
        self._state, rest, name = TextStateMachine.flush(self._state)
        return self._read(name, rest) + self._read(END, "")

    def _read(self, name: str, text: str) -> list[Part]:
        """Give the parts of a text that belongs to the state `name`."""
        raise NotImplementedError

    def _take_call(self, parse: Callable[[str], Any], written: str) -> list[Part]:
        """Give the calls that were just written, or their text where it cannot be parsed."""
        text, self._call = self._call, ""
        if not text.strip():
            return []
        try:
            parsed = parse(text)
            calls = [call_of(c) for c in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception:  # a parser may raise any error on what a model writes
            return [Part("text", written)]
        return [Part("call", call=call) for call in calls]


class MlxReader(MachineReader):
    """A reader with the markers and the tool parser that mlx-lm knows for the model.

    The newlines around thinking belong to neither the thinking nor the answer: the template writes
    them there again."""

    def __init__(self, tokenizer: Any, prompt: Tokens, tools: list[Any] | None) -> None:
        initial = initial_state(tokenizer, prompt)
        super().__init__(make_text_state_machine(tokenizer), initial)
        self._tools = tools
        self._parser = tokenizer.tool_parser
        self._markers = (tokenizer.tool_call_start or "", tokenizer.tool_call_end or "")
        self._newlines = ""
        """The newlines at the end of the thinking so far."""
        self._between = initial == "reasoning"
        """Only newlines came since thinking began or ended."""

    def _read(self, name: str, text: str) -> list[Part]:
        parts = []
        if name != self._was:
            if self._was == "tool":
                start, stop = self._markers
                written = start + self._call + (stop if name != END else "")
                parts += self._take_call(self._parsed, written)
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

    def _parsed(self, text: str) -> Any:
        return self._parser(text, self._tools) if self._parser else json.loads(text)

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


class HarmonyReader(MachineReader):
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

    def __init__(self, header: str | None = None) -> None:
        """`header` is the header of the message that the prompt ends in, if its body has begun."""
        super().__init__(self.MACHINE, "header" if header is None else "body")
        self._header = header or ""
        self._first = header is None

    def feed(self, text: str) -> list[Part]:
        parts = super().feed(text)
        header = self._header.lstrip()
        if self._first and not any(o.startswith(header[: len(o)]) for o in self.OPENINGS):
            return parts + self._as_text()
        return parts

    def _read(self, name: str, text: str) -> list[Part]:
        parts = []
        if self._was == "body" and name != "body":
            parts += self._take_call(self._parsed, self._call)
            self._header = ""
        self._was = name
        if name == "header":
            self._header += text
        elif name == "body":
            self._first = False
            if self._recipient():
                self._call += text
            else:
                parts.append(Part("thinking" if "analysis" in self._header else "text", text))
        elif self._first:
            parts.append(Part("text", self._header))
        return parts

    def _parsed(self, text: str) -> Any:
        return {"name": self._recipient(), "arguments": json.loads(text)}

    def _recipient(self) -> str:
        names = self._header.partition("to=")[2].partition("<|")[0].split()
        return names[0].removeprefix("functions.") if names else ""

    def _as_text(self) -> list[Part]:
        """Read the rest as text, since the model does not keep to the format."""
        text, self._header = self._header, ""
        unread = self._state[3]
        self._first = False
        self._was = "body"
        self._state = self.MACHINE.make_state("body")
        return self.feed(text + unread)


def reader_of(tokenizer: Any, prompt: Tokens, tools: list[Any] | None) -> Reader:
    if not (tokenizer.has_thinking or tokenizer.has_tool_calling or tokenizer.response_transitions):
        # Asking for the whole vocabulary is slow.
        ids = {m: tokenizer.convert_tokens_to_ids(m) for m in HarmonyReader.MARKERS}
        if not {None, tokenizer.unk_token_id} & set(ids.values()):
            return HarmonyReader(_open_header(tokenizer, prompt, ids))
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
        tokens = prompt.tolist()
        if tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens):
            return "reasoning"
    return "normal"


def _open_header(tokenizer: Any, prompt: Tokens, ids: dict[str, int]) -> str | None:
    """Find the header of the message that the prompt ends in; None where its body has not begun."""
    others = [n for marker, n in ids.items() if marker not in ("<|message|>", "<|channel|>")]
    outside = np.flatnonzero(np.isin(prompt, others))
    message = prompt[int(outside[-1]) + 1 if len(outside) else 0 :]
    begins = np.flatnonzero(message == ids["<|message|>"])
    return str(tokenizer.decode(message[: int(begins[0])].tolist())) if len(begins) else None
