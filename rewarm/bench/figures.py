"""The bench's arithmetic, and how its figures are shown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rewarm.cache.tree import Tree, encode
from rewarm.values import Tokens


@dataclass(frozen=True)
class Spread:
    """The median and the range of several rounds."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        found = list(values)
        return Spread(statistics.median(found), min(found), max(found))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Give the ratio of `theirs` to `ours`, round by round: a disturbance of a round hits both
    sides.

    Only rounds that both have count, since a run may have been interrupted."""
    return Spread.of(b / a for a, b in zip(ours, theirs, strict=False))


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the tokens that two sequences have in common at their beginning."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:length]) != np.asarray(b[:length]))
    return int(differ[0]) if len(differ) else length


def trie_size(prompts: Iterable[Sequence[int] | Tokens]) -> int:
    """Count the distinct tokens of all prompts. A token counts once for each beginning before
    it."""
    tree = Tree()
    size = 0
    for prompt in prompts:
        tokens = np.asarray(prompt, dtype=np.int32)
        data = encode(tokens)
        node, shared = tree.walk(data)
        if shared < len(tokens):
            if shared < node.end:
                node = tree.split(node, shared)
            tree.add(node, data[shared * 4 :], "prefill")
            size += len(tokens) - shared
    return size


def amplification(prefilled: int, prompts: Iterable[Sequence[int] | Tokens]) -> float:
    """Give the tokens prefilled over the distinct tokens; 1.0 is the floor."""
    size = trie_size(prompts)
    return prefilled / size if size else 0.0


def percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def megabytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:.2f}"
