"""Carries plans out on the model. Everything here runs on the engine's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from rewarm.accel.launch import is_cuda
from rewarm.cache import Lease, PrefixCache
from rewarm.device import device_bytes
from rewarm.values import (
    Alternative,
    Boundary,
    Cost,
    Cut,
    Finish,
    Kind,
    Match,
    Miss,
    Sampled,
    Tokens,
)

from .decode.batch import MOST_PADDING, Batch, Costs, Start, Step, wastes_little
from .decode.sampling import make_processors, make_sampler
from .request import Request

log = logging.getLogger("rewarm.engine")

CLEAR_AFTER = 2048
"""Positions computed between two times that MLX gives free buffers back."""

CUDA_KEEPS = 1 / 8
"""Of a CUDA GPU's memory that free buffers may take: new ones take longer than what is done with
them. Where this process needs it for something else, MLX gives them back by itself."""

ONE_PASS, CUDA_ONE_PASS = 32, 256
"""Tokens of a prompt's last piece with its last token: a pass less for whoever waits, but the model
computes the logits of all of them."""

MOST_ROOM = 4096
"""Tokens of an answer that a restored cache has room for; a longer one grows by copying."""


@dataclass(eq=False)
class Sequence:
    """One answer to a request, or a prompt that is warmed ahead, and where it stands."""

    id: int
    prompt: Tokens
    request: Request | None = None
    choice: int = 0
    boundaries: tuple[Boundary, ...] = ()
    marks: tuple[int, ...] = ()
    salt: str | None = None
    max_tokens: int = 0
    generated: list[int] = field(default_factory=list)
    lease: Lease | None = None
    admitted: bool = False
    isolated: bool = False
    """Its batch failed once: it decodes alone from then on, so that a second failure is its own."""
    ended: Finish | None = None
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    match: Match | None = None
    resumed_at: Kind | None = None
    match_ms: float = 0.0
    restore_ms: float = 0.0
    restored_bytes: int = 0
    miss: Miss | None = None

    @property
    def warm(self) -> bool:
        return self.request is None

    @property
    def tokens(self) -> Tokens:
        """The prompt, and what was generated after it."""
        if not self.generated:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.generated, np.int32)])

    @property
    def position(self) -> int:
        """Prompt tokens that are in its caches."""
        return self.lease.position if self.lease is not None else 0

    def give(self, token: int) -> None:
        """A token that was generated."""
        if self.first_token is None:
            self.first_token = time.perf_counter()
        self.generated.append(token)

    def report(self) -> Cost:
        now = time.perf_counter()
        started = self.started or now
        match = self.match or Match(len(self.prompt))
        computed = match.tokens if self.admitted else max(self.position, match.resume)
        ran_ms = ((self.first_token or now) - started) * 1e3
        return Cost(
            match=match,
            resumed_at=self.resumed_at,
            prefilled=computed - match.resume,
            queued_ms=(started - self.submitted) * 1e3,
            match_ms=self.match_ms,
            restore_ms=self.restore_ms,
            prefill_ms=max(ran_ms - self.match_ms - self.restore_ms, 0.0),
            ttft_ms=((self.first_token or now) - self.submitted) * 1e3,
            restored_bytes=self.restored_bytes,
            miss=self.miss,
        )


class Failed(NamedTuple):
    """A batch that cannot be continued: the sequences that were in it."""

    ids: list[int]
    error: Exception


class Decoded(NamedTuple):
    """A step of every batch."""

    steps: list[Step]
    failed: list[Failed]


class Runner:
    """Prefills one sequence at a time, decodes them together, and stores what they computed."""

    def __init__(
        self,
        model: Any,
        cache: PrefixCache,
        vocabulary: int,
        costs: Costs | None = None,
        batched: bool = False,
    ) -> None:
        self.model = model
        self.cache = cache
        self.vocabulary = vocabulary
        self.costs = costs or Costs(0, 0)
        self.batched = batched
        self._shared: list[Batch] = []
        """Usually one; more where lengths differ so much that padding would cost more."""
        self._alone: list[Batch] = []
        """Of one sequence each: of models that cannot share, and after a failure."""
        self._opened: list[Batch] = []
        """Of one sequence each, about to be shared."""
        self.prefilled_tokens = 0
        self.warm_tokens = 0
        self._one_pass = CUDA_ONE_PASS if is_cuda() else ONE_PASS
        self._since_clearing = 0
        self._kept = CUDA_KEEPS * device_bytes() if is_cuda() else 0

    def renewed(self) -> Runner:
        """Another one in its place, with nothing running."""
        new = Runner(self.model, self.cache, self.vocabulary, self.costs, self.batched)
        new.prefilled_tokens, new.warm_tokens = self.prefilled_tokens, self.warm_tokens
        return new

    def bytes_for(self, tokens: int) -> int:
        """What a sequence of this length takes while it runs; in a batch, with its padding."""
        padded = MOST_PADDING if self.batched else 1.0
        return self.costs.fixed + int(self.costs.row * tokens * padded)

    def start(self, sequence: Sequence) -> None:
        """Match and restore."""
        sequence.started = sequence.started or time.perf_counter()
        lease = self.cache.acquire(
            sequence.tokens,
            salt=sequence.salt,
            boundaries=sequence.boundaries,
            marks=sequence.marks,
            headroom=min(sequence.max_tokens - len(sequence.generated), MOST_ROOM),
            warm=sequence.warm,
            hint=sequence.request.hint if sequence.request is not None else 1.0,
        )
        sequence.lease = lease
        if sequence.match is None:
            cost = lease.cost
            sequence.match, sequence.resumed_at = cost.match, cost.resumed_at
            sequence.match_ms, sequence.restore_ms = cost.match_ms, cost.restore_ms
            sequence.restored_bytes, sequence.miss = cost.restored_bytes, cost.miss

    def next_piece(self, sequence: Sequence, awaited: Iterable[int] = ()) -> int:
        """How many tokens come next. `awaited` are positions that other requests wait for."""
        lease = _leased(sequence)
        for position in awaited:
            self.cache.mark(lease, position)
        return next((c.stop - lease.position for c in lease.cuts if c.stop > lease.position), 0)

    def prefill(self, sequence: Sequence) -> bool:
        """One chunk; whether all but the last token is computed now."""
        lease = _leased(sequence)
        cut = next((c for c in lease.cuts if c.stop > lease.position), None)
        if cut is not None:
            stop = cut.stop + self._takes_last_token(sequence, cut)
            chunk = mx.array(lease.tokens[lease.position : stop])
            try:
                logits = self.model(chunk[None], cache=lease.caches)
                if stop > cut.stop:
                    lease.logits = mx.contiguous(logits[:, -1:])  # not a view of all of them
                    mx.eval(lease.logits)
                mx.eval([c.state for c in lease.caches])
            except BaseException:
                lease.caches = []  # some layers have gone on, others not: nobody may store that
                raise
            if sequence.warm:
                self.warm_tokens += chunk.size
            else:
                # A token that was generated before a new start is none of the prompt's.
                generated = sequence.admitted and stop > cut.stop
                self.prefilled_tokens += chunk.size - generated
            self.cache.commit(lease, stop, checkpoint=cut.checkpoint)
            self._computed(chunk.size)
        return lease.position >= len(lease.tokens) - 1

    def _takes_last_token(self, sequence: Sequence, cut: Cut) -> bool:
        """Whether a piece goes through the prompt's last token, instead of a pass of its own.

        Only where rows are all there is: else the same prompt again could not go on before it. And
        not beyond the cache's limit: a piece that ends there is cut where every other run cuts it.
        """
        lease, layout = _leased(sequence), self.cache.layout
        only_rows = layout.has_rows and not layout.has_state and not layout.has_window
        return (
            cut.stop == len(lease.tokens) - 1
            and cut.stop - lease.position < self._one_pass
            and only_rows
            and len(lease.tokens) <= self.cache.limit
            and self.cache.reuse == "fast"
            and not sequence.warm
        )

    def open(self, sequence: Sequence) -> Step:
        """Its first step, alone: what is wrong with it shows here."""
        lease, request = _leased(sequence), sequence.request
        if request is None:
            raise TypeError("warm-ahead does not decode")
        batch = Batch(
            self.model,
            Start(
                id=sequence.id,
                caches=lease.caches,
                tokens=lease.tokens,
                sampler=make_sampler(
                    request.sampling, sequence.choice, len(sequence.generated), self.vocabulary
                ),
                processors=make_processors(request),
                logits=lease.logits,
            ),
        )
        if not sequence.admitted:
            sequence.admitted = True
            self.prefilled_tokens += lease.logits is None
        # The batch has them now; held here too, they would be kept after it merged them.
        lease.caches, lease.logits = [], None
        shares = self.batched and not sequence.isolated
        (self._opened if shares else self._alone).append(batch)
        return batch.first()

    def join(self) -> list[Failed]:
        """What was opened goes into batches. All that go into one do so together, since every time
        the whole batch is copied."""
        groups = [[batch] for batch in self._shared]
        padded = self.cache.layout.has_rows
        for batch in self._opened:
            suiting = (g for g in groups if not padded or wastes_little([*g, batch]))
            group = next(suiting, None)
            if group is None:
                groups.append([batch])
            else:
                group.append(batch)
        self._shared, self._opened, failed = [g[0] for g in groups], [], []
        for first, *others in groups:
            ids = [each for batch in (first, *others) for each in batch.ids]
            try:
                if others:
                    first.join(others)
            except Exception as error:
                failed.append(Failed(ids, error))
                self.dissolve(ids)
        return failed

    def decode(self) -> Decoded:
        """One step of every batch. One that fails is dissolved: it must not be continued."""
        decoded = Decoded([], [])
        self._computed(1)
        for batch in [*self._shared, *self._alone]:
            try:
                decoded.steps.extend(batch.step())
            except Exception as error:
                decoded.failed.append(Failed(batch.ids, error))
                self.dissolve(batch.ids)
        return decoded

    def _computed(self, positions: int) -> None:
        """MLX keeps the buffers it frees. As contexts grow, these are soon of no use."""
        self._since_clearing += positions
        if self._since_clearing >= CLEAR_AFTER:
            self._since_clearing = 0
            if mx.get_cache_memory() > self._kept:
                mx.clear_cache()

    def dissolve(self, ids: Iterable[int]) -> None:
        """Forget the batches of these sequences."""
        gone = set(ids)
        for batches in self._batches:
            batches[:] = [b for b in batches if gone.isdisjoint(b.ids)]

    def leave(self, sequences: Collection[Sequence], *, keep: bool = True) -> None:
        """Out of their batches and leases, with all that was computed stored (or not)."""
        for sequence in sequences:
            if keep:
                self._store_all(sequence)
            if sequence.lease is not None:
                sequence.lease.release()
                sequence.lease = None
        gone = {s.id for s in sequences}
        for batches in self._batches:
            for batch in batches:
                batch.remove(gone)
            batches[:] = [b for b in batches if len(b)]

    def window_is_full(self, sequence: Sequence) -> bool:
        """Whether the next step overwrites a row that was not stored yet."""
        window = self.cache.layout.shortest_window
        return bool(window) and len(sequence.generated) % max(window - 1, 1) == 0

    def store_answer(self, sequence: Sequence, checkpoint: Kind | None = None) -> None:
        """What was decoded so far."""
        batch = self._batch_of(sequence)
        if batch is None or self.cache.reuse == "exact":
            return
        lease = _leased(sequence)
        done = len(lease.tokens) - len(sequence.prompt)
        computed = len(sequence.generated) - batch.is_ahead(sequence.id)
        lease.extend(sequence.generated[done:computed])
        try:
            lease.caches = batch.caches(sequence.id)
            self.cache.commit(lease, len(lease.tokens), origin="decode", checkpoint=checkpoint)
        except Exception:
            lease.stopped_storing = True
            log.exception("an answer could not be stored; it will be computed again")
        lease.caches = []

    def _store_all(self, sequence: Sequence) -> None:
        lease = sequence.lease
        if lease is None:
            return
        if self._batch_of(sequence) is not None:
            if sequence.generated:
                self.store_answer(sequence, "answer")
        elif lease.position > lease.cost.match.resume and lease.caches:
            # The prefill ends here, too early: without a checkpoint, recurrent layers lose it all.
            self.cache.commit(lease, lease.position, checkpoint="end")

    def _batch_of(self, sequence: Sequence) -> Batch | None:
        return next((b for b in chain(*self._batches) if sequence.id in b.ids), None)

    @property
    def _batches(self) -> tuple[list[Batch], ...]:
        return self._shared, self._alone, self._opened


def alternatives(logprobs: mx.array, token: int, count: int) -> Sampled:
    """A token with its logprob, and the likeliest others."""
    row = np.asarray(logprobs.astype(mx.float32))
    best = np.argpartition(-row, count - 1)[:count] if 0 < count < len(row) else np.arange(0)
    best = best[np.argsort(-row[best], kind="stable")]
    return Sampled(
        token, float(row[token]), tuple(Alternative(int(i), float(row[i])) for i in best)
    )


def _leased(sequence: Sequence) -> Lease:
    if sequence.lease is None:
        raise RuntimeError(f"sequence {sequence.id} has no lease")
    return sequence.lease
