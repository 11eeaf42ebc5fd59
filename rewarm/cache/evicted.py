"""Evicted prefixes, remembered by their hashes: enough to say so, in a bounded space.

The hash of a prefix is a sum over its tokens, each mixed with its position. So one pass over a
prompt gives the hashes of all its prefixes, and a node's hash is its parent's with its own span's.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rewarm.values import Tokens

from .tree import Node
from .worth import Item

CAPACITY = 1 << 15
"""Marks that are kept; each takes 17 bytes."""
GRAIN = 64
"""Tokens between two marks inside a span: a prompt that shares a part of it is recognised too."""
ROUNDS = 3
"""Multiplications that mix a token with its position."""

Hashes = npt.NDArray[np.uint64]


class Lost(NamedTuple):
    """The part of a prompt that was once held, and the last position that could be resumed at."""

    held: int = 0
    resume: int = 0


class EvictedIndex:
    """Marks of what was evicted from memory. The oldest are overwritten."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._hash = np.zeros(capacity, np.uint64)
        self._position = np.zeros(capacity, np.int64)
        self._resumable = np.zeros(capacity, np.bool_)
        self._count = 0
        # They are chosen anew in every process, so no client can make two prompts look alike.
        self._secrets = [np.uint64(secrets.randbits(64) | 1) for _ in range(ROUNDS)]

    @property
    def nbytes(self) -> int:
        return self._hash.nbytes + self._position.nbytes + self._resumable.nbytes

    def note(self, item: Item, *, resumable: bool) -> None:
        """Note an item that is about to go. `resumable` says that a prompt could be resumed at any
        position of a span."""
        node = item.node
        if item.what == "leaf" and node.parent is not None:
            inside = range(node.start // GRAIN * GRAIN + GRAIN, node.end, GRAIN)
            positions = np.array([*inside, node.end], np.int64)
            hashes = self._prefixes(node.tokens(), self._end(node.parent), node.start)
            self._add(hashes[positions - node.start - 1], positions, resumable)
        if item.what != "leaf" or (node.checkpoint is not None and not resumable):
            last = np.array([self._end(node)], np.uint64)
            self._add(last, np.array([node.end], np.int64), True)

    def look(self, prompt: Tokens, node: Node) -> Lost:
        """Find how much of a prompt was held and is gone, beyond a node that it goes through."""
        start = node.end
        position = self._position[: min(self._count, len(self._hash))]
        within = np.flatnonzero((position > start) & (position <= len(prompt)))
        if not within.size:
            return Lost()
        hashes = self._prefixes(prompt[start:], self._end(node), start)
        alike = within[hashes[position[within] - start - 1] == self._hash[within]]
        held = position[alike]
        resume = held[self._resumable[alike]]
        return Lost(int(held.max(initial=0)), int(resume.max(initial=0)))

    def clear(self) -> None:
        self._count = 0

    def _add(self, hashes: Hashes, positions: npt.NDArray[np.int64], resumable: bool) -> None:
        at = (self._count + np.arange(len(hashes))) % len(self._hash)
        self._hash[at] = hashes
        self._position[at] = positions
        self._resumable[at] = resumable
        self._count += len(hashes)

    def _end(self, node: Node) -> int:
        """The hash of the path to a node's end, which nodes remember. A root has one already."""
        unknown = [node]
        while unknown[-1].digest is None and unknown[-1].parent is not None:
            unknown.append(unknown[-1].parent)
        digest = unknown.pop().digest or 0
        for each in reversed(unknown):
            digest = each.digest = int(self._prefixes(each.tokens(), digest, each.start)[-1])
        return digest

    def _prefixes(self, tokens: Tokens, before: int, start: int) -> Hashes:
        """The hash of every prefix that ends with one of the tokens, which begin at `start`.

        `before` is the hash of what lies before them. Numbers wrap around, as they should."""
        positions = np.arange(start, start + len(tokens), dtype=np.uint64)
        mixed = positions << np.uint64(32) | tokens.astype(np.uint64)
        for secret in self._secrets:
            mixed *= secret
            mixed ^= mixed >> np.uint64(32)
        return np.asarray(np.cumsum(mixed) + np.uint64(before), np.uint64)
