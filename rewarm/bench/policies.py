"""The scenario `trace`: retention policies beside one another, over budgets."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rewarm.options import parse_size

from . import profiles
from .bench import Bench
from .scenario import names, scenario
from .simulate import POLICIES, WAYS, Outcome, replay
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
    trie = found.trie_tokens()
    result = bench.result
    result.model = model.name
    result.figures["requests"] = f"{len(found.requests):,}, {found.blocks:,} blocks"
    result.figures["prompt tokens"] = f"{found.prompt_tokens:,}, {trie:,} of them distinct"
    result.figures["hit rate that no cache can beat"] = f"{1 - trie / found.prompt_tokens:.2%}"
    sheet = result.sheet(
        f"{found.name}, {model.name}",
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

    replays = len(sizes) * sum(len(WAYS[p]) for p in policies)
    with bench.steps("replaying", replays * len(found.requests)) as step:
        for budget in sizes:
            outcomes: dict[str, Outcome] = {}
            with bench.concluding(partial(rows, budget, outcomes)):
                for name in policies:
                    outcomes[name] = replay(
                        *(found, model, budget, name), trie_tokens=trie, on_request=step
                    )


def gap_closed(outcomes: dict[str, Outcome]) -> str:
    """Give the share of the distance from LRU to clairvoyant. It is left out where both are
    equal."""
    if not {"rewarm", "lru", "clairvoyant"} <= outcomes.keys():
        return ""
    ours, lru, best = (outcomes[p].hit_rate for p in ("rewarm", "lru", "clairvoyant"))
    return f"{(ours - lru) / (best - lru):.0%}" if best - lru > 0.002 else "-"
