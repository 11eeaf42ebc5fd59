"""A short demonstration: a chat with Pocket, and what each turn of it reused."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from rewarm import pocket
from rewarm.cache import PrefixCache
from rewarm.errors import InvalidOption
from rewarm.loading import load
from rewarm.session import Reply, Session
from rewarm.values import Message

QUESTIONS = (
    "Who is the harbour master?",
    "My berth is 27.",
    "When is the island ferry?",
    "What is 348 + 275?",
    "What is my berth?",
    "What is the fuel price?",
)
EDITED = "And the door code?"


def show(turns: int, reuse: str) -> None:
    if reuse not in ("fast", "exact"):
        raise InvalidOption(f'reuse={reuse!r} is unknown: give "fast" or "exact"')
    console = Console()
    model, tokenizer = load()
    # A short chunk, so that a short chat has several.
    cache = PrefixCache(
        model, memory="256MB", reuse="exact" if reuse == "exact" else "fast", chunk=64
    )
    session = Session(model, tokenizer, cache)
    console.print(
        "Pocket has recurrent layers and attention, and its template strips the thinking\n"
        "of earlier turns. Every turn sends the whole history again.\n"
    )
    table = Table(
        "", "prompt", "cached", "again", "new", "first token", "", "", box=None, pad_edge=False
    )
    for column in table.columns[1:6]:
        column.justify = "right"
    messages: list[Message] = [{"role": "system", "content": pocket.TABLE}]
    for turn in range(turns):
        messages.append({"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)]})
        reply = session.chat(messages, max_tokens=192)
        _row(table, f"turn {turn + 1}", reply)
        messages.append({"role": "assistant", "content": reply.text})
    edited = [*messages[:-4], {"role": "user", "content": EDITED}]
    _row(table, "edited", session.chat(edited, max_tokens=192))
    _row(table, "repeated", session.chat(edited, max_tokens=192))
    console.print(table)
    stats = cache.stats()
    console.print(
        f"\n{stats.tokens:,} distinct tokens are held in {stats.held / 1e6:.2f} MB, "
        f"with {stats.checkpoints} checkpoints."
    )


def _row(table: Table, name: str, reply: Reply) -> None:
    used = reply.usage
    new = used.prefilled_tokens - used.replayed_tokens
    cells = 16
    cached = round(cells * used.cached_tokens / used.prompt_tokens)
    again = round(cells * used.replayed_tokens / used.prompt_tokens)
    rest = cells - cached - again
    bar = f"[green]{'█' * cached}[/][yellow]{'▒' * again}[/][red]{'░' * rest}[/]"
    table.add_row(
        name,
        f"{used.prompt_tokens:,}",
        f"{used.cached_tokens:,}",
        f"{used.replayed_tokens:,}",
        f"{new:,}",
        f"{reply.timings.ttft_ms:.0f} ms",
        bar,
        reply.text,
    )
