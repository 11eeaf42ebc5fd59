"""The engine's requests, the sequences that it computes for them, and how both end.

They have tokens and no text: the caller converts between the two.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rewarm.cache import Lease
from rewarm.cache.tiers.fetch import Fetch
from rewarm.errors import EngineFault
from rewarm.values import Boundary, Cost, Finish, Match, Sampled, Sampling, Tokens

from .scheduler import Job, Scheduler

if TYPE_CHECKING:
    from .runner import Runner

log = logging.getLogger("rewarm.engine")


class Sink:
    """A sink takes the results of a request, on the engine's thread. Every method must return soon
    and never block. This one drops them all."""

    def fetched(self, done: int, total: int) -> None:
        """Take the number of prompt tokens that were fetched, and of all. The first call comes when
        a fetch starts, and all of them before `prefilled`."""

    def prefilled(self, done: int, total: int) -> None:
        """Take the number of prompt tokens that are ready, and of all. The first call comes when
        the prefill starts."""

    def token(self, choice: int, sampled: Sampled) -> bool:
        """Take one token of an answer, also its end-of-text token. Return True to end this
        choice."""
        return False

    def ended(self, choice: int, reason: Finish) -> None:
        """Say that this choice gets no more tokens."""

    def done(self, report: Cost) -> None:
        """Say that every choice has ended, by itself or by cancel. The last call is this one or
        `failed`."""

    def failed(self, error: Exception) -> None:
        """Say that the request cannot be answered. The last call."""


_numbers = itertools.count(1)


@dataclass(eq=False)
class Request:
    """One prompt, and options for its answers."""

    tokens: Tokens
    sink: Sink
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    """The number of answers to the prompt, which is computed once."""
    boundaries: Sequence[Boundary] = ()
    marks: Sequence[int] = ()
    """Positions of explicit checkpoints."""
    top_logprobs: int | None = None
    """The number of alternatives to report for each token; None for no logprobs at all."""
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end the answer with "stop"."""
    opening: tuple[int, ...] = ()
    """Tokens that the answer must have after its thinking, e.g. those that open a tool call."""
    opens_after: tuple[int, ...] = ()
    """The end of the thinking; empty where the answer starts with `opening`."""
    salt: str | None = None
    hint: float = 1.0
    """A value above 1 means that this prompt is likelier than others to come again."""
    name: str = ""
    """A name for the log."""
    id: int = field(default_factory=lambda: next(_numbers))
    """A unique number, by which the request is cancelled."""


@dataclass(eq=False, kw_only=True)
class Running(Job):
    """One answer to a request, or a prompt that is warmed ahead: a job with everything that is
    needed to compute it."""

    request: Request
    """Warm-ahead has a request too, which asks for no answer."""
    choice: int = 0
    submitted: float = field(default_factory=time.perf_counter)
    generated: list[int] = field(default_factory=list)
    pace: float | None = None
    """The seconds that a prompt token takes to compute; None where lower tiers are not asked."""
    fetching: Fetch | None = None
    """Its fetch from lower tiers, while it waits for that."""
    unused: int = 0
    """The tokens of its last step that came after the end of its answer."""
    lease: Lease | None = None
    admitted: bool = False
    isolated: bool = False
    """Its batch has failed. It now decodes alone, so that a second failure is its own."""
    ended: Finish | None = None
    started: float | None = None
    first_token: float | None = None
    cost: Cost | None = None
    """The cost of the first match and restore; a new start after a failure is not counted."""

    @property
    def tokens(self) -> Tokens:
        """The prompt, and what was generated after it."""
        if not self.generated:
            return self.request.tokens
        return np.concatenate([self.request.tokens, np.asarray(self.generated, np.int32)])

    @property
    def leased(self) -> Lease:
        if self.lease is None:
            raise RuntimeError(f"sequence {self.id} has no lease")
        return self.lease

    def tell_progress(self) -> None:
        """Tell the request's sink how many of the prompt's tokens are in its caches, or have been
        fetched for them."""
        sink, total = self.request.sink, len(self.request.tokens)
        if self.generated or self.choice:
            return
        if self.lease is not None:
            sink.prefilled(self.lease.position, total)
        elif self.fetching is not None:
            progress = self.fetching.progress
            sink.fetched(self.fetching.tokens * progress.done // max(progress.total, 1), total)

    def stop_fetching(self) -> None:
        if self.fetching is not None:
            self.fetching.cancel()
            self.fetching = None

    def report(self) -> Cost:
        """Give the cost so far."""
        now = time.perf_counter()
        started, first_token = self.started or now, self.first_token or now
        cost = self.cost or Cost(Match(len(self.request.tokens)))
        position = self.lease.position if self.lease is not None else 0
        computed = cost.match.tokens if self.admitted else max(position, cost.match.resume)
        ran_ms = (first_token - started) * 1e3
        return replace(
            cost,
            prefilled=computed - cost.match.resume,
            queued_ms=(started - self.submitted) * 1e3,
            prefill_ms=max(ran_ms - cost.match_ms - cost.restore_ms, 0.0),
            ttft_ms=(first_token - self.submitted) * 1e3,
        )

    def __str__(self) -> str:
        return "warm-ahead" if self.warm else f"request {self.request.name or self.id}"


class Requests:
    """The open requests. The sink of each is told exactly once that it is done or has failed."""

    def __init__(self, runner: Runner, scheduler: Scheduler[Running]) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._open: dict[Request, dict[int, Cost]] = {}
        """Each open request, with the costs of its choices that have ended."""

    def __len__(self) -> int:
        return len(self._open)

    def has(self, running: Running) -> bool:
        """Say whether a sequence belongs to a request that is open."""
        return running.request in self._open

    def open(self, request: Request) -> None:
        self._open[request] = {}

    def sequences(self, request: int) -> list[Running]:
        """Give the sequences of a request."""
        return [s for s in self._scheduler.jobs.values() if s.request.id == request]

    def leave(self, sequences: Collection[Running], reason: Finish = "cancelled") -> None:
        """Store what these sequences computed, forget them, and tell their sinks. `reason` is for
        those that have not ended yet."""
        sequences = [s for s in sequences if s.id in self._scheduler.jobs]
        costs = [s.report() for s in sequences]
        for running in sequences:
            running.ended = running.ended or reason  # also if something fails below
        self._runner.leave(sequences)
        for running, cost in zip(sequences, costs, strict=True):
            self._scheduler.remove(running)
            self._end(running, cost)

    def fail(self, running: Running, error: BaseException) -> None:
        """End all answers of a sequence's request with an error."""
        log.error("%s failed", running, exc_info=error)
        for each in [running, *self.sequences(running.request.id)]:
            self._runner.leave([each], keep=False)
            self._scheduler.remove(each)
        self._fail(running.request, error)

    def stop(
        self, sequences: Sequence[Running], error: BaseException, *, keep: bool = True
    ) -> list[Running]:
        """Take out the sequences of a batch or a turn that failed. Returns those that start over. A
        sequence with its whole answer ends. One that was alone already fails with the error.
        Without `keep`, all the others do, too."""
        for each in sequences:
            ran = each.lease is not None
            cost = each.report()
            self._runner.leave([each], keep=False)
            self._scheduler.remove(each)
            if each.ended is not None:
                self._end(each, cost)
            elif not keep or (ran and each.isolated):
                self.fail(each, error)
            each.isolated = each.isolated or ran
        return [each for each in sequences if each.ended is None and self.has(each)]

    def fail_lost(self, error: BaseException) -> None:
        """End the requests that have no sequences: a turn ended before they were there."""
        for request in self._open.keys() - {s.request for s in self._scheduler.jobs.values()}:
            self._fail(request, error)

    def _end(self, running: Running, cost: Cost) -> None:
        request = running.request
        costs = self._open.get(request)
        if costs is None:
            return
        _tell(request.sink.ended, running.choice, running.ended)
        costs[running.choice] = cost
        if len(costs) == request.n:
            del self._open[request]
            _tell(request.sink.done, costs[0])  # the other choices reused its prompt

    def _fail(self, request: Request, error: BaseException) -> None:
        if self._open.pop(request, None) is not None:
            fault = EngineFault(f"the model failed on this request: {type(error).__name__}")
            _tell(request.sink.failed, fault)


def _tell(call: Callable[..., None], *details: Any) -> None:
    """Call a sink. If it raises, that is logged and changes nothing else."""
    try:
        call(*details)
    except Exception:
        log.exception("a request's sink failed")
