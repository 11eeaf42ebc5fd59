"""The prompts that an engine runs before it is ready, so that no client waits for compilation."""

from __future__ import annotations

import logging
import time

import mlx.core as mx
import numpy as np

from rewarm.cache import PrefixCache
from rewarm.cache.model import context_size
from rewarm.values import Sampling

from .loop import Loop
from .messages import Inbox, Submit
from .request import Request, Sink
from .runner import Runner
from .scheduler import Scheduler

log = logging.getLogger("rewarm.engine")

REHEARSED, REHEARSED_ON_CPU = 403, 139
"""The tokens of the longest prompt. On a CPU they cost time at every start, and longer ones compile
nothing more."""
MANY, FEW = 40, 3
"""The tokens by which the second prompt is longer than the first, and the third than the second. A
few tokens take another path through accel/ than many."""
ANSWERED = 5
"""The tokens of an answer: enough for all three to decode together."""
REHEARSED_IN = "4GB"
"""The memory that the rehearsal's cache may take."""
DRAWN = Sampling(temperature=1.0, top_p=0.9, top_k=40, min_p=0.01, seed=0)


def rehearse(runner: Runner) -> None:
    """Answer three prompts together in a cache of their own. Each prompt goes on from the last one.

    MLX compiles most functions at their first use, which takes a second or two each. A failure is
    logged, as for any request.
    """
    try:
        _answer_three(runner)
    except Exception:
        log.exception("a first prompt could not be tried out; the first ones will be slow")


def _answer_three(runner: Runner) -> None:
    cache = PrefixCache(runner.model, memory=REHEARSED_IN, make_cache=runner.cache.blank)
    alone = Runner(runner.model, cache, runner.vocabulary, runner.costs, runner.batched)
    loop = Loop(alone, Scheduler(3, 1 << 62, cache.chunk), Inbox())
    most = REHEARSED_ON_CPU if mx.default_device() == mx.cpu else REHEARSED
    longest = min(most, context_size(runner.model) - ANSWERED)
    tokens = np.arange(longest, dtype=np.int32) * 7919 % runner.vocabulary
    for length in sorted({longest - MANY - FEW, longest - FEW, longest}):
        if length > 0:
            sampling = DRAWN if length == longest else Sampling()
            request = Request(
                tokens[:length], Sink(), ANSWERED, sampling, name="that is tried out at the start"
            )
            loop.take(Submit(request, time.perf_counter()))
    while loop.requests:
        loop.turn()
