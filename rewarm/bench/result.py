"""The result of a scenario, as data: tables, plots and single figures."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import InitVar, asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rewarm.errors import InvalidOption


@dataclass
class Sheet:
    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    formats: InitVar[Sequence[str]] = ()
    """The format of each column's numbers, while rows are added."""

    def __post_init__(self, formats: Sequence[str]) -> None:
        self._formats = formats

    def add(self, *cells: object) -> None:
        """Add a row. An unknown number, None or NaN, is shown as a dash."""
        self.rows.append([_shown(*each) for each in zip(cells, self._formats, strict=True)])


def _shown(cell: object, form: str) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "-"
    return cell if isinstance(cell, str) else format(cell, form)


@dataclass
class Plot:
    title: str
    x: str
    y: str
    lines: dict[str, list[list[float]]] = field(default_factory=dict)
    """The points of each line, by its name."""
    log_x: bool = False

    def add(self, line: str, x: float, y: float) -> None:
        """Add a point to a line. An unknown value, NaN, is left out."""
        if math.isnan(y):
            return
        self.lines.setdefault(line, []).append([x, y])


@dataclass
class Result:
    """A result. It is filled while a scenario runs, so an interrupted run keeps its figures."""

    scenario: str
    model: str
    command: str = ""
    """The command line that measures it again."""
    machine: dict[str, str] = field(default_factory=dict)
    sheets: list[Sheet] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    """Single values by name."""
    seconds: float = 0.0
    complete: bool = False

    def sheet(self, title: str, *columns: str) -> Sheet:
        """Begin a table. A column may have a format, as in "hit:.1%"."""
        split = [column.partition(":") for column in columns]
        sheet = Sheet(title, [name for name, _, _ in split], formats=[form for *_, form in split])
        self.sheets.append(sheet)
        return sheet

    def plot(self, title: str, x: str, y: str, *, log_x: bool = False) -> Plot:
        self.plots.append(Plot(title, x, y, log_x=log_x))
        return self.plots[-1]

    @property
    def has_rows(self) -> bool:
        return any(sheet.rows for sheet in self.sheets)

    def show(self, console: Console) -> None:
        for sheet in (s for s in self.sheets if s.rows):
            table = Table(*sheet.columns, box=None, title=sheet.title, title_justify="left")
            for column in table.columns:
                column.overflow = "fold"  # break lines of a narrow table rather than cut them
            for column in table.columns[1:]:
                column.justify = "right"
            for row in sheet.rows:
                table.add_row(*row)
            console.print(table)
            console.print()
        for name, value in self.figures.items():
            console.print(f"{name}: [bold]{value}[/]", highlight=False)
        if not self.complete:
            done = "this is what was done" if self.has_rows else "nothing was measured yet"
            console.print(f"[yellow]interrupted: {done}[/]")

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Result:
        try:
            given = json.loads(path.read_text())
            sheets = [Sheet(**sheet) for sheet in given.pop("sheets")]
            plots = [Plot(**plot) for plot in given.pop("plots")]
            return Result(**given, sheets=sheets, plots=plots)
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidOption(f"{path} is no result of `rewarm bench`: {error}") from error


def machine() -> dict[str, str]:
    import mlx.core as mx

    import rewarm
    from rewarm.accel import blas

    info: dict[str, Any] = dict(mx.device_info())
    return {
        "device": str(info.get("device_name") or info.get("architecture") or mx.default_device()),
        "on": str(mx.default_device()),
        "blas": blas.current().name,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "rewarm": rewarm.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
