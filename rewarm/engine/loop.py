"""A turn of the engine: admit, one decode step for the batch, one chunk of prefill, idle work."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import mlx.core as mx
import numpy as np

from rewarm.cache.tiers.fetch import Fetch
from rewarm.cache.tree import encode
from rewarm.errors import EngineFault
from rewarm.values import Cost, Finish, Sampled

from .messages import (
    Cancel,
    Clear,
    Close,
    Explain,
    Fetched,
    FetchLate,
    FetchMoved,
    FindMatch,
    MarkIdle,
    Message,
    Resize,
    Submit,
    Warm,
)
from .runner import Runner, alternatives
from .running import Running
from .scheduler import Job, Piece, Preparation, Scheduler

log = logging.getLogger("rewarm.engine")


TELL_EVERY = 0.25
"""Seconds between two times that a client is told how far a fetch is."""

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


class Post(Protocol):
    def __call__(self, message: Message, at: float | None = None, /) -> None:
        """Leave a message; `at`: by `time.monotonic`, when it becomes due."""


class Loop:
    """What waits and what runs, and the turns that bring it on. All on the engine's thread."""

    def __init__(self, runner: Runner, scheduler: Scheduler, post: Post) -> None:
        """`post` leaves a message for a later turn, from any thread."""
        self.runner = runner
        self.scheduler = scheduler
        self.running: dict[int, Running] = {}
        self.stats = EngineStats()
        """As of the last turn, or the last answer that ended: replaced, never changed."""
        self._open: dict[int, _Open] = {}
        self._numbers = itertools.count(1)
        self._again: list[Running] = []
        """Those that start over after a turn that failed."""
        self._post = post
        self._late: dict[int, Fetch] = {}
        """Fetches that nobody waits for any more, by the sequence that did."""
        self._busy = False
        """The last turn did something, so another one may."""

    @property
    def has_requests(self) -> bool:
        return bool(self._open)

    @property
    def has_work(self) -> bool:
        return self._busy or bool(self._again)

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
                self._leave(mates)
            case Close():
                self._leave(list(self.running.values()))
                for fetch in self._late.values():
                    fetch.cancel()
            case Fetched(number, came):
                self._take_in(number, came)
            case FetchLate(number):
                self._compute_instead(number)
            case FetchMoved(number):
                if self._is_fetching(number):
                    self._progress(self.running[number])
                    self._post(message, time.monotonic() + TELL_EVERY)
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
                # The other answers find what the first one's prompt left in memory.
                pace=message.pace if choice == 0 else None,
            )
            if request.id in self._open:  # none of its answers has failed
                self._add(running)

    def _add(self, running: Running) -> None:
        """Queue a sequence that is to be computed."""
        self.running[running.id] = running
        tokens = running.tokens
        try:
            match = self.runner.cache.match(tokens, running.salt, running.boundaries, tiers=False)
        except Exception as error:
            self.fail(running, error)
            return
        if running.warm and match.resume >= len(tokens) - 1:
            del self.running[running.id]
            return
        self.scheduler.add(
            Job(
                id=running.id,
                data=encode(tokens),
                stop=len(tokens) - 1,
                known=match.resume,
                salt=running.salt,
                nbytes=self.runner.bytes_for(len(running.prompt) + running.max_tokens),
                warm=running.warm,
                fetch=running.pace is not None and match.resume < len(tokens) - 1,
            )
        )

    def turn(self) -> None:
        again, self._again = self._again, []
        for running in again:
            if running.request is None or running.request.id in self._open:
                self._add(running)
        self._busy = bool(again)
        while (first := self.scheduler.preparation()) is not None:
            self._busy = True
            self._prepare(first)
        plan = self.scheduler.plan()
        self._busy |= bool(plan)
        self._admit(plan.admit)
        for each in plan.store:
            self.runner.store_answer(self.running[each])
            self.scheduler.stored(each)
        if plan.decode:
            self._decode()
        for piece in plan.prefill:
            self._prefill(piece)
        self._publish()

    def restart(self, error: BaseException, *, keep: bool) -> None:
        """Begin anew with nothing, after a turn that failed as a whole. Whoever can start over
        does so in the next turn; the rest has failed, everything where not `keep`."""
        self.runner = self.runner.renewed()
        self.scheduler = self.scheduler.renewed()
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
            waiting=stages.count("waiting") + stages.count("fetching") + len(self._again),
            prefilling=stages.count("prefilling") + stages.count("ready"),
            decoding=stages.count("decoding"),
            warm_waiting=len(jobs) - len(stages),
            prefilled_tokens=self.runner.prefilled_tokens,
            warm_tokens=self.runner.warm_tokens,
            restarts=self.stats.restarts,
        )

    def _prepare(self, first: Preparation) -> None:
        running = self.running[first.id]
        try:
            match first.what:
                case "forget":
                    self._leave([running])
                case "pause":
                    self._pause(running)
                case "fetch":
                    self._fetch(running)
                case "start":
                    one_pass = self.runner.start(running)
                    lease = running.leased
                    self.scheduler.started(running.id, lease.position, lease.cuts, one_pass)
                    self._progress(running)
                case "mark":
                    marks = self.scheduler.jobs[running.id].marks
                    self.scheduler.marked(running.id, self.runner.mark(running, marks))
        except Exception as error:
            self.fail(running, error)

    def _admit(self, ids: Iterable[int]) -> None:
        for each in ids:
            running = self.running.get(each)
            if running is None:
                continue  # another answer to its request failed
            try:
                first = self.runner.open(running)
                self.scheduler.admitted(each)
                running.ended = self._give(running, first.token, first.logprobs)
            except Exception as error:
                self.fail(running, error)
                continue
            if running.ended is not None:
                self._leave([running])
        for failed in self.runner.join():
            self._start_over(*failed)

    def _decode(self) -> None:
        decoded = self.runner.decode()
        for failed in decoded.failed:
            self._start_over(*failed)
        ended: list[Running] = []
        broken: list[tuple[Running, Exception]] = []
        for step in decoded.steps:
            running = self.running.get(step.id)
            if running is None:
                continue  # another answer to its request failed
            if running.ended is not None:
                running.unused += 1
                continue
            try:
                if not step.given:
                    running.ended = self._give(running, step.token, step.logprobs)
            except Exception as error:
                broken.append((running, error))
                continue
            if running.ended is not None:
                ended.append(running)
            else:
                self.scheduler.decoded(running.id)
        self._leave(ended)
        for running, failure in broken:
            self.fail(running, failure)
            failure.__traceback__ = None  # its frames would keep the arrays of this step

    def _give(self, running: Running, token: int, logprobs: mx.array) -> Finish | None:
        """Hand a token to whoever asked for it; says whether the answer ends with it."""
        request = running.requested
        running.give(token)
        if request.top_logprobs is None:
            sampled = Sampled(token)
        else:
            sampled = alternatives(logprobs, token, request.top_logprobs)
        if request.sink.token(running.choice, sampled) or token in request.end_tokens:
            return "stop"
        return "length" if len(running.generated) >= running.max_tokens else None

    def _prefill(self, piece: Piece) -> None:
        running = self.running.get(piece.id)
        if running is None:
            return  # another answer to its request failed
        try:
            self.runner.prefill(running, piece)
            self.scheduler.computed(piece)
            self._progress(running)
        except Exception as error:
            self.fail(running, error)
            return
        # What cannot be stored is not worth computing ahead.
        if running.warm and (piece.last or running.leased.stopped_storing):
            self._leave([running], "stop")

    def _progress(self, running: Running) -> None:
        """Tell how far a prompt is."""
        if running.request is not None and not running.generated and running.choice == 0:
            running.request.sink.prefilled(running.position, len(running.prompt))

    def _fetch(self, running: Running) -> None:
        """Ask lower tiers for a prompt, as long as that may be faster than computing it."""
        number, pace = running.id, running.pace or 0.0
        job = self.scheduler.jobs[number]

        def late_after(tokens: int) -> None:
            self._post(FetchLate(number), time.monotonic() + tokens * pace)

        def worth(tokens: int, nbytes: int) -> bool:
            late_after(tokens)  # now it is known how many they are
            return True

        running.pace = None  # once is enough
        fetch = self.runner.cache.fetch(
            running.tokens, running.salt, running.boundaries, worth=worth
        )
        running.fetch = fetch
        self.scheduler.fetching(number)
        self._progress(running)
        late_after(job.stop - job.known)
        self._post(FetchMoved(number), time.monotonic() + TELL_EVERY)
        fetch.on_done(lambda f: self._post(Fetched(number, f.future.result() and f.tokens > 0)))

    def _is_fetching(self, number: int) -> bool:
        job = self.scheduler.jobs.get(number)
        return job is not None and job.stage == "fetching"

    def _take_in(self, number: int, came: bool) -> None:
        """A fetch is over."""
        late = self._late.pop(number, None)
        if late is not None:
            if came:
                _try(lambda: self.runner.cache.take_in(late))
        elif self._is_fetching(number):
            running = self.running[number]
            fetch = running.fetch
            known = fetch.tokens if came and fetch is not None and fetch.future.result() else 0
            if not known:
                running.stop_fetching()
            self.scheduler.fetched(number, known)

    def _compute_instead(self, number: int) -> None:
        if self._is_fetching(number):
            running = self.running[number]
            if running.fetch is not None:
                self._late[number], running.fetch = running.fetch, None
            self.scheduler.fetched(number)

    def _pause(self, running: Running) -> None:
        """A request goes first. What was warmed stays, and the rest is begun again later."""
        self.runner.leave([running])
        job = self.scheduler.jobs[running.id]
        self.scheduler.back(job.id, job.data, job.stop, job.position)

    def _leave(self, sequences: Collection[Running], reason: Finish = "cancelled") -> None:
        """These are done: store, forget, and tell. `reason`: of those that have not ended yet."""
        sequences = [s for s in sequences if s.id in self.running]
        reports = [s.report() for s in sequences]
        for running in sequences:
            running.ended = running.ended or reason  # whatever fails from here on
        self.runner.leave(sequences)
        for running, report in zip(sequences, reports, strict=True):
            self.running.pop(running.id, None)
            self.scheduler.remove(running.id)
            self._end(running, report)

    def _end(self, running: Running, report: Cost) -> None:
        request, reason = running.request, running.ended
        if request is None or request.id not in self._open:
            return
        _tell(request.sink.ended, running.choice, reason)
        still = self._open[request.id]
        still.remaining -= 1
        if running.choice == 0 or still.report is None:
            still.report = report
        if not still.remaining:
            del self._open[request.id]
            self._publish()
            _tell(request.sink.done, still.report)

    def _start_over(self, ids: Iterable[int], error: Exception) -> None:
        """A batch failed. Its sequences go back to what the tree holds of them and decode alone
        from there: whoever caused it fails alone then, and the others lose nothing."""
        for each in ids:
            running = self.running.get(each)
            if running is None:
                continue
            if running.isolated:
                self.fail(running, error)
                continue
            log.warning("a batch failed (%s); %s starts over", error, running)
            running.isolated = True
            self.runner.leave([running], keep=False)
            tokens = running.tokens
            self.scheduler.back(each, encode(tokens), len(tokens) - 1, 0)
        # Its frames refer to the list that it is in, and would keep the batch alive.
        error.__traceback__ = None

    def fail(self, running: Running, error: BaseException) -> None:
        """An error belongs to its request, and ends all of it."""
        log.error("%s failed", running, exc_info=error)
        request = running.request
        mates = [s for s in self.running.values() if request and s.request is request]
        for each in mates or [running]:
            self._drop(each)
        if request is not None and self._open.pop(request.id, None) is not None:
            fault = EngineFault(f"the model failed on this request: {type(error).__name__}")
            _tell(request.sink.failed, fault)

    def _drop(self, running: Running) -> None:
        """Forget a sequence, and store nothing more of it."""
        self.runner.leave([running], keep=False)
        self.running.pop(running.id, None)
        self.scheduler.remove(running.id)


def _tell(call: Callable[..., None], *details: Any) -> None:
    """A sink that fails has only itself to blame."""
    try:
        call(*details)
    except Exception:
        log.exception("a request's sink failed")


def _try(do: Callable[[], object]) -> None:
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
