"""`rewarm chat`: a chat in the terminal, on an engine of its own."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from rewarm import pocket
from rewarm.errors import NotReady
from rewarm.options import CacheOptions, EngineOptions, ModelOptions, ServerOptions
from rewarm.values import Sampling

from .serve import Model, engine_of
from .spread import spread


@spread
def chat(
    model: Model = pocket.BUILT_IN,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 2048,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 is always the likeliest.")
    ] = Sampling.temperature,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = Sampling.top_p,
    seed: Annotated[int | None, typer.Option(help="For answers that can be repeated.")] = None,
    *,
    server: Annotated[ServerOptions, "chat_template_args", "warm_ahead"],
    engine: Annotated[EngineOptions, "context"],
    cache: CacheOptions,
    source: ModelOptions,
) -> None:
    """Chat with a model in the terminal, and see what each turn reused."""
    from rewarm.generate.generator import Generator
    from rewarm.generate.options import GenerationOptions

    from .conversation import Conversation

    console = Console()
    built_in = model == pocket.BUILT_IN
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    running = engine_of(model, engine, cache, source)
    conversation = Conversation(
        Generator(running, server),
        GenerationOptions(max_tokens=max_tokens, sampling=sampling, stream=True),
        console,
        system=pocket.TABLE if built_in and system is None else system,
        questions=pocket.ASK if built_in else None,
    )
    with console.status(f"loading {model}"):
        running.start()
        state = running.wait()
    try:
        if state != "ready":
            raise NotReady(running.detail)
        hint = "/help says what to ask it" if built_in else "/help lists the commands"
        console.print(f"[bold]{model}[/]  [dim]{hint}, Ctrl-D leaves[/]")
        conversation.run()
    finally:
        running.stop()
