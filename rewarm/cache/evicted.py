"""What was evicted, remembered as hashes of prefixes: enough to say so, in a bounded space.

The hash of a prefix is a polynomial over its tokens, so one pass over a prompt gives the hashes of
all its prefixes, and a node's hash is its parent's and its own span's."""

from __future__ import annotations

import secrets
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rewarm.values import Tokens

from .retention import Item
from .tree import Node

CAPACITY = 1 << 15
"""Marks that are kept; each takes 17 bytes."""
GRAIN = 64
"""Tokens between two marks inside a span: a prompt that shares a part of it is recognised too."""
PRIME = (1 << 31) - 1
ROWS, RESUME = 0, 1

Hashes = npt.NDArray[np.uint64]


class Lost(NamedTuple):
    """How far a prompt was once held, and the last position that could be resumed at."""

    held: int = 0
    resume: int = 0


class EvictedIndex:
    """Marks of what memory let go of. The oldest are overwritten."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._hash = np.zeros(capacity, np.uint64)
        self._position = np.zeros(capacity, np.int64)
        self._kind = np.zeros(capacity, np.uint8)
        self._count = 0
        # Chosen anew in every process: nobody can make two prompts look alike.
        self._bases = [2 + secrets.randbelow(PRIME - 3) for _ in range(2)]
        self._powers = np.ones((2, 1), np.uint64)

    @property
    def nbytes(self) -> int:
        return self._hash.nbytes + self._position.nbytes + self._kind.nbytes

    def note(self, item: Item, *, resumable: bool) -> None:
        """An item is about to go. `resumable`: any position of a span could be resumed at."""
        node = item.node
        if item.what == "leaf":
            inside = range(node.start // GRAIN * GRAIN + GRAIN, node.end, GRAIN)
            positions = np.array([*inside, node.end], np.int64)
            hashes = self._of(node.tokens(), self._before(node), node.start)
            kind = RESUME if resumable else ROWS
            self._add(hashes[positions - node.start - 1], positions, kind, item.tree.seed)
        if item.what != "leaf" or (node.checkpoint is not None and not resumable):
            last = np.array([self._end(node)], np.uint64)
            self._add(last, np.array([node.end], np.int64), RESUME, item.tree.seed)

    def look(self, prompt: Tokens, node: Node, seed: int) -> Lost:
        """What of a prompt was held and is gone, beyond a node that it goes through."""
        start = node.end
        position = self._position[: min(self._count, len(self._hash))]
        within = np.flatnonzero((position > start) & (position <= len(prompt)))
        if not within.size:
            return Lost()
        hashes = self._of(prompt[start:], self._end(node), start) ^ np.uint64(seed)
        alike = within[hashes[position[within] - start - 1] == self._hash[within]]
        held = position[alike]
        resume = held[self._kind[alike] == RESUME]
        return Lost(int(held.max(initial=0)), int(resume.max(initial=0)))

    def clear(self) -> None:
        self._count = 0

    def _add(self, hashes: Hashes, positions: npt.NDArray[np.int64], kind: int, seed: int) -> None:
        at = (self._count + np.arange(len(hashes))) % len(self._hash)
        self._hash[at] = hashes ^ np.uint64(seed)
        self._position[at] = positions
        self._kind[at] = kind
        self._count += len(hashes)

    def _before(self, node: Node) -> int:
        return self._end(node.parent) if node.parent is not None else 0

    def _end(self, node: Node) -> int:
        """The hash of the path to a node's end; remembered in the node."""
        unknown = []
        above: Node | None = node
        while above is not None and above.parent is not None and above.digest is None:
            unknown.append(above)
            above = above.parent
        digest = above.digest or 0 if above is not None else 0
        for each in reversed(unknown):
            digest = int(self._of(each.tokens(), digest, each.start)[-1])
            each.digest = digest
        return digest

    def _of(self, tokens: Tokens, before: int, start: int) -> Hashes:
        """The hash of every prefix that ends with one of the tokens, which begin at `start`."""
        powers = self._powers_to(start + len(tokens))[:, start : start + len(tokens)]
        values = tokens.astype(np.uint64) + np.uint64(1)
        # A product is below 2**62, and so is a sum of fewer than 2**31 remainders.
        sums = np.cumsum(values * powers % np.uint64(PRIME), axis=1)
        first = (sums[0] + np.uint64(before >> 31)) % np.uint64(PRIME)
        second = (sums[1] + np.uint64(before & PRIME)) % np.uint64(PRIME)
        return np.asarray(first << np.uint64(31) | second, np.uint64)

    def _powers_to(self, length: int) -> npt.NDArray[np.uint64]:
        while self._powers.shape[1] < length:
            known = self._powers.shape[1]
            steps = np.array([[pow(b, known, PRIME)] for b in self._bases], np.uint64)
            more = self._powers * steps % np.uint64(PRIME)
            self._powers = np.concatenate([self._powers, more], axis=1)
        return self._powers
