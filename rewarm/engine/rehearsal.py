"""What a server does for itself before it says that it is ready."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from rewarm.cache import PrefixCache
from rewarm.cache.model import context_size
from rewarm.values import Sampling

from .request import Request, Silent
from .runner import Runner
from .running import Running

REHEARSED, REHEARSED_ON_CPU = 403, 139
"""Tokens of the longest prompt. On a CPU they cost time at every start, and longer ones compile
nothing more."""
MANY, FEW = 40, 3
"""Tokens that the second and the third prompt have more than the one before. A few tokens go
another way through accel/ than many."""
MOST_REHEARSED = 8
"""Tokens of an answer in it, and more than there are."""
REHEARSED_IN = "4GB"
"""The memory that it may take."""
DRAWN = Sampling(temperature=1.0, top_p=0.9, top_k=40, min_p=0.01, seed=0)


def rehearse(runner: Runner) -> None:
    """Three prompts, each going on from the one before, answered together in a cache of their own.

    MLX compiles most of what it runs when it is first used, for a second or two each: not while
    somebody waits for an answer.
    """
    cache = PrefixCache(runner.model, memory=REHEARSED_IN, make_cache=runner.cache.blank)
    alone = Runner(runner.model, cache, runner.vocabulary, runner.costs, runner.batched)
    on_cpu = mx.default_device() == mx.cpu
    most = REHEARSED_ON_CPU if on_cpu else REHEARSED
    longest = min(most, context_size(runner.model) - MOST_REHEARSED)
    tokens = np.arange(longest, dtype=np.int32) * 7919 % runner.vocabulary
    running: dict[int, Running] = {}
    lengths = {longest - MANY - FEW, longest - FEW, longest}
    for length in sorted(length for length in lengths if length > 0):
        sampling = DRAWN if length == longest else Sampling()
        request = Request(tokens[:length], Silent(), MOST_REHEARSED, sampling)
        sequence = Running(
            length,
            stop=length - 1,
            prompt=request.tokens,
            request=request,
            max_tokens=request.max_tokens,
        )
        running[sequence.id] = sequence
        sequence.one_pass = alone.start(sequence)
        sequence.cuts = sequence.leased.cuts
        while (piece := sequence.piece(sequence.leased.position)).size:
            alone.prefill(sequence, piece)
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
