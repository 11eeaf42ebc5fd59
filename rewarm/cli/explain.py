"""`rewarm explain`: ask a running server what a request would reuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from rewarm.errors import InvalidOption

from .remote import HERE, ApiKey, Remote, Url


def explain(
    request: Annotated[str, typer.Argument(help="A file with a request's JSON; - reads stdin.")],
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="The server's answer as it is.")] = False,
) -> None:
    """Say what a request would reuse, why not more, and what to change; nothing is run."""
    found = Remote(url, api_key).ask("/v1/cache/explain", _request(request))
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        _print(found, Console(highlight=False))


def _request(path: str) -> Any:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
        return json.loads(text)
    except OSError as error:
        raise InvalidOption(f"{path!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidOption(f"{path!r} is no text: {error}") from error
    except ValueError as error:
        raise InvalidOption(f"{path!r} is not JSON: {error}") from error


def _print(found: dict[str, Any], console: Console) -> None:
    cached, again = found["cached_tokens"], found["replayed_tokens"]
    new = found["prefilled_tokens"] - again
    console.print(
        f"{found['prompt_tokens']:,} tokens: [green]{cached:,} cached[/], "
        f"[yellow]{again:,} again[/], [red]{new:,} new[/]"
    )
    miss = found["miss"]
    if miss is None:
        console.print("All that is known of it is reused.")
        return
    cases = [(miss["reason"], miss), *((advice["pattern"], advice) for advice in found["advice"])]
    for name, case in cases:
        console.print(f"\n[bold]{name}[/]  {escape(case['text'])}")
        # Only a miss by a difference has words before it. An advice's words may be empty.
        if "before" in case or case.get("stored") or case.get("sent"):
            for words in ("before", "stored", "sent"):
                if words in case:
                    console.print(f"  [dim]{words:>6}[/]  {escape(repr(case[words]))}")
