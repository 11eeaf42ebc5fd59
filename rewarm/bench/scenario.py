"""Scenarios as commands: their options, how one is run, and what becomes of its result."""

from __future__ import annotations

import inspect
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rewarm.errors import InvalidOption

from .bench import Bench
from .report import draw_all
from .result import Result, machine
from .sides import command

INTERRUPTED = 130
"""The exit status after Ctrl-C."""

WIDE = 120
"""The least number of characters in a line of a table that goes to a file."""

Name = TypeVar("Name", bound=str)


def at_least(least: int, help: str) -> Any:
    return typer.Option(min=least, help=help)


def _file(help: str) -> Any:
    return typer.Option(help=f"Write {help} to this file.")


MODEL = "pocket, a folder, a Hugging Face id, or random:ARCH (random weights)."
PEER = 'Beside it, in turns: mlx-lm, or "CMD with {model} {port}".'


def _shared(
    model: Annotated[str, typer.Option(help=MODEL)] = "pocket",
    peer: Annotated[str | None, typer.Option(help=PEER)] = None,
    rounds: Annotated[int, at_least(1, "Repetitions; medians and spreads are shown.")] = 3,
    json: Annotated[Path | None, _file("the result")] = None,
    plot: Annotated[Path | None, _file("the plots, as SVG,")] = None,
) -> None:
    """The options that several scenarios have."""


Turns = Annotated[int, at_least(1, "Turns of a chat.")]
SystemLength = Annotated[int, typer.Option("--system", min=1, help="Tokens of the system prompt.")]
Answer = Annotated[int, at_least(1, "Tokens of an answer.")]
Archs = Annotated[str, typer.Option(help="Architectures of random:ARCH, with commas.")]


def scenario(*shared: str, **defaults: Any) -> Callable[[Callable[..., None]], Any]:
    """Make a command of a function that takes a `Bench` and a scenario's own options.

    The command also has `--json`, `--plot`, the `shared` options, and those of `defaults` with
    another default."""

    def made(measure: Callable[..., None]) -> Any:
        _, *own = inspect.signature(measure, eval_str=True).parameters.values()
        known = inspect.signature(_shared, eval_str=True).parameters
        added = [known[name] for name in (*shared, *defaults, "json", "plot")]
        added = [p.replace(default=defaults.get(p.name, p.default)) for p in added]

        def run(context: typer.Context, **given: Any) -> None:
            mine = {p.name: given.pop(p.name) for p in own}
            _run(context, partial(measure, **mine), **given)

        parameters = [
            Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
            *(p.replace(kind=Parameter.KEYWORD_ONLY) for p in (*added[:-2], *own, *added[-2:])),
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app = typer.Typer(add_completion=False)
        app.command(measure.__name__, help=measure.__doc__)(run)
        return typer.main.get_command(app)

    return made


def _run(
    context: typer.Context,
    measure: Callable[[Bench], None],
    *,
    model: str = "",
    peer: str | None = None,
    rounds: int = 1,
    json: Path | None,
    plot: Path | None,
) -> None:
    """Run a scenario. However it ends, what was measured is shown and saved."""
    if peer is not None:
        command(peer, "", 0)  # a wrong option is an error before anything is loaded
    result = Result(context.info_name or "", model, _line(context), machine=machine())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    began, interrupted = time.perf_counter(), False
    try:
        with (
            _sigterm_as_ctrl_c(),
            Progress(
                *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
            ) as progress,
            ExitStack() as stack,
        ):
            measure(Bench(result, model, peer, rounds, progress, stack))
        result.complete = True
    except KeyboardInterrupt:
        interrupted = True
    finally:
        result.seconds = time.perf_counter() - began
        if result.has_rows or interrupted:
            console = Console()
            if not console.is_terminal:
                console.width = max(console.width, WIDE)
            result.show(console)
        if json is not None and result.has_rows:
            result.save(json)
        if plot is not None and result.has_rows:
            plot.parent.mkdir(parents=True, exist_ok=True)
            plot.write_text(draw_all(result.plots))
    if interrupted:
        raise typer.Exit(INTERRUPTED)


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C: otherwise the servers would run on."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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


def numbers(option: str, text: str, least: int = 1) -> list[int]:
    """Read an option that is a list of numbers with commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise InvalidOption(f"{option} {text!r}: give numbers from {least}, commas between them")
    return found


def names(option: str, text: str, known: Iterable[Name]) -> list[Name]:
    """Read an option that is a list of names with commas; give them in the order of `known`."""
    wanted = [part.strip() for part in text.split(",")]
    found = [name for name in known if name in wanted]
    if unknown := [word for word in wanted if word not in found]:
        raise InvalidOption(f"{option} {unknown[0]!r} is unknown: give some of {', '.join(known)}")
    return found
