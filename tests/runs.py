"""Prompts, and models that are run on them through a cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from rewarm.cache import Lease, PrefixCache
from rewarm.values import Match

Logits = npt.NDArray[np.float32]
Prompt = npt.NDArray[np.int32]

CHUNK = 32


def prompt(length: int, seed: int = 0, vocabulary: int = 512) -> Prompt:
    return np.random.default_rng(seed).integers(0, vocabulary, length).astype(np.int32)


def joined(*parts: Prompt) -> Prompt:
    return np.concatenate(parts)


class Counted:
    """A model that counts the tokens it is run on, and the passes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.computed = 0
        self.passes = 0

    def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
        self.computed += tokens.size
        self.passes += 1
        result: mx.array = self._model(tokens, **options)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@dataclass
class Ran:
    logits: Logits
    match: Match
    tokens: list[int]


def advance(model: Any, cache: PrefixCache, lease: Lease, cuts: int | None = None) -> None:
    """Prefill the next chunks of a lease, and commit each."""
    todo = [c for c in lease.cuts if c.stop > lease.position]
    for cut in todo[:cuts]:
        model(mx.array(lease.tokens[lease.position : cut.stop])[None], cache=lease.caches)
        mx.eval([c.state for c in lease.caches])
        cache.commit(lease, cut.stop, checkpoint=cut.checkpoint)


def finish(model: Any, lease: Lease) -> Logits:
    """Compute the logits after the last prompt token."""
    out = model(mx.array(lease.tokens[lease.position :])[None], cache=lease.caches)
    return np.array(out[0, -1].astype(mx.float32))


def run(model: Any, cache: PrefixCache, tokens: Prompt, *, decode: int = 0, **options: Any) -> Ran:
    """Prefill a prompt, decode greedily, and commit all of it."""
    with cache.acquire(tokens, headroom=decode, **options) as lease:
        advance(model, cache, lease)
        logits = finish(model, lease)
        answer = [int(logits.argmax())]
        for _ in range(decode):
            step = model(mx.array(answer[-1:])[None], cache=lease.caches)
            answer.append(int(np.array(step[0, -1].astype(mx.float32)).argmax()))
        if decode:
            # The caches stand after the last token that was fed.
            lease.extend(answer[:decode])
            cache.commit(lease, len(lease.tokens), origin="decode", checkpoint="answer")
        return Ran(logits, lease.cost.match, answer)


def cold(model: Any, tokens: Prompt, *, decode: int = 0, like: PrefixCache, **options: Any) -> Ran:
    """Run the same prompt on a cache that holds nothing."""
    empty = last_empty(like) if model is like.model else empty_cache(model, like)
    empty.clear(give_back=False)
    return run(model, empty, tokens, decode=decode, **options)


def empty_cache(model: Any, like: PrefixCache) -> PrefixCache:
    return PrefixCache(
        model, memory="64MB", reuse=like.reuse, chunk=like.chunk, make_cache=like.blank
    )


@lru_cache(maxsize=1)
def last_empty(like: PrefixCache) -> PrefixCache:
    """Make one empty cache for many cold runs: to make one takes longer than a short prompt."""
    return empty_cache(like.model, like)


def divergence(a: Logits, b: Logits) -> float:
    """Compute the Kullback-Leibler divergence, in double precision."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    x, y = (v - v.max() for v in (x, y))
    p, q = (v - np.log(np.exp(v).sum()) for v in (x, y))
    return float((np.exp(p) * (p - q)).sum())
