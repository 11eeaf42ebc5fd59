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

KEPT_HEADS = 1024
"""The number of short texts whose common tokens are remembered."""

_space = re.compile(r"\s*")
_start, _stop = attrgetter("start"), attrgetter("stop")


class Anchor(NamedTuple):
    start: int
    """In characters."""
    stop: int
    token: int
    """Its index among the tokens."""


START = Anchor(0, 0, 0)
"""The beginning of a text, where no anchor lies before a place."""


@dataclass(frozen=True, eq=False)
class Encoded:
    text: str
    tokens: Tokens
    anchors: Sequence[Anchor]

    def anchor_within(self, characters: int) -> Anchor:
        """Find the last anchor that ends within so many characters, or else START."""
        index = bisect_right(self.anchors, characters, key=_stop)
        return self.anchors[index - 1] if index else START

    def anchor_from(self, characters: int) -> Anchor:
        """Find the first anchor that starts after so many characters, or else the text's end."""
        index = bisect_left(self.anchors, characters, key=_start)
        if index < len(self.anchors):
            return self.anchors[index]
        return Anchor(len(self.text), len(self.text), len(self.tokens))


NOTHING = Encoded("", np.empty(0, np.int32), ())


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
        self._same = lru_cache(KEPT_HEADS)(self._common)

    def encode(self, text: str) -> Encoded:
        """Encode a text, beginning at the last anchor that it shares with a known text."""
        with self._lock:
            if text in self._texts:
                self._texts.move_to_end(text)
                return self._texts[text]
            texts = list(self._texts.values())
        known, anchor = NOTHING, START
        for other in reversed(texts):
            shared = other.anchor_within(common_text(other.text, text))
            if shared.start > anchor.start:
                known, anchor = other, shared
        new = self.tokens(text[anchor.start :])
        anchors = self._anchors(text, new, known, anchor)
        tokens = np.concatenate([known.tokens[: anchor.token], new])
        tokens.flags.writeable = False
        found = Encoded(text, tokens, anchors)
        with self._lock:
            if anchor in known.anchors[-4:]:
                # It is the text of an earlier turn: this one has all of it but its generation
                # prompt.
                self._texts.pop(known.text, None)
            self._texts[text] = found
            characters = sum(map(len, self._texts))
            while len(self._texts) > KEPT_TEXTS or characters > KEPT_CHARACTERS:
                oldest, _ = self._texts.popitem(last=False)
                characters -= len(oldest)
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
        after = whole.anchor_from(at)
        is_followed = after.start < len(whole.text)
        if is_followed and _space.fullmatch(whole.text, at, after.start):
            return after.token
        return self._edge(whole, at, (), FAR_END if is_followed else 0, FAR_END)

    def edge(self, whole: Encoded, at: int, tails: tuple[str, ...]) -> int | None:
        """Give the number of tokens that stay the same whatever follows the first `at` characters.

        `tails` are texts that are known to follow. None where the place is too far from an anchor.
        """
        return self._edge(whole, at, tails, FAR, FAR)

    def _edge(
        self, whole: Encoded, at: int, tails: tuple[str, ...], most_after: int, most_before: int
    ) -> int | None:
        before, after = whole.anchor_within(at), whole.anchor_from(at)
        if at - before.start > 2 * NEAR and after.start - at <= most_after:
            found = self._from_the_end(whole, at, after, tails)
            if found is not None:
                return found
        if at - before.start > most_before:
            return None
        same = self._same(whole.text[before.start : at], tails)
        return before.token + common_tokens(same, whole.tokens[before.token :])

    def _from_the_end(
        self, whole: Encoded, at: int, after: Anchor, tails: tuple[str, ...]
    ) -> int | None:
        """Find the position by a short text around the place, up to the anchor after it."""
        near = whole.text[at - NEAR : at]
        mine = self.tokens(near + whole.text[at : after.start])
        same = common_tokens(self._same(near, tails), mine)
        position = after.token - (len(mine) - same)
        in_step = whole.tokens[position - IN_STEP : after.token]
        if same < IN_STEP or not np.array_equal(in_step, mine[same - IN_STEP :]):
            return None
        return position

    def _common(self, head: str, tails: tuple[str, ...]) -> Tokens:
        """Give the tokens that a text begins with, whatever follows it."""
        same = self.tokens(head)
        for tail in (*tails, *FOLLOWERS):
            same = same[: common_tokens(same, self.tokens(head + tail))]
        return same

    def _anchors(self, text: str, new: Tokens, known: Encoded, anchor: Anchor) -> Sequence[Anchor]:
        """Find the places of added tokens. `new` are the tokens from a known text's anchor on.

        A text has all its anchors or, where the text and the tokens disagree on them, none, so that
        they do not depend on the texts before it."""
        if self._pattern is None:
            return ()
        matches = list(self._pattern.finditer(text, anchor.start))
        indices = np.flatnonzero(np.isin(new, self._ids))
        if new[indices].tolist() != [self._added[m.group()] for m in matches]:
            return ()
        before = [a for a in known.anchors if a.start < anchor.start]
        pairs = zip(matches, indices.tolist(), strict=True)
        return [*before, *(Anchor(m.start(), m.end(), anchor.token + i) for m, i in pairs)]


def _anchor_tokens(tokenizer: Any) -> dict[str, int]:
    """Find the added tokens before which a text can be cut without a change of its other tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if backend is None or not added:
        return {}
    normalizer = backend.normalizer
    # A tokenizer without a normalizer may have an empty sequence of them.
    plain = normalizer is None or '"normalizers":[]' in str(normalizer.__getstate__())
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
