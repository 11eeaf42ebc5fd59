"""An answer as it is generated: tokens in, messages out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rewarm.values import Message, Tokens

from .readers import Call, Part, Plain, Reader, reader_of
from .stops import Stops

LOST = "\ufffd"
"""What bytes that are no whole character are decoded to."""

SPELLINGS = (LOST, "ï¿½", "<0xEF><0xBF><0xBD>")
"""That character itself, as vocabularies write it: its text, or its three bytes."""

TAIL = 8
"""Tokens at the end of a prompt among which a whole character is looked for."""


class Piece(NamedTuple):
    """What a token added. Text comes when it is certain: characters are whole, and what might
    begin a stop sequence or a marker is held back."""

    text: str
    reasoning: str
    calls: list[Call]
    stop: str | None
    """The stop sequence that ended the answer."""


class Answer:
    """What has been generated so far. A stop sequence is looked for in the content only."""

    def __init__(
        self,
        tokenizer: Any,
        prompt_tokens: Tokens | Sequence[int],
        *,
        tools: list[Any] | None = None,
        stop: Iterable[str] = (),
        raw: bool = False,
        continued: bool = False,
    ) -> None:
        """`raw`: everything is text. `continued`: the text goes on from the prompt's own, so that a
        space at its beginning is part of it; `raw` implies it."""
        prompt = np.asarray(prompt_tokens, dtype=np.int32)
        self.text = ""
        self.reasoning = ""
        self.calls: list[Call] = []
        self.stopped_by: str | None = None
        self._reader: Reader = Plain() if raw else reader_of(tokenizer, prompt, tools)
        self._stops = Stops([stop] if isinstance(stop, str) else stop)
        self._ends = frozenset(tokenizer.eos_token_ids)
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer
        self._finished = False
        if raw or continued:
            # Detokenizers drop a space at the very beginning.
            for token in self._whole_tail(prompt):
                self._segment(token)

    def add(self, token: int) -> Piece:
        """A token of the answer. One that ends it adds no text."""
        if self._finished or self.stopped_by is not None or token in self._ends:
            return Piece("", "", [], None)
        return self._take(self._reader.feed(self._segment(token)))

    def finish(self) -> Piece:
        """What was held back, once the answer has ended in whatever way."""
        if self._finished or self.stopped_by is not None:
            self._finished = True
            return Piece("", "", [], None)
        self._finished = True
        parts = self._reader.feed(self._last_segment()) + self._reader.finish()
        return self._take(parts, last=True)

    def message(self) -> Message:
        """The assistant's message as it was delivered."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [dict(call) for call in self.calls]
        return message

    def _take(self, parts: list[Part], *, last: bool = False) -> Piece:
        text = reasoning = ""
        calls: list[Call] = []
        for part in parts:
            if part.reasoning or part.calls:
                # No stop sequence spans these, and what came before them is not to come after.
                text += self._stops.flush()
            passed = self._stops.feed(part.text)
            text += passed.text
            if passed.stop is not None:
                self.stopped_by = passed.stop
                break
            reasoning += part.reasoning
            calls += part.calls
        if last and self.stopped_by is None:
            text += self._stops.flush()
        self.text += text
        self.reasoning += reasoning
        self.calls += calls
        return Piece(text, reasoning, calls, self.stopped_by)

    def _segment(self, token: int) -> str:
        try:
            self._detokenizer.add_token(token)
            return str(self._detokenizer.last_segment)
        except Exception:  # a token that the tokenizer does not know adds nothing
            return ""

    def _last_segment(self) -> str:
        try:
            self._detokenizer.finalize()
        except Exception:  # half a character, which mlx-lm's detokenizer may stumble over
            return ""
        segment = str(self._detokenizer.last_segment)
        if segment.endswith(LOST) and not self._wrote_lost():
            return segment.rstrip(LOST)
        return segment

    def _wrote_lost(self) -> bool:
        """Whether the last character is LOST itself, and not the beginning of another."""
        try:
            # Its bytes may be three tokens.
            tokens = self._tokenizer.convert_ids_to_tokens(self._detokenizer.tokens[-3:])
        except Exception:  # tokens that the tokenizer does not know
            return False
        return "".join(t or "" for t in tokens).endswith(SPELLINGS)

    def _whole_tail(self, prompt: Tokens) -> list[int]:
        """Tokens near the prompt's end that are whole characters, so that a detokenizer holds
        nothing of them back for the answer; it does so with a space, too."""
        for stop in range(len(prompt), max(len(prompt) - TAIL, 0), -1):
            for begin in range(stop - 1, max(stop - TAIL, 0) - 1, -1):
                tail: list[int] = prompt[begin:stop].tolist()
                text = self._decoded(tail)
                if text and not text.startswith(LOST) and not text.endswith((LOST, " ")):
                    return tail
        return []

    def _decoded(self, tokens: list[int]) -> str:
        try:
            return str(self._tokenizer.decode(tokens))
        except Exception:  # tokens that the tokenizer does not know
            return ""
