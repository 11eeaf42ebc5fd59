"""Make mlx-lm's samplers and logits processors from a request's values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
from mlx_lm.sample_utils import (
    greedy_sampler,
    make_frequency_penalty,
    make_presence_penalty,
    make_repetition_penalty,
)

from rewarm.errors import InvalidOption
from rewarm.values import Sampling

from ..request import Request

Sampler = Callable[[mx.array], mx.array]
Processor = Callable[[mx.array, mx.array], mx.array]

REPETITION_CONTEXT = 64
"""The number of last tokens that a repetition penalty counts."""

MOST_BIAS = 1000
"""The largest bias. One near the limit of float16 would make every logit NaN."""

ALL = 1 << 30
"""A number of tokens that no context has."""


def checked(sampling: Sampling, vocabulary: int) -> None:
    """Raise `InvalidOption` for a value that would fail, or mean nothing, inside a step."""
    s = sampling
    limits: tuple[tuple[str, float, float, float], ...] = (
        ("temperature", s.temperature, 0, 100),
        ("top_p", s.top_p, 0, 1),
        ("min_p", s.min_p, 0, 1),
        ("repetition_penalty", s.repetition_penalty, 0.01, 100),
        ("presence_penalty", s.presence_penalty, -100, 100),
        ("frequency_penalty", s.frequency_penalty, -100, 100),
    )
    for name, value, least, most in limits:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not least <= value <= most:
            raise InvalidOption(f"{name}={value!r}: give a number from {least:g} to {most:g}")
    if not _whole(s.top_k) or s.top_k < 0:
        raise InvalidOption(f"top_k={s.top_k!r}: give a whole number, 0 (off) or more")
    if s.seed is not None and not _whole(s.seed):
        raise InvalidOption(f"seed={s.seed!r}: give a whole number")
    for token, bias in s.logit_bias.items():
        if not _whole(token) or not 0 <= token < vocabulary:
            raise InvalidOption(
                f"logit_bias: token {token!r} is outside the vocabulary (0 to {vocabulary - 1})"
            )
        if not isinstance(bias, (int, float)) or not -MOST_BIAS <= bias <= MOST_BIAS:
            raise InvalidOption(
                f"logit_bias[{token}]={bias!r}: give a number from {-MOST_BIAS} to {MOST_BIAS}"
            )


def make_sampler(sampling: Sampling, choice: int, generated: int) -> Sampler:
    """Make the function that chooses each token. `generated` is the number of tokens that were
    chosen in an earlier batch. The seed is set: `submit` draws one where a request has none.

    Greedy requests share one function, so that mlx-lm samples the whole batch in one call.
    """
    if sampling.temperature == 0 or sampling.top_p == 0 or sampling.top_k == 1:
        return cast("Sampler", greedy_sampler)
    return _Seeded(sampling, _mixed(sampling.seed or 0, choice), generated)


def make_processors(request: Request) -> list[Processor]:
    """Make the functions that change the logits before a token is chosen."""
    s, prompt = request.sampling, len(request.tokens)
    processors: list[Processor] = []
    if s.logit_bias:
        tokens = mx.array(list(s.logit_bias))
        biases = mx.array([float(b) for b in s.logit_bias.values()])
        processors.append(lambda _, logits: logits.at[:, tokens].add(biases.astype(logits.dtype)))
    if s.repetition_penalty != 1:
        processors.append(make_repetition_penalty(s.repetition_penalty, REPETITION_CONTEXT))
    if s.presence_penalty:
        presence = make_presence_penalty(s.presence_penalty, ALL)
        processors.append(lambda context, logits: presence(context[prompt:], logits))
    if s.frequency_penalty:
        frequency = make_frequency_penalty(s.frequency_penalty, ALL)
        processors.append(lambda context, logits: frequency(context[prompt:], logits))
    if request.opening:
        processors.append(_opening(request))
    return processors


@dataclass
class _Seeded:
    """Draw tokens with a key of seed and position, so that any batch gives the same tokens."""

    sampling: Sampling
    seed: int
    position: int

    def __call__(self, logprobs: mx.array) -> mx.array:
        s = self.sampling
        if 0 < s.top_p < 1:
            logprobs = top_p(logprobs, s.top_p)
        if s.min_p > 0:
            logprobs = min_p(logprobs, s.min_p)
        if 0 < s.top_k < logprobs.shape[-1]:
            logprobs = top_k(logprobs, s.top_k)
        key = mx.random.key(_mixed(self.seed, self.position))
        self.position += 1
        # In float32, and with the best at 0: a small temperature must not make all of them -inf.
        best = logprobs.astype(mx.float32)
        best = (best - best.max(axis=-1, keepdims=True)) * min(1 / s.temperature, 1e30)
        return mx.random.categorical(best, key=key)


# mlx-lm has these three as well, but MLX compiles those anew for every value that is asked for.
# On a CPU that takes about a second, in which no request gets a token.


def top_p(logprobs: mx.array, p: float) -> mx.array:
    """Keep the likeliest tokens that together have the probability `p`, and rule out others."""
    ordered = mx.sort(logprobs, axis=-1)
    probabilities = mx.exp(ordered.astype(mx.float32))
    likelier = mx.cumsum(probabilities, axis=-1, reverse=True, inclusive=False)
    total = likelier[..., :1] + probabilities[..., :1]
    dropped = (likelier >= p * total).sum(axis=-1, keepdims=True)
    least = mx.take_along_axis(ordered, dropped, axis=-1)
    return mx.where(logprobs < least, -math.inf, logprobs)


def min_p(logprobs: mx.array, p: float) -> mx.array:
    """Rule out tokens that have less than the share `p` of the likeliest one's probability."""
    least = logprobs.max(axis=-1, keepdims=True) + math.log(p)
    return mx.where(logprobs < least, -math.inf, logprobs)


def top_k(logprobs: mx.array, k: int) -> mx.array:
    """Keep the `k` likeliest tokens, and rule out others."""
    others = mx.argpartition(-logprobs, kth=k - 1, axis=-1)[..., k:]
    ruled_out = mx.array(-math.inf, logprobs.dtype)
    return mx.put_along_axis(logprobs, others, ruled_out, axis=-1)


def _opening(request: Request) -> Processor:
    """Force the tokens that an answer must have after its thinking.

    It computes with arrays only, since the token before a step is not known when the step is built.
    """
    prompt, after, opening = len(request.tokens), request.opens_after, request.opening

    def force(context: mx.array, logits: mx.array) -> mx.array:
        for i, token in enumerate(opening):
            only = mx.where(mx.arange(logits.shape[-1]) == token, 0.0, -math.inf)
            if not after:
                if len(context) == prompt + i:
                    return only.astype(logits.dtype)[None]
                continue
            before = mx.array([*after, *opening[:i]])
            if len(context) >= prompt + len(before):
                here = (context[-len(before) :] == before).all()
                logits = mx.where(here, only.astype(logits.dtype), logits)
        return logits

    return force


def _mixed(seed: int, n: int) -> int:
    """Mix two numbers into one of 64 well spread bits (the finaliser of splitmix64)."""
    mask = (1 << 64) - 1
    x = (seed + (n + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
