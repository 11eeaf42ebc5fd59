"""The command line: its commands, which have a file each, and the options that all share."""

from __future__ import annotations

import logging
import platform
import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

import rewarm
from rewarm.bench.commands import bench_app
from rewarm.errors import RewarmError

from .cache import cache_app
from .chat import chat
from .demo import demo
from .explain import explain
from .serve import serve
from .top import top

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="A prompt cache for MLX language models: work already done for a prompt is never done "
    "again.",
)
for command in (demo, explain, top, serve, chat):
    app.command()(command)
app.add_typer(cache_app, name="cache")
app.add_typer(bench_app, name="bench")


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    import mlx.core as mx

    from rewarm.accel import blas

    print(f"rewarm {rewarm.__version__}")
    for package in ("mlx", "mlx-lm"):
        print(f"{package} {version(package)}")
    print(f"python {platform.python_version()}, {platform.system()} {platform.machine()}")
    print(f"device {mx.default_device()}")
    print(f"blas {blas.current().name}")
    if blas.current().note:
        print(f"note: {blas.current().note}")
    raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Versions, device and BLAS."
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is done.")] = False,
) -> None:
    level = logging.INFO if verbose else logging.WARNING
    if sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False)
        logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
    else:  # a file or a service gets one line for each record, however long it is
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")


def main() -> None:
    try:
        app()
    except RewarmError as error:
        print(f"rewarm: {error}", file=sys.stderr)
        sys.exit(2)
