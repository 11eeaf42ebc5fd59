"""One HTML page of several results."""

from __future__ import annotations

from html import escape
from pathlib import Path

from rewarm.errors import InvalidOption

from .result import Result, Sheet
from .svg import draw_all

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Rewarm: what was measured</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
th, td {{ padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #9ca3af55 }}
th:first-child, td:first-child {{ text-align: left }}
.note {{ opacity: .7 }}
svg {{ max-width: 100%; height: auto }}
</style></head><body><h1>Rewarm: what was measured</h1>
{body}
</body></html>
"""


def write(folder: Path) -> Path:
    """Write `report.html` with all results of a folder."""
    found = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not found:
        raise InvalidOption(
            f"{str(folder)!r} holds no results: write some with --json DIR/NAME.json"
        )
    page = folder / "report.html"
    page.write_text(PAGE.format(body="\n".join(_section(Result.load(path)) for path in found)))
    return page


def _section(result: Result) -> str:
    about = ", ".join(f"{k} {v}" for k, v in result.machine.items())
    parts = [
        f"<h2>{escape(result.scenario)}: {escape(result.model)}</h2>",
        f'<p class="note">{escape(about)}<br><code>{escape(result.command)}</code>, '
        f"{result.seconds:.0f} s" + ("" if result.complete else ", interrupted") + "</p>",
    ]
    parts += [_table(sheet) for sheet in result.sheets]
    if result.figures:
        items = "".join(
            f"<li>{escape(k)}: {escape(str(v))}</li>" for k, v in result.figures.items()
        )
        parts.append(f"<ul>{items}</ul>")
    parts += [draw_all([plot]) for plot in result.plots]
    return "\n".join(parts)


def _table(sheet: Sheet) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in sheet.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in sheet.rows
    )
    title = f"<h3>{escape(sheet.title)}</h3>"
    return f"{title}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
