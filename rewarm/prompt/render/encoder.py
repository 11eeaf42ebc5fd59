"""Text to tokens, each text only from where it differs from earlier ones.

Encoding that starts at an added token (`<|im_start|>`) gives what it gives in the middle of a text:
tokenizers cut the text there first. So such places, *anchors*, are where work is taken up again.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from rewarm.errors import InvalidPrompt
from rewarm.values import Tokens

from ..text import common_text

KEPT_TEXTS = 256
KEPT_CHARACTERS = 16_000_000

_start, _stop = attrgetter("start"), attrgetter("stop")


class Anchor(NamedTuple):
    start: int
    """In characters."""
    stop: int
    token: int
    """Its index among the tokens."""


@dataclass(frozen=True, eq=False)
class Encoded:
    text: str
    tokens: Tokens
    anchors: Sequence[Anchor]

    def anchor_within(self, characters: int) -> Anchor | None:
        """The last anchor that lies within so many characters."""
        index = bisect_right(self.anchors, characters, key=_stop)
        return self.anchors[index - 1] if index else None

    def anchor_from(self, characters: int) -> Anchor | None:
        """The first anchor that starts after so many characters."""
        index = bisect_left(self.anchors, characters, key=_start)
        return self.anchors[index] if index < len(self.anchors) else None


class Encoder:
    """Encodes as `apply_chat_template` does. Safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = _anchor_tokens(tokenizer)
        longest_first = sorted(self._added, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if self._added else None
        self._ids = np.array(sorted(self._added.values()), dtype=np.int32)
        self._texts: OrderedDict[str, Encoded] = OrderedDict()
        self._lock = threading.Lock()
        self._encoding = threading.Lock()

    def encode(self, text: str) -> Encoded:
        """The tokens of a text; only what follows the last anchor known from before is encoded."""
        known, anchor = self._nearest(text)
        if known is not None and known.text == text:
            self._remember(known, None)
            return known
        before: tuple[Anchor, ...] = ()
        start, tokens = 0, np.empty(0, np.int32)
        if known is not None and anchor is not None:
            before = tuple(a for a in known.anchors if a.start < anchor.start)
            start, tokens = anchor.start, known.tokens[: anchor.token]
        new = self.tokens(text[start:])
        more = self._anchors(text, start, new, len(tokens))
        # All or none: what is known of a text does not depend on which texts came before it.
        anchors = () if more is None else (*before, *more)
        whole = np.concatenate([tokens, new])
        whole.flags.writeable = False
        found = Encoded(text, whole, anchors)
        # An earlier turn's text, all of it but the generation prompt, is of no more use.
        covered = known is not None and anchor in known.anchors[-4:]
        self._remember(found, known.text if known is not None and covered else None)
        return found

    def tokens(self, text: str) -> Tokens:
        """The tokens of a text, all of it encoded."""
        try:
            # A tokenizer's state is not made for two threads.
            with self._encoding:
                tokens = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # lone surrogates, above all
            raise InvalidPrompt(f"the text cannot be tokenised: {error}") from error
        return np.asarray(tokens, dtype=np.int32)

    def _nearest(self, text: str) -> tuple[Encoded | None, Anchor | None]:
        """The known text that has most in common with this one, and the last anchor in that."""
        with self._lock:
            texts = list(self._texts.values())
        nearest: tuple[Encoded | None, Anchor | None] = (None, None)
        furthest = 0
        for known in reversed(texts):
            if known.text == text:
                return known, None
            anchor = known.anchor_within(common_text(known.text, text))
            if anchor is not None and anchor.start > furthest:
                nearest, furthest = (known, anchor), anchor.start
        return nearest

    def _anchors(self, text: str, start: int, tokens: Tokens, before: int) -> list[Anchor] | None:
        """The places of added tokens, in characters and in tokens; None where the two disagree."""
        if self._pattern is None:
            return []
        matches = list(self._pattern.finditer(text, start))
        indices = np.flatnonzero(np.isin(tokens, self._ids))
        expected = [self._added[m.group()] for m in matches]
        if tokens[indices].tolist() != expected:
            return None
        pairs = zip(matches, indices.tolist(), strict=True)
        return [Anchor(m.start(), m.end(), before + i) for m, i in pairs]

    def _remember(self, found: Encoded, replaced: str | None) -> None:
        with self._lock:
            if replaced is not None:
                self._texts.pop(replaced, None)
            self._texts[found.text] = found
            self._texts.move_to_end(found.text)
            held = sum(map(len, self._texts))
            while len(self._texts) > KEPT_TEXTS or (held > KEPT_CHARACTERS and self._texts):
                text, _ = self._texts.popitem(last=False)
                held -= len(text)


def _anchor_tokens(tokenizer: Any) -> dict[str, int]:
    """The added tokens that a text can be cut before without changing its other tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if backend is None or not added:
        return {}
    plain = _is_identity(backend.normalizer)
    return {
        token.content: number
        for number, token in added.items()
        if token.content
        and not (token.lstrip or token.single_word)
        # A normalizer may change what lies before such a token together with it.
        and (plain or not token.normalized)
        # One that ordinary text may give too (runs of spaces) tells nothing.
        and (token.special or backend.model.token_to_id(token.content) is None)
    }


def _is_identity(normalizer: Any) -> bool:
    if normalizer is None:
        return True
    return '"normalizers":[]' in str(getattr(normalizer, "__getstate__", lambda: b"")())
