"""A turn of the engine: admit, one decode step for the batch, one chunk of prefill, idle work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from rewarm.cache.tree import encode
from rewarm.errors import EngineFault
from rewarm.values import Cost, Finish, Sampled

from .request import Request
from .runner import Runner, Sequence, alternatives
from .scheduler import Job, Scheduler

log = logging.getLogger("rewarm.engine")

MOST_WARM = 64
"""Warm-ahead that waits; beyond it the oldest is forgotten."""


@dataclass
class _Open:
    """A request that is not answered yet."""

    remaining: int
    report: Cost | None = None
    """Of the first choice: the others resume where it got to."""


class Loop:
    """What waits and what runs, and the turns that bring it on. All on the engine's thread."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.sequences: dict[int, Sequence] = {}
        self._open: dict[Request, _Open] = {}

    @property
    def has_requests(self) -> bool:
        return bool(self._open)

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    def take(self, sequence: Sequence) -> None:
        """A sequence that is to be computed."""
        request = sequence.request
        if request is not None:
            if sequence.choice == 0:
                self._open.setdefault(request, _Open(request.n))
            elif request not in self._open:
                return  # another of its answers has failed
        self.sequences[sequence.id] = sequence
        tokens = sequence.tokens
        match = self.runner.cache.match(tokens, sequence.salt, sequence.boundaries)
        if sequence.warm:
            if match.resume >= len(tokens) - 1:
                del self.sequences[sequence.id]
                return
            self._forget_old_warm_ahead()
        self.scheduler.add(
            Job(
                id=sequence.id,
                data=encode(tokens),
                stop=len(tokens) - 1,
                known=match.resume,
                salt=sequence.salt,
                nbytes=self.runner.bytes_for(len(sequence.prompt) + sequence.max_tokens),
                warm=sequence.warm,
            )
        )

    def cancel(self, request: Request) -> None:
        self._leave([s for s in self.sequences.values() if s.request is request], "cancelled")

    def close(self) -> None:
        """End everything, warm-ahead too. What was computed is kept."""
        self._leave(list(self.sequences.values()), "cancelled")

    def turn(self) -> None:
        plan = self.scheduler.plan()
        self._admit(plan.admit)
        if plan.decode:
            self._decode()
        if plan.pause is not None:
            self._pause(plan.pause)
        # Short prompts, and short pieces between two checkpoints, share the time of one chunk.
        left = self.runner.cache.chunk
        chosen = plan.prefill
        while chosen in self.sequences:
            took = self._prefill(self.sequences[chosen], left)
            if not took:
                break
            left -= took
            chosen = self.scheduler.plan().prefill

    def restart(self, error: BaseException, *, keep: bool) -> list[Sequence]:
        """The turn itself failed: begin anew with nothing. Returns what can be taken in again; the
        rest has failed, everything where not `keep`."""
        self.runner = self.runner.renewed()
        self.scheduler = Scheduler(self.scheduler.max_batch, self.scheduler.room)
        sequences, self.sequences = list(self.sequences.values()), {}
        for sequence in sequences:
            ran = sequence.lease is not None
            report = sequence.report()
            self.runner.leave([sequence], keep=False)
            if sequence.ended is not None:
                self._end(sequence, report)
            elif not keep or (ran and sequence.isolated):
                self.fail(sequence, error)
            sequence.isolated = sequence.isolated or ran
        return [s for s in sequences if s.request in self._open and s.ended is None]

    def _admit(self, ids: Iterable[int]) -> None:
        for each in ids:
            sequence = self.sequences.get(each)
            if sequence is None:
                continue  # another answer to its request failed
            try:
                first = self.runner.open(sequence)
                self.scheduler.moved(each, len(sequence.tokens) - 1, "decoding")
                finish = self._give(sequence, first.token, first.logprobs)
            except Exception as error:
                self.fail(sequence, error)
                continue
            if finish is not None:
                self._leave([sequence], finish)
        for failed in self.runner.join():
            self._start_over(*failed)

    def _decode(self) -> None:
        decoded = self.runner.decode()
        for failed in decoded.failed:
            self._start_over(*failed)
        ended: dict[Finish, list[Sequence]] = {"stop": [], "length": []}
        for step in decoded.steps:
            sequence = self.sequences.get(step.id)
            if sequence is None:
                continue  # another answer to its request failed
            finish = None
            try:
                if not step.given:
                    finish = self._give(sequence, step.token, step.logprobs)
            except Exception as error:
                self.fail(sequence, error)
                continue
            if finish is not None:
                ended[finish].append(sequence)
            elif self.runner.window_is_full(sequence):
                self.runner.store_answer(sequence)
        for reason, sequences in ended.items():
            self._leave(sequences, reason)

    def _give(self, sequence: Sequence, token: int, logprobs: mx.array) -> Finish | None:
        """Hand a token to whoever asked for it; says whether the answer ends with it."""
        request = _requested(sequence)
        sequence.give(token)
        if request.top_logprobs is None:
            sampled = Sampled(token)
        else:
            sampled = alternatives(logprobs, token, request.top_logprobs)
        if request.sink.token(sequence.choice, sampled) or token in request.end_tokens:
            return "stop"
        return "length" if len(sequence.generated) >= sequence.max_tokens else None

    def _prefill(self, sequence: Sequence, most: int) -> int:
        """One piece of a prompt, if it has at most so many tokens; how much of that it took."""
        runner = self.runner
        try:
            if sequence.lease is None:
                runner.start(sequence)
                self._moved(sequence)
            awaited = self.scheduler.jobs[sequence.id].marks
            size = runner.next_piece(sequence, awaited)
            if size > most:
                return 0
            done = runner.prefill(sequence)
            self._moved(sequence)
        except Exception as error:
            self.fail(sequence, error)
            return most
        full = sequence.lease is not None and sequence.lease.stopped_storing
        if sequence.warm and (done or full):  # what cannot be stored is not worth computing
            self._leave([sequence], "stop")
        elif done:
            self.scheduler.moved(sequence.id, len(sequence.tokens) - 1, "ready")
        return max(size, 1)

    def _moved(self, sequence: Sequence) -> None:
        position = sequence.position
        self.scheduler.moved(sequence.id, position, "prefilling")
        if sequence.request is not None and not sequence.generated and sequence.choice == 0:
            sequence.request.sink.prefilled(position, len(sequence.prompt))

    def _pause(self, warm: int) -> None:
        """A request goes first. What was warmed stays, and the rest is begun again later."""
        sequence = self.sequences[warm]
        self.runner.leave([sequence])
        job = self.scheduler.jobs[warm]
        self.scheduler.back(warm, job.data, job.stop, job.position)

    def _leave(self, sequences: Collection[Sequence], reason: Finish) -> None:
        """These are done: store, forget, and tell."""
        sequences = [s for s in sequences if s.id in self.sequences]
        reports = [s.report() for s in sequences]
        for sequence in sequences:
            sequence.ended = reason  # whatever fails from here on
        self.runner.leave(sequences)
        for sequence, report in zip(sequences, reports, strict=True):
            self.sequences.pop(sequence.id, None)
            self.scheduler.remove(sequence.id)
            self._end(sequence, report)

    def _end(self, sequence: Sequence, report: Cost) -> None:
        request, reason = sequence.request, sequence.ended
        if request is None or request not in self._open:
            return
        _tell(request.sink.ended, sequence.choice, reason)
        still = self._open[request]
        still.remaining -= 1
        if sequence.choice == 0 or still.report is None:
            still.report = report
        if not still.remaining:
            del self._open[request]
            _tell(request.sink.done, still.report)

    def _start_over(self, ids: Iterable[int], error: Exception) -> None:
        """A batch failed. Its sequences go back to what the tree holds of them and decode alone
        from there: whoever caused it fails alone then, and the others lose nothing."""
        for each in ids:
            sequence = self.sequences.get(each)
            if sequence is None:
                continue
            if sequence.isolated:
                self.fail(sequence, error)
                continue
            log.warning("a batch failed (%s); %s starts over", error, _named(sequence))
            sequence.isolated = True
            self.runner.leave([sequence], keep=False)
            tokens = sequence.tokens
            self.scheduler.back(each, encode(tokens), len(tokens) - 1, 0)
        # Its frames refer to the list that it is in, and would keep the batch alive.
        error.__traceback__ = None

    def fail(self, sequence: Sequence, error: BaseException) -> None:
        """An error belongs to its request, and ends all of it."""
        log.error("%s failed", _named(sequence), exc_info=error)
        request = sequence.request
        mates = [s for s in self.sequences.values() if request and s.request is request]
        for each in mates or [sequence]:
            self._drop(each)
        if request is not None and self._open.pop(request, None) is not None:
            fault = EngineFault(f"the model failed on this request: {type(error).__name__}")
            _tell(request.sink.failed, fault)

    def _drop(self, sequence: Sequence) -> None:
        """Forget a sequence, and store nothing more of it."""
        self.runner.leave([sequence], keep=False)
        self.sequences.pop(sequence.id, None)
        self.scheduler.remove(sequence.id)

    def _forget_old_warm_ahead(self) -> None:
        waiting = [s for s in self.sequences.values() if s.warm]
        if len(waiting) >= MOST_WARM:
            self._leave(waiting[:1], "cancelled")


def _requested(sequence: Sequence) -> Request:
    if sequence.request is None:
        raise TypeError("warm-ahead has no answer")
    return sequence.request


def _named(sequence: Sequence) -> str:
    name = sequence.request.name if sequence.request is not None else "warm-ahead"
    return f"request {name or sequence.id}"


def _tell(call: Callable[..., None], *details: Any) -> None:
    """A sink that fails has only itself to blame."""
    try:
        call(*details)
    except Exception:
        log.exception("a request's sink failed")
