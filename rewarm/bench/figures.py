"""Figures: times taken in this process, their ratios, and counts of tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from rewarm.cache import PrefixCache
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


def milliseconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


class Parts(dict[str, float]):
    """The milliseconds that each part took, by its name. A part ends when the device is idle."""

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        mx.synchronize()
        began = time.perf_counter()
        yield
        mx.synchronize()
        self[part] = self.get(part, 0.0) + (time.perf_counter() - began) * 1e3


def median(rounds: Sequence[Parts]) -> Parts:
    """Give the median of each part."""
    return Parts({part: statistics.median(r[part] for r in rounds) for part in rounds[0]})


def random_tokens(count: int, vocabulary: int, seed: int = 0) -> Tokens:
    """Make random tokens, without the first and last ten, which may have a meaning of their own."""
    draw = np.random.default_rng(seed)
    return draw.integers(10, vocabulary - 10, count, dtype=np.int32)


def prefill(model: Any, cache: PrefixCache, prompt: Tokens) -> Parts:
    """Compute what the cache lacks of a prompt, store it, and take the first step."""
    parts = Parts()
    with parts.timed("look up, restore"):
        lease = cache.acquire(prompt, headroom=1)
    with lease:
        for cut in lease.cuts:
            with parts.timed("the new tokens"):
                model(mx.array(prompt[lease.position : cut.stop])[None], cache=lease.caches)
                mx.eval([c.state for c in lease.caches])
            with parts.timed("storing them"):
                cache.commit(lease, cut.stop, checkpoint=cut.checkpoint)
        with parts.timed("the first step"):
            mx.eval(model(mx.array(prompt[lease.position :])[None], cache=lease.caches))
    return parts
