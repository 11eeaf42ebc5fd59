"""The scenario `disk`: restores compared with computing and reading, decoding while the writer
works, and the opening of a large index."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import numpy as np
import typer

import rewarm
from rewarm.cache import PrefixCache
from rewarm.cache.tiers.disk.files import ALIGNED
from rewarm.cache.tiers.disk.index import Changes, FileRow, NamespaceInfo, NodeRow, new_id
from rewarm.cache.tiers.disk.store import Store
from rewarm.values import Tokens

from .bench import Bench
from .figures import Parts, Spread, median, milliseconds, prefill, random_tokens, ratios
from .scenario import at_least, names, scenario

PARTS = ("restore", "writer", "open")
ANSWER = 32
"""Tokens of an answer. Answers are short, so that their length does not slow them down."""

BENCH = 1
"""The number of the namespace that is measured."""
SERVED = 500
"""Tokens of the prompt that is answered beside the writer."""


@scenario(model="random:hybrid-wide", rounds=7)
def disk(
    bench: Bench,
    tokens: Annotated[int, at_least(1000, "Tokens of the prompt.")] = 20_000,
    nodes: Annotated[int, at_least(20, "Nodes of the index to open.")] = 100_000,
    parts: Annotated[str, typer.Option(help="Parts, with commas.")] = ",".join(PARTS),
    folder: Annotated[
        Path | None, typer.Option(help="Write below this folder instead of a temporary one.")
    ] = None,
) -> None:
    """The disk tier: restoring, decoding while it writes, and opening a large index."""
    wanted = names("--parts", parts, PARTS)
    model, tokenizer = rewarm.load(bench.location)
    prompt = random_tokens(tokens, len(tokenizer))
    measure: dict[str, Callable[[Path], None]] = {
        "restore": lambda at: _restore(bench, model, prompt, at),
        "writer": lambda at: _beside_the_writer(bench, model, prompt, at),
        "open": lambda at: _open(bench, nodes, at),
    }
    for part in wanted:
        with tempfile.TemporaryDirectory(prefix="rewarm-bench-", dir=folder) as made:
            measure[part](Path(made))


def _cache(model: Any, folder: Path) -> PrefixCache:
    return PrefixCache(model, memory="8GB", disk=str(folder), chunk=512)


def _restore(bench: Bench, model: Any, prompt: Tokens, folder: Path) -> None:
    """Measure restores from disk, beside a plain read and a copy of the same bytes."""
    cache = _cache(model, folder)
    computed = milliseconds(lambda: prefill(model, cache, prompt))
    cache.close()
    paths = list(folder.rglob("*.safetensors"))
    size = sum(path.stat().st_size for path in paths)
    sheet = bench.result.sheet(
        f"{len(prompt):,} tokens, {size / 1e6:.1f} MB in {len(paths)} files, "
        f"computed in {computed:,.0f} ms: the median in ms",
        *("files", "restored:.1f", "plain read:.1f", "read / restored"),
        *("times faster than computing:.0f", "from memory:.1f", "one copy:.1f"),
    )
    for dropped in (False, True) if hasattr(os, "posix_fadvise") else (False,):
        rounds = [
            _restored(model, prompt, folder, paths, dropped)
            for _ in bench.each("restores", range(bench.rounds))
        ]
        took = median(rounds)
        share = ratios([r["restored"] for r in rounds], [r["plain read"] for r in rounds])
        where = "dropped from the page cache" if dropped else "in the page cache"
        times = computed / took["restored"]
        beside = (took["from memory"], took["copy"])
        sheet.add(where, took["restored"], took["plain read"], share, times, *beside)


def _restored(model: Any, prompt: Tokens, folder: Path, paths: list[Path], dropped: bool) -> Parts:
    """Restore the prompt in a new cache. `dropped` files are read from the disk itself."""
    parts = Parts()
    if dropped:
        _drop(paths)
    with parts.timed("plain read"):
        kept = [_read(path) for path in paths]
    with parts.timed("copy"):
        copies = [data.copy() for data in kept]
    del kept, copies
    cache = _cache(model, folder)
    cache.match(prompt)  # reads the index
    if dropped:
        _drop(paths)
    for part, tier in (("restored", "disk"), ("from memory", "memory")):
        with parts.timed(part):
            lease = cache.acquire(prompt)
        match = lease.cost.match
        lease.release()
        if (match.tier, match.resume) != (tier, len(prompt) - 1):
            raise RuntimeError(f"{match.resume:,} tokens came from {match.tier}, not from {tier}")
        del lease
    cache.close()
    return parts


def _read(path: Path) -> Any:
    """Read a file's bytes in aligned memory: the system copies much more slowly into other
    memory."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        data = np.empty(size + ALIGNED, np.uint8)
        data = data[-data.ctypes.data % ALIGNED :][:size]
        file.readinto(data.data)
    return data


def _drop(paths: list[Path]) -> None:
    """Have the system drop its copy of the files."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _beside_the_writer(bench: Bench, model: Any, prompt: Tokens, folder: Path) -> None:
    sheet = bench.result.sheet(
        "decoding while the prompt is written",
        *("round", "MB:.0f", "seconds:.1f", "tokens/s:.0f", "idle:.0f", "share:.2f"),
    )
    shares: list[float] = []
    for i in bench.each("rounds", range(bench.rounds)):
        cache = _cache(model, folder / str(i))
        prefill(model, cache, prompt)
        with cache.acquire(prompt[:SERVED]):  # the writer rests while a request is served
            _decode_rate(model, cache, prompt, lambda past: past < 0.2)
            before = _decode_rate(model, cache, prompt, lambda past: past < 1)
            began = time.perf_counter()
            busy = _decode_rate(model, cache, prompt, partial(_writes, cache))
            took = time.perf_counter() - began
            after = _decode_rate(model, cache, prompt, lambda past: past < 1)
        written = cache.stats().below["disk"].written
        cache.close()
        idle = (before + after) / 2
        shares.append(busy / idle)
        sheet.add(i + 1, written / 1e6, took, busy, idle, shares[-1])
    bench.result.figures["decoding beside the writer, of the idle rate"] = str(Spread.of(shares))


def _writes(cache: PrefixCache, past: float) -> bool:
    """Offer what is not written yet. Returns whether the writer still has work."""
    return not cache.flush(wait=False) or cache.stats().below["disk"].unwritten > 0


def _decode_rate(
    model: Any, cache: PrefixCache, prompt: Tokens, goes_on: Callable[[float], bool]
) -> float:
    """Measure the tokens a second in short answers, for as long as `goes_on` says after so many
    seconds."""
    began, steps, decoding = time.perf_counter(), 0, 0.0
    while goes_on(time.perf_counter() - began) or not steps:
        with cache.acquire(prompt[:SERVED], headroom=ANSWER) as lease:
            started = time.perf_counter()
            for _ in range(ANSWER):
                mx.eval(model(mx.array([[11]]), cache=lease.caches))
            decoding += time.perf_counter() - started
            steps += ANSWER
    return steps / decoding


def _open(bench: Bench, nodes: int, folder: Path, tokens: int = 512) -> None:
    """Open a store with so many nodes, and read all nodes, as the first match of a namespace
    does."""
    with bench.steps("writing an index", 1), Store.open(folder, limit=1 << 40) as store:
        store.commit(_rows(nodes, tokens))
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    opening, reading = list[float](), list[float]()
    for _ in bench.each("opening", range(bench.rounds)):
        began = time.perf_counter()
        with Store.open(folder, limit=1 << 40) as store:
            opened = time.perf_counter()
            found = store.index.load(BENCH).nodes
            reading.append(time.perf_counter() - opened)
        opening.append(opened - began)
        assert len(found) == nodes
    sheet = bench.result.sheet(
        f"an index of {nodes:,} nodes of {tokens} tokens, {size / 1e6:,.0f} MB: seconds",
        *("opened", "all its nodes read"),
    )
    sheet.add(Spread.of(opening), Spread.of(reading))


def _rows(nodes: int, tokens: int) -> Changes:
    """Make the rows of so many nodes, twenty to a path."""
    draw = np.random.default_rng(0)
    changes = Changes([NamespaceInfo(BENCH, "bench", {})])
    parent = None
    for n in range(nodes):
        at = n % 20 * tokens
        file = FileRow(new_id(), BENCH, 1 << 20, at, at + tokens)
        key = draw.integers(0, 150_000, tokens, dtype=np.int32)
        key[0] = n  # no two paths begin alike
        node = NodeRow(
            id=new_id(),
            namespace=BENCH,
            parent=parent if at else None,
            origin="prefill",
            kind="turn",
            hits=0,
            used=time.time(),
            hint=1.0,
            rows_file=file.id,
            window_file=None,
            state_file=None,
            key=key.tobytes(),
        )
        changes.files.append(file)
        changes.nodes.append(node)
        parent = node.id
    return changes
