"""`rewarm bench trace`: policies beside one another, over budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rewarm.errors import InvalidOption
from rewarm.options import parse_size

from .bench import Bench
from .profiles import Profile, profile
from .simulate import POLICIES, WAYS, Outcome, Policy, replay
from .traces import read


@dataclass(frozen=True)
class Wanted:
    files: Sequence[Path]
    profile: Profile
    budgets: list[int]
    policies: list[Policy]
    stagger: float
    seed: int


def checked(
    files: Sequence[Path], name: str, memory: str, policy: str, stagger: float, seed: int
) -> Wanted:
    """Raise for what cannot be meant, before anything is read."""
    policies: list[Policy] = []
    for word in policy.split(","):
        found = [p for p in POLICIES if p == word.strip()]
        if not found:
            raise InvalidOption(f"policy {word!r} is unknown: give some of {', '.join(POLICIES)}")
        policies += found
    return Wanted(files, profile(name), budgets(memory), policies, stagger, seed)


def budgets(memory: str) -> list[int]:
    """Sizes with commas; a range doubles from its first to its last."""
    found: list[int] = []
    for part in memory.split(","):
        first, _, last = part.partition("..")
        size = parse_size(first)
        found.append(size)
        while last and size * 2 <= parse_size(last):
            size *= 2
            found.append(size)
    return found


def compare(bench: Bench, wanted: Wanted) -> None:
    with bench.steps("reading", 1):
        trace = read(wanted.files, wanted.stagger, wanted.seed)
    trie = trace.trie_tokens()
    result = bench.result
    result.model = wanted.profile.name
    result.figures["requests"] = f"{len(trace.requests):,}, {trace.blocks:,} blocks"
    result.figures["prompt tokens"] = f"{trace.prompt_tokens:,}, {trie:,} of them distinct"
    result.figures["hit rate that no cache can beat"] = f"{1 - trie / trace.prompt_tokens:.2%}"
    sheet = result.sheet(
        f"{trace.name}, {wanted.profile.name}",
        *("budget", "policy", "hit rate", "amplification", "FLOPs saved", "checkpoints"),
        "gap closed",
    )
    hits = result.plot("Token hit rate", "budget, GB", "%", log_x=True)
    work = result.plot("Prefill amplification", "budget, GB", "", log_x=True)

    def rows(budget: int, outcomes: dict[str, Outcome]) -> None:
        for name, outcome in outcomes.items():
            sheet.add(
                f"{budget / 1e9:g} GB",
                name,
                f"{outcome.hit_rate:.2%}",
                f"{outcome.amplification:.2f}",
                f"{outcome.flops_saved / outcome.flops_all:.1%}",
                f"{outcome.checkpoint_bytes / max(outcome.held_bytes, 1):.0%}",
                gap_closed(outcomes) if name == "rewarm" else "",
            )
            hits.add(name, budget / 1e9, 100 * outcome.hit_rate)
            work.add(name, budget / 1e9, outcome.amplification)

    replays = len(wanted.budgets) * sum(len(WAYS[p]) for p in wanted.policies)
    with bench.steps("replaying", replays * len(trace.requests)) as step:
        for budget in wanted.budgets:
            outcomes: dict[str, Outcome] = {}
            with bench.ending(partial(rows, budget, outcomes)):
                for policy in wanted.policies:
                    outcomes[policy] = replay(
                        *(trace, wanted.profile, budget, policy), trie_tokens=trie, on_request=step
                    )


def gap_closed(outcomes: dict[str, Outcome]) -> str:
    """The share of the way from LRU to clairvoyant; nothing where that is no way to speak of."""
    if not {"rewarm", "lru", "clairvoyant"} <= outcomes.keys():
        return ""
    ours, lru, best = (outcomes[p].hit_rate for p in ("rewarm", "lru", "clairvoyant"))
    return f"{(ours - lru) / (best - lru):.0%}" if best - lru > 0.002 else "-"
