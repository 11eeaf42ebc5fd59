"""Try a model out before its engine is ready.

The trial finds out whether the model decodes right in a batch, and how many bytes a sequence takes.
Then it rehearses: it answers a few prompts, so that no client waits for compilation.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from rewarm.cache import PrefixCache
from rewarm.cache.model import MakeCaches, context_size
from rewarm.errors import InvalidOption
from rewarm.values import Sampling

from .decode.batch import merged
from .loop import Loop
from .messages import Inbox, Submit
from .request import Request, Sink
from .runner import Costs, Runner
from .scheduler import Scheduler

log = logging.getLogger("rewarm.engine")

CHECK_LENGTHS = (5, 9)
FAR_LENGTHS = (1203, 2381)
"""The lengths for models that choose the keys they attend to. Padding moves the blocks that they
choose from. That makes a difference only if there are several blocks."""
CHECK_STEPS = 4
TOLERANCE, MOST_TOLERANCE = 0.05, 0.15
"""The difference that any model may have, and the most that a model with large rounding errors may
have, as a share of the largest logit. A wrong mask or padding made a difference of 0.17 or more."""

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


def merges(cache: Any) -> bool:
    """Say whether mlx-lm can batch a cache of this kind without losing anything.

    A ring that keeps its first rows can be merged, but loses them. Quantised, chunked and
    concatenating caches cannot be merged at all.
    """
    if isinstance(cache, CacheList):
        return all(merges(c) for c in cache.caches)
    if isinstance(cache, RotatingKVCache):
        return bool(cache.keep == 0)
    needed = ("merge", "extract", "filter", "extend")
    return type(cache) is KVCache or all(hasattr(cache, name) for name in needed)


def decodes_in_batches(model: Any, blank: MakeCaches, vocabulary: int) -> bool:
    """Say whether two sequences decoded together get the logits that each gets alone."""
    caches = blank()
    if not all(merges(c) for c in caches):
        return False
    by_blocks = any(_chooses_keys(c) for c in caches)
    lengths = [CHECK_LENGTHS, FAR_LENGTHS] if by_blocks else [CHECK_LENGTHS]
    return all(_decodes_in_batches(model, blank, vocabulary, each) for each in lengths)


def _decodes_in_batches(
    model: Any, blank: MakeCaches, vocabulary: int, lengths: tuple[int, int]
) -> bool:
    tokens = np.random.default_rng(0).integers(0, vocabulary, (2, max(lengths) + CHECK_STEPS))
    alone, at_once, answers, prefilled = [], [], [], []
    for row, length in zip(tokens, lengths, strict=True):
        stepping, whole, shared = (_prefilled(model, blank(), row[:length]) for _ in range(3))
        answer = mx.array(row[None, length : length + CHECK_STEPS])
        alone.append(_steps(model, answer, stepping))
        at_once.append(model(answer, cache=whole))
        answers.append(answer)
        prefilled.append(shared)
    batch = merged(prefilled)
    try:
        together = _steps(model, mx.concatenate(answers), batch)
    except (TypeError, ValueError):
        return False  # it takes one position for all sequences, as dynamic NTK does
    expected = mx.concatenate(alone)
    # Sums in another order round differently, by an amount that depends on model and device. One
    # sequence that takes its steps at once has the same rounding errors.
    rounding = _apart(mx.concatenate(at_once), expected)
    tolerance = min(max(TOLERANCE, 2 * rounding), MOST_TOLERANCE)
    return _apart(together, expected) <= tolerance


def _apart(logits: mx.array, expected: mx.array) -> float:
    """Give the largest distance as a share of the largest logit."""
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    return float(mx.abs(logits - expected).max() / mx.abs(expected).max())


def _chooses_keys(cache: Any) -> bool:
    """Say whether a layer keeps keys for an index beside those it attends to."""
    return isinstance(cache, CacheList) and all(type(c) is KVCache for c in cache.caches)


def running_bytes(model: Any, cache: PrefixCache) -> Costs:
    n = max(CHECK_LENGTHS)
    layout = cache.layout
    caches = cache.blank()
    try:
        _prefilled(model, caches, np.zeros(n, np.int32))
    except ValueError as error:
        groups = {c.group_size for c in caches if isinstance(c, QuantizedKVCache)}
        if not groups:
            raise
        raise InvalidOption(
            f"kv_group_size={groups.pop()}: this model's heads do not divide into such groups "
            f"({error}); give a smaller one, such as 32"
        ) from error
    if not layout.reusable:
        return Costs(sum(getattr(c, "nbytes", 0) for c in caches) // n, 0)
    rows = layout.packing("rows", caches, 0, n).nbytes(n) // n if layout.has_rows else 0
    fixed = layout.state_bytes(caches) if layout.has_state else 0
    if layout.has_window:
        fixed += layout.packing("window", caches, 0, n).nbytes(n) // n * layout.longest_window
    return Costs(rows, fixed)


def _prefilled(model: Any, caches: list[Any], tokens: Any) -> list[Any]:
    model(mx.array(tokens[None]), cache=caches)
    mx.eval([c.state for c in caches])
    return caches


def _steps(model: Any, tokens: mx.array, caches: list[Any]) -> mx.array:
    """Give the logits of tokens that are computed one by one."""
    steps = [model(tokens[:, i : i + 1], cache=caches) for i in range(tokens.shape[1])]
    return mx.concatenate(steps, axis=1)


def rehearse(runner: Runner, vocabulary: int) -> None:
    """Answer three prompts together in a cache of their own. Each prompt goes on from the last one.

    MLX compiles most functions at their first use, which takes a second or two each. A failure is
    logged, as for any request.
    """
    try:
        cache = PrefixCache(runner.model, memory=REHEARSED_IN, make_cache=runner.cache.blank)
        alone = Runner(runner.model, cache, runner.costs, runner.batched)
        loop = Loop(alone, Scheduler(3, 1 << 62, cache.chunk), Inbox())
        most = REHEARSED_ON_CPU if mx.default_device() == mx.cpu else REHEARSED
        longest = min(most, context_size(runner.model) - ANSWERED)
        tokens = np.arange(longest, dtype=np.int32) * 7919 % vocabulary
        for length in (longest - MANY - FEW, longest - FEW, longest):
            if length > 0:
                sampling = DRAWN if length == longest else Sampling()
                prompt, name = tokens[:length], "that is tried out at the start"
                request = Request(prompt, Sink(), ANSWERED, sampling, name=name)
                loop.take(Submit(request, time.perf_counter()))
        while loop.requests:
            loop.turn()
    except Exception:
        log.exception("a first prompt could not be tried out; the first ones will be slow")
