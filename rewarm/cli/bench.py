"""`rewarm bench`: the numbers, each from one command."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rewarm.bench.bench import Bench

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
Turns = Annotated[int, typer.Option(min=1, help="Turns of a chat.")]
System = Annotated[int, typer.Option(min=1, help="Tokens of the system prompt.")]
Answer = Annotated[int, typer.Option(min=1, help="Tokens of an answer.")]
Json = Annotated[Path | None, typer.Option(help="Write the result to this file.")]
SvgFile = Annotated[Path | None, typer.Option("--plot", help="Write the plots to this SVG file.")]

INTERRUPTED = 130


@bench_app.command()
def trace(
    context: typer.Context,
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
    from rewarm.bench import policies

    wanted = policies.checked(files, profile, memory, policy, stagger, seed)
    _run(context, lambda b: policies.compare(b, wanted))


@bench_app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Where --json put its files.")],
) -> None:
    """One HTML page of all results in a folder."""
    from rewarm.bench.report import write

    Console().print(str(write(folder)), soft_wrap=True)


@bench_app.command()
def chat(
    context: typer.Context,
    model: Model = "pocket",
    peer: Peer = None,
    turns: Turns = 40,
    answer: Answer = 64,
    system: System = 200,
    memory: Annotated[
        str | None, typer.Option(help="Beside it, a Rewarm with this budget, such as 4MB.")
    ] = None,
    json: Json = None,
    plot: SvgFile = None,
) -> None:
    """A long chat: hits, times and bytes by turn, with and without warm-ahead."""
    from rewarm.bench import chats

    _run(context, lambda b: chats.chat(b, turns, answer, system, memory))


@bench_app.command()
def burst(
    context: typer.Context,
    model: Model = "pocket",
    peer: Peer = None,
    parallel: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 5,
    system: System = 2700,
    answer: Answer = 16,
    rounds: Rounds = 3,
    json: Json = None,
    plot: SvgFile = None,
) -> None:
    """Parallel requests over one system prompt, cold and again."""
    from rewarm.bench import crowds

    _run(context, lambda b: crowds.burst(b, parallel, system, answer))


@bench_app.command()
def agent(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Conversations as OpenAI messages, JSON.")],
    model: Model = "pocket",
    peer: Peer = None,
    conversations: Annotated[int, typer.Option(min=1, help="The first so many.")] = 4,
    answer: Answer = 4,
    json: Json = None,
    plot: SvgFile = None,
) -> None:
    """Recorded tool loops, replayed."""
    from rewarm.bench import crowds

    recorded = crowds.conversations(file)[:conversations]
    _run(context, lambda b: crowds.agent(b, file.name, recorded, answer))


@bench_app.command()
def branch(
    context: typer.Context,
    model: Model = "pocket",
    peer: Peer = None,
    turns: Annotated[int, typer.Option(min=3, help="Turns of the chat.")] = 6,
    answer: Answer = 24,
    json: Json = None,
    plot: SvgFile = None,
) -> None:
    """Edits and forks at earlier turns of a chat."""
    from rewarm.bench import chats

    _run(context, lambda b: chats.branch(b, turns, answer))


@bench_app.command()
def restart(
    context: typer.Context,
    model: Model = "pocket",
    peer: Peer = None,
    turns: Turns = 6,
    answer: Answer = 24,
    json: Json = None,
    plot: SvgFile = None,
) -> None:
    """The same chat over a restart, with the disk tier."""
    from rewarm.bench import chats

    _run(context, lambda b: chats.restart(b, turns, answer))


@bench_app.command()
def prefix(
    context: typer.Context,
    model: Model = "pocket",
    peer: Peer = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Prompt lengths in tokens, with commas. "
            "Without it 2000 and 20000, on a GPU 100000 too, as far as the context reaches."
        ),
    ] = None,
    answer: Answer = 2,
    http: Annotated[bool, typer.Option(help="Over HTTP as well.")] = True,
    rounds: Rounds = 3,
    json: Json = None,
    plot: SvgFile = None,
) -> None:
    """A prompt cold, one that goes on from it, and one that leaves it near its end."""
    from rewarm.bench import prefix

    wanted = prefix.lengths(lengths) if lengths is not None else None
    _run(context, lambda b: prefix.prefix(b, wanted, answer, http))


@bench_app.command()
def memory(
    context: typer.Context,
    model: Model = "pocket",
    peer: Peer = None,
    conversations: Annotated[int, typer.Option(min=1, help="At the same time.")] = 4,
    turns: Turns = 10,
    answer: Answer = 32,
    json: Json = None,
    plot: SvgFile = None,
) -> None:
    """Bytes held for each distinct token as conversations grow."""
    from rewarm.bench import inside

    _run(context, lambda b: inside.memory(b, conversations, turns, answer))


@bench_app.command()
def overhead(
    context: typer.Context,
    model: Model = "pocket",
    peer: Peer = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of the long message.")] = 4000,
    messages: Annotated[int, typer.Option(min=2, help="Messages of the history.")] = 200,
    answer: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 64,
    rounds: Rounds = 5,
    json: Json = None,
    plot: SvgFile = None,
) -> None:
    """What the cache costs where it brings nothing: cold, and in decoding, against mlx-lm."""
    from rewarm.bench import inside

    _run(context, lambda b: inside.overhead(b, length, messages, answer))


def _run(context: typer.Context, scenario: Callable[[Bench], None]) -> None:
    """With the options that its command was given."""
    from rewarm.bench import bench
    from rewarm.bench.result import Result, machine

    given = context.params
    result = Result(
        context.info_name or "", given.get("model", ""), _command(context), machine=machine()
    )
    bench.run(
        scenario,
        result,
        peer=given.get("peer"),
        rounds=given.get("rounds", 1),
        json=given["json"],
        plot=given["plot"],
    )
    if not result.complete:
        raise typer.Exit(INTERRUPTED)


def _command(context: typer.Context) -> str:
    """The line that gives this result again: what differs from the defaults."""
    words: list[str] = ["rewarm", "bench", context.info_name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        value: Any = context.params.get(name)
        if name in ("json", "plot") or value == parameter.get_default(context):
            continue
        if parameter.param_type_name == "argument":
            words += map(str, value if isinstance(value, (list, tuple)) else [value])
        elif isinstance(value, bool):
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            words += [parameter.opts[0], str(value)]
    return shlex.join(words)
