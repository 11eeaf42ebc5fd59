"""What a server does for itself before it says that it is ready."""

from __future__ import annotations

import numpy as np

from rewarm.cache import PrefixCache
from rewarm.cache.model import context_size

from .request import Request, Silent
from .runner import Runner, Sequence

REHEARSED = 400
"""Tokens of a rehearsal."""
APART = 40
"""Tokens that its second prompt has more than its first."""
MOST_REHEARSED = 8
"""Tokens of an answer in it, and more than there are."""
REHEARSED_IN = "4GB"
"""The memory that it may take."""


def rehearse(runner: Runner) -> None:
    """A prompt and another that goes on from it, answered together, in a cache of their own.

    On CUDA MLX compiles most kernels when they are first used, for a second or two each: not while
    somebody waits for an answer.
    """
    cache = PrefixCache(runner.model, memory=REHEARSED_IN, make_cache=runner.cache.blank)
    alone = Runner(runner.model, cache, runner.vocabulary, runner.costs, runner.batched)
    longest = min(REHEARSED, context_size(runner.model) - MOST_REHEARSED)
    tokens = np.arange(longest, dtype=np.int32) * 7919 % runner.vocabulary
    running: dict[int, Sequence] = {}
    for length in (longest - APART, longest):
        request = Request(tokens[:length], Silent(), max_tokens=MOST_REHEARSED)
        sequence = Sequence(length, request.tokens, request, max_tokens=request.max_tokens)
        running[sequence.id] = sequence
        alone.start(sequence)
        while not alone.prefill(sequence):
            pass
        sequence.give(alone.open(sequence).token)
        failed = alone.join()
        for _ in range(2):
            steps, more = alone.decode()
            failed += more
            for step in steps:
                if not step.given:
                    running[step.id].give(step.token)
        if failed:
            raise failed[0].error
    alone.leave(list(running.values()))
