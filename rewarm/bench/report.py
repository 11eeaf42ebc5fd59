"""Results for a browser: plots as SVG, readable on light and dark pages, and one page of many."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from rewarm.errors import InvalidOption

from .result import Plot, Result, Sheet

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


WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 48
COLOURS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#64748b")

STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #1f2937 }
.title { font-size: 14px; font-weight: 600 }
.grid { stroke: #9ca3af; stroke-opacity: .35 }
@media (prefers-color-scheme: dark) { text { fill: #e5e7eb } }
</style>"""


def draw_all(plots: list[Plot]) -> str:
    """Draw all plots in one document, one below the other."""
    parts = [
        f'<g transform="translate(0 {i * HEIGHT})">{_plot(plot)}</g>'
        for i, plot in enumerate(plots)
    ]
    height = HEIGHT * max(len(plots), 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}">{STYLE}{"".join(parts)}</svg>\n'
    )


def _plot(plot: Plot) -> str:
    points = [p for line in plot.lines.values() for p in line]
    if not points:
        return _text(LEFT, 24, f"{plot.title}: nothing", "start", "title")
    across = _Axis([p[0] for p in points], LEFT, WIDTH - RIGHT, plot.log_x)
    up = _Axis([0.0, *(p[1] for p in points)], HEIGHT - BOTTOM, TOP, False)
    parts = [
        _text(LEFT, 20, plot.title, "start", "title"),
        _text(LEFT, 36, plot.y),
        _text(WIDTH - RIGHT, HEIGHT - 10, plot.x, "end"),
    ]
    for value in up.ticks():
        y = up.at(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text(LEFT - 6, y + 4, _short(value), "end"))
    for value in across.ticks():
        parts.append(_text(across.at(value), HEIGHT - BOTTOM + 16, _short(value), "middle"))
    for i, (name, line) in enumerate(plot.lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        places = [f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in line]
        parts.append(
            f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" '
            'stroke-width="2"/>'
        )
        for x, y in line:
            parts.append(
                f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="2.5" fill="{colour}"/>'
            )
        legend = LEFT + i * (WIDTH - LEFT - RIGHT) / len(plot.lines)
        parts.append(
            f'<rect x="{legend:.0f}" y="{HEIGHT - 20}" width="10" height="10" fill="{colour}"/>'
        )
        parts.append(_text(legend + 14, HEIGHT - 11, name))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "label") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


class _Axis:
    def __init__(self, values: list[float], start: float, stop: float, log: bool) -> None:
        self.log = log
        low, high = min(map(self._scaled, values)), max(map(self._scaled, values))
        self.low, self.high = low, high if high > low else low + 1
        self.start, self.stop = start, stop

    def at(self, value: float) -> float:
        share = (self._scaled(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            return [2.0**n for n in range(math.ceil(self.low), math.floor(self.high) + 1)]
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 2))
        for more in (1, 2, 5, 10):
            if (self.high - self.low) / (step * more) <= 6:
                step *= more
                break
        first = math.ceil(self.low / step)
        last = math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]

    def _scaled(self, value: float) -> float:
        return math.log2(value) if self.log else value


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
