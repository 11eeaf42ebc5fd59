"""`rewarm top`: a running server in the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rewarm.errors import NotReady

from .remote import HERE, ApiKey, Remote, Url

LIVE = "/v1/live"
BAR = 12
"""Cells of a bar."""
MOST_RUNNING, MOST_RECENT, MOST_PREFIXES = 12, 8, 6
"""Rows of the tables."""

Seen = dict[str, Any]
"""A part of the reply of `/v1/live`."""


def top(
    url: Url = HERE,
    api_key: ApiKey = None,
    salt: Annotated[
        str | None, typer.Option(help="Show the words of requests with this cache_salt.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="One picture, and the end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two pictures.")] = 1.0,
) -> None:
    """Watch a running server: requests, hit rate, first tokens, memory, the hottest prefixes."""
    console, remote = Console(), Remote(url, api_key, salt)
    seen = remote.ask(LIVE)
    if once or not console.is_terminal:
        console.print(frame(seen))
        return
    picture = Live(frame(seen), console=console, screen=True, auto_refresh=False)
    with suppress(KeyboardInterrupt), picture as live:
        while True:
            time.sleep(interval)
            note = ""
            try:
                seen = remote.ask(LIVE)
            except NotReady as error:  # it may come back
                note = str(error)
            live.update(frame(seen, note), refresh=True)


def frame(seen: Seen, note: str = "") -> RenderableType:
    """Make one picture of the reply of `/v1/live`."""
    parts: list[RenderableType] = [_head(seen)]
    if note:
        parts.append(Text(f"{note}; what follows is older", style="red"))
    parts += [Text(), _figures(seen)]
    if seen["tiers"]:
        parts += [Text(), _tiers(seen)]
    if seen["cache"] is not None:
        parts.append(_evictions(seen["cache"]))
    parts += [Text(), _running(seen["requests"])]
    if seen["recent"]:
        parts += [Text(), _recent(seen)]
    if seen["hottest"]:
        parts += [Text(), _hottest(seen["hottest"])]
    return Group(*parts)


def _head(seen: Seen) -> Text:
    style = "green" if seen["state"] == "ready" else "red"
    since = f"  up {_duration(seen['uptime_s'])}  rewarm {seen['version']}"
    return Text.assemble(
        (str(seen["model"]), "bold"), "  ", (str(seen["state"]), style), (since, "dim")
    )


def _figures(seen: Seen) -> Table:
    table = _table("", "", "", "")
    rate, ttft, engine = seen["hit_rate"], seen["ttft_ms"], seen["engine"]
    table.add_row(
        "[dim]hit rate",
        f"{_percent(rate['minute'])} last minute",
        f"{_percent(rate['fifteen_minutes'])} last 15 minutes",
        f"{_percent(rate['total'])} in all, of {seen['totals']['prompt_tokens']:,} tokens",
    )
    table.add_row("[dim]first token", *(f"{_ms(ttft[p])} {p}" for p in ("p50", "p90", "p99")))
    if engine is not None:
        table.add_row(
            "[dim]requests",
            f"{engine['waiting']:,} waiting (of {engine['max_queue']:,})",
            f"{engine['prefilling']:,} prefilling",
            f"{engine['decoding']:,} decoding (of {engine['max_batch']:,})",
        )
    return table


def _tiers(seen: Seen) -> Table:
    table = _table("tier", "held", "budget", "", "")
    for name, tier in seen["tiers"].items():
        kinds = "  ".join(f"{k} {decimal(v)}" for k, v in tier["kinds"].items() if v)
        table.add_row(
            name,
            decimal(tier["held"]),
            decimal(tier["budget"]),
            _bar([(tier["held"], "cyan")], max(tier["budget"], tier["held"])),
            _last(kinds, "dim"),
        )
    return table


def _evictions(cache: Seen) -> Text:
    went = ", ".join(f"{n:,} {what}" for what, n in cache["evicted"].items() if n)
    return Text(f"{cache['evictions']:,} evictions" + (f" ({went})" if went else ""), style="dim")


def _running(requests: list[Seen]) -> RenderableType:
    if not requests:
        return Text("nothing in flight", style="dim")
    table = _table("in flight", "prompt", "", "cached", "prefilled", "generated", "age")
    for request in requests[:MOST_RUNNING]:
        parts = (request["cached_tokens"], "green"), (request["prefilled_tokens"], "yellow")
        table.add_row(
            request["stage"],
            *_counted(request["prompt_tokens"], *parts),
            f"{request['generated_tokens']:,}",
            _duration(request["age_ms"] / 1e3),
        )
    if len(requests) > MOST_RUNNING:
        table.add_row(Text(f"and {len(requests) - MOST_RUNNING:,} more", style="dim"))
    return table


def _recent(seen: Seen) -> Table:
    table = _table("ago", "prompt", "", "cached", "again", "new", "first token", "why not more")
    for done in seen["recent"][:MOST_RECENT]:
        again = done["replayed_tokens"]
        new = done["prefilled_tokens"] - again
        parts = (done["cached_tokens"], "green"), (again, "yellow"), (new, "red")
        table.add_row(
            _duration(seen["now"] - done["ended"]),
            *_counted(done["prompt_tokens"], *parts),
            _ms(done["ttft_ms"]),
            _why(done),
        )
    return table


def _why(done: Seen) -> Text:
    if done["status"] >= 400:
        return _last(f"status {done['status']}", "red")
    miss = done["miss"]
    if miss is None:
        return _last("-", "dim")
    why = str(miss["reason"])
    if miss.get("field"):
        why += f" in {miss['field']}"
        if miss.get("message") is not None:
            why += f" of message {miss['message']}"
    return _last(why)


def _hottest(prefixes: list[Seen]) -> Table:
    table = _table("hottest", "hits", "tokens", "held", "tier", "")
    for prefix in prefixes[:MOST_PREFIXES]:
        label = prefix["label"]
        table.add_row(
            prefix["boundary"] or "prefix",
            f"{prefix['hits']:,}",
            f"{prefix['tokens']:,}",
            decimal(prefix["bytes"]),
            prefix["tier"],
            _last(label if label is not None else "of another salt", "dim"),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, show_header=any(columns), header_style="dim")
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True)
    table.add_column(columns[-1])  # it becomes narrower in a narrow terminal
    return table


def _last(text: str, style: str = "") -> Text:
    """Make a text for the last column, which is cut off rather than wrapped."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _counted(whole: int, *parts: tuple[int, str]) -> tuple[RenderableType, ...]:
    """Make the cells of a prompt: its tokens, a bar, and the tokens of each part."""
    return (f"{whole:,}", _bar(parts, whole), *(f"{size:,}" for size, _ in parts))


def _bar(parts: Iterable[tuple[int, str]], whole: int) -> Text:
    """Draw cells in proportion. A part that is not empty has at least one cell."""
    bar, left = Text(), BAR
    for size, style in parts:
        cells = min(left, max(round(BAR * size / whole), 1) if size and whole else 0)
        bar.append("█" * cells, style=style)
        left -= cells
    return bar.append("·" * left, style="dim")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _ms(time: float | None) -> str:
    if time is None:
        return "-"
    return f"{time:,.0f} ms" if time < 10_000 else f"{time / 1e3:,.1f} s"


def _duration(seconds: float) -> str:
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h"
