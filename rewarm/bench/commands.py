"""`rewarm bench`: a command for each scenario."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

MODULES = {
    "trace": "simulate",
    "chat": "chats",
    "burst": "crowds",
    "agent": "crowds",
    "branch": "chats",
    "restart": "chats",
    "prefix": "prefix",
    "memory": "inside",
    "overhead": "inside",
    "index": "index",
    "disk": "disk",
    "page": "page",
    "hit": "hit",
    "prefill": "prefill",
    "recurrences": "recurrences",
}
"""The scenarios, and the module in which each has its function."""


class _Scenarios(TyperGroup):
    """The scenarios. Each is imported when it is asked for: it imports MLX, which other commands do
    without."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        # Help and suggestions list the names of these; `get_command` gives the commands.
        self.commands.update((name, TyperCommand(name)) for name in MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in MODULES:
            return getattr(import_module(f"rewarm.bench.{MODULES[cmd_name]}"), cmd_name)
        return super().get_command(ctx, cmd_name)


bench_app = typer.Typer(
    cls=_Scenarios,
    help="Measure: every number that the documentation gives comes from here.",
    no_args_is_help=True,
)


@bench_app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of the files that --json wrote.")],
) -> None:
    """Write one HTML page of all results in a folder."""
    from .report import write

    Console().print(str(write(folder)), soft_wrap=True)
