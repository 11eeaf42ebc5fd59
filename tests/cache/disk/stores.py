"""Stores of the disk tier under test, and nodes and payloads that a number tells all of."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np

from rewarm.cache.tiers.disk import files
from rewarm.cache.tiers.disk.records import (
    AddNode,
    AddPayload,
    StoredNode,
    StoredPayload,
)
from rewarm.cache.tiers.disk.store import Store

LIMIT = 64 << 20
ABOUT = {"model": "tiny", "salt": "none"}

# Children are forked from a process that has imported everything once, and holds nothing of ours.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    ["tests.cache.disk.test_store_kills", "tests.cache.disk.test_restart"]
)


def opened(folder: Path, limit: int = LIMIT, reserve: int = 0) -> Store:
    return Store.open(folder, limit=limit, reserve=reserve)


def content(n: int, size: int | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """What payload `n` holds."""
    draw = np.random.default_rng(n)
    length = int(draw.integers(1, 4000)) if size is None else size
    return {
        "a": draw.integers(0, 1 << 16, (2, length), dtype=np.uint16),
        "b": draw.standard_normal(length // 2).astype(np.float32),
    }


def key_of(n: int) -> bytes:
    return np.random.default_rng(n).integers(0, 1 << 30, 1 + n % 90, dtype=np.int32).tobytes()


def node_of(id: int, n: int, rows: int | None, parent: int | None = None) -> StoredNode:
    kinds = (None, "loop", "system")
    origin = ("prefill", "decode")[n % 2]
    return StoredNode(
        *(id, parent, n % 7, key_of(n), origin, kinds[n % 3], n, n + 0.25, 1.0, rows, None, None)
    )


def add(kept: Store, space: int, n: int, parent: int | None = None) -> tuple[int, StoredPayload]:
    """Node `n` with payload `n`, committed."""
    payload = kept.put_payload(content(n), (n, n))
    id = kept.next_id()
    kept.commit(space, [AddPayload(payload), AddNode(node_of(id, n, payload.id, parent))])
    return id, payload


def n_of(payload: StoredPayload) -> int:
    assert payload.span is not None
    return payload.span[0]


def same(found: dict[str, Any] | None, wanted: dict[str, Any]) -> bool:
    return (
        found is not None
        and list(found) == list(wanted)
        and all(
            found[k].dtype == v.dtype and found[k].shape == v.shape and np.array_equal(found[k], v)
            for k, v in wanted.items()
        )
    )


def on_disk(folder: Path) -> list[Path]:
    return sorted(p for p in (folder / "payloads").rglob("*") if p.is_file())


def file_of(kept: Store, payload: StoredPayload) -> Path:
    with kept.guard.using() as index:
        row = kept._pending.get(payload.id) or index.payload(payload.id)
    assert row is not None
    return Path(files.place(kept._payloads, row.written.name))


def used(folder: Path) -> int:
    """As `du` sees it, without the lock."""
    found = [p for p in folder.rglob("*") if p.is_file() and p.name != "lock"]
    return sum(p.stat().st_size for p in found)


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


# Damage


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)
