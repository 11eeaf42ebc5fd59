"""Measurements in this process: milliseconds, and the parts of a prefill through the cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from rewarm.cache import PrefixCache
from rewarm.values import Tokens


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
