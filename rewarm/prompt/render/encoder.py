"""Encode text, and find the token positions of places in a text that no other ending moves.

A text is encoded only from where it differs from earlier ones.

Tokenizers cut a text at added tokens (`<|im_start|>`) first. So encoding that starts at such a
token gives the same tokens as in the middle of a text. The places of these tokens are *anchors*,
where encoding can start again.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from rewarm.errors import InvalidPrompt
from rewarm.values import Tokens

from ..text import common_text, common_tokens

KEPT_TEXTS = 256
KEPT_CHARACTERS = 16_000_000

FOLLOWERS = ("Aa", "a", "1", " x", "  ", "\n", "\n\n", ".", '"', "\\n", "{", "[", "<", "é", "中")
"""Beginnings of following texts. A token that one of them changes is not common to all endings."""

FAR = 16384
"""Characters between a place and an anchor beyond which the position is not looked for."""

FAR_END = 4096
"""The same for the ends of messages, of which there may be many."""

NEAR = 96
"""Characters before a place that decide which of its tokens another ending changes."""

IN_STEP = 4
"""The number of tokens before a place that a short text must have in common with the whole one."""

KEPT_HEADS = 4096
LONGEST_HEAD = 512
"""Characters of a text whose common tokens are remembered."""

_space = re.compile(r"\s*")
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
        """Find the last anchor that ends within so many characters."""
        index = bisect_right(self.anchors, characters, key=_stop)
        return self.anchors[index - 1] if index else None

    def anchor_from(self, characters: int) -> Anchor | None:
        """Find the first anchor that starts after so many characters."""
        index = bisect_left(self.anchors, characters, key=_start)
        return self.anchors[index] if index < len(self.anchors) else None


class Encoder:
    """An encoder that encodes as `apply_chat_template` does. Safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = _anchor_tokens(tokenizer)
        longest_first = sorted(self._added, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if self._added else None
        self._ids = np.array(sorted(self._added.values()), dtype=np.int32)
        self._texts: OrderedDict[str, Encoded] = OrderedDict()
        self._lock = threading.Lock()
        self._encoding = threading.Lock()
        self._remembered = lru_cache(KEPT_HEADS)(self._common)

    def encode(self, text: str) -> Encoded:
        """Encode a text, beginning at the last anchor that it shares with a known text."""
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
        # A text has all its anchors or none, so that they do not depend on the texts before it.
        anchors = () if more is None else (*before, *more)
        whole = np.concatenate([tokens, new])
        whole.flags.writeable = False
        found = Encoded(text, whole, anchors)
        # The text of an earlier turn is dropped: this one has all of it but its generation prompt.
        covered = known is not None and anchor in known.anchors[-4:]
        self._remember(found, known.text if known is not None and covered else None)
        return found

    def tokens(self, text: str) -> Tokens:
        """Give the tokens of a text, all of it encoded."""
        try:
            # A tokenizer is not safe to use from two threads at once.
            with self._encoding:
                tokens = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # lone surrogates, above all
            raise InvalidPrompt(f"the text cannot be tokenised: {error}") from error
        return np.asarray(tokens, dtype=np.int32)

    def end(self, whole: Encoded, at: int) -> int | None:
        """Find the position of a message's end, by the added token that follows it or else by the
        text before it. None where it is too far from an anchor."""
        space = _space.match(whole.text, at)
        after = whole.anchor_from(at)
        if after is not None and space is not None and after.start <= space.end():
            return after.token
        return self._edge(whole, at, (), FAR_END if after is not None else 0, FAR_END)

    def edge(self, whole: Encoded, at: int, tails: tuple[str, ...]) -> int | None:
        """Give the number of tokens that stay the same whatever follows the first `at` characters.

        `tails` are texts that are known to follow. None where the place is too far from an anchor.
        """
        return self._edge(whole, at, tails, FAR, FAR)

    def _edge(
        self, whole: Encoded, at: int, tails: tuple[str, ...], most_after: int, most_before: int
    ) -> int | None:
        before, after = whole.anchor_within(at), whole.anchor_from(at)
        start, index = (before.start, before.token) if before else (0, 0)
        stop, last = (after.start, after.token) if after else (len(whole.text), len(whole.tokens))
        if at - start > 2 * NEAR and stop - at <= most_after:
            found = self._from_the_end(whole, at, stop, last, tails)
            if found is not None:
                return found
        if at - start > most_before:
            return None
        same = self._same(whole.text[start:at], tails)
        return index + common_tokens(same, whole.tokens[index:])

    def _from_the_end(
        self, whole: Encoded, at: int, stop: int, last: int, tails: tuple[str, ...]
    ) -> int | None:
        """Find the position by a short text around the place; `last` is the position of `stop`."""
        near = whole.text[at - NEAR : at]
        mine = self.tokens(near + whole.text[at:stop])
        same = common_tokens(self._same(near, tails), mine)
        position = last - (len(mine) - same)
        in_step = whole.tokens[position - IN_STEP : last]
        if same < IN_STEP or not np.array_equal(in_step, mine[same - IN_STEP :]):
            return None
        return position

    def _same(self, head: str, tails: tuple[str, ...]) -> Tokens:
        """Give the tokens that a text begins with, whatever follows it."""
        return (self._remembered if len(head) <= LONGEST_HEAD else self._common)(head, tails)

    def _common(self, head: str, tails: tuple[str, ...]) -> Tokens:
        same = self.tokens(head)
        for tail in (*tails, *FOLLOWERS):
            same = same[: common_tokens(same, self.tokens(head + tail))]
        return same

    def _nearest(self, text: str) -> tuple[Encoded | None, Anchor | None]:
        """Find the known text that begins most like this one, and the last anchor that both
        have."""
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
        """Find the places of added tokens; None where the text and the tokens disagree on them."""
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
    """Find the added tokens before which a text can be cut without a change of its other tokens."""
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
        # A token that ordinary text may give too (a run of spaces) is no anchor.
        and (token.special or backend.model.token_to_id(token.content) is None)
    }


def _is_identity(normalizer: Any) -> bool:
    if normalizer is None:
        return True
    return '"normalizers":[]' in str(getattr(normalizer, "__getstate__", lambda: b"")())
