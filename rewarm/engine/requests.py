"""The requests that are not over, and how they end: answered, cancelled or failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from rewarm.errors import EngineFault
from rewarm.values import Cost, Finish

from .request import Request
from .runner import Runner
from .running import Running
from .scheduler import Scheduler

log = logging.getLogger("rewarm.engine")


@dataclass
class _Open:
    request: Request
    remaining: int
    """The answers that have not ended."""
    report: Cost | None = None
    """The cost of the first choice. The others reuse its prompt."""


class Requests:
    """The open requests. The sink of each is told exactly once that it is done or has failed."""

    def __init__(self, runner: Runner, scheduler: Scheduler[Running]) -> None:
        self._runner = runner
        self._jobs = scheduler.jobs
        self._remove = scheduler.remove
        self._open: dict[int, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def has(self, running: Running) -> bool:
        """Say whether a sequence belongs to a request that is open."""
        return running.request.id in self._open

    def open(self, request: Request) -> None:
        self._open[request.id] = _Open(request, request.n)

    def sequences(self, request: int) -> list[Running]:
        """Give the sequences of a request."""
        return [s for s in self._jobs.values() if s.request.id == request]

    def leave(self, sequences: Collection[Running], reason: Finish = "cancelled") -> None:
        """Store what these sequences computed, forget them, and tell their sinks. `reason` is for
        those that have not ended yet."""
        sequences = [s for s in sequences if s.id in self._jobs]
        reports = [s.report() for s in sequences]
        for running in sequences:
            running.ended = running.ended or reason  # also if something fails below
        self._runner.leave(sequences)
        for running, report in zip(sequences, reports, strict=True):
            self._remove(running.id)
            self._end(running, report)

    def fail(self, running: Running, error: BaseException) -> None:
        """End all answers of a sequence's request with an error."""
        log.error("%s failed", running, exc_info=error)
        for each in [running, *self.sequences(running.request.id)]:
            self._runner.leave([each], keep=False)
            self._remove(each.id)
        self._fail(running.request, error)

    def restart(self, error: BaseException, *, keep: bool) -> Iterator[Running]:
        """End the sequences of a turn that failed as a whole. Returns those that start over."""
        running = list(self._jobs.values())
        for each in running:
            ran = each.lease is not None
            report = each.report()
            self._runner.leave([each], keep=False)
            self._remove(each.id)
            if each.ended is not None:
                self._end(each, report)
            elif not keep or (ran and each.isolated):
                self.fail(each, error)
            each.isolated = each.isolated or ran
        again = [each for each in running if each.ended is None and self.has(each)]
        known = {each.request.id for each in again}
        for opened in [o for number, o in self._open.items() if number not in known]:
            self._fail(opened.request, error)  # the turn ended before its sequences were there
        return iter(again)

    def _end(self, running: Running, report: Cost) -> None:
        opened = self._open.get(running.request.id)
        if opened is None:
            return
        sink = opened.request.sink
        _tell(sink.ended, running.choice, running.ended)
        opened.remaining -= 1
        if running.choice == 0 or opened.report is None:
            opened.report = report
        if not opened.remaining:
            del self._open[opened.request.id]
            _tell(sink.done, opened.report)

    def _fail(self, request: Request, error: BaseException) -> None:
        if self._open.pop(request.id, None) is not None:
            fault = EngineFault(f"the model failed on this request: {type(error).__name__}")
            _tell(request.sink.failed, fault)


def _tell(call: Callable[..., None], *details: Any) -> None:
    """Call a sink. If it raises, that is logged and changes nothing else."""
    try:
        call(*details)
    except Exception:
        log.exception("a request's sink failed")
