"""A sequence that an engine computes, and where it stands."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from rewarm.cache import Lease
from rewarm.cache.tiers.fetch import Fetch
from rewarm.values import Boundary, Cost, Finish, Match, Tokens

from .request import Request


@dataclass(eq=False)
class Running:
    """One answer to a request, or a prompt that is warmed ahead."""

    id: int
    prompt: Tokens
    request: Request | None = None
    choice: int = 0
    boundaries: tuple[Boundary, ...] = ()
    marks: tuple[int, ...] = ()
    salt: str | None = None
    max_tokens: int = 0
    submitted: float = field(default_factory=time.perf_counter)
    generated: list[int] = field(default_factory=list)
    pace: float | None = None
    """The seconds that a prompt token takes to compute; None where nothing is fetched instead."""
    fetch: Fetch | None = None
    """What is on its way from lower tiers."""
    unused: int = 0
    """Tokens of its last step that came after the end of its answer."""
    lease: Lease | None = None
    admitted: bool = False
    isolated: bool = False
    """Its batch failed once: it decodes alone from then on, so that a second failure is its own."""
    ended: Finish | None = None
    started: float | None = None
    first_token: float | None = None
    cost: Cost | None = None
    """The cost of the first match and restore; a new start after a failure is not counted."""

    @property
    def warm(self) -> bool:
        return self.request is None

    @property
    def tokens(self) -> Tokens:
        """The prompt, and what was generated after it."""
        if not self.generated:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.generated, np.int32)])

    @property
    def position(self) -> int:
        """Prompt tokens that are in its caches, or have been fetched for them."""
        if self.lease is not None:
            return self.lease.position
        if self.fetch is None or not self.fetch.progress.total:
            return 0
        progress = self.fetch.progress
        return self.fetch.tokens * progress.done // progress.total

    @property
    def leased(self) -> Lease:
        if self.lease is None:
            raise RuntimeError(f"sequence {self.id} has no lease")
        return self.lease

    @property
    def requested(self) -> Request:
        if self.request is None:
            raise TypeError("warm-ahead has no answer")
        return self.request

    def start(self, lease: Lease) -> None:
        """Go on from what the cache gave."""
        self.lease, self.fetch = lease, None
        self.cost = self.cost or lease.cost

    def stop_fetching(self) -> None:
        if self.fetch is not None:
            self.fetch.cancel()
            self.fetch = None

    def give(self, token: int) -> None:
        """Add a token that was generated."""
        if self.first_token is None:
            self.first_token = time.perf_counter()
        self.generated.append(token)

    def report(self) -> Cost:
        """The cost so far."""
        now = time.perf_counter()
        started = self.started or now
        cost = self.cost or Cost(Match(len(self.prompt)))
        match = cost.match
        position = self.lease.position if self.lease is not None else 0
        computed = match.tokens if self.admitted else max(position, match.resume)
        ran_ms = ((self.first_token or now) - started) * 1e3
        return replace(
            cost,
            prefilled=computed - match.resume,
            queued_ms=(started - self.submitted) * 1e3,
            prefill_ms=max(ran_ms - cost.match_ms - cost.restore_ms, 0.0),
            ttft_ms=((self.first_token or now) - self.submitted) * 1e3,
        )

    def __str__(self) -> str:
        name = self.request.name or self.id if self.request is not None else "warm-ahead"
        return f"request {name}"
