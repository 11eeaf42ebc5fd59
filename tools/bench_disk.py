"""The disk tier: how fast a prefix comes back, beside computing it and beside a plain read of the
same bytes; what its writer takes from decoding; and how long a large store takes to open.

python tools/bench_disk.py [--tokens 20000] [--rounds 7] [--only narrow wide writer open]
                           [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rewarm import PrefixCache, accel

accel.install()

# After rewarm, which brings a faster BLAS.
import mlx.core as mx  # noqa: E402
from mlx_lm.models import qwen3_5  # noqa: E402
from mlx_lm.models.cache import KVCache  # noqa: E402

from rewarm.cache.layout import Layout  # noqa: E402
from rewarm.cache.tiers.disk.files import ALIGNED, Written, new_name  # noqa: E402
from rewarm.cache.tiers.disk.records import PayloadRow, StoredNode  # noqa: E402
from rewarm.cache.tiers.disk.store import Store  # noqa: E402
from rewarm.cache.tiers.disk.trees import DiskTrees  # noqa: E402
from rewarm.cache.tiers.disk.writer import Writer  # noqa: E402

VOCABULARY = 512
MODELS = {"narrow": (4, 32), "wide": (16, 64)}
"""Heads and their width: 1 and 8 KB of rows a token."""
ANSWER = 32
"""Tokens."""


def hybrid(heads: int, width: int) -> Any:
    """A model of four layers, three of them recurrent."""
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width,
        "full_attention_interval": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 1 << 16,
    }
    mx.random.seed(0)
    args = qwen3_5.ModelArgs.from_dict({"model_type": "qwen3_5", "text_config": text})
    model = qwen3_5.Model(args)
    mx.eval(model.parameters())
    return model


def prefill(model: Any, cache: PrefixCache, tokens: Any) -> None:
    with cache.acquire(tokens) as lease:
        for cut in lease.cuts:
            model(mx.array(lease.tokens[lease.position : cut.stop])[None], cache=lease.caches)
            mx.eval([c.state for c in lease.caches])
            cache.commit(lease, cut.stop, checkpoint=cut.checkpoint)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return (time.perf_counter() - began) * 1e3, result


def plain_read(paths: list[Path]) -> list[Any]:
    """The same bytes into memory that is kept, as whoever loads them needs it: aligned, for the
    system copies much more slowly to where numpy's arrays begin."""
    kept = []
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        size = os.fstat(fd).st_size
        data = np.empty(size + ALIGNED, np.uint8)
        data = data[-data.ctypes.data % ALIGNED :][:size]
        os.readv(fd, [data])
        os.close(fd)
        kept.append(data)
    return kept


def forget(paths: list[Path]) -> None:
    """Have the system drop its copy of the files, where it can."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def restore(name: str, tokens: Any, rounds: int, folder: Path) -> None:
    model = hybrid(*MODELS[name])

    def opened() -> PrefixCache:
        return PrefixCache(model, memory="8GB", disk=str(folder), chunk=512)

    cache = opened()
    computed, _ = timed(lambda: prefill(model, cache, tokens))
    cache.close()
    paths = list(folder.rglob("*.safetensors"))
    size = sum(path.stat().st_size for path in paths) / 1e6
    print(
        f"\n{name}: {len(tokens):,} tokens, {size:.1f} MB in {len(paths)} files, "
        f"computed in {computed:,.0f} ms"
    )
    print(f"{'ms, median':<18}{'plain':>8}{'restored':>10}{'share':>8}{'x faster':>10}", end="")
    print(f"{'(to memory':>13}{'to caches)':>11}{'from memory':>13}{'copy':>7}")
    for state in ("hot", "cold") if hasattr(os, "posix_fadvise") else ("hot",):
        columns: list[list[float]] = []
        for _ in range(rounds):
            if state == "cold":
                forget(paths)
            plain, kept = timed(lambda: plain_read(paths))
            copied, copies = timed(lambda kept=kept: [data.copy() for data in kept])
            del kept, copies
            cache = opened()
            cache.match(tokens)  # reads the index
            if state == "cold":
                forget(paths)
            whole, lease = timed(lambda cache=cache: cache.acquire(tokens))
            assert (lease.cost.match.tier, lease.cost.match.resume) == ("disk", len(tokens) - 1)
            lease.release()
            del lease
            warm, lease = timed(lambda cache=cache: cache.acquire(tokens))
            assert lease.cost.match.tier == "memory"
            lease.release()
            del lease
            cache.close()
            columns.append([plain, whole, warm, copied])
        plain, whole, warm, copied = np.median(columns, axis=0)
        share = np.median([row[0] / row[1] for row in columns])
        print(
            f"{'files ' + state:<18}{plain:8.1f}{whole:10.1f}{share:8.2f}{computed / whole:9.0f}x"
            f"{whole - warm:13.1f}{warm:11.1f}{warm:13.1f}{copied:7.1f}"
        )


def decode_rate(
    model: Any, cache: PrefixCache, tokens: Any, goes_on: Callable[[float], bool]
) -> float:
    """Tokens a second after a prompt, for as long as `goes_on` says after so many seconds. Answers
    are short, so that no token is slower than others for the length of what is before it."""
    began, steps, decoding = time.perf_counter(), 0, 0.0
    while goes_on(time.perf_counter() - began):
        with cache.acquire(tokens, headroom=ANSWER) as lease:
            started = time.perf_counter()
            for _ in range(ANSWER):
                mx.eval(model(mx.array([[1]]), cache=lease.caches))
            decoding += time.perf_counter() - started
            steps += ANSWER
    return steps / decoding


def decode_beside_the_writer(tokens: Any, rounds: int, folder: Path) -> None:
    model = hybrid(*MODELS["wide"])
    cache = PrefixCache(model, memory="8GB", disk=str(folder), chunk=512)
    disk = cache.disk
    assert disk is not None
    prefill(model, cache, tokens)
    cache.flush()
    shares, seconds = [], []
    for _ in range(rounds):
        disk.forget()
        for tree in cache.memory.trees.values():
            for node in tree.nodes():
                disk.changed(tree, node)
        asked = tokens[:500]
        with cache.acquire(asked):  # somebody is served all the while
            decode_rate(model, cache, asked, lambda past: past < 0.2)
            before = decode_rate(model, cache, asked, lambda past: past < 1)
            cache.flush(wait=False)
            began, rests = time.perf_counter(), disk.writer.rests
            busy = decode_rate(model, cache, asked, lambda _: disk.writer.waiting > 0)
            assert disk.writer.rests > rests
            seconds.append(time.perf_counter() - began)
            disk.wait()
            after = decode_rate(model, cache, asked, lambda past: past < 1)
        shares.append(2 * busy / (before + after))
    print(
        f"\ndecode rate while 164 MB are written ({np.median(seconds):.1f} s), against idle before "
        f"and after: {np.median(shares):.2f} (median of {rounds}; "
        f"{min(shares):.2f} to {max(shares):.2f})"
    )
    cache.close()


def stored_nodes(folder: Path, count: int, tokens: int, about: dict[str, Any]) -> None:
    """An index of so many nodes, twenty to a path, of so many tokens each."""
    draw = np.random.default_rng(0)
    with Store.open(folder, limit=1 << 40) as store:
        space = store.namespace("bench", about)
        with store.guard.using() as index, index.transaction():
            above = None
            for n in range(count):
                file, at = store.next_id(), n % 20 * tokens
                written = Written(new_name(), 1 << 20, draw.bytes(16))
                index.add_payload(PayloadRow(file, space, written, (at, at + tokens)))
                key = draw.integers(0, 150_000, tokens, dtype=np.int32)
                key[0] = n  # no two paths begin alike
                above = above if at else None
                node = StoredNode(
                    id=store.next_id(),
                    parent=above,
                    start=at,
                    key=key.tobytes(),
                    origin="prefill",
                    kind="turn",
                    hits=0,
                    used=time.time(),
                    hint=1.0,
                    rows=file,
                    window=None,
                    state=None,
                )
                index.put_node(space, node, new=True)
                above = node.id


def open_large(rounds: int, folder: Path, count: int = 100_000, tokens: int = 512) -> None:
    """Opening, and the tree of a namespace with all the nodes, which its first match needs."""
    about = {"grid": "fast", "name": "bench"}
    stored_nodes(folder, count, tokens, about)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) / 1e6
    columns = []
    for _ in range(rounds):
        opening, store = timed(lambda: Store.open(folder, limit=1 << 40))
        writer = Writer(store)
        trees = DiskTrees(store, writer, Layout([KVCache()]), about)
        reading, _ = timed(trees.read_all)
        assert trees.account.held.nodes == count
        columns.append([opening, reading])
        writer.close()
        store.close()
    opening, reading = np.median(columns, axis=0) / 1e3
    print(
        f"\nan index of {count:,} nodes of {tokens} tokens, {size:,.0f} MB: opened in "
        f"{opening:.2f} s, all its trees read in {reading:.2f} s (medians of {rounds})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", choices=(*MODELS, "writer", "open"))
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder else")
    options = parser.parse_args()
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, options.tokens, dtype=np.int32)
    for what in options.only or (*MODELS, "writer", "open"):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            if what == "writer":
                decode_beside_the_writer(tokens, options.rounds, Path(folder))
            elif what == "open":
                open_large(options.rounds, Path(folder))
            else:
                restore(what, tokens, options.rounds, Path(folder))


if __name__ == "__main__":
    main()
