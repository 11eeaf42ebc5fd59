"""`rewarm top` and `rewarm explain`: questions to a running server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from rewarm.errors import InvalidOption

from .remote import Remote

Url = Annotated[str, typer.Option(envvar="REWARM_URL", help="Where the server is.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="REWARM_API_KEY", help="Where the server asks for one.")
]
Salt = Annotated[str | None, typer.Option(help="Show the words of requests with this cache_salt.")]
HERE = "http://127.0.0.1:8080"


def top(
    url: Url = HERE,
    api_key: ApiKey = None,
    salt: Salt = None,
    once: Annotated[bool, typer.Option("--once", help="One picture, and the end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two pictures.")] = 1.0,
) -> None:
    """Watch a running server: requests, hit rate, first tokens, memory, the hottest prefixes."""
    from .top import show

    show(Remote(url, api_key, salt), once=once, interval=interval)


def explain(
    request: Annotated[str, typer.Argument(help="A file with a request's JSON; - reads stdin.")],
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="The server's answer as it is.")] = False,
) -> None:
    """Say what a request would reuse, why not more, and what to change; nothing is run."""
    found = Remote(url, api_key).post("/v1/cache/explain", _request(request))
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        _print(found, Console())


def _request(path: str) -> Any:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
    except OSError as error:
        raise InvalidOption(f"{path!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidOption(f"{path!r} is no text: {error}") from error
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidOption(f"{path!r} is not JSON: {error}") from error


def _print(found: dict[str, Any], console: Console) -> None:
    cached, again = found["cached_tokens"], found["replayed_tokens"]
    new = found["prefilled_tokens"] - again
    console.print(
        f"{found['prompt_tokens']:,} tokens: [green]{cached:,} cached[/], "
        f"[yellow]{again:,} again[/], [red]{new:,} new[/]",
        highlight=False,
    )
    miss = found["miss"]
    if miss is None:
        console.print("All that is known of it is reused.")
        return
    console.print(f"\n[bold]{miss['reason']}[/]  {escape(miss['text'])}", highlight=False)
    if "stored" in miss:
        for name in ("before", "stored", "sent"):
            console.print(f"  [dim]{name:>6}[/]  {escape(repr(miss[name]))}", highlight=False)
    for advice in found["advice"]:
        console.print(f"\n[bold]{advice['pattern']}[/]  {escape(advice['text'])}", highlight=False)
        if advice["stored"] or advice["sent"]:
            console.print(
                f"  [dim]{'stored':>6}[/]  {escape(repr(advice['stored']))}\n"
                f"  [dim]{'sent':>6}[/]  {escape(repr(advice['sent']))}",
                highlight=False,
            )
