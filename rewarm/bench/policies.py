"""The scenario `trace`: retention policies beside one another, over budgets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rewarm.options import parse_size

from .bench import Bench
from .profiles import Profile
from .simulate import WAYS, Outcome, Policy, replay
from .traces import read


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


def compare(
    bench: Bench,
    files: Sequence[Path],
    profile: Profile,
    memory: Sequence[int],
    policies: Sequence[Policy],
    stagger: float,
    seed: int,
) -> None:
    """Replay the files as one trace with every policy, within every budget of `memory`."""
    with bench.steps("reading", 1):
        trace = read(files, stagger, seed)
    trie = trace.trie_tokens()
    result = bench.result
    result.model = profile.name
    result.figures["requests"] = f"{len(trace.requests):,}, {trace.blocks:,} blocks"
    result.figures["prompt tokens"] = f"{trace.prompt_tokens:,}, {trie:,} of them distinct"
    result.figures["hit rate that no cache can beat"] = f"{1 - trie / trace.prompt_tokens:.2%}"
    sheet = result.sheet(
        f"{trace.name}, {profile.name}",
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

    replays = len(memory) * sum(len(WAYS[p]) for p in policies)
    with bench.steps("replaying", replays * len(trace.requests)) as step:
        for budget in memory:
            outcomes: dict[str, Outcome] = {}
            with bench.concluding(partial(rows, budget, outcomes)):
                for policy in policies:
                    outcomes[policy] = replay(
                        *(trace, profile, budget, policy), trie_tokens=trie, on_request=step
                    )


def gap_closed(outcomes: dict[str, Outcome]) -> str:
    """Give the share of the distance from LRU to clairvoyant. It is left out where both are
    equal."""
    if not {"rewarm", "lru", "clairvoyant"} <= outcomes.keys():
        return ""
    ours, lru, best = (outcomes[p].hit_rate for p in ("rewarm", "lru", "clairvoyant"))
    return f"{(ours - lru) / (best - lru):.0%}" if best - lru > 0.002 else "-"
