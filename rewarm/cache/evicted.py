"""The index of evicted prefixes. It keeps their hashes, in bounded space, to explain misses.

The hash of a prefix is a sum over its tokens, each mixed with its position. So one pass over a
prompt gives the hashes of all its prefixes. A node's hash is its parent's plus that of its span.
"""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt

from rewarm.values import Tokens

from .tree import Node
from .worth import Item

CAPACITY = 1 << 15
"""The number of marks that are kept. Each takes 16 bytes."""
GRAIN = 64
"""Tokens between two marks inside a span: they show that a prompt shares a part of it."""
ROUNDS = 3
"""The number of multiplications that mix a token with its position."""

Hashes = npt.NDArray[np.uint64]


class EvictedIndex:
    """Keeps a mark of each resume point that was evicted. New marks overwrite the oldest."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._hash = np.zeros(capacity, np.uint64)
        self._position = np.zeros(capacity, np.int64)
        self._count = 0
        # Each process draws new ones, so no client can make two prompts look alike.
        self._secrets = [np.uint64(secrets.randbits(64) | 1) for _ in range(ROUNDS)]

    def note(self, item: Item, *, resumable: bool) -> None:
        """Mark an item that is about to be evicted. `resumable` says that a prompt could resume at
        any position of its span."""
        node = item.node
        if item.what == "leaf" and resumable and node.parent is not None:
            inside = range(node.start // GRAIN * GRAIN + GRAIN, node.end, GRAIN)
            positions = np.array([*inside, node.end], np.int64)
            hashes = self._prefixes(node.tokens(), self._end(node.parent), node.start)
            self._add(hashes[positions - node.start - 1], positions)
        elif item.what != "leaf" or node.checkpoint is not None:
            self._add(np.array([self._end(node)], np.uint64), np.array([node.end], np.int64))

    def look(self, prompt: Tokens, node: Node) -> int:
        """Find the last position beyond a node on its path at which a prompt could have resumed,
        before something was evicted; 0 where there is none."""
        start = node.end
        position = self._position[: min(self._count, len(self._hash))]
        within = np.flatnonzero((position > start) & (position <= len(prompt)))
        if not within.size:
            return 0
        hashes = self._prefixes(prompt[start:], self._end(node), start)
        alike = within[hashes[position[within] - start - 1] == self._hash[within]]
        return int(position[alike].max(initial=0))

    def clear(self) -> None:
        self._count = 0

    def _add(self, hashes: Hashes, positions: npt.NDArray[np.int64]) -> None:
        at = (self._count + np.arange(len(hashes))) % len(self._hash)
        self._hash[at] = hashes
        self._position[at] = positions
        self._count += len(hashes)

    def _end(self, node: Node) -> int:
        """Return the hash of the path to a node's end, and keep it in the node."""
        unknown = [node]
        while unknown[-1].digest is None and unknown[-1].parent is not None:
            unknown.append(unknown[-1].parent)
        digest = unknown.pop().digest or 0
        for each in reversed(unknown):
            digest = each.digest = int(self._prefixes(each.tokens(), digest, each.start)[-1])
        return digest

    def _prefixes(self, tokens: Tokens, before: int, start: int) -> Hashes:
        """Return the hash of every prefix that ends with one of the tokens. They begin at `start`.

        `before` is the hash of the tokens before them. Numbers wrap around on purpose."""
        positions = np.arange(start, start + len(tokens), dtype=np.uint64)
        mixed = positions << np.uint64(32) | tokens.astype(np.uint64)
        for secret in self._secrets:
            mixed *= secret
            mixed ^= mixed >> np.uint64(32)
        return np.asarray(np.cumsum(mixed) + np.uint64(before), np.uint64)
