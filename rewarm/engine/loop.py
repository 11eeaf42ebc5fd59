"""A turn of the engine: admit, one decode step for the batch, one chunk of prefill, idle work."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from rewarm.cache.tree import encode
from rewarm.values import Sampled

from .fetching import Fetching
from .messages import Cancel, Close, Inbox, Message, Question, Submit, Warm
from .request import Request, Requests, Running, Sink
from .runner import Failed, Runner, alternatives
from .scheduler import Piece, Preparation, Scheduler

log = logging.getLogger("rewarm.engine")


@dataclass(frozen=True)
class EngineStats:
    waiting: int = 0
    prefilling: int = 0
    decoding: int = 0
    warm_waiting: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens computed for requests since the start, without warm-ahead."""
    warm_tokens: int = 0
    restarts: int = 0


class Loop:
    """The loop takes messages and does turns. Everything but `stats` runs on the engine's
    thread."""

    def __init__(self, runner: Runner, scheduler: Scheduler[Running], inbox: Inbox) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.requests = Requests(runner, scheduler)
        self._fetching = Fetching(runner.cache, scheduler, inbox)
        self._numbers = itertools.count(1)
        self._restarts = 0
        self.has_work = False
        """The last turn did something, so another one may."""

    def stats(self, messages: Sequence[Message]) -> EngineStats:
        """Count what runs, what waits, and what these messages will add. Any thread may call it: it
        reads a copy of the list of jobs, and one attribute of each."""
        jobs = list(self.scheduler.jobs.values())
        stages = [j.stage for j in jobs if not j.warm]
        posted = sum(m.request.n for m in messages if isinstance(m, Submit))
        return EngineStats(
            waiting=posted + stages.count("waiting") + stages.count("fetching"),
            prefilling=stages.count("prefilling") + stages.count("ready"),
            decoding=stages.count("decoding"),
            warm_waiting=len(jobs) - len(stages) + sum(isinstance(m, Warm) for m in messages),
            prefilled_tokens=self.runner.prefilled_tokens,
            warm_tokens=self.runner.warm_tokens,
            restarts=self._restarts,
        )

    def take(self, message: Message) -> None:
        """Carry out a message: queue, stop, or answer what it asks for."""
        match message:
            case Submit():
                self._submit(message)
            case Warm(path):
                # The last token of a prompt is computed by the first decode step. Warm-ahead has
                # no such step, so one more token is added.
                prompt = np.append(path.tokens, np.int32(0))
                request = Request(prompt, Sink(), 0, boundaries=path.boundaries, salt=path.salt)
                number = next(self._numbers)
                self._queue(Running(number, salt=path.salt, warm=True, request=request))
            case Cancel(number):
                self.requests.leave(self.requests.sequences(number))
            case Close():
                self.requests.leave(list(self.scheduler.jobs.values()))
                self._fetching.close()
            case Question(call, answer):
                if answer.set_running_or_notify_cancel():
                    try:
                        answer.set_result(call(self.runner.cache))
                    except Exception as error:
                        answer.set_exception(error)
            case _:
                self._fetching.take(message)

    def _submit(self, message: Submit) -> None:
        request = message.request
        self.requests.open(request)
        for choice in range(request.n):
            running = Running(
                next(self._numbers),
                salt=request.salt,
                request=request,
                choice=choice,
                submitted=message.at,
                # What is fetched for the first answer is then in memory for the others.
                pace=message.pace if choice == 0 else None,
            )
            if self.requests.has(running):  # none of its answers has failed
                self._queue(running)

    def _queue(self, running: Running) -> None:
        """Match a sequence's prompt, and let it wait for its turn."""
        cache, tokens, request = self.runner.cache, running.tokens, running.request
        try:
            match = cache.match(tokens, running.salt, request.boundaries, tiers=False)
        except Exception as error:
            self.requests.fail(running, error)
            return
        running.data, running.stop, running.known = encode(tokens), len(tokens) - 1, match.resume
        is_known = running.known >= running.stop
        running.nbytes = self.runner.bytes_for(len(request.tokens) + request.max_tokens)
        running.fetch = running.pace is not None and not is_known
        if not (running.warm and is_known):
            self.scheduler.add(running)

    def turn(self) -> None:
        self.has_work = False
        while self.scheduler.undecided and (first := self.scheduler.preparation()) is not None:
            self.has_work = True
            self._prepare(first)
        plan = self.scheduler.plan()
        self.has_work |= bool(plan.decode or plan.prefill)
        if plan.admit:
            self._admit(plan.admit)
        if plan.store:
            for running in self._still_running(plan.store):
                self.runner.store_answer(running)
                running.unstored = 0
        if plan.decode:
            self._decode()
        for piece in plan.prefill:
            self._prefill(piece)

    def restart(self, error: BaseException, *, keep: bool) -> None:
        """Drop everything that ran, after a turn that failed as a whole. Sequences that can start
        over do so, and the others fail. Without `keep`, all fail."""
        self._restarts += 1
        self.runner.forget_batches()
        for running in self.requests.stop(list(self.scheduler.jobs.values()), error, keep=keep):
            self._queue(running)
        self.requests.fail_lost(error)
        self.has_work = True

    def _prepare(self, first: Preparation) -> None:
        running = self.scheduler.jobs[first.id]
        try:
            match first.what:
                case "forget":
                    self.requests.leave([running])
                case "pause":
                    # What was warmed stays stored, and the rest is computed later.
                    self.runner.leave([running])
                    self.scheduler.paused(running)
                case "fetch":
                    self._fetching.begin(running)
                case "start":
                    lease = self.runner.start(running)
                    self.scheduler.started(running, lease.position, lease.cuts)
                    running.tell_progress()
                case "mark":
                    self.scheduler.marked(running, self.runner.mark(running, running.marks))
        except Exception as error:
            self.requests.fail(running, error)

    def _admit(self, ids: Iterable[int]) -> None:
        for running in self._still_running(ids):
            try:
                first = self.runner.open(running)
                self.scheduler.admitted(running)
                self._give(running, first.token, first.logprobs)
            except Exception as error:
                self.requests.fail(running, error)
                continue
            if running.ended is not None:
                self.requests.leave([running])
        for failed in self.runner.join():
            self._start_over(failed)

    def _decode(self) -> None:
        ended: list[Running] = []
        broken: list[tuple[Running, Exception]] = []
        for step in self.runner.decode():
            if isinstance(step, Failed):
                self._start_over(step)
                continue
            running = self.scheduler.jobs.get(step.id)
            if running is None:
                continue  # another answer to its request failed
            if running.ended is not None:
                running.unused += 1
                continue
            try:
                if not step.given:
                    self._give(running, step.token, step.logprobs)
            except Exception as error:
                broken.append((running, error))
                continue
            if running.ended is not None:
                ended.append(running)
            else:
                running.unstored += 1
        if ended:
            self.requests.leave(ended)
        for running, failure in broken:
            self.requests.fail(running, failure)
            failure.__traceback__ = None  # its frames would keep the arrays of this step

    def _give(self, running: Running, token: int, logprobs: mx.array) -> None:
        """Hand a token to the request's sink, and note where the answer ends with it."""
        request = running.request
        running.first_token = running.first_token or time.perf_counter()
        running.generated.append(token)
        others = request.top_logprobs
        sampled = Sampled(token) if others is None else alternatives(logprobs, token, others)
        if request.sink.token(running.choice, sampled) or token in request.end_tokens:
            running.ended = "stop"
        elif len(running.generated) >= request.max_tokens:
            running.ended = "length"

    def _prefill(self, piece: Piece) -> None:
        running = self.scheduler.jobs.get(piece.id)
        if running is None:
            return  # another answer to its request failed
        try:
            self.runner.prefill(running, piece)
            self.scheduler.computed(piece)
            running.tell_progress()
        except Exception as error:
            self.requests.fail(running, error)
            return
        # What cannot be stored is not worth computing ahead.
        if running.warm and (piece.last or running.leased.stopped_storing):
            self.requests.leave([running], "stop")

    def _still_running(self, ids: Iterable[int]) -> Iterator[Running]:
        """Give these sequences one by one, except those that end meanwhile because another answer
        to their request failed."""
        for each in ids:
            running = self.scheduler.jobs.get(each)
            if running is not None:
                yield running

    def _start_over(self, failed: Failed) -> None:
        """Start the sequences of a failed batch over, from what the tree holds of them. Each then
        decodes alone: the one that caused the failure fails alone, and the others lose nothing."""
        for running in self.requests.stop(list(self._still_running(failed.ids)), failed.error):
            log.warning("a batch failed (%s); %s starts over", failed.error, running)
            self._queue(running)
        # Its frames refer to the list that it is in, and would keep the batch alive.
        failed.error.__traceback__ = None
