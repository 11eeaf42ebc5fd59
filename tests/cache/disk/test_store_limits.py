"""A store counts its bytes, keeps to its limit, and stays quick when it is large."""

from __future__ import annotations

import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from rewarm.cache.tiers.disk import files
from rewarm.cache.tiers.disk.index import Changes, FileRow, new_id
from rewarm.cache.tiers.disk.store import Store
from tests.sets import SOAK

from .stores import (
    ONE,
    TWO,
    add,
    commit,
    content,
    node_of,
    on_disk,
    opened,
    space_of,
    used,
    write,
)

# Limits and namespaces


def test_bytes_and_room_are_what_the_disk_says(folder: Path) -> None:
    with opened(folder, limit=10 << 20) as kept:
        made = []
        for n in range(30):
            made.append(add(kept, n)[1])
            assert kept.bytes() == used(folder)
        waiting = write(kept, 31)
        assert kept.bytes() == used(folder)
        # The log may be moved into the index at any time, and then grows again beside it.
        spare = kept.index.may_grow
        assert kept.free_bytes() == (10 << 20) - used(folder) - spare
        kept.set_aside(made[0].id, "of a flip")
        assert kept.bytes() == used(folder)
        commit(kept, gone_files={file.id: 0 for file in (waiting, *made[:10])})
        assert kept.bytes() == used(folder)
    with opened(folder, limit=10_000) as kept:
        kept.verify()
        assert kept.bytes() == used(folder)
        assert kept.free_bytes() <= 10_000 - used(folder) < 0


def test_room_leaves_a_reserve_on_the_disk(folder: Path) -> None:
    disk = shutil.disk_usage(folder.parent)
    with opened(folder, limit=1 << 60, reserve=disk.free + (1 << 30)) as kept:
        assert kept.free_bytes() < 0
    with opened(folder, limit=1 << 60) as kept:
        assert 0 < kept.free_bytes() <= disk.total


def test_the_quarantine_stays_small(folder: Path) -> None:
    with opened(folder, limit=1 << 20) as kept:
        for n in range(12):
            kept.set_aside(write(kept, n, size=5000).id, "of a flip")
        size = sum(p.stat().st_size for p in (folder / "quarantine").iterdir())
        assert 90_000 < size <= (1 << 20) // 8
        assert kept.bytes() == used(folder)


def test_the_index_gives_its_room_back(folder: Path) -> None:
    with opened(folder) as kept:
        ids = [new_id() for _ in range(3000)]
        commit(kept, *(node_of(i, 1, None)._replace(key=bytes(2048)) for i in ids))
        kept.index.checkpoint()
        assert (folder / "index.sqlite-wal").stat().st_size == 0
        large = kept.bytes()
        assert large > 6_000_000
        commit(kept, gone_nodes=ids)
        kept.index.checkpoint()
        assert kept.bytes() == used(folder) < large // 10


def test_clear_takes_what_it_is_told_to(folder: Path) -> None:
    with opened(folder) as kept:
        held = {}
        for i in range(5):
            held[i] = sum(add(kept, i * 10 + n, space=i)[1].nbytes for n in range(3))
            about = {"model": f"m{i % 2}", "salt": f"s{i}"}
            kept.commit(Changes([space_of(i, about)]))
        (folder / "quarantine" / "old").write_bytes(bytes(1000))
        infos = {info.id: info for info in kept.index.namespaces()}
        assert [infos[i].digest for i in range(5)] == ["0", "1", "2", "3", "4"]
        assert all((i.nodes, i.files, i.bytes) == (3, 3, held[i.id]) for i in infos.values())
        assert infos[3].about == {"model": "m1", "salt": "s3"}
        assert abs(infos[0].used - time.time()) < 60

        kept.index.checkpoint()
        assert kept.clear(lambda info: info.about["salt"] == "s1") >= held[1]
        assert kept.clear(lambda info: info.about["salt"] == "s1") == 0
        assert not list((folder / "quarantine").iterdir())
        assert kept.clear(lambda info: info.id == 0) >= held[0]
        assert [info.id for info in kept.index.namespaces()] == [2, 3, 4]
        assert len(on_disk(folder)) == 9
        kept.clear()
        assert (kept.index.namespaces(), on_disk(folder)) == ([], [])
        assert kept.bytes() == used(folder)


def test_nothing_of_a_cleared_namespace_is_left_in_the_index(folder: Path) -> None:
    with opened(folder) as kept:
        secret = b"only this tenant's tokens"
        commit(kept, *(node_of(new_id(), 1, None)._replace(key=secret * 4) for _ in range(50)))
        add(kept, 1, space=TWO)
        kept.clear(lambda info: info.id == ONE)
        for path in folder.rglob("*"):
            assert path.is_dir() or secret not in path.read_bytes(), path


def test_a_large_index_opens_in_a_few_queries(folder: Path) -> None:
    count = 100_000 if SOAK else 20_000
    with opened(folder, limit=1 << 40) as kept:
        nodes, made = [], []
        above = None
        for n in range(count):
            made.append(FileRow(new_id(), ONE, 1000, n, n + 1))
            above = None if n % 20 == 0 else above
            nodes.append(node_of(new_id(), n, made[-1].id, above)._replace(key=bytes(256)))
            above = nodes[-1].id
        commit(kept, *nodes, files=made)
    statements: list[str] = []
    real = sqlite3.connect

    def traced(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        db: sqlite3.Connection = real(*args, **kwargs)
        db.set_trace_callback(statements.append)
        return db

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", traced)
        patch.setattr(files, "stored", lambda _: pytest.fail("the files are not looked at"))
        patch.setattr(files, "place", lambda *_: pytest.fail("nor is any one of them"))
        kept = opened(folder, limit=1 << 40)
        stored = kept.index.load(ONE)
    assert len(stored.nodes) == len(stored.files) == count
    assert len(statements) < 60
    kept.close()


def test_what_is_planned_is_no_longer_free(kept: Store) -> None:
    unplanned, free = kept.unplanned_bytes(), kept.free_bytes()
    kept.plan(5000)
    assert (unplanned - kept.unplanned_bytes(), kept.free_bytes()) == (5000, free)
    size = kept.write(1, content(1), planned=5000)
    assert unplanned - kept.unplanned_bytes() == size
    kept.plan(-5000)  # what will be removed
    commit(kept, gone_files={1: 5000})
    assert kept.free_bytes() == kept.unplanned_bytes()
