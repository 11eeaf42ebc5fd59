"""The scenario `trace`: retention policies beside one another, over budgets, without a model.

A trace goes through the real tree, placement and retention. The tokens and the FLOPs are counted
that a model would have computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer

from rewarm.cache import LRU, WorkPerByte
from rewarm.cache.tree import WIDTH, Node
from rewarm.cache.worth import Item, Retention
from rewarm.options import parse_size

from . import profiles
from .bench import Bench
from .profiles import Profile
from .scenario import names, scenario
from .sized import sized_cache
from .traces import Trace, read

Policy = Literal["rewarm", "lru", "clairvoyant"]
POLICIES: tuple[Policy, ...] = ("rewarm", "lru", "clairvoyant")

NEVER = 1 << 40


@scenario()
def trace(
    bench: Bench,
    files: Annotated[list[Path], typer.Argument(help="Traces: files, or folders of them.")],
    profile: Annotated[
        str, typer.Option(help="The model whose bytes and FLOPs count.")
    ] = "qwen3.5-9b",
    memory: Annotated[
        str, typer.Option(help="Budgets: sizes with commas, or a range such as 1GB..256GB.")
    ] = "1GB..256GB",
    policy: Annotated[str, typer.Option(help="Policies, with commas.")] = ",".join(POLICIES),
    stagger: Annotated[
        float, typer.Option(min=0, help="Let sessions begin within so many seconds.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the moments of --stagger.")] = 0,
) -> None:
    """Replay a trace through the real tree and its policies, with no model."""
    model, sizes = profiles.profile(profile), budgets(memory)
    policies = names("--policy", policy, POLICIES)
    with bench.steps("reading", 1):
        found = read(files, stagger, seed)
    trie, result = found.trie_tokens, bench.result
    result.model = model.name
    result.figures["requests"] = f"{len(found.requests):,}, {found.blocks:,} blocks"
    result.figures["prompt tokens"] = f"{found.prompt_tokens:,}, {trie:,} of them distinct"
    result.figures["hit rate that no cache can beat"] = f"{1 - trie / found.prompt_tokens:.2%}"
    sheet = result.sheet(
        f"{found.name}, {model.name}",
        *("budget", "policy", "hit rate:.2%", "amplification:.2f", "FLOPs saved:.1%"),
        *("checkpoints:.0%", "gap closed"),
    )
    hits = result.plot("Token hit rate", "budget, GB", "%", log_x=True)
    work = result.plot("Prefill amplification", "budget, GB", "", log_x=True)

    def rows(budget: int, outcomes: dict[str, Outcome]) -> None:
        for name, outcome in outcomes.items():
            work_done = (outcome.hit_rate, outcome.amplification, outcome.flops_saved_share)
            gap = _gap_closed(outcomes) if name == "rewarm" else ""
            sheet.add(f"{budget / 1e9:g} GB", name, *work_done, outcome.checkpoint_share, gap)
            hits.add(name, budget / 1e9, 100 * outcome.hit_rate)
            work.add(name, budget / 1e9, outcome.amplification)

    replays = len(sizes) * sum(len(WAYS[p]) for p in policies)
    with bench.steps("replaying", replays * len(found.requests)) as step:
        for budget in sizes:
            outcomes: dict[str, Outcome] = {}
            with bench.concluding(partial(rows, budget, outcomes)):
                for name in policies:
                    outcomes[name] = replay(found, model, budget, name, on_request=step)


def budgets(memory: str) -> list[int]:
    """Parse sizes with commas between them. A range doubles from its first size to its last."""
    found: list[int] = []
    for part in memory.split(","):
        first, _, last = part.partition("..")
        size = parse_size(first)
        found.append(size)
        while last and size * 2 <= parse_size(last):
            size *= 2
            found.append(size)
    return found


def _gap_closed(outcomes: dict[str, Outcome]) -> str:
    """Give the share of the distance from LRU to clairvoyant. It is left out where both are
    equal."""
    if not {"rewarm", "lru", "clairvoyant"} <= outcomes.keys():
        return ""
    ours, lru, best = (outcomes[p].hit_rate for p in ("rewarm", "lru", "clairvoyant"))
    return f"{(ours - lru) / (best - lru):.0%}" if best - lru > 0.002 else "-"


@dataclass(frozen=True)
class Outcome:
    """The result of a policy on a trace within a budget."""

    prompt_tokens: int
    cached_tokens: int
    trie_tokens: int
    flops_saved_share: float
    checkpoint_share: float
    """The share of checkpoints in the bytes that memory holds at the end of the trace."""
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
        self._starts = np.searchsorted(ids[order], np.arange(int(np.max(ids)) + 2))
        self.now = -1
        """The number of the request that runs."""

    def worth(self, item: Item) -> float:
        return 1.0

    def last_used(self, item: Item) -> float:
        node = item.node
        below = node.checkpoints_below() if item.what == "checkpoint" else []
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
    policy: Policy,
    *,
    chunk: int = 2048,
    on_request: Callable[[], None] = lambda: None,
) -> Outcome:
    """Replay every request in order, each one complete before the next.

    Answers are not stored: the traces do not say which tokens of the next prompt they are."""
    outcomes = [
        _replayed(trace, profile, memory, way(trace), chunk, on_request) for way in WAYS[policy]
    ]
    return max(outcomes, key=lambda outcome: outcome.hit_rate)


def _replayed(
    trace: Trace,
    profile: Profile,
    memory: int,
    retention: Retention,
    chunk: int,
    on_request: Callable[[], None],
) -> Outcome:
    cache = sized_cache(profile, memory, retention, chunk)
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
        trie_tokens=trace.trie_tokens,
        flops_saved_share=saved / total,
        checkpoint_share=stats.memory.kinds["checkpoint"] / max(stats.held, 1),
        evictions=stats.evictions,
    )
