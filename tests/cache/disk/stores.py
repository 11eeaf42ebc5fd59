"""Stores of the disk tier for tests, with nodes and payloads that are made from a number."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rewarm.cache.tiers.disk import files
from rewarm.cache.tiers.disk.errors import Damaged, StoreBroken
from rewarm.cache.tiers.disk.index import Changes, FileRow, NamespaceInfo, NodeRow, new_id
from rewarm.cache.tiers.disk.store import Store
from rewarm.cache.tiers.seal import is_whole, stamped

LIMIT = 64 << 20
ABOUT = {"model": "tiny", "salt": "none"}
ONE, TWO = 1001, 1002
"""The ids of two namespaces."""

# Children are forked from a process that has imported everything once, and has no other state.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    ["tests.cache.disk.test_store_kills", "tests.cache.disk.test_restart"]
)


def opened(folder: Path, limit: int = LIMIT, reserve: int = 0) -> Store:
    return Store.open(folder, limit=limit, reserve=reserve)


def content(n: int, size: int | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """Make the arrays of payload `n`, with their seal."""
    draw = np.random.default_rng(n)
    length = int(draw.integers(1, 4000)) if size is None else size
    return stamped(
        {
            "a": draw.integers(0, 1 << 16, (2, length), dtype=np.uint16),
            "b": draw.standard_normal(length // 2).astype(np.float32),
        }
    )


def key_of(n: int) -> bytes:
    return np.random.default_rng(n).integers(0, 1 << 30, 1 + n % 90, dtype=np.int32).tobytes()


def node_of(id: int, n: int, rows: int | None, parent: int | None = None) -> NodeRow:
    kinds = (None, "turn", "system")
    origin = ("prefill", "decode")[n % 2]
    return NodeRow(
        *(id, ONE, parent, origin, kinds[n % 3], n, n + 0.25, 1.0, rows, None, None, key_of(n))
    )


def space_of(id: int, about: Any = None) -> NamespaceInfo:
    return NamespaceInfo(id, str(id), about or ABOUT)


def write(kept: Store, n: int, space: int = ONE, size: int | None = None) -> FileRow:
    """Write a file that the index does not know yet."""
    id = new_id()
    return FileRow(id, space, kept.write(id, content(n, size)), n, n + 1)


def commit(kept: Store, *nodes: NodeRow, files: Sequence[FileRow] = (), **more: Any) -> None:
    spaces = {each.namespace for each in (*nodes, *files)}
    kept.commit(Changes([space_of(id) for id in spaces], list(files), list(nodes), **more))


def add(kept: Store, n: int, parent: int | None = None, space: int = ONE) -> tuple[int, FileRow]:
    """Commit node `n` with payload `n`."""
    file = write(kept, n, space)
    id = new_id()
    commit(kept, node_of(id, n, file.id, parent)._replace(namespace=space), files=[file])
    return id, file


def n_of(file: FileRow) -> int:
    assert file.start is not None
    return file.start


def read(kept: Store, file: FileRow) -> dict[str, Any] | None:
    """Read a payload as the caller of a tier gets it: with a whole seal, or not at all."""
    try:
        found = kept.read(file.id, file.nbytes)
    except (Damaged, StoreBroken):
        return None
    return found if is_whole(found) else None


def same(found: dict[str, Any] | None, wanted: dict[str, Any]) -> bool:
    return (
        found is not None
        and set(found) == set(wanted)
        and all(
            found[k].dtype == v.dtype and found[k].shape == v.shape and np.array_equal(found[k], v)
            for k, v in wanted.items()
        )
    )


def on_disk(folder: Path) -> list[Path]:
    return sorted(p for p in (folder / "payloads").rglob("*") if p.is_file())


def file_of(kept: Store, file: FileRow) -> Path:
    return Path(files.place(kept._payloads, file.id))


def used(folder: Path) -> int:
    """Add up the bytes of all files but the lock."""
    found = [p for p in folder.rglob("*") if p.is_file() and p.name != "lock"]
    return sum(p.stat().st_size for p in found)


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


# Damage


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)
