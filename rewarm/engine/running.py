"""A sequence that an engine computes, with its progress."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from rewarm.cache import Lease
from rewarm.cache.tiers.fetch import Fetch
from rewarm.values import Cost, Finish, Match, Tokens

from .request import Request
from .scheduler import Job


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
    def ready_tokens(self) -> int:
        """The prompt tokens that are in its caches, or have been fetched for them."""
        if self.lease is not None:
            return self.lease.position
        if self.fetching is None or not self.fetching.progress.total:
            return 0
        progress = self.fetching.progress
        return self.fetching.tokens * progress.done // progress.total

    @property
    def leased(self) -> Lease:
        if self.lease is None:
            raise RuntimeError(f"sequence {self.id} has no lease")
        return self.lease

    def tell_progress(self) -> None:
        """Tell the request's sink how much of the prompt is ready."""
        if not self.generated and self.choice == 0:
            sink, total = self.request.sink, len(self.request.tokens)
            tell = sink.fetched if self.lease is None else sink.prefilled
            tell(self.ready_tokens, total)

    def give(self, token: int) -> None:
        """Add a token that was generated."""
        if self.first_token is None:
            self.first_token = time.perf_counter()
        self.generated.append(token)

    def stop_fetching(self) -> None:
        if self.fetching is not None:
            self.fetching.cancel()
            self.fetching = None

    def report(self) -> Cost:
        """Give the cost so far."""
        now = time.perf_counter()
        started, first_token = self.started or now, self.first_token or now
        cost = self.cost or Cost(Match(len(self.request.tokens)))
        match = cost.match
        position = self.lease.position if self.lease is not None else 0
        computed = match.tokens if self.admitted else max(position, match.resume)
        ran_ms = (first_token - started) * 1e3
        return replace(
            cost,
            prefilled=computed - match.resume,
            queued_ms=(started - self.submitted) * 1e3,
            prefill_ms=max(ran_ms - cost.match_ms - cost.restore_ms, 0.0),
            ttft_ms=(first_token - self.submitted) * 1e3,
        )

    def __str__(self) -> str:
        return "warm-ahead" if self.warm else f"request {self.request.name or self.id}"
