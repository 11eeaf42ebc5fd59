"""`rewarm bench`: a command for each scenario."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from inspect import Parameter
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

Scenario = Callable[["Bench"], None]

INTERRUPTED = 130


def _least(least: int, help: str) -> Any:
    return typer.Option(min=least, help=help)


def _file(help: str) -> Any:
    return typer.Option(help=f"Write {help} to this file.")


MODEL = "pocket, a folder, a Hugging Face id, or random:ARCH (random weights)."
PEER = 'Beside it, in turns: mlx-lm, or "CMD with {model} {port}".'


def _shared(
    model: Annotated[str, typer.Option(help=MODEL)] = "pocket",
    peer: Annotated[str | None, typer.Option(help=PEER)] = None,
    rounds: Annotated[int, _least(1, "Repetitions; medians and spreads are shown.")] = 3,
    json: Annotated[Path | None, _file("the result")] = None,
    plot: Annotated[Path | None, _file("the plots, as SVG,")] = None,
) -> None:
    """The options that several scenarios have."""


Turns = Annotated[int, _least(1, "Turns of a chat.")]
System = Annotated[int, _least(1, "Tokens of the system prompt.")]
Answer = Annotated[int, _least(1, "Tokens of an answer.")]
Archs = Annotated[str, typer.Option(help="Architectures of random:ARCH, with commas.")]


def scenario(*shared: str, **defaults: Any) -> Callable[[Callable[..., Scenario]], None]:
    """Make a command of a function that takes a scenario's own options and returns the scenario.

    The command also has `--json`, `--plot`, the `shared` options, and those of `defaults` with
    another default."""

    def register(make: Callable[..., Scenario]) -> None:
        own = list(inspect.signature(make, eval_str=True).parameters.values())
        known = inspect.signature(_shared, eval_str=True).parameters
        added = [known[name] for name in (*shared, *defaults, "json", "plot")]
        added = [p.replace(default=defaults.get(p.name, p.default)) for p in added]

        def command(context: typer.Context, **given: Any) -> None:
            _run(context, make(**{p.name: given[p.name] for p in own}))

        parameters = [
            Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
            *(p.replace(kind=Parameter.KEYWORD_ONLY) for p in (*added[:-2], *own, *added[-2:])),
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        bench_app.command(make.__name__, help=make.__doc__)(command)

    return register


@bench_app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of the files that --json wrote.")],
) -> None:
    """Write one HTML page of all results in a folder."""
    from rewarm.bench.report import write

    Console().print(str(write(folder)), soft_wrap=True)


@scenario()
def trace(
    files: Annotated[list[Path], typer.Argument(help="Traces: files, or folders of them.")],
    profile: Annotated[
        str, typer.Option(help="The model whose bytes and FLOPs count.")
    ] = "qwen3.5-9b",
    memory: Annotated[
        str, typer.Option(help="Budgets: sizes with commas, or a range such as 1GB..256GB.")
    ] = "1GB..256GB",
    policy: Annotated[str, typer.Option(help="Policies, with commas.")] = "rewarm,lru,clairvoyant",
    stagger: Annotated[
        float, typer.Option(min=0, help="Let sessions begin within so many seconds.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the moments of --stagger.")] = 0,
) -> Scenario:
    """Replay a trace through the real tree and its policies, with no model."""
    from rewarm.bench import lists, policies, profiles, simulate

    known = profiles.profile(profile)
    budgets = policies.budgets(memory)
    names = lists.names("--policy", policy, simulate.POLICIES)
    return lambda bench: policies.compare(bench, files, known, budgets, names, stagger, seed)


@scenario("model", "peer")
def chat(
    turns: Turns = 40,
    answer: Answer = 64,
    system: System = 200,
    memory: Annotated[
        str | None, typer.Option(help="Beside it, a Rewarm with this budget, such as 4MB.")
    ] = None,
) -> Scenario:
    """A long chat: hits, times and bytes by turn, with and without warm-ahead."""
    from rewarm.bench import chats

    return lambda bench: chats.chat(bench, turns, answer, system, memory)


@scenario("model", "peer", "rounds")
def burst(
    parallel: Annotated[int, _least(1, "Requests at once.")] = 5,
    system: System = 2700,
    answer: Answer = 16,
) -> Scenario:
    """Parallel requests over one system prompt, cold and again."""
    from rewarm.bench import crowds

    return lambda bench: crowds.burst(bench, parallel, system, answer)


@scenario("model", "peer")
def agent(
    file: Annotated[Path, typer.Argument(help="Conversations as OpenAI messages, JSON.")],
    conversations: Annotated[int, _least(1, "Conversations to replay.")] = 4,
    answer: Answer = 4,
) -> Scenario:
    """Recorded tool loops, replayed."""
    from rewarm.bench import crowds

    recorded = crowds.conversations(file)[:conversations]
    return lambda bench: crowds.agent(bench, file.name, recorded, answer)


@scenario("model", "peer")
def branch(
    turns: Annotated[int, _least(3, "Turns of the chat.")] = 6, answer: Answer = 24
) -> Scenario:
    """Edits and forks at earlier turns of a chat."""
    from rewarm.bench import chats

    return lambda bench: chats.branch(bench, turns, answer)


@scenario("model", "peer")
def restart(turns: Turns = 6, answer: Answer = 24) -> Scenario:
    """The same chat over a restart, with the disk tier."""
    from rewarm.bench import chats

    return lambda bench: chats.restart(bench, turns, answer)


@scenario("model", "peer", "rounds")
def prefix(
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Prompt lengths in tokens, with commas. "
            "Without it 2000 and 20000, on a GPU 100000 too, as far as the context reaches."
        ),
    ] = None,
    answer: Answer = 2,
    http: Annotated[bool, typer.Option(help="Over HTTP as well.")] = True,
) -> Scenario:
    """A prompt cold, one that continues it, and one that differs near its end."""
    from rewarm.bench import lists, prefix

    wanted = lists.numbers("--lengths", lengths, prefix.TAIL + 1) if lengths is not None else None
    return lambda bench: prefix.prefix(bench, wanted, answer, http)


@scenario("model", "peer")
def memory(
    conversations: Annotated[int, _least(1, "Conversations at the same time.")] = 4,
    turns: Turns = 10,
    answer: Answer = 32,
) -> Scenario:
    """Bytes held for each distinct token as conversations grow."""
    from rewarm.bench import inside

    return lambda bench: inside.memory(bench, conversations, turns, answer)


@scenario("model", "peer", rounds=5)
def overhead(
    length: Annotated[int, _least(1, "Tokens of the long message.")] = 4000,
    messages: Annotated[int, _least(2, "Messages of the history.")] = 200,
    answer: Annotated[int, _least(2, "Tokens of an answer.")] = 64,
) -> Scenario:
    """The cost of the cache where nothing is cached: cold prompts and decoding, against mlx-lm."""
    from rewarm.bench import inside

    return lambda bench: inside.overhead(bench, length, messages, answer)


@scenario(rounds=30)
def index(
    tokens: Annotated[int, _least(100, "Tokens of the stored prompt.")] = 100_000,
) -> Scenario:
    """The index alone, beside mlx-lm's trie: bytes of a token, and the time of a match."""
    from rewarm.bench import index

    return lambda bench: index.index(bench, tokens)


@scenario(model="random:hybrid-wide", rounds=7)
def disk(
    tokens: Annotated[int, _least(1000, "Tokens of the prompt.")] = 20_000,
    nodes: Annotated[int, _least(20, "Nodes of the index to open.")] = 100_000,
    parts: Annotated[str, typer.Option(help="Parts, with commas.")] = "restore,writer,open",
    folder: Annotated[
        Path | None, typer.Option(help="Write below this folder instead of a temporary one.")
    ] = None,
) -> Scenario:
    """The disk tier: restoring, decoding while it writes, and opening a large index."""
    from rewarm.bench import disk, lists

    wanted = lists.names("--parts", parts, disk.PARTS)
    return lambda bench: disk.disk(bench, tokens, nodes, wanted, folder)


@scenario("model", rounds=6)
def page(
    answer: Annotated[int, _least(2, "Tokens of an answer.")] = 400,
    polls: Annotated[float, typer.Option(min=0.1, help="Polls a second; the page has 1.")] = 1.0,
) -> Scenario:
    """The cost of an open page: processor time, and the decode rate with its polls and without."""
    from rewarm.bench import page

    return lambda bench: page.page(bench, answer, polls)


@scenario(rounds=5)
def hit(
    arch: Annotated[str, typer.Option(help="An architecture of random:ARCH.")] = "qwen3.5-0.6b",
    length: Annotated[int, _least(1, "Tokens of the prompt.")] = 100_000,
    kernels: Annotated[
        Path | None, typer.Option(help="Trace a hit into this folder (CUDA, with PyTorch).")
    ] = None,
) -> Scenario:
    """A hit part by part: look-up, restore, the new tokens, storing them, the first step."""
    from rewarm.bench import hit

    if kernels is not None:
        hit.prepare_profiler()
    return lambda bench: hit.hit(bench, arch, length, kernels)


@scenario("rounds")
def prefill(
    archs: Archs = "hybrid-12x384",
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, with commas.")] = "1024",
    product: Annotated[int, _least(1, "Size of the matrix product to compare with.")] = 1024,
) -> Scenario:
    """Prefill and decoding of whole models, by mlx-lm and with each part that Rewarm replaces."""
    from rewarm.bench import lists, prefill

    sizes = lists.numbers("--lengths", lengths)
    return lambda bench: prefill.prefill(bench, archs.split(","), sizes, product)


@scenario(rounds=5)
def recurrences(
    archs: Archs = "",
    tokens: Annotated[int, _least(8, "Tokens of a prompt.")] = 512,
) -> Scenario:
    """Recurrences alone, as mlx-lm's loops and in Rewarm's forms."""
    from rewarm.bench import recurrences

    names = [arch for arch in archs.split(",") if arch]
    return lambda bench: recurrences.recurrences(bench, names, tokens)


def _run(context: typer.Context, run: Scenario) -> None:
    """Run a scenario with the shared options of its command, and exit with its status."""
    from rewarm.bench import bench
    from rewarm.bench.result import Result, machine

    given = context.params
    name = context.info_name or ""
    result = Result(name, given.get("model", ""), _line(context), machine=machine())
    kept = {key: given[key] for key in ("peer", "rounds", "json", "plot") if key in given}
    bench.run(run, result, **kept)
    if not result.complete:
        raise typer.Exit(INTERRUPTED)


def _line(context: typer.Context) -> str:
    """Give the command line that gives this result again, without options at their defaults."""
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
