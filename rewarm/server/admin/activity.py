"""The requests that run and that ran lately, and the prefixes that requests resumed from most.

`Activity` belongs to the event loop. Everything here is bounded."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from rewarm.cache import PrefixCache
from rewarm.generate.generation import PromptRun
from rewarm.values import Boundary, Tokens

from ..dialect import miss_object
from ..exchange import Work, token_figures

RECENT = 64
FIRST_TOKENS = 512
"""The number of requests whose time to first token is remembered."""
STEP = 10
"""Seconds of a slot of the history."""
SLOTS = 90
SLOT_TIMES = 32
WINDOWS = {"minute": 60, "five_minutes": 300, "fifteen_minutes": 900}
"""The seconds that a hit rate covers."""

HOTTEST = 128
HOTTEST_TOKENS = 1_000_000
"""The most tokens of all these prefixes together: 4 MB."""
LABEL_TOKENS = 48
LABEL = 36
"""Characters of each end of a label."""


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


TOTALS = ("requests", "prompt_tokens", "cached_tokens", "replayed_tokens", "generated_tokens")
"""The figures that are added up over several requests."""


@dataclass
class Slot:
    """A few seconds of the history."""

    at: int
    totals: Counter[str] = field(default_factory=Counter)
    first_tokens: list[float] = field(default_factory=list)

    def shown(self) -> dict[str, Any]:
        totals = {name: self.totals[name] for name in TOTALS if name != "replayed_tokens"}
        times = {f"ttft_p{p}_ms": percentile(self.first_tokens, p) for p in (50, 99)}
        return {"at": self.at, **totals, **times}


class Activity:
    """Requests in flight, the last ones, a short history, and the prefixes that were hit most."""

    def __init__(self) -> None:
        self.started = time.time()
        self.running: dict[Work, int] = {}
        """Requests in flight, with their numbers."""
        self.recent: deque[Finished] = deque(maxlen=RECENT)
        self.first_tokens: deque[float] = deque(maxlen=FIRST_TOKENS)
        self.history: deque[Slot] = deque(maxlen=SLOTS)
        self.total: Counter[str] = Counter()
        self.hottest = HotPrefixes()
        self._numbers = itertools.count(1)

    def add(self, work: Work) -> None:
        self.running[work] = next(self._numbers)

    def finish(self, work: Work, status: int) -> None:
        """Remember a request that is over."""
        exchange, costs, salt = work.exchange, work.costs, work.options.salt
        figures, completion = token_figures(costs), sum(choice.tokens for choice in work.choices)
        now = time.time()
        ttft = round(costs[0].ttft_ms, 3) if costs and completion else None
        shown = {
            "number": self.running.pop(work),
            "own": True,
            "id": exchange.id,
            "ended": round(now, 3),
            "endpoint": exchange.endpoint,
            "status": status,
            **figures,
            "completion_tokens": completion,
            "ttft_ms": ttft,
            "total_ms": round((time.monotonic() - exchange.began) * 1e3, 3),
            "miss": miss_object(work),
        }
        self.recent.append(Finished(salt, shown))
        at = int(now) // STEP * STEP
        if not self.history or self.history[-1].at < at:
            self.history.append(Slot(at))
        slot = self.history[-1]
        del figures["prefilled_tokens"]
        for totals in (self.total, slot.totals):
            totals.update(figures, requests=1, generated_tokens=completion)
        if ttft is not None:
            self.first_tokens.append(ttft)
            if len(slot.first_tokens) < SLOT_TIMES:
                slot.first_tokens.append(ttft)
        for run in work.runs:
            self.hottest.note(run, salt)

    def hit_rates(self) -> dict[str, float | None]:
        """Give the share of prompt tokens that was not computed, by window."""
        since = time.time() - STEP
        rates = {
            name: share([slot.totals for slot in self.history if slot.at > since - seconds])
            for name, seconds in WINDOWS.items()
        }
        return {**rates, "total": share([self.total])}


def stage_of(work: Work) -> str:
    if any(choice.tokens for choice in work.choices):
        return "decoding"
    resumed = any(run.resumed is not None for run in work.runs)
    return "prefilling" if resumed else "waiting"


def share(totals: Sequence[Counter[str]]) -> float | None:
    """Give the share of the prompt tokens that was not computed."""
    whole = sum(t["prompt_tokens"] for t in totals)
    return round(sum(t["cached_tokens"] for t in totals) / whole, 4) if whole else None


def percentile(times: Sequence[float], percent: int) -> float | None:
    """Give the smallest time that at least so many percent of the times do not exceed."""
    if not times:
        return None
    index = max(0, -(-len(times) * percent // 100) - 1)
    return round(sorted(times)[index], 3)


@dataclass
class HotPrefix:
    """A prefix that requests resumed from."""

    salt: str | None
    tokens: int
    prompt: Tokens
    """The prefix and one more token, so that this prompt would resume at the prefix's end."""
    boundaries: Sequence[Boundary]
    kind: str | None
    hits: int = 0
    nbytes: int = 0
    used: float = 0.0
    tier: str | None = None
    """The tier that had it when it was last looked for."""

    def label(self, tokenizer: Any) -> str:
        """Give its first and its last words."""
        prefix = self.prompt[:-1]
        begins, ends = (
            " ".join(str(tokenizer.decode(part, skip_special_tokens=True)).split())
            for part in (prefix[:LABEL_TOKENS].tolist(), prefix[-LABEL_TOKENS:].tolist())
        )
        short = self.tokens <= LABEL_TOKENS
        return ends[:LABEL] if short else f"{begins[:LABEL]} … {ends[-LABEL:]}"

    def shown_to(self, salt: str | None, tokenizer: Any) -> dict[str, Any]:
        own = self.salt == salt
        return {
            "tokens": self.tokens,
            "hits": self.hits,
            "bytes": self.nbytes,
            "tier": self.tier,
            "boundary": self.kind,
            "idle_s": round(time.time() - self.used, 1),
            "own": own,
            "label": self.label(tokenizer) if own else None,
        }


class HotPrefixes:
    """The prefixes that were resumed from. Safe to use from several threads."""

    def __init__(self) -> None:
        self._prefixes: OrderedDict[tuple[str | None, int], HotPrefix] = OrderedDict()
        """By salt and a hash of the tokens, those used last at the end."""
        self._lock = threading.Lock()

    def note(self, run: PromptRun, salt: str | None) -> None:
        """Note the prefix that a prompt went on from, if there is one."""
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
                prefix = HotPrefix(salt, at, prompt, boundaries, cost.resumed_at)
                self._prefixes[key] = prefix
            prefix.hits += 1
            prefix.nbytes = cost.restored_bytes
            prefix.used = time.time()
            self._prefixes.move_to_end(key)
            tokens = sum(p.tokens for p in self._prefixes.values())
            while len(self._prefixes) > HOTTEST or tokens > HOTTEST_TOKENS:
                tokens -= self._prefixes.popitem(last=False)[1].tokens

    def resumable(self, cache: PrefixCache) -> Iterator[HotPrefix]:
        """Give the prefixes that a request could still resume from, those hit most first. The
        others are forgotten. This may wait for the cache's lock."""
        with self._lock:
            ranked = sorted(self._prefixes.items(), key=lambda i: (-i[1].hits, -i[1].used))
        for key, prefix in ranked:
            match = cache.match(prefix.prompt, prefix.salt, prefix.boundaries)
            if match.resume == prefix.tokens:
                prefix.tier = match.tier
                yield prefix
            else:
                with self._lock:
                    self._prefixes.pop(key, None)

    def forget(self) -> None:
        with self._lock:
            self._prefixes.clear()
