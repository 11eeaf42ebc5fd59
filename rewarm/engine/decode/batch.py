"""Decode: sequences that were prefilled alone take their steps together, by mlx-lm's own batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, StopSequences
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache
from mlx_lm.sample_utils import greedy_sampler

from ..request import Running
from .sampling import make_processors, make_sampler

NO_LIMIT = 1 << 62
"""The limit that mlx-lm's batch is given: the engine ends sequences by itself."""

MOST_PADDING = 2.0
"""The most rows that a batch may hold, as a multiple of those that its sequences have."""
SPARE_ROWS = 1024
"""The rows of padding for each sequence that are always allowed."""


class Step(NamedTuple):
    id: int
    token: int
    logprobs: mx.array
    given: bool = False
    """`Batch.first` gave this token before."""


class Batch:
    """Sequences in one `GenerationBatch`. A single sequence decodes on its own caches, with no
    copy. They are merged when a second sequence joins.

    A new batch has one sequence and has taken its first step, so that an error of a sequence is
    found while it is alone. Everything here runs on the engine's thread. Where a method raises, the
    batch must not be used again.

    A subclass may decode in another way. Its step may append more tokens than it gives, to check a
    draft. It takes back what it does not give: `undo.Before` says how.
    """

    most: ClassVar[int] = 1
    """The most tokens that one step gives to a sequence."""

    def __init__(self, model: Any, running: Running) -> None:
        """The caches of the sequence's lease hold everything but the last token. Where the lease
        has logits, they hold the last token too, and the logits follow it."""
        request, lease = running.request, running.leased
        known, processors = lease.logits, make_processors(request)
        self._generation = GenerationBatch(
            model=model if known is None else lambda inputs, cache: known,
            uids=[running.id],
            inputs=mx.array(lease.tokens[-1:]),
            prompt_cache=lease.caches,
            # Read by processors only.
            tokens=[lease.tokens[:-1].tolist() if processors else []],
            samplers=[make_sampler(request.sampling, running.choice, len(running.generated))],
            fallback_sampler=greedy_sampler,
            logits_processors=[processors],
            stop_sequences=[StopSequences()],
            max_tokens=[NO_LIMIT],
        )
        self._generation.model = model
        self._merged = False
        self.lengths = [len(lease.tokens)]
        """The number of tokens that each sequence had when it began to decode."""
        self._ahead: set[int] = set()
        """Sequences whose first token was given before the model ran on it."""

    @property
    def ids(self) -> list[int]:
        return list(self._generation.uids)

    def join(self, newcomers: Sequence[Batch]) -> None:
        """Take over the sequences of other batches, of one sequence each, in one copy of all
        caches."""
        mine = self._generation
        caches = [batch._generation.prompt_cache for batch in newcomers]
        if self._merged:
            for cache, newer in zip(mine.prompt_cache, merged(caches), strict=True):
                cache.extend(newer)
        else:
            mine.prompt_cache = merged([mine.prompt_cache, *caches])
            self._merged = True
        for batch in newcomers:
            batch._generation.prompt_cache = []  # it is a part of ours now
            mine.extend(batch._generation)
            self.lengths += batch.lengths
            self._ahead |= batch._ahead

    def first(self) -> Step:
        """Give the token of the first step at once. `step` would give it only when the next pass is
        under way, and a client that waits for its first token would wait for that too."""
        (sequence,), generation = self.ids, self._generation
        self._ahead.add(sequence)
        return Step(sequence, int(generation._next_tokens), generation._next_logprobs[0])

    def step(self) -> list[Step]:
        """Give every sequence its next token, or its next few, one after the other. The token of
        its first step is among them, as `given`."""
        ahead, self._ahead = self._ahead, set()
        return [Step(r.uid, r.token, r.logprobs, r.uid in ahead) for r in self._generation.next()]

    def is_ahead(self, sequence: int) -> bool:
        """Say whether the last token given is not in the sequence's caches yet."""
        return sequence in self._ahead

    def caches(self, sequence: int, unused: int = 0) -> list[Any]:
        """Give the caches of a sequence, to be read only.

        They end after the last token that the last step gave it, or before that token where it
        `is_ahead`. With `unused`, they end so many tokens earlier; it is given only between that
        step and `remove`. Here a step gives one token, so none is ever unused."""
        if not self._merged:
            return list(self._generation.prompt_cache)
        place = self.ids.index(sequence)
        return [_extracted(cache, place) for cache in self._generation.prompt_cache]

    def remove(self, gone: set[int]) -> None:
        """Forget sequences."""
        keep = [i for i, each in enumerate(self.ids) if each not in gone]
        if len(keep) < len(self.ids):
            self.lengths = [self.lengths[i] for i in keep]
            self._generation.filter(keep)


def _extracted(cache: Any, place: int) -> Any:
    """Give one sequence's part. mlx-lm fails on a cache that the model never used."""
    if isinstance(cache, BatchKVCache) and cache.keys is None:
        return KVCache()
    if isinstance(cache, BatchRotatingKVCache) and cache.keys is None:
        return RotatingKVCache(cache.max_size)
    return cache.extract(place)


def wastes_little(batches: Sequence[Batch]) -> bool:
    """Say whether these can be one batch with little padding. A batch holds as many rows for each
    sequence as the longest one has."""
    lengths = [length for batch in batches for length in batch.lengths]
    return len(lengths) * (max(lengths) - SPARE_ROWS) <= MOST_PADDING * sum(lengths)


def merged(sequences: Sequence[list[Any]]) -> list[Any]:
    """Merge the caches of all sequences, layer by layer."""
    return [layer[0].merge(list(layer)) for layer in zip(*sequences, strict=True)]
