"""Places in a text to positions among its tokens, as far as no other ending moves them."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from rewarm.values import Tokens

from ..text import common_tokens
from .encoder import Encoded, Encoder

FOLLOWERS = ("Aa", "a", "1", " x", "  ", "\n", "\n\n", ".", '"', "\\n", "{", "[", "<", "é", "中")
"""Beginnings of messages. A token that one of them changes is not part of what is common."""

FAR = 16384
"""Characters between a place and an anchor beyond which its position is not worth finding."""

FAR_END = 4096
"""The same for the ends of all the messages, of which there may be many."""

NEAR = 96
"""Characters before a place that decide which of its tokens another ending changes."""

IN_STEP = 4
"""Tokens in which a short text must agree with the whole one to be taken for a part of it."""

KEPT = 4096
LONGEST_KEPT = 512

_space = re.compile(r"\s*")


class Edges:
    """Safe to use from several threads."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._common: OrderedDict[tuple[str, tuple[str, ...]], Tokens] = OrderedDict()
        self._lock = threading.Lock()

    def end(self, whole: Encoded, at: int) -> int | None:
        """The position of a message's end: before the added token that follows it, or by what
        lies before it only."""
        space = _space.match(whole.text, at)
        after = whole.anchor_from(at)
        if after is not None and space is not None and after.start <= space.end():
            return after.token
        return self._edge(whole, at, (), FAR_END if after is not None else 0, FAR_END)

    def edge(self, whole: Encoded, at: int, tails: Iterable[str] = ()) -> int | None:
        """The number of tokens that stay the same whatever follows the first `at` characters.

        `tails` are texts that are known to follow. None where it is too far from an anchor.
        """
        return self._edge(whole, at, tuple(tails), FAR, FAR)

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
        """By a short text around the place; `last` is the position of `stop`."""
        near = whole.text[at - NEAR : at]
        mine = self._encoder.tokens(near + whole.text[at:stop])
        same = common_tokens(self._same(near, tails), mine)
        position = last - (len(mine) - same)
        in_step = whole.tokens[position - IN_STEP : last]
        if same < IN_STEP or not np.array_equal(in_step, mine[same - IN_STEP :]):
            return None
        return position

    def _same(self, head: str, tails: tuple[str, ...]) -> Tokens:
        """The tokens that a text begins with, whatever follows it."""
        key = (head, tails)
        with self._lock:
            if key in self._common:
                self._common.move_to_end(key)
                return self._common[key]
        same = self._encoder.tokens(head)
        for tail in (*tails, *FOLLOWERS):
            same = same[: common_tokens(same, self._encoder.tokens(head + tail))]
        with self._lock:
            if len(head) <= LONGEST_KEPT:
                self._common[key] = same
            while len(self._common) > KEPT:
                self._common.popitem(last=False)
        return same
