"""Read an answer as it is generated: its tokens become thinking, text and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewarm.values import Tokens

from ..messages import AnswerParts, Part
from .readers import Reader, reader_of

LOST = "\ufffd"
"""The character that replaces bytes which are no whole character."""

SPELLINGS = (LOST, "ï¿½", "<0xEF><0xBF><0xBD>")
"""The spellings of that character in vocabularies: its text, or its three bytes."""

TAIL = 16
"""Tokens at the end of a prompt among which a whole character is looked for."""


@dataclass(frozen=True)
class Increment(AnswerParts):
    """The parts that a token added. Text is held back until it is certain: until its characters are
    whole, and it cannot begin a stop sequence or a marker."""

    parts: Sequence[Part] = ()
    """Thinking first, then text, then calls."""
    stop: str | None = None
    """The stop sequence that ended the answer."""


NOTHING = Increment()


class Stops:
    """Let text through up to the first stop sequence, which may come in pieces.

    The first one is the one that ends first; of two that end together, it is the longer one. So the
    result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = sorted({s for s in stops if s}, key=len, reverse=True)
        self._kept_back = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Give the text that is certain now. It ends where a stop sequence is found."""
        text = self._kept_back + text
        ends = [(at + len(s), i) for i, s in enumerate(self._stops) if (at := text.find(s)) >= 0]
        if ends:
            end, first = min(ends)
            self.found = self._stops[first]
            self._kept_back = ""
            return text[: end - len(self.found)]
        certain = len(text) - max((_begun(text, s) for s in self._stops), default=0)
        self._kept_back = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Give the text that was held back because a stop sequence might have begun."""
        text, self._kept_back = self._kept_back, ""
        return text


def _begun(text: str, stop: str) -> int:
    """Give the number of characters at the end of a text that may begin a stop sequence."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0


class Answer(AnswerParts):
    """An answer, as far as it was generated. Stop sequences are looked for in its text only."""

    def __init__(
        self,
        tokenizer: Any,
        prompt_tokens: Tokens | Sequence[int],
        *,
        tools: list[Any] | None = None,
        stop: Iterable[str] = (),
        raw: bool = False,
        continued: bool = False,
        one_call: bool = False,
    ) -> None:
        """Begin an answer to a prompt.

        With `raw`, everything is text. With `continued`, which `raw` implies, the answer goes on
        from the prompt's own text, so that a space at its beginning is kept. With `one_call`, calls
        after the first are left out."""
        prompt = np.asarray(prompt_tokens, dtype=np.int32)
        self.parts: list[Part] = []
        """The delivered parts in their order; no two neighbours are text, or thinking."""
        self._reader = Reader() if raw else reader_of(tokenizer, prompt, tools)
        self._stops = Stops([stop] if isinstance(stop, str) else stop)
        self.ends = frozenset(tokenizer.eos_token_ids)
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer
        self._finished = False
        self._one_call = one_call
        if (raw or continued) and self._shows_text(prompt[-TAIL:].tolist()):
            # Detokenizers drop a space at the very beginning.
            for token in tokenizer.encode("a", add_special_tokens=False):
                self._segment(token)

    @property
    def stopped_by(self) -> str | None:
        return self._stops.found

    def add(self, token: int) -> Increment:
        """Take a token of the answer. One that ends it adds no text."""
        if self._finished or self.stopped_by is not None or token in self.ends:
            return NOTHING
        return self._take(self._reader.feed(self._segment(token)))

    def finish(self) -> Increment:
        """Give the parts that were held back, once the answer has ended."""
        is_over = self._finished or self.stopped_by is not None
        self._finished = True
        if is_over:
            return NOTHING
        parts = self._reader.feed(self._last_segment()) + self._reader.finish()
        return self._take(parts, last=True)

    def _take(self, parts: list[Part], *, last: bool = False) -> Increment:
        text = thinking = ""
        calls: list[Part] = []
        for part in parts:
            if part.call is not None or (part.kind == "thinking" and part.text):
                # No stop sequence spans these parts, and text from before must not come after them.
                text += self._stops.flush()
            if part.kind == "call":
                calls.append(part)
            elif part.kind == "thinking":
                thinking += part.text
            else:
                text += self._stops.feed(part.text)
                if self.stopped_by is not None:
                    break
        if last:
            text += self._stops.flush()
        if self._one_call and calls:
            calls = [] if self.calls else calls[:1]
        return self._delivered(thinking, text, calls)

    def _delivered(self, thinking: str, text: str, calls: list[Part]) -> Increment:
        new = [part for part in (Part("thinking", thinking), Part("text", text)) if part.text]
        for part in new:
            last = self.parts[-1] if self.parts else None
            if last is not None and last.kind == part.kind:
                self.parts[-1] = part._replace(text=last.text + part.text)
            else:
                self.parts.append(part)
        self.parts += calls
        if not (new or calls or self.stopped_by):
            return NOTHING
        return Increment(new + calls, self.stopped_by)

    def _segment(self, token: int) -> str:
        try:
            self._detokenizer.add_token(token)
            return str(self._detokenizer.last_segment)
        except Exception:  # a token that the tokenizer does not know adds nothing
            return ""

    def _last_segment(self) -> str:
        try:
            self._detokenizer.finalize()
        except Exception:  # mlx-lm's detokenizer may fail on half a character
            return ""
        segment = str(self._detokenizer.last_segment)
        if segment.endswith(LOST) and not self._wrote_lost():
            return segment.rstrip(LOST)
        return segment

    def _wrote_lost(self) -> bool:
        """Say whether the last character is LOST itself, and not a part of another character."""
        try:
            # Its bytes may be three tokens.
            tokens = self._tokenizer.convert_ids_to_tokens(self._detokenizer.tokens[-3:])
        except Exception:  # tokens that the tokenizer does not know
            return False
        return "".join(t or "" for t in tokens).endswith(SPELLINGS)

    def _shows_text(self, tokens: list[int]) -> bool:
        try:
            return bool(self._tokenizer.decode(tokens).strip(f" {LOST}"))
        except Exception:  # tokens that the tokenizer does not know
            return False
