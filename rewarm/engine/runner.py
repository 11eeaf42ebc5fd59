"""Carry out plans on the model. Everything here runs on the engine's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from rewarm.accel.device import device_bytes, is_cuda
from rewarm.cache import Lease, PrefixCache
from rewarm.values import Alternative, Cut, Kind, Sampled

from .decode.batch import MOST_PADDING, Batch, Step, wastes_little
from .request import Running
from .scheduler import Piece

log = logging.getLogger("rewarm.engine")

CLEAR_AFTER = 2048
"""The number of computed positions after which MLX gives free buffers back."""

CUDA_KEEPS = 1 / 8
"""The share of a CUDA GPU's memory that free buffers may take: making a new buffer takes longer
than the work on it. MLX gives them back by itself where this process needs the memory."""

ONE_PASS, CUDA_ONE_PASS = 32, 256
"""A last piece of fewer tokens is computed together with the prompt's last token. That saves a
pass, but the model computes the logits of all these tokens."""

PACE = 0.01
"""The estimate of the seconds for a prompt token, before any was computed."""
LEAST_TIMED = 64
"""The fewest tokens of a piece that is timed: shorter ones say little about others."""
NEWEST = 0.3
"""The weight of the newest piece in the pace."""

MOST_HEADROOM = 4096
"""The most tokens of an answer that fit into a restored cache. For a longer answer it is copied as
it grows."""


class Costs(NamedTuple):
    """The bytes that a running sequence takes: `row` for each token, and `fixed` whatever its
    length."""

    row: int
    fixed: int


class Failed(NamedTuple):
    """The sequences of a batch that cannot be continued."""

    ids: list[int]
    error: Exception


class Runner:
    """The runner prefills one sequence at a time, decodes in batches, and stores the results."""

    def __init__(
        self,
        model: Any,
        cache: PrefixCache,
        costs: Costs | None = None,
        batched: bool = False,
        decoder: type[Batch] = Batch,
    ) -> None:
        self.model = model
        self.cache = cache
        self.costs = costs or Costs(0, 0)
        self.batched = batched
        self.decoder = decoder
        self._shared: list[Batch] = []
        """Batches that several sequences share. Usually there is one; there are more where lengths
        differ so much that padding would cost more."""
        self._alone: list[Batch] = []
        """Batches of one sequence each: for models that decode wrongly in batches, and after a
        failure."""
        self._opened: list[Batch] = []
        """Batches of one sequence each that are about to be shared."""
        self.prefilled_tokens = 0
        self.warm_tokens = 0
        self.pace = PACE
        """The seconds that a prompt token takes to compute, averaged over recent pieces."""
        self._one_pass = CUDA_ONE_PASS if is_cuda() else ONE_PASS
        self._since_clearing = 0
        self._kept = CUDA_KEEPS * device_bytes() if is_cuda() else 0

    def forget_batches(self) -> None:
        """Drop all batches, which must not be continued."""
        for batches in self._batches:
            batches.clear()

    def bytes_for(self, tokens: int) -> int:
        """Estimate the bytes that a sequence of so many tokens takes while it runs, with the
        padding of a batch."""
        padded = MOST_PADDING if self.batched else 1.0
        return self.costs.fixed + int(self.costs.row * tokens * padded)

    def start(self, running: Running) -> Lease:
        """Match a prompt and restore what is known of it."""
        running.started = running.started or time.perf_counter()
        request = running.request
        lease = self.cache.acquire(
            running.tokens,
            salt=running.salt,
            boundaries=request.boundaries,
            marks=request.marks,
            headroom=min(request.max_tokens - len(running.generated), MOST_HEADROOM),
            warm=running.warm,
            hint=request.hint,
            fetch=running.fetching or False,
        )
        running.lease, running.fetching = lease, None
        running.cost = running.cost or lease.cost
        layout = self.cache.layout
        # This needs a model with rows only: others could not resume before the last token when the
        # prompt comes again. It is off beyond the cache's limit, where the cuts are fixed.
        only_rows = layout.has_rows and not layout.has_state and not layout.has_window
        fast = self.cache.reuse == "fast" and len(lease.tokens) <= self.cache.limit
        running.one_pass = self._one_pass if only_rows and fast and not running.warm else 0
        return lease

    def mark(self, running: Running, positions: Iterable[int]) -> list[Cut]:
        """Divide a prompt at positions that other prompts wait for. Returns its cuts."""
        for position in sorted(positions):
            self.cache.mark(running.leased, position)
        return running.leased.cuts

    def prefill(self, running: Running, piece: Piece) -> None:
        """Compute a piece of a prompt, and store it."""
        lease = running.leased
        if not piece.size:
            return
        began = time.perf_counter()
        chunk = mx.array(lease.tokens[piece.start : piece.stop])
        try:
            logits = self.model(chunk[None], cache=lease.caches)
            if piece.stop == len(lease.tokens):
                lease.logits = mx.contiguous(logits[:, -1:])  # not a view of all of them
                mx.eval(lease.logits)
            mx.eval([c.state for c in lease.caches])
        except BaseException:
            lease.caches = []  # some layers have gone on, others not: that must not be stored
            raise
        if chunk.size >= LEAST_TIMED:
            pace = (time.perf_counter() - began) / chunk.size
            self.pace += (pace - self.pace) * NEWEST if self.prefilled_tokens else pace - self.pace
        if running.warm:
            self.warm_tokens += chunk.size
        else:
            # After a new start, `tokens` ends with generated tokens, and the last one does not
            # count as a prompt token.
            generated = running.admitted and lease.logits is not None
            self.prefilled_tokens += chunk.size - generated
        self.cache.commit(lease, piece.stop, checkpoint=piece.checkpoint)
        self._computed(chunk.size)

    def open(self, running: Running) -> Step:
        """Take the first step of a sequence alone, so that its own errors are found here."""
        lease = running.leased
        batch = self.decoder(self.model, running)
        if not running.admitted:
            running.admitted = True
            self.prefilled_tokens += lease.logits is None
        # The batch holds them now. If the lease kept them too, they would outlive their merge.
        lease.caches, lease.logits = [], None
        shares = self.batched and not running.isolated
        (self._opened if shares else self._alone).append(batch)
        return batch.first()

    def join(self) -> list[Failed]:
        """Put the opened sequences into batches. All newcomers of a batch join it at once, since
        every join copies the whole batch."""
        groups = [[batch] for batch in self._shared]
        padded = self.cache.layout.has_rows
        for batch in self._opened:
            suiting = [g for g in groups if not padded or wastes_little([*g, batch])]
            if suiting:
                suiting[0].append(batch)
            else:
                groups.append([batch])
        self._shared, self._opened, failed = [g[0] for g in groups], [], []
        for first, *others in groups:
            ids = [each for batch in (first, *others) for each in batch.ids]
            try:
                if others:
                    first.join(others)
            except Exception as error:
                failed.append(self._dissolved(ids, error))
        return failed

    def decode(self) -> list[Step | Failed]:
        """Take one step of every batch. A batch that fails is dissolved."""
        outcomes: list[Step | Failed] = []
        self._computed(1)
        for batch in [*self._shared, *self._alone]:
            try:
                outcomes += batch.step()
            except Exception as error:
                outcomes.append(self._dissolved(batch.ids, error))
        return outcomes

    def _computed(self, positions: int) -> None:
        """Count positions, and from time to time have MLX give back its free buffers. As contexts
        grow, these are soon too small to be used again."""
        self._since_clearing += positions
        if self._since_clearing >= CLEAR_AFTER:
            self._since_clearing = 0
            if mx.get_cache_memory() > self._kept:
                mx.clear_cache()

    def _dissolved(self, ids: list[int], error: Exception) -> Failed:
        """Forget the batches of these sequences, which must not go on."""
        for batches in self._batches:
            batches[:] = [b for b in batches if set(ids).isdisjoint(b.ids)]
        return Failed(ids, error)

    def leave(self, sequences: Collection[Running], *, keep: bool = True) -> None:
        """End the batches and leases of these sequences. With `keep`, what they computed is
        stored."""
        for running in sequences:
            running.stop_fetching()
            if running.lease is not None:
                if keep:
                    self._store(running, running.lease)
                running.lease.release()
                running.lease = None
        gone = {s.id for s in sequences}
        for batches in self._batches:
            for batch in batches:
                batch.remove(gone)
            batches[:] = [b for b in batches if b.ids]

    def store_answer(self, running: Running, checkpoint: Kind | None = None) -> None:
        """Store what was decoded so far."""
        batch = self._batch_of(running)
        if batch is None or self.cache.reuse == "exact":
            return
        lease = running.leased
        done = len(lease.tokens) - len(running.request.tokens)
        computed = len(running.generated) - batch.is_ahead(running.id)
        lease.extend(running.generated[done:computed])
        try:
            lease.caches = batch.caches(running.id, running.unused)
            self.cache.commit(lease, len(lease.tokens), origin="decode", checkpoint=checkpoint)
        except Exception:
            lease.stopped_storing = True
            log.exception("an answer could not be stored; it will be computed again")
        lease.caches = []

    def _store(self, running: Running, lease: Lease) -> None:
        if lease.caches and lease.position > lease.cost.match.resume:
            # The prefill was stopped here. Without a checkpoint, recurrent layers could not resume.
            self.cache.commit(lease, lease.position, checkpoint="end")
        elif running.generated:
            self.store_answer(running, "answer")

    def _batch_of(self, running: Running) -> Batch | None:
        return next((b for b in chain(*self._batches) if running.id in b.ids), None)

    @property
    def _batches(self) -> tuple[list[Batch], ...]:
        return self._shared, self._alone, self._opened


def alternatives(logprobs: mx.array, token: int, count: int) -> Sampled:
    """Give a token with its logprob, and the likeliest others."""
    row = np.asarray(logprobs.astype(mx.float32))
    best = np.argpartition(-row, count - 1)[:count] if 0 < count < len(row) else np.arange(0)
    best = best[np.argsort(-row[best], kind="stable")]
    others = tuple(Alternative(int(i), float(row[i])) for i in best)
    return Sampled(token, float(row[token]), others)
