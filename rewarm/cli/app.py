"""The command line."""

from __future__ import annotations

import gc
import json
import logging
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

import rewarm
from rewarm.accel import blas
from rewarm.errors import InvalidOption, NotReady, RewarmError
from rewarm.options import AUTO, DISK_SIZE, CacheOptions, EngineOptions, ServerOptions

from .bench import bench_app
from .cache import cache_app
from .live import explain, top

if TYPE_CHECKING:
    from rewarm.engine import Engine

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="A prompt cache for MLX language models: work already done for a prompt is never done "
    "again.",
)


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    import mlx.core as mx

    used = blas.current()
    print(f"rewarm {rewarm.__version__}")
    for package in ("mlx", "mlx-lm"):
        try:
            print(f"{package} {version(package)}")
        except PackageNotFoundError:
            print(f"{package} is not installed as a package")
    print(f"python {platform.python_version()}, {platform.system()} {platform.machine()}")
    print(f"device {mx.default_device()}")
    print(f"blas {used.name}")
    if used.note:
        print(f"note: {used.note}")
    raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Versions, device and BLAS."
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is done.")] = False,
) -> None:
    level = logging.INFO if verbose else logging.WARNING
    if sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False)
        logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
    else:  # a file or a service: one line each, however long
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")


@app.command()
def demo(
    turns: Annotated[int, typer.Option(min=2, max=40, help="How long the chat becomes.")] = 6,
    reuse: Annotated[
        str, typer.Option(help="fast, or exact: a hit gives the very bits of a cold run.")
    ] = "fast",
) -> None:
    """Chat with the built-in model, and see turn by turn what was cached."""
    from .demo import show

    show(turns, reuse)


app.add_typer(cache_app, name="cache")
app.command()(explain)
app.command()(top)
app.add_typer(bench_app, name="bench")

CACHE, MODEL = "Cache", "Model"

Model = Annotated[
    str, typer.Argument(help="pocket (built in), a model folder, or a Hugging Face id.")
]
Memory = Annotated[
    str, typer.Option(help="For the cache: auto, or a size such as 4GB.", rich_help_panel=CACHE)
]
Disk = Annotated[
    str | None,
    typer.Option(help="A folder that outlives the process.", rich_help_panel=CACHE),
]
DiskSize = Annotated[str, typer.Option(help="Limit of that folder.", rich_help_panel=CACHE)]
Reuse = Annotated[
    str,
    typer.Option(
        help="fast, or exact: a hit gives the very bits of a cold run.", rich_help_panel=CACHE
    ),
]
Chunk = Annotated[
    int | None,
    typer.Option(
        help="Prompt tokens computed at a time (512; 2048 on a GPU).", rich_help_panel=CACHE
    ),
]
AdapterPath = Annotated[
    str | None, typer.Option(help="A folder with a LoRA adapter.", rich_help_panel=MODEL)
]
KvBits = Annotated[
    int | None, typer.Option(help="Quantise the K/V cache to so many bits.", rich_help_panel=MODEL)
]
KvGroupSize = Annotated[int, typer.Option(help="Group size of --kv-bits.", rich_help_panel=MODEL)]
TemplateArgs = Annotated[
    str,
    typer.Option(
        metavar="JSON",
        help="For the chat template, such as '{\"enable_thinking\": false}'.",
        rich_help_panel=MODEL,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(help="Let a model's tokenizer run its own code.", rich_help_panel=MODEL),
]
WarmAhead = Annotated[
    bool,
    typer.Option(help="Prepare the next turn while nothing else is to do.", rich_help_panel=CACHE),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")]
MaxBatch = Annotated[int, typer.Option(min=1, help="Answers generated at once.")]
MaxQueue = Annotated[int, typer.Option(min=1, help="Requests that may wait.")]
Context = Annotated[int | None, typer.Option(help="Lower the model's context to so many tokens.")]


@app.command()
def serve(
    model: Model = "pocket",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = ServerOptions.host,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 picks a free one.")
    ] = ServerOptions.port,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="REWARM_API_KEY", help="Asked of every client. Needed on a public host."
        ),
    ] = None,
    allow_public: Annotated[
        bool, typer.Option("--allow-public", help="Listen on a public host without a key.")
    ] = False,
    context: Context = EngineOptions.context,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Answers generated at once.")
    ] = EngineOptions.max_batch,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Requests that may wait.")
    ] = EngineOptions.max_queue,
    memory: Memory = AUTO,
    disk: Disk = CacheOptions.disk,
    disk_size: DiskSize = DISK_SIZE,
    reuse: Reuse = CacheOptions.reuse,
    chunk: Chunk = CacheOptions.chunk,
    warm_ahead: WarmAhead = ServerOptions.warm_ahead,
    keep_billing_header: Annotated[
        bool,
        typer.Option(
            "--keep-billing-header",
            help="Leave a coding agent's billing header, new in every request, in the prompt.",
            rich_help_panel=CACHE,
        ),
    ] = False,
    adapter_path: AdapterPath = None,
    kv_bits: KvBits = CacheOptions.kv_bits,
    kv_group_size: KvGroupSize = CacheOptions.kv_group_size,
    chat_template_args: TemplateArgs = "{}",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve a model through the OpenAI and Anthropic APIs."""
    from rewarm.server.serve import serve

    logging.getLogger("rewarm").setLevel(logging.INFO)
    options = ServerOptions(
        model_name=model,
        api_key=api_key,
        host=host,
        port=port,
        allow_public=allow_public,
        template_options=_json_object(chat_template_args),
        keep_billing_header=keep_billing_header,
        warm_ahead=warm_ahead,
    )
    engine = _engine(
        EngineOptions(max_batch=max_batch, max_queue=max_queue, context=context),
        model,
        adapter_path=adapter_path,
        trust_remote_code=trust_remote_code,
        memory=memory,
        disk=disk,
        disk_size=disk_size,
        reuse=reuse,
        chunk=chunk,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
    )
    console = Console(stderr=True)

    def ready(url: str) -> None:
        # What is loaded stays: a collection need not look at it again, some 70 ms each time.
        gc.collect()
        gc.freeze()
        key = ' -H "Authorization: Bearer $REWARM_API_KEY"' if api_key else ""
        console.print(
            f"[bold]{model}[/] is served, with a context of {engine.context:,} tokens and "
            f"{engine.cache.memory.budget / 1e9:.1f} GB of cache ({reuse}). Ctrl-C stops.\n\n"
            f"  a page to look at   {url}/\n"
            f"  a line to paste     curl {url}/v1/chat/completions{key} "
            "-H 'Content-Type: application/json' "
            '-d \'{"messages": [{"role": "system", "content": "door code: 4417"}, '
            '{"role": "user", "content": "What is the door code?"}], "max_tokens": 256}\'\n',
            highlight=False,
            soft_wrap=True,
        )

    options.check_bind()
    console.print(f"[dim]loading {model}[/]", highlight=False)
    serve(engine, options, ready)
    if engine.alive:
        # A model that is still loading cannot be waited for, nor be left at it while Python ends.
        logging.shutdown()
        os._exit(0)


@app.command()
def chat(
    model: Model = "pocket",
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 2048,
    temperature: Annotated[float, typer.Option(min=0, help="0 is always the likeliest.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    seed: Annotated[int | None, typer.Option(help="For answers that can be repeated.")] = None,
    context: Context = EngineOptions.context,
    memory: Memory = AUTO,
    disk: Disk = CacheOptions.disk,
    disk_size: DiskSize = DISK_SIZE,
    reuse: Reuse = CacheOptions.reuse,
    chunk: Chunk = CacheOptions.chunk,
    warm_ahead: WarmAhead = ServerOptions.warm_ahead,
    adapter_path: AdapterPath = None,
    kv_bits: KvBits = CacheOptions.kv_bits,
    kv_group_size: KvGroupSize = CacheOptions.kv_group_size,
    chat_template_args: TemplateArgs = "{}",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Chat with a model in the terminal, and see what each turn reused."""
    from rewarm import pocket
    from rewarm.values import Sampling

    from .chat import ChatOptions, Conversation

    console = Console()
    built_in = model == pocket.BUILT_IN
    options = ChatOptions(
        system=pocket.TABLE if built_in and system is None else system,
        ask=pocket.ASK if built_in else "",
        max_tokens=max_tokens,
        sampling=Sampling(temperature=temperature, top_p=top_p, seed=seed),
        template=_json_object(chat_template_args),
        warm_ahead=warm_ahead,
    )
    engine = _engine(
        EngineOptions(context=context),
        model,
        adapter_path=adapter_path,
        trust_remote_code=trust_remote_code,
        memory=memory,
        disk=disk,
        disk_size=disk_size,
        reuse=reuse,
        chunk=chunk,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
    )
    with console.status(f"loading {model}"):
        engine.start()
        state = engine.wait()
    try:
        if state != "ready":
            raise NotReady(engine.detail)
        hint = "/help says what to ask it" if built_in else "/help lists the commands"
        console.print(f"[bold]{model}[/]  [dim]{hint}, Ctrl-D leaves[/]")
        Conversation(engine, options, console).run()
    finally:
        engine.stop()


def _engine(
    options: EngineOptions,
    model: str,
    *,
    adapter_path: str | None,
    trust_remote_code: bool,
    **cache_options: Any,
) -> Engine:
    """An engine that loads its model when it starts; what can be wrong at once is said at once."""
    from rewarm import PrefixCache, load
    from rewarm.engine import Engine, Loaded

    CacheOptions(**cache_options)

    def loaded() -> Loaded:
        found = load(model, adapter_path=adapter_path, trust_remote_code=trust_remote_code)
        cache = PrefixCache(found.model, attach=False, **cache_options)
        return Loaded(found.model, found.tokenizer, cache)

    return Engine(loaded, options)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidOption(f"--chat-template-args {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidOption(f"--chat-template-args {text!r} is not a JSON object")
    return value


def main() -> None:
    try:
        app()
    except RewarmError as error:
        print(f"rewarm: {error}", file=sys.stderr)
        sys.exit(2)
