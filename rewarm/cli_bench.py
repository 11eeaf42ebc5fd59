"""`rewarm bench`: the numbers, each from one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rewarm.errors import InvalidOption

bench_app = typer.Typer(
    help="Measure: every number that the documentation gives comes from here.",
    no_args_is_help=True,
)

Model = Annotated[
    str, typer.Option(help="pocket, a folder, a Hugging Face id, or random:ARCH (random weights).")
]
Peer = Annotated[
    str | None,
    typer.Option(help='Beside it, in turns: mlx-lm, or "CMD with {model} {port}".'),
]
Rounds = Annotated[int, typer.Option(min=1, help="Repetitions; medians and spreads are shown.")]
Json = Annotated[Path | None, typer.Option(help="Write the result to this file.")]
SvgFile = Annotated[Path | None, typer.Option("--plot", help="Write the plots to this SVG file.")]


@bench_app.command()
def trace(
    files: Annotated[list[Path], typer.Argument(help="Traces: files, or folders of them.")],
    profile: Annotated[str, typer.Option(help="Whose bytes and FLOPs to count.")] = "qwen3.5-9b",
    memory: Annotated[
        str, typer.Option(help="Budgets: sizes with commas, or a range such as 1GB..256GB.")
    ] = "1GB..256GB",
    policy: Annotated[str, typer.Option(help="With commas.")] = "rewarm,lru,clairvoyant",
    stagger: Annotated[
        float, typer.Option(min=0, help="Let sessions begin within so many seconds.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="For --stagger.")] = 0,
    json: Json = None,
    plot: SvgFile = None,
) -> None:
    """Replay a trace through the real tree and its policies, with no model."""
    from rewarm.bench import bench, policies

    wanted = policies.checked(files, profile, memory, policy, stagger, seed)
    bench.run(
        lambda b: policies.compare(b, wanted),
        "trace",
        "",
        json=json,
        plot=plot,
        options={
            "files": " ".join(map(str, files)),
            "profile": profile,
            "memory": memory,
            "policy": policy,
            "stagger": stagger,
        },
    )


@bench_app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Where --json put its files.")],
) -> None:
    """One HTML page of all results in a folder."""
    from rewarm.bench.report import write

    Console().print(str(write(folder)), soft_wrap=True)


@bench_app.command()
def chat(
    model: Model = "pocket",
    peer: Peer = None,
    turns: Annotated[int, typer.Option(min=1)] = 40,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    memory: Annotated[
        str | None, typer.Option(help="Beside it, a Rewarm with this budget, such as 4MB.")
    ] = None,
    json: Json = None,
    plot: SvgFile = None,
) -> None:
    """A long chat: hits, times and bytes by turn, with and without warm-ahead."""
    from rewarm.bench import bench, over_http

    options = {"model": model, "peer": peer, "turns": turns, "answer": answer, "memory": memory}
    bench.run(
        lambda b: over_http.chat(b, turns, answer, memory),
        "chat",
        model,
        peer=peer,
        json=json,
        plot=plot,
        options=options,
    )


@bench_app.command()
def burst(
    model: Model = "pocket",
    peer: Peer = None,
    parallel: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 5,
    system: Annotated[int, typer.Option(min=1, help="Tokens of the system prompt.")] = 2700,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 16,
    rounds: Rounds = 3,
    json: Json = None,
) -> None:
    """Parallel requests over one system prompt, cold and again."""
    from rewarm.bench import bench, over_http

    options = {"model": model, "peer": peer, "parallel": parallel, "system": system}
    bench.run(
        lambda b: over_http.burst(b, parallel, system, answer),
        "burst",
        model,
        peer=peer,
        rounds=rounds,
        json=json,
        options={**options, "rounds": rounds},
    )


@bench_app.command()
def agent(
    file: Annotated[Path, typer.Argument(help="Conversations as OpenAI messages, JSON.")],
    model: Model = "pocket",
    peer: Peer = None,
    conversations: Annotated[int, typer.Option(min=1, help="The first so many.")] = 4,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 4,
    json: Json = None,
) -> None:
    """Recorded tool loops, replayed."""
    from rewarm.bench import bench, over_http

    bench.run(
        lambda b: over_http.agent(b, file, conversations, answer),
        "agent",
        model,
        peer=peer,
        json=json,
        options={"model": model, "peer": peer, "conversations": conversations},
    )


@bench_app.command()
def branch(
    model: Model = "pocket",
    peer: Peer = None,
    turns: Annotated[int, typer.Option(min=3)] = 6,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 24,
    json: Json = None,
) -> None:
    """Edits and forks at earlier turns of a chat."""
    from rewarm.bench import bench, over_http

    bench.run(
        lambda b: over_http.branch(b, turns, answer),
        "branch",
        model,
        peer=peer,
        json=json,
        options={"model": model, "peer": peer, "turns": turns},
    )


@bench_app.command()
def restart(
    model: Model = "pocket",
    turns: Annotated[int, typer.Option(min=1)] = 6,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 24,
    json: Json = None,
) -> None:
    """The same chat over a restart, with the disk tier."""
    from rewarm.bench import bench, over_http

    bench.run(
        lambda b: over_http.restart(b, turns, answer),
        "restart",
        model,
        json=json,
        options={"model": model, "turns": turns},
    )


@bench_app.command()
def prefix(
    model: Model = "pocket",
    peer: Peer = None,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, with commas.")] = (
        "2000,20000"
    ),
    http: Annotated[bool, typer.Option(help="Over HTTP as well.")] = True,
    rounds: Rounds = 3,
    json: Json = None,
) -> None:
    """A prompt cold, one that goes on from it, and one that leaves it near its end."""
    from rewarm.bench import bench, inside

    wanted = _numbers(lengths)
    bench.run(
        lambda b: inside.prefix(b, wanted, http),
        "prefix",
        model,
        peer=peer,
        rounds=rounds,
        json=json,
        options={"model": model, "peer": peer, "lengths": lengths, "rounds": rounds},
    )


@bench_app.command()
def memory(
    model: Model = "pocket",
    conversations: Annotated[int, typer.Option(min=1)] = 4,
    turns: Annotated[int, typer.Option(min=1)] = 10,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 32,
    json: Json = None,
    plot: SvgFile = None,
) -> None:
    """Bytes held for each distinct token as conversations grow."""
    from rewarm.bench import bench, inside

    bench.run(
        lambda b: inside.memory(b, conversations, turns, answer),
        "memory",
        model,
        json=json,
        plot=plot,
        options={"model": model, "conversations": conversations, "turns": turns},
    )


@bench_app.command()
def overhead(
    model: Model = "pocket",
    length: Annotated[int, typer.Option(min=1, help="Tokens of the long message.")] = 4000,
    messages: Annotated[int, typer.Option(min=2, help="Messages of the history.")] = 200,
    answer: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 64,
    rounds: Rounds = 5,
    json: Json = None,
) -> None:
    """What the cache costs where it brings nothing: cold, and in decoding."""
    from rewarm.bench import bench, inside

    bench.run(
        lambda b: inside.overhead(b, length, messages, answer),
        "overhead",
        model,
        rounds=rounds,
        json=json,
        options={"model": model, "length": length, "messages": messages, "rounds": rounds},
    )


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidOption(f"--lengths {text!r}: give numbers with commas") from None
