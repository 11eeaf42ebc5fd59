"""What the server is doing and did lately. Lives on the event loop; every store here is bounded."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..exchange import Exchange
from ..usage import miss_object, replayed
from .hottest import Hottest

RECENT = 64
FIRST_TOKENS = 512
"""Requests whose time to first token is remembered."""
STEP = 10
"""Seconds of a slot of the history."""
SLOTS = 90
SLOT_TIMES = 32

Stage = Literal["waiting", "prefilling", "decoding"]


@dataclass(frozen=True)
class Finished:
    """A request that is over."""

    number: int
    id: str
    salt: str | None
    ended: float
    endpoint: str
    status: int
    prompt_tokens: int
    cached_tokens: int
    replayed_tokens: int
    prefilled_tokens: int
    completion_tokens: int
    ttft_ms: float | None
    total_ms: float
    miss: dict[str, Any] | None


@dataclass
class Slot:
    """A few seconds of the history."""

    at: int
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_tokens: list[float] = field(default_factory=list)


class Activity:
    """Requests in flight, the last ones, a short history, and the prefixes that were hit most."""

    def __init__(self) -> None:
        self.started = time.time()
        self.running: dict[int, Exchange] = {}
        self.recent: deque[Finished] = deque(maxlen=RECENT)
        self.first_tokens: deque[float] = deque(maxlen=FIRST_TOKENS)
        self.history: deque[Slot] = deque(maxlen=SLOTS)
        self.total = Slot(0)
        self.replayed_tokens = 0
        self.hottest = Hottest()
        self._numbers = itertools.count(1)
        self._number_of: dict[Exchange, int] = {}

    def began(self, exchange: Exchange) -> None:
        number = next(self._numbers)
        self.running[number] = exchange
        self._number_of[exchange] = number

    def ended(self, exchange: Exchange, status: int) -> None:
        number = self._number_of.pop(exchange, None)
        if number is None or exchange.work is None:
            return
        del self.running[number]
        runs = exchange.work.runs
        reports = [run.report for run in runs if run.report is not None]
        completion = sum(choice.tokens for run in runs for choice in run.choices)
        ttft = reports[0].ttft_ms if reports and completion else None
        done = Finished(
            number=number,
            id=exchange.id,
            salt=exchange.salt,
            ended=time.time(),
            endpoint=exchange.endpoint,
            status=status,
            prompt_tokens=sum(r.match.tokens for r in reports),
            cached_tokens=sum(r.match.resume for r in reports),
            replayed_tokens=sum(replayed(r) for r in reports),
            prefilled_tokens=sum(r.prefilled for r in reports),
            completion_tokens=completion,
            ttft_ms=ttft,
            total_ms=(time.monotonic() - exchange.began) * 1e3,
            miss=miss_object(runs),
        )
        self.recent.append(done)
        self._count(done)
        for run in runs:
            self.hottest.resumed(run)

    def hit_rate(self, seconds: float) -> float | None:
        """Of the prompt tokens of the last so many seconds, the share that was not computed."""
        since = time.time() - seconds
        slots = [slot for slot in self.history if slot.at + STEP > since]
        return share(
            sum(slot.cached_tokens for slot in slots), sum(slot.prompt_tokens for slot in slots)
        )

    def _count(self, done: Finished) -> None:
        at = int(done.ended) // STEP * STEP
        if not self.history or self.history[-1].at < at:
            self.history.append(Slot(at))
        for slot in (self.history[-1], self.total):
            slot.requests += 1
            slot.prompt_tokens += done.prompt_tokens
            slot.cached_tokens += done.cached_tokens
            slot.generated_tokens += done.completion_tokens
        self.replayed_tokens += done.replayed_tokens
        if done.ttft_ms is not None:
            self.first_tokens.append(done.ttft_ms)
            times = self.history[-1].first_tokens
            if len(times) < SLOT_TIMES:
                times.append(done.ttft_ms)


def stage_of(exchange: Exchange) -> Stage:
    runs = exchange.work.runs if exchange.work is not None else []
    if any(choice.tokens for run in runs for choice in run.choices):
        return "decoding"
    return "prefilling" if any(run.collector.resumed is not None for run in runs) else "waiting"


def share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def percentile(times: Sequence[float], percent: float) -> float | None:
    """The smallest time that at least so many percent of them do not exceed."""
    if not times:
        return None
    ranked = sorted(times)
    index = max(0, -(-len(ranked) * percent // 100) - 1)
    return round(ranked[int(index)], 3)
