"""`rewarm serve`: a model behind the HTTP APIs."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rewarm.options import CacheOptions, EngineOptions, ModelOptions, ServerOptions
from rewarm.pocket import BUILT_IN

from .spread import spread

if TYPE_CHECKING:
    from rewarm.engine import Engine

Model = Annotated[
    str, typer.Argument(help="pocket (built in), a model folder, or a Hugging Face id.")
]


@spread
def serve(
    model: Model = BUILT_IN,
    *,
    server: ServerOptions,
    engine: EngineOptions,
    cache: CacheOptions,
    source: ModelOptions,
) -> None:
    """Serve a model through the OpenAI and Anthropic APIs."""
    from rewarm.server.serve import serve

    server = dataclasses.replace(server, model_name=model)
    running = engine_of(model, engine, cache, source)
    console = Console(stderr=True)

    def ready(url: str) -> None:
        # What is loaded stays, so later collections skip it. That saves some 70 ms each time.
        gc.collect()
        gc.freeze()
        key = ' -H "Authorization: Bearer $REWARM_API_KEY"' if server.api_key else ""
        core = running.core
        console.print(
            f"[bold]{model}[/] is served, with a context of {core.context:,} tokens and "
            f"{core.cache.stats().budget / 1e9:.1f} GB of cache ({cache.reuse}). Ctrl-C stops."
            f"\n\n  a page to look at   {url}/\n"
            f"  a line to paste     curl {url}/v1/chat/completions{key} "
            "-H 'Content-Type: application/json' "
            '-d \'{"messages": [{"role": "system", "content": "door code: 4417"}, '
            '{"role": "user", "content": "What is the door code?"}], "max_tokens": 256}\'\n',
            highlight=False,
            soft_wrap=True,
        )

    logging.getLogger("rewarm").setLevel(logging.INFO)
    console.print(f"[dim]loading {model}[/]", highlight=False)
    serve(running, server, ready)
    if running.alive:
        # Python would wait at its end for the thread of a model that is still loading.
        logging.shutdown()
        os._exit(0)


def engine_of(
    model: str, options: EngineOptions, cache: CacheOptions, source: ModelOptions
) -> Engine:
    """Make an engine that loads its model when it is started."""
    from rewarm import PrefixCache, load
    from rewarm.engine import Engine, EngineParts

    def loaded() -> EngineParts:
        found = load(model, **vars(source))
        return EngineParts(*found, PrefixCache(found.model, attach=False, **vars(cache)))

    return Engine(loaded, options)
