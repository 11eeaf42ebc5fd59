"""The requests that run and that ran lately, and the prefixes that requests resumed from most.

`Activity` lives on the event loop; every store here is bounded."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import xxhash

from rewarm.cache import PrefixCache
from rewarm.generate.generation import Run
from rewarm.values import Boundary, Tokens

from ..dialect import cached_tokens, miss_object
from ..exchange import Exchange

RECENT = 64
FIRST_TOKENS = 512
"""Requests whose time to first token is remembered."""
STEP = 10
"""Seconds of a moment of the history."""
MOMENTS = 90
MOMENT_TIMES = 32

HOTTEST = 128
HOTTEST_TOKENS = 1_000_000
"""A limit for all of them together: 4 MB."""
LABEL_TOKENS = 48
LABEL = 36
"""Characters of each end of a label."""


Stage = Literal["waiting", "prefilling", "decoding"]


@dataclass(frozen=True)
class Finished:
    """A request that is over."""

    salt: str | None
    shown: dict[str, Any]
    """The request as its own tenant sees it."""

    def shown_to(self, salt: str | None) -> dict[str, Any]:
        if self.salt == salt:
            return self.shown
        miss = self.shown["miss"]
        reason = {"reason": miss["reason"]} if miss is not None else None
        return {**self.shown, "own": False, "id": None, "miss": reason}


@dataclass
class Moment:
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
        self.history: deque[Moment] = deque(maxlen=MOMENTS)
        self.total = Moment(0)
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
        work = exchange.work
        costs = work.costs
        completion = sum(choice.tokens for choice in work.choices)
        now = time.time()
        shown = {
            "number": number,
            "own": True,
            "id": exchange.id,
            "ended": round(now, 3),
            "endpoint": exchange.endpoint,
            "status": status,
            "prompt_tokens": sum(cost.match.tokens for cost in costs),
            "cached_tokens": cached_tokens(work),
            "replayed_tokens": sum(cost.replayed for cost in costs),
            "prefilled_tokens": sum(cost.prefilled for cost in costs),
            "completion_tokens": completion,
            "ttft_ms": round(costs[0].ttft_ms, 3) if costs and completion else None,
            "total_ms": round((time.monotonic() - exchange.began) * 1e3, 3),
            "miss": miss_object(work),
        }
        self.recent.append(Finished(exchange.salt, shown))
        self._count(shown, int(now))
        for run in work.runs:
            self.hottest.resumed(run, exchange.salt)

    def hit_rate(self, seconds: float) -> float | None:
        """The share of the last seconds' prompt tokens that was not computed."""
        since = time.time() - seconds
        recent = [moment for moment in self.history if moment.at + STEP > since]
        return share(sum(m.cached_tokens for m in recent), sum(m.prompt_tokens for m in recent))

    def _count(self, shown: dict[str, Any], now: int) -> None:
        at = now // STEP * STEP
        if not self.history or self.history[-1].at < at:
            self.history.append(Moment(at))
        for moment in (self.history[-1], self.total):
            moment.requests += 1
            moment.prompt_tokens += shown["prompt_tokens"]
            moment.cached_tokens += shown["cached_tokens"]
            moment.generated_tokens += shown["completion_tokens"]
        self.replayed_tokens += shown["replayed_tokens"]
        if shown["ttft_ms"] is not None:
            self.first_tokens.append(shown["ttft_ms"])
            times = self.history[-1].first_tokens
            if len(times) < MOMENT_TIMES:
                times.append(shown["ttft_ms"])


def stage_of(exchange: Exchange) -> Stage:
    work = exchange.work
    if work is None or not work.runs:
        return "waiting"
    if any(choice.tokens for choice in work.choices):
        return "decoding"
    return "prefilling" if any(run.resumed is not None for run in work.runs) else "waiting"


def share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def percentile(times: Sequence[float], percent: float) -> float | None:
    """The smallest time that at least so many percent of them do not exceed."""
    if not times:
        return None
    ranked = sorted(times)
    index = max(0, -(-len(ranked) * percent // 100) - 1)
    return round(ranked[int(index)], 3)


@dataclass
class Prefix:
    """A prefix that requests resumed from."""

    salt: str | None
    prompt: Tokens
    """One token more than the prefix: a prompt that would resume at its end."""
    boundaries: Sequence[Boundary]
    kind: str | None
    hits: int = 0
    nbytes: int = 0
    used: float = 0.0
    tier: str | None = None
    """The tier that had it when it was last looked for."""
    _label: str | None = None

    @property
    def tokens(self) -> int:
        return len(self.prompt) - 1

    def label(self, tokenizer: Any) -> str:
        """Its first and its last words."""
        if self._label is None:
            prefix = self.prompt[:-1]
            begins, ends = (
                " ".join(str(tokenizer.decode(part, skip_special_tokens=True)).split())
                for part in (prefix[:LABEL_TOKENS].tolist(), prefix[-LABEL_TOKENS:].tolist())
            )
            short = self.tokens <= LABEL_TOKENS
            self._label = ends[:LABEL] if short else f"{begins[:LABEL]} … {ends[-LABEL:]}"
        return self._label


class Hottest:
    """Bounded in number and in size. Safe to use from several threads."""

    def __init__(self, most: int = HOTTEST, most_tokens: int = HOTTEST_TOKENS) -> None:
        self._most, self._most_tokens = most, most_tokens
        self._prefixes: OrderedDict[tuple[str | None, int], Prefix] = OrderedDict()
        self._tokens = 0
        self._lock = threading.Lock()

    def resumed(self, run: Run, salt: str | None) -> None:
        """A request went on from what was stored."""
        cost = run.cost
        if cost is None or not cost.match.resume:
            return
        at = cost.match.resume
        key = (salt, xxhash.xxh3_64_intdigest(run.prompt.tokens[:at].tobytes()))
        with self._lock:
            prefix = self._prefixes.get(key)
            if prefix is None:
                prompt = run.prompt.tokens[: at + 1].copy()
                boundaries = [b for b in run.prompt.boundaries if b.position <= at]
                prefix = self._prefixes[key] = Prefix(salt, prompt, boundaries, cost.resumed_at)
                self._tokens += len(prompt)
            prefix.hits += 1
            prefix.nbytes = cost.restored_bytes
            prefix.used = time.time()
            self._prefixes.move_to_end(key)
            while len(self._prefixes) > self._most or self._tokens > self._most_tokens:
                self._drop(next(iter(self._prefixes)))

    def held(self, cache: PrefixCache, most: int) -> list[Prefix]:
        """The prefixes that a request could still resume from; what is gone is forgotten.

        May wait for the cache's lock."""
        with self._lock:
            ranked = sorted(self._prefixes.items(), key=lambda i: (-i[1].hits, -i[1].used))
        found: list[Prefix] = []
        for key, prefix in ranked:
            if len(found) == most:
                break
            match = cache.match(prefix.prompt, prefix.salt, prefix.boundaries)
            if match.resume < prefix.tokens:
                with self._lock:
                    self._drop(key)
                continue
            prefix.tier = match.tier
            found.append(prefix)
        return found

    def forget(self) -> None:
        with self._lock:
            self._prefixes.clear()
            self._tokens = 0

    def _drop(self, key: tuple[str | None, int]) -> None:
        prefix = self._prefixes.pop(key, None)
        if prefix is not None:
            self._tokens -= len(prefix.prompt)
