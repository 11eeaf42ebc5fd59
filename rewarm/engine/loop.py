"""A turn of the engine: admit, one decode step for the batch, one chunk of prefill, idle work."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from rewarm.cache.tree import encode
from rewarm.errors import EngineFault
from rewarm.values import Cost, Finish, Sampled

from .messages import (
    Cancel,
    Clear,
    Close,
    Explain,
    FindMatch,
    MarkIdle,
    Message,
    Resize,
    Submit,
    Warm,
)
from .runner import Runner, alternatives
from .running import Running
from .scheduler import Job, Scheduler

log = logging.getLogger("rewarm.engine")

MOST_WARM = 64
"""Warm-ahead that waits; beyond it the oldest is forgotten."""


T = TypeVar("T")


@dataclass(frozen=True)
class EngineStats:
    waiting: int = 0
    prefilling: int = 0
    decoding: int = 0
    warm_waiting: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens computed for requests since the start; warm-ahead apart."""
    warm_tokens: int = 0
    restarts: int = 0

    def expecting(self, messages: Sequence[Message]) -> EngineStats:
        """The same, with what is about to be taken."""
        if not messages:
            return self
        answers = sum(m.request.n for m in messages if isinstance(m, Submit))
        warm = sum(isinstance(m, Warm) for m in messages)
        return replace(self, waiting=self.waiting + answers, warm_waiting=self.warm_waiting + warm)


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
        self.running: dict[int, Running] = {}
        self.stats = EngineStats()
        """As of the last turn, or the last answer that ended: replaced, never changed."""
        self._open: dict[int, _Open] = {}
        self._numbers = itertools.count(1)
        self._again: list[Running] = []
        """Those that start over after a turn that failed."""

    @property
    def has_requests(self) -> bool:
        return bool(self._open)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._again)

    def take(self, message: Message) -> None:
        """Note what somebody wants."""
        cache = self.runner.cache
        match message:
            case Submit():
                self._add_answers(message)
            case Warm(path):
                # The last token of a prompt is left to its first step; here that is nobody's.
                prompt = np.append(path.tokens, np.int32(0))
                boundaries = tuple(path.boundaries)
                number = next(self._numbers)
                self._add(Running(number, prompt, boundaries=boundaries, salt=path.salt))
            case Cancel(request):
                mates = [s for s in self.running.values() if s.request and s.request.id == request]
                self._leave(mates, "cancelled")
            case Close():
                self._leave(list(self.running.values()), "cancelled")
            case MarkIdle(path):
                _try(lambda: cache.mark_idle(path.tokens, path.salt, path.boundaries))
            case FindMatch(path):
                _answer(
                    message.answer, lambda: cache.match(path.tokens, path.salt, path.boundaries)
                )
            case Explain(path):
                others = message.other_salts
                _answer(
                    message.answer,
                    lambda: cache.miss(path.tokens, path.salt, path.boundaries, other_salts=others),
                )
            case Clear(give_back):
                _answer(message.answer, lambda: cache.clear(give_back=give_back))
            case Resize(nbytes):
                _answer(message.answer, lambda: cache.resize(nbytes))

    def _add_answers(self, message: Submit) -> None:
        request = message.request
        self._open[request.id] = _Open(request.n)
        for choice in range(request.n):
            running = Running(
                next(self._numbers),
                request.tokens,
                request,
                choice,
                boundaries=tuple(request.boundaries),
                marks=tuple(request.marks),
                salt=request.salt,
                max_tokens=request.max_tokens,
                submitted=message.at,
            )
            if request.id in self._open:  # none of its answers has failed
                self._add(running)

    def _add(self, running: Running) -> None:
        """Queue a sequence that is to be computed."""
        self.running[running.id] = running
        tokens = running.tokens
        try:
            match = self.runner.cache.match(tokens, running.salt, running.boundaries)
        except Exception as error:
            self.fail(running, error)
            return
        if running.warm:
            if match.resume >= len(tokens) - 1:
                del self.running[running.id]
                return
            self._forget_old_warm_ahead()
        self.scheduler.add(
            Job(
                id=running.id,
                data=encode(tokens),
                stop=len(tokens) - 1,
                known=match.resume,
                salt=running.salt,
                nbytes=self.runner.bytes_for(len(running.prompt) + running.max_tokens),
                warm=running.warm,
            )
        )

    def turn(self) -> None:
        again, self._again = self._again, []
        for running in again:
            if running.request is None or running.request.id in self._open:
                self._add(running)
        plan = self.scheduler.plan()
        self._admit(plan.admit)
        if plan.decode:
            self._decode()
        if plan.pause is not None:
            self._pause(plan.pause)
        # Short prompts, and short pieces between two checkpoints, share the time of one chunk.
        left = self.runner.cache.chunk
        chosen = plan.prefill
        while chosen in self.running:
            took = self._prefill(self.running[chosen], left)
            if not took:
                break
            left -= took
            chosen = self.scheduler.plan().prefill
        self._publish()

    def restart(self, error: BaseException, *, keep: bool) -> None:
        """Begin anew with nothing, after a turn that failed as a whole. Whoever can start over
        does so in the next turn; the rest has failed, everything where not `keep`."""
        self.runner = self.runner.renewed()
        self.scheduler = Scheduler(self.scheduler.max_batch, self.scheduler.room)
        self.stats = replace(self.stats, restarts=self.stats.restarts + 1)
        all_running, self.running = [*self.running.values(), *self._again], {}
        for running in all_running:
            ran = running.lease is not None
            report = running.report()
            self.runner.leave([running], keep=False)
            if running.ended is not None:
                self._end(running, report)
            elif not keep or (ran and running.isolated):
                self.fail(running, error)
            running.isolated = running.isolated or ran
        self._again = [
            r for r in all_running if r.ended is None and r.request and r.request.id in self._open
        ]
        self._publish()

    def _publish(self) -> None:
        jobs = self.scheduler.jobs.values()
        stages = [j.stage for j in jobs if not j.warm]
        self.stats = EngineStats(
            waiting=stages.count("waiting") + len(self._again),
            prefilling=stages.count("prefilling") + stages.count("ready"),
            decoding=stages.count("decoding"),
            warm_waiting=len(jobs) - len(stages),
            prefilled_tokens=self.runner.prefilled_tokens,
            warm_tokens=self.runner.warm_tokens,
            restarts=self.stats.restarts,
        )

    def _admit(self, ids: Iterable[int]) -> None:
        for each in ids:
            sequence = self.running.get(each)
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
        ended: dict[Finish, list[Running]] = {"stop": [], "length": []}
        for step in decoded.steps:
            sequence = self.running.get(step.id)
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

    def _give(self, sequence: Running, token: int, logprobs: mx.array) -> Finish | None:
        """Hand a token to whoever asked for it; says whether the answer ends with it."""
        request = sequence.requested
        sequence.give(token)
        if request.top_logprobs is None:
            sampled = Sampled(token)
        else:
            sampled = alternatives(logprobs, token, request.top_logprobs)
        if request.sink.token(sequence.choice, sampled) or token in request.end_tokens:
            return "stop"
        return "length" if len(sequence.generated) >= sequence.max_tokens else None

    def _prefill(self, sequence: Running, most: int) -> int:
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

    def _moved(self, sequence: Running) -> None:
        position = sequence.position
        self.scheduler.moved(sequence.id, position, "prefilling")
        if sequence.request is not None and not sequence.generated and sequence.choice == 0:
            sequence.request.sink.prefilled(position, len(sequence.prompt))

    def _pause(self, warm: int) -> None:
        """A request goes first. What was warmed stays, and the rest is begun again later."""
        sequence = self.running[warm]
        self.runner.leave([sequence])
        job = self.scheduler.jobs[warm]
        self.scheduler.back(warm, job.data, job.stop, job.position)

    def _leave(self, sequences: Collection[Running], reason: Finish) -> None:
        """These are done: store, forget, and tell."""
        sequences = [s for s in sequences if s.id in self.running]
        reports = [s.report() for s in sequences]
        for sequence in sequences:
            sequence.ended = reason  # whatever fails from here on
        self.runner.leave(sequences)
        for sequence, report in zip(sequences, reports, strict=True):
            self.running.pop(sequence.id, None)
            self.scheduler.remove(sequence.id)
            self._end(sequence, report)

    def _end(self, sequence: Running, report: Cost) -> None:
        request, reason = sequence.request, sequence.ended
        if request is None or request.id not in self._open:
            return
        _tell(request.sink.ended, sequence.choice, reason)
        still = self._open[request.id]
        still.remaining -= 1
        if sequence.choice == 0 or still.report is None:
            still.report = report
        if not still.remaining:
            del self._open[request.id]
            self._publish()
            _tell(request.sink.done, still.report)

    def _start_over(self, ids: Iterable[int], error: Exception) -> None:
        """A batch failed. Its sequences go back to what the tree holds of them and decode alone
        from there: whoever caused it fails alone then, and the others lose nothing."""
        for each in ids:
            sequence = self.running.get(each)
            if sequence is None:
                continue
            if sequence.isolated:
                self.fail(sequence, error)
                continue
            log.warning("a batch failed (%s); %s starts over", error, sequence)
            sequence.isolated = True
            self.runner.leave([sequence], keep=False)
            tokens = sequence.tokens
            self.scheduler.back(each, encode(tokens), len(tokens) - 1, 0)
        # Its frames refer to the list that it is in, and would keep the batch alive.
        error.__traceback__ = None

    def fail(self, sequence: Running, error: BaseException) -> None:
        """An error belongs to its request, and ends all of it."""
        log.error("%s failed", sequence, exc_info=error)
        request = sequence.request
        mates = [s for s in self.running.values() if request and s.request is request]
        for each in mates or [sequence]:
            self._drop(each)
        if request is not None and self._open.pop(request.id, None) is not None:
            fault = EngineFault(f"the model failed on this request: {type(error).__name__}")
            _tell(request.sink.failed, fault)

    def _drop(self, sequence: Running) -> None:
        """Forget a sequence, and store nothing more of it."""
        self.runner.leave([sequence], keep=False)
        self.running.pop(sequence.id, None)
        self.scheduler.remove(sequence.id)

    def _forget_old_warm_ahead(self) -> None:
        waiting = [s for s in self.running.values() if s.warm]
        if len(waiting) >= MOST_WARM:
            self._leave(waiting[:1], "cancelled")


def _tell(call: Callable[..., None], *details: Any) -> None:
    """A sink that fails has only itself to blame."""
    try:
        call(*details)
    except Exception:
        log.exception("a request's sink failed")


def _try(do: Callable[[], None]) -> None:
    """A hint that cannot be taken costs nobody anything."""
    try:
        do()
    except Exception:
        log.debug("a hint could not be taken", exc_info=True)


def _answer(answer: Future[T], do: Callable[[], T]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(do())
    except Exception as error:
        answer.set_exception(error)
