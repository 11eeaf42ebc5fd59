"""The scenario `hit`: the parts of a hit, a pass of the model by its tokens, and the kernels."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import numpy as np
import typer

from rewarm import accel
from rewarm.cache import PrefixCache
from rewarm.values import Tokens

from .archs import random_model, vocabulary
from .bench import Bench
from .figures import Parts, median, prefill, random_tokens
from .prefix import TAIL
from .result import Sheet
from .scenario import at_least, scenario

PASSES = (1, 2, 16, 64, 256, 2048)
OTHER_TAIL = TAIL + 5
"""A number of new tokens that MLX has not planned for yet."""

SHOWN = 20
"""The number of kernels in the table."""


@scenario(rounds=5)
def hit(
    bench: Bench,
    arch: Annotated[str, typer.Option(help="An architecture of random:ARCH.")] = "qwen3.5-0.6b",
    length: Annotated[int, at_least(1, "Tokens of the prompt.")] = 100_000,
    kernels: Annotated[
        Path | None, typer.Option(help="Trace a hit into this folder (CUDA, with PyTorch).")
    ] = None,
) -> None:
    """A hit part by part: look-up, restore, the new tokens, storing them, the first step."""
    if kernels is not None:
        _prepare_profiler()
    accel.install()
    model = random_model(arch)
    cache = PrefixCache(model)
    size = vocabulary(arch)
    prompt = random_tokens(length, size)
    sheet = bench.result.sheet(
        f"{length:,} tokens and {TAIL} new ones, ms",
        *("what", *(f"{part}:.1f" for part in PARTS), "in all:.1f"),
    )

    def ask(count: int, seed: int) -> Parts:
        return prefill(model, cache, np.concatenate([prompt, random_tokens(count, size, seed)]))

    _row(sheet, "cold", prefill(model, cache, prompt))
    _row(sheet, "the first hit", ask(TAIL, 1))
    hits = [ask(TAIL, 2 + i) for i in bench.each("hits", range(bench.rounds))]
    _row(sheet, f"a hit, median of {bench.rounds}", median(hits))
    _row(sheet, f"a hit with {OTHER_TAIL} new tokens", ask(OTHER_TAIL, 2 + bench.rounds))
    if kernels is not None:
        _kernels(bench, lambda: ask(TAIL, 3 + bench.rounds), kernels)
    _passes(bench, model, cache, prompt, size)
    bench.result.figures["peak memory, GB"] = f"{mx.get_peak_memory() / 1e9:.1f}"


PARTS = ("look up, restore", "the new tokens", "storing them", "the first step")


def _row(sheet: Sheet, what: str, parts: Parts) -> None:
    sheet.add(what, *(parts[part] for part in PARTS), sum(parts.values()))


def _passes(bench: Bench, model: Any, cache: PrefixCache, prompt: Tokens, size: int) -> None:
    """Measure the model on so many tokens after a hit, without logits, as in a prefill."""
    sheet = bench.result.sheet("a pass of the model after a hit", "tokens", "ms, median:.1f")
    for count in bench.each("passes", PASSES):
        rounds = []
        for i in range(bench.rounds):
            tokens = random_tokens(count, size, i)
            with cache.acquire(np.concatenate([prompt, tokens]), headroom=1) as lease:
                caches = lease.caches
            mx.eval([c.state for c in caches])
            rounds.append(Parts())
            with rounds[-1].timed("pass"):
                model(mx.array(tokens)[None], cache=caches)
                mx.eval([c.state for c in caches])
        sheet.add(count, median(rounds)["pass"])


def _prepare_profiler() -> None:
    """Make PyTorch's profiler usable: PyTorch must use the GPU before MLX does."""
    import torch

    torch.zeros(1, device="cuda")


def _kernels(bench: Bench, do: Callable[[], object], folder: Path) -> None:
    """List every kernel of a call. PyTorch's profiler sees those of other libraries, too."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        do()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    ran = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in ran:
        by_name[event["name"][:100]].append(event["dur"] / 1e3)
    span = max(e["ts"] + e["dur"] for e in ran) - min(e["ts"] for e in ran) if ran else 0.0
    busy = sum(map(sum, by_name.values()))
    sheet = bench.result.sheet(
        f"{len(ran):,} kernels, at work for {busy:.1f} of {span / 1e3:.1f} ms",
        *("kernel", "ms:.2f", "runs"),
    )
    for name, took in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
        sheet.add(name, sum(took), len(took))
