"""`rewarm demo`: a chat with Pocket that shows what each turn reused."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rewarm import pocket
from rewarm.options import CacheOptions
from rewarm.values import Message

from .spread import spread

QUESTIONS = (
    "Who is the harbour master?",
    "My berth is 27.",
    "When is the island ferry?",
    "What is 348 + 275?",
    "What is my berth?",
    "What is the fuel price?",
)
EDITED = "And the door code?"
CHUNK = 64
"""Tokens of a chunk. It is short, so that a short chat has several."""
LONGEST_ANSWER = 192
BAR = 16


@spread
def demo(
    turns: Annotated[int, typer.Option(min=2, max=40, help="How long the chat becomes.")] = 6,
    *,
    cache: Annotated[CacheOptions, "reuse"],
) -> None:
    """Chat with the built-in model, and see turn by turn what was cached."""
    from rewarm import PrefixCache, Session, load

    model, tokenizer = load()
    tree = PrefixCache(model, memory="256MB", reuse=cache.reuse, chunk=CHUNK)
    session = Session(model, tokenizer, tree)
    console = Console()
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

    def ask(name: str, messages: list[Message]) -> str:
        reply = session.chat(messages, max_tokens=LONGEST_ANSWER)
        used = reply.usage
        cached = round(BAR * used.cached_tokens / used.prompt_tokens)
        again = round(BAR * used.replayed_tokens / used.prompt_tokens)
        new = BAR - cached - again
        table.add_row(
            name,
            f"{used.prompt_tokens:,}",
            f"{used.cached_tokens:,}",
            f"{used.replayed_tokens:,}",
            f"{used.prefilled_tokens - used.replayed_tokens:,}",
            f"{reply.timings.ttft_ms:.0f} ms",
            f"[green]{'█' * cached}[/][yellow]{'▒' * again}[/][red]{'░' * new}[/]",
            reply.text,
        )
        return reply.text

    for turn in range(turns):
        messages.append({"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)]})
        answer = ask(f"turn {turn + 1}", messages)
        messages.append({"role": "assistant", "content": answer})
    edited = [*messages[:-4], {"role": "user", "content": EDITED}]
    ask("edited", edited)
    ask("repeated", edited)
    console.print(table)
    stats = tree.stats()
    console.print(
        f"\n{stats.tokens:,} distinct tokens are held in {stats.held / 1e6:.2f} MB, "
        f"with {stats.checkpoints} checkpoints."
    )
