"""`rewarm cache`: look at a disk tier and clear it, without a model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rewarm.errors import InvalidOption
from rewarm.pocket import BUILT_IN, FOLDER

if TYPE_CHECKING:
    from rewarm.cache.tiers.disk.store import Store

cache_app = typer.Typer(help="What a disk tier holds.", no_args_is_help=True)

Disk = Annotated[
    Path, typer.Option(envvar="REWARM_DISK", help="The folder that was given to --disk.")
]
Namespace = Annotated[
    str | None, typer.Option(help="Only this namespace: the beginning of its name in `ls`.")
]
Salt = Annotated[str | None, typer.Option(help="Only what was stored for this salt.")]

UNLIMITED = 1 << 60
"""A limit in bytes that no store reaches, so that looking at a store evicts nothing."""


def _opened(folder: Path) -> Store:
    if not folder.is_dir():
        raise InvalidOption(f"--disk {str(folder)!r} is no folder: give the one that was served")
    from rewarm.cache.tiers.disk.store import Store  # imports MLX: not for a help text

    return Store.open(folder, limit=UNLIMITED, reserve=0)


@cache_app.command()
def stats(disk: Disk) -> None:
    """Say how much there is in all."""
    with _opened(disk) as store:
        known = store.index.namespaces()
        Console().print(
            f"{decimal(store.bytes())} in {sum(n.files for n in known):,} files, "
            f"{sum(n.nodes for n in known):,} spans of {len(known):,} "
            + ("namespace" if len(known) == 1 else "namespaces")
        )


def _model(source: str) -> str:
    """Give the name that people know a model by, from the folder that it was loaded from."""
    path = Path(source)
    if path == FOLDER:
        return BUILT_IN
    for folder in path.parts:
        if folder.startswith("models--"):  # Hugging Face's cache, where the last part is a revision
            return folder.removeprefix("models--").replace("--", "/")
    return path.name.removeprefix("mlx_lm.models.")


@cache_app.command()
def ls(disk: Disk) -> None:
    """Print a line for each namespace: a model, in one form, for one salt."""
    with _opened(disk) as store:
        table = Table("name", "model", "salt", "mode", "size", "spans", "last used", box=None)
        for each in sorted(store.index.namespaces(), key=lambda n: -n.used):
            about = each.about
            table.add_row(
                each.digest[:8],
                _model(str(about.get("name", ""))),
                str(about.get("salt", ""))[:8] or "-",
                str(about.get("grid", "")),
                decimal(each.bytes),
                f"{each.nodes:,}",
                time.strftime("%b %d %H:%M", time.localtime(each.used)),
            )
        Console().print(table)


@cache_app.command()
def verify(disk: Disk) -> None:
    """Read everything, and drop what is damaged."""
    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _opened(disk) as store, Progress(*columns, transient=True) as progress:
        task = progress.add_task("")
        found = store.verify(lambda done, total: progress.update(task, completed=done, total=total))
    said = "all sound"
    if found.damaged or found.dropped:
        said = f"{found.damaged:,} damaged, {found.dropped:,} spans dropped"
    Console().print(f"{found.files:,} files, {decimal(found.bytes)}: {said}")
    if found.damaged:
        raise typer.Exit(1)


@cache_app.command()
def clear(disk: Disk, namespace: Namespace = None, salt: Salt = None) -> None:
    """Delete everything, one namespace, or what was stored for one salt."""
    with _opened(disk) as store:
        if namespace is not None:
            found = [n for n in store.index.namespaces() if n.digest.startswith(namespace)]
            if len(found) != 1:
                raise InvalidOption(
                    f"--namespace {namespace!r} names {len(found)} of them: `rewarm cache ls` "
                    "shows their names"
                )
            freed = store.clear(lambda info: info.id == found[0].id)
        elif salt is not None:
            from rewarm.cache.tiers.disk.parts import salt_digest

            wanted = salt_digest(salt)
            freed = store.clear(lambda info: info.about.get("salt") == wanted)
        else:
            freed = store.clear()
        Console().print(f"{decimal(freed)} deleted")
