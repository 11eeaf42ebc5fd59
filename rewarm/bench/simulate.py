"""The policy simulator: a trace goes through the real tree, placement and retention.

No model runs: it counts the tokens and the FLOPs that a model would have computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rewarm.cache import LRU, PrefixCache, WorkPerByte
from rewarm.cache.retention import Item, Retention
from rewarm.cache.tree import WIDTH, Node
from rewarm.cache.worth import checkpoints_below

from .profiles import Profile
from .sized import sized_cache
from .traces import Trace

Policy = Literal["rewarm", "lru", "clairvoyant"]
POLICIES: tuple[Policy, ...] = ("rewarm", "lru", "clairvoyant")

NEVER = 1 << 40


@dataclass(frozen=True)
class Outcome:
    """The result of a policy on a trace within a budget."""

    prompt_tokens: int
    cached_tokens: int
    trie_tokens: int
    flops_saved: float
    flops_all: float
    checkpoint_bytes: int
    """The bytes of checkpoints in memory at the end of the trace."""
    held_bytes: int
    """The bytes of everything in memory at the end of the trace."""
    evictions: int

    @property
    def prefilled_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def amplification(self) -> float:
        return self.prefilled_tokens / self.trie_tokens


class Clairvoyant:
    """A policy that evicts the item whose next use is the farthest: an offline and greedy bound.

    The next use of a span is the next request that goes through its end. The next use of a
    checkpoint is the next request that would resume there: one that goes through it, and through no
    checkpoint below. So this policy keeps chats whole, or not at all.
    """

    def __init__(self, trace: Trace) -> None:
        self._blocks = [r.blocks for r in trace.requests]
        self._size = trace.requests[0].block_size
        ids = np.concatenate(self._blocks)
        times = np.repeat(np.arange(len(self._blocks)), [len(b) for b in self._blocks])
        order = np.argsort(ids, kind="stable")
        self._times = times[order]
        self._starts = np.searchsorted(ids[order], np.arange(int(ids.max()) + 2))
        self.now = -1
        """The number of the request that runs."""

    def worth(self, item: Item) -> float:
        return 1.0

    def last_used(self, item: Item) -> float:
        node = item.node
        below = checkpoints_below(node) if item.what == "checkpoint" else []
        # On a tie the deeper item is evicted first.
        return -self._next(node, below) - min(node.end, 1 << 24) / (1 << 25)

    def age_penalty(self, item: Item) -> float:
        return 0.0

    def abandoned_discount(self, crowd: int) -> float:
        return 1.0

    def _next(self, node: Node, below: list[Node] | None = None) -> int:
        block = int.from_bytes(node.key[-WIDTH:], "little")
        visits = self._times[self._starts[block] : self._starts[block + 1]]
        first = int(np.searchsorted(visits, self.now, side="right"))
        for at in visits[first : first + 64]:
            if not below or not any(self._passes(int(at), n) for n in below):
                return int(at)
        return NEVER

    def _passes(self, request: int, node: Node) -> bool:
        blocks = self._blocks[request]
        at = (node.end - 1) // self._size
        return at < len(blocks) and int(blocks[at]) == int.from_bytes(node.key[-WIDTH:], "little")


class ClairvoyantWork(Clairvoyant):
    """A policy that evicts the item that saves the least work, per byte and per request until its
    next use.


    Every request that goes through a checkpoint uses it: where memory is small, the checkpoints
    below it will be evicted by then."""

    def worth(self, item: Item) -> float:
        waits = self._next(item.node) - self.now
        return item.saves / max(item.nbytes, 1) / max(waits, 1)

    def last_used(self, item: Item) -> float:
        return 0.0


WAYS: dict[Policy, tuple[Callable[[Trace], Retention], ...]] = {
    "rewarm": (lambda _: WorkPerByte(),),
    "lru": (lambda _: LRU(),),
    "clairvoyant": (Clairvoyant, ClairvoyantWork),
}
"""The retention policies behind each name. Where there are several, the best result counts: the
better of two greedy bounds is nearer to the optimum."""


def replay(
    trace: Trace,
    profile: Profile,
    memory: int,
    policy: Policy = "rewarm",
    *,
    trie_tokens: int | None = None,
    chunk: int = 2048,
    on_request: Callable[[], None] = lambda: None,
) -> Outcome:
    """Replay every request in order, each one complete before the next.

    Answers are not stored: the traces do not say which tokens of the next prompt they are."""
    trie = trie_tokens or trace.trie_tokens()
    outcomes: list[Outcome] = []
    for way in WAYS[policy]:
        retention = way(trace)
        cache = sized_cache(profile, memory, retention, chunk)
        outcomes.append(_replayed(trace, profile, cache, retention, trie, on_request))
    return max(outcomes, key=lambda outcome: outcome.hit_rate)


def _replayed(
    trace: Trace,
    profile: Profile,
    cache: PrefixCache,
    retention: Retention,
    trie_tokens: int,
    on_request: Callable[[], None],
) -> Outcome:
    cached = 0
    saved = total = 0.0
    for i, request in enumerate(trace.requests):
        on_request()
        if isinstance(retention, Clairvoyant):
            retention.now = i
        if not request.length:
            continue
        with cache.acquire(request.tokens(), boundaries=request.boundaries()) as lease:
            for cut in lease.cuts:
                cache.commit(lease, cut.stop, checkpoint=cut.checkpoint)
            if isinstance(retention, Clairvoyant):  # their next use is now in the past
                cache.memory.ledger.noted.update(dict.fromkeys(lease.pin.node.path()))
        if request.waits:
            cache.mark_idle(lease.tokens, boundaries=request.boundaries())
        match = lease.cost.match
        cached += match.resume
        saved += profile.prefill_flops(0, match.resume)
        total += profile.prefill_flops(0, match.tokens)
    stats = cache.stats()
    return Outcome(
        prompt_tokens=trace.prompt_tokens,
        cached_tokens=cached,
        trie_tokens=trie_tokens,
        flops_saved=saved,
        flops_all=total,
        checkpoint_bytes=stats.memory.kinds["checkpoint"],
        held_bytes=stats.held,
        evictions=stats.evictions,
    )
