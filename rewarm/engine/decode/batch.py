"""Decoding: what was prefilled alone takes its steps together, by mlx-lm's own batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationBatch, StopSequences
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.sample_utils import greedy_sampler

from rewarm.cache import PrefixCache
from rewarm.cache.model import MakeCaches
from rewarm.errors import InvalidOption
from rewarm.values import Tokens

from .sampling import Processor, Sampler

NO_LIMIT = 1 << 62
"""When a sequence ends is ours to say."""

MOST_PADDING = 2.0
SPARE_ROWS = 1024
"""Rows of padding that do not matter."""

CHECK_LENGTHS = (5, 9)
FAR_LENGTHS = (1203, 2381)
"""For models that choose the keys they attend to: with padding before them, in blocks that lie
elsewhere. It shows only where there is something to choose from."""
CHECK_STEPS = 4
TOLERANCE, MOST_TOLERANCE = 0.05, 0.15
"""Of the largest logit: what any model may differ by, and one that rounds much. The least that a
wrong mask or padding was seen to do is 0.17."""


@dataclass(frozen=True)
class Start:
    """What a sequence begins to decode with. Its caches hold everything but the last token; where
    the logits are there, which follow it, that as well."""

    id: int
    caches: list[Any]
    tokens: Tokens
    sampler: Sampler
    processors: list[Processor]
    logits: mx.array | None = None


class Step(NamedTuple):
    id: int
    token: int
    logprobs: mx.array
    given: bool = False
    """Whether `Batch.first` gave this token before."""


class Batch:
    """Sequences in one `GenerationBatch`. One alone decodes on its own caches, with no copy; they
    are merged when a second one joins.

    Making one takes the first step, on the last prompt token: what is wrong with a sequence shows
    while it is alone.
    """

    def __init__(self, model: Any, start: Start) -> None:
        known = start.logits
        self._generation = GenerationBatch(
            model=model if known is None else lambda inputs, cache: known,
            uids=[start.id],
            inputs=mx.array(start.tokens[-1:]),
            prompt_cache=start.caches,
            # Read by processors only.
            tokens=[start.tokens[:-1].tolist() if start.processors else []],
            samplers=[start.sampler],
            fallback_sampler=greedy_sampler,
            logits_processors=[start.processors],
            stop_sequences=[StopSequences()],
            max_tokens=[NO_LIMIT],
        )
        self._generation.model = model
        self._merged = False
        self._lengths = [len(start.tokens)]
        self._ahead: set[int] = set()
        """Sequences whose first token was given before the model ran on it."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def ids(self) -> list[int]:
        return list(self._generation.uids)

    def join(self, newcomers: Sequence[Batch]) -> None:
        """Take over the sequences of others, which are alone, in one copy of all caches."""
        mine = self._generation
        caches = [batch._generation.prompt_cache for batch in newcomers]
        if self._merged:
            for cache, newer in zip(mine.prompt_cache, merged(caches), strict=True):
                cache.extend(newer)
        else:
            mine.prompt_cache = merged([mine.prompt_cache, *caches])
            self._merged = True
        for batch in newcomers:
            batch._generation.prompt_cache = []  # it is in ours
            mine.extend(batch._generation)
            self._lengths += batch._lengths
            self._ahead |= batch._ahead

    def first(self) -> Step:
        """The token that making it gave. By `step` it would come when the next pass is under way,
        which nobody who waits for a first token should have to wait for."""
        (sequence,), generation = self.ids, self._generation
        self._ahead.add(sequence)
        return Step(sequence, int(generation._next_tokens), generation._next_logprobs[0])

    def step(self) -> list[Step]:
        """The next token of every sequence. Where it raises, the batch must not be used again."""
        ahead, self._ahead = self._ahead, set()
        return [Step(r.uid, r.token, r.logprobs, r.uid in ahead) for r in self._generation.next()]

    def is_ahead(self, sequence: int) -> bool:
        """Whether the last token given is not in its caches yet."""
        return sequence in self._ahead

    def caches(self, sequence: int) -> list[Any]:
        """A sequence's caches, which stand after the last token given (not where it `is_ahead`)."""
        if not self._merged:
            return list(self._generation.prompt_cache)
        place = self.ids.index(sequence)
        return [_extracted(cache, place) for cache in self._generation.prompt_cache]

    def remove(self, gone: set[int]) -> None:
        keep = [i for i, each in enumerate(self.ids) if each not in gone]
        if len(keep) == len(self):
            return
        self._lengths = [self._lengths[i] for i in keep]
        if keep or self._merged:
            self._generation.filter(keep)
        else:
            self._generation.uids = []


def _extracted(cache: Any, place: int) -> Any:
    """One sequence's part. mlx-lm stumbles over a cache that the model never used."""
    if isinstance(cache, BatchKVCache) and cache.keys is None:
        return KVCache()
    if isinstance(cache, BatchRotatingKVCache) and cache.keys is None:
        return RotatingKVCache(cache.max_size)
    return cache.extract(place)


def wastes_little(batches: Sequence[Batch]) -> bool:
    """Whether these can be one: a batch holds, for everybody, as many rows as its longest sequence
    has."""
    lengths = [length for batch in batches for length in batch._lengths]
    return len(lengths) * (max(lengths) - SPARE_ROWS) <= MOST_PADDING * sum(lengths)


def merged(sequences: Sequence[list[Any]]) -> list[Any]:
    """The caches of all sequences, layer by layer."""
    return [layer[0].merge(list(layer)) for layer in zip(*sequences, strict=True)]


def merges(cache: Any) -> bool:
    """Whether mlx-lm can batch a cache of this kind without losing anything.

    A ring that keeps its first rows merges, and drops them; quantised, chunked and concatenating
    caches do not merge at all.
    """
    if isinstance(cache, CacheList):
        return all(merges(c) for c in cache.caches)
    if isinstance(cache, RotatingKVCache):
        return bool(cache.keep == 0)
    if type(cache) in (KVCache, ArraysCache):
        return True
    return all(hasattr(cache, name) for name in ("merge", "extract", "filter", "extend"))


def decodes_in_batches(model: Any, blank: MakeCaches, vocabulary: int) -> bool:
    """Whether two sequences decoded together get the logits that each gets alone."""
    caches = blank()
    if not all(merges(c) for c in caches):
        return False
    lengths = [CHECK_LENGTHS]
    if any(_chooses_keys(c) for c in caches):
        lengths.append(FAR_LENGTHS)
    return all(_decodes_in_batches(model, blank, vocabulary, each) for each in lengths)


def _decodes_in_batches(
    model: Any, blank: MakeCaches, vocabulary: int, lengths: tuple[int, int]
) -> bool:
    tokens = np.random.default_rng(0).integers(0, vocabulary, (2, max(lengths) + CHECK_STEPS))
    alone, at_once, prefilled = [], [], []
    for row, length in zip(tokens, lengths, strict=True):
        caches = [_prefilled(model, blank(), row[:length]) for _ in range(3)]
        steps = [model(mx.array(row[None, i : i + 1]), cache=caches[0]) for i in _steps(length)]
        alone.append(mx.concatenate(steps, axis=1)[0])
        at_once.append(model(mx.array(row[None, _steps(length)]), cache=caches[1])[0])
        prefilled.append(caches[2])
    batch = merged(prefilled)
    together = []
    try:
        for i in range(CHECK_STEPS):
            inputs = [[row[length + i]] for row, length in zip(tokens, lengths, strict=True)]
            together.append(model(mx.array(np.array(inputs)), cache=batch))
    except (TypeError, ValueError):
        return False  # it wants one position for all, as dynamic NTK does
    expected = mx.stack(alone)
    # Sums in another order round otherwise, and how far that goes depends on model and device. It
    # shows in a sequence that is alone, too, where it takes its steps at once.
    rounding = _apart(mx.stack(at_once), expected)
    tolerance = min(max(TOLERANCE, 2 * rounding), MOST_TOLERANCE)
    return _apart(mx.concatenate(together, axis=1), expected) <= tolerance


def _apart(logits: mx.array, expected: mx.array) -> float:
    """The largest distance, of the largest logit."""
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    return float(mx.abs(logits - expected).max() / mx.abs(expected).max())


def _chooses_keys(cache: Any) -> bool:
    """Whether a layer keeps keys for an index beside those it attends to."""
    return isinstance(cache, CacheList) and all(type(c) is KVCache for c in cache.caches)


class Costs(NamedTuple):
    """Bytes that a running sequence takes: for each token, and however long it is."""

    row: int
    fixed: int


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


def _steps(length: int) -> range:
    return range(length, length + CHECK_STEPS)
