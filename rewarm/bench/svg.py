"""Plots as SVG, readable on light and on dark pages."""

from __future__ import annotations

import math
from html import escape

from .result import Plot

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
        return f'<text class="title" x="{LEFT}" y="24">{escape(plot.title)}: nothing</text>'
    across = _Axis([p[0] for p in points], LEFT, WIDTH - RIGHT, plot.log_x)
    up = _Axis([0.0, *(p[1] for p in points)], HEIGHT - BOTTOM, TOP, False)
    parts = [f'<text class="title" x="{LEFT}" y="20">{escape(plot.title)}</text>']
    for value in up.ticks():
        y = up.at(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>'
        )
    for value in across.ticks():
        x = across.at(value)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{_short(value)}</text>"
        )
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">{escape(plot.x)}</text>'
    )
    parts.append(f'<text x="{LEFT}" y="36">{escape(plot.y)}</text>')
    for i, (name, line) in enumerate(plot.lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="2.5" fill="{colour}"/>'
            for x, y in line
        ]
        legend = LEFT + i * (WIDTH - LEFT - RIGHT) / len(plot.lines)
        parts.append(
            f'<rect x="{legend:.0f}" y="{HEIGHT - 20}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{legend + 14:.0f}" y="{HEIGHT - 11}">{escape(name)}</text>'
        )
    return "".join(parts)


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
