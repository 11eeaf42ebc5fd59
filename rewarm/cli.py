"""The command line."""

from __future__ import annotations

import logging
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

import rewarm
from rewarm.accel import blas
from rewarm.errors import RewarmError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="A prompt cache for MLX language models: work already done for a prompt is never done "
    "again.",
)


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    import mlx.core as mx

    used = blas.current()
    print(f"rewarm {rewarm.__version__}")
    for package in ("mlx", "mlx-lm"):
        try:
            print(f"{package} {version(package)}")
        except PackageNotFoundError:
            print(f"{package} is not installed as a package")
    print(f"python {platform.python_version()}, {platform.system()} {platform.machine()}")
    print(f"device {mx.default_device()}")
    print(f"blas {used.name}")
    if used.note:
        print(f"note: {used.note}")
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
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=Console(stderr=True), show_path=False)],
    )


@app.command()
def demo(
    turns: Annotated[int, typer.Option(min=2, max=40, help="How long the chat becomes.")] = 6,
    reuse: Annotated[
        str, typer.Option(help="fast, or exact: a hit gives the very bits of a cold run.")
    ] = "fast",
) -> None:
    """Chat with a tiny hybrid model, and see turn by turn what was cached."""
    from rewarm.demo import show

    show(turns, reuse)


def main() -> None:
    try:
        app()
    except RewarmError as error:
        print(f"rewarm: {error}", file=sys.stderr)
        sys.exit(2)
