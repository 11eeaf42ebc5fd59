"""The bytes of a store, its limit, its namespaces, and its size."""

from __future__ import annotations

import shutil
import sqlite3
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from rewarm.cache.tiers.disk import files
from rewarm.cache.tiers.disk.files import Written
from rewarm.cache.tiers.disk.records import (
    AddNode,
    AddPayload,
    PayloadRow,
    RemoveNode,
)
from tests.sets import SOAK

from .stores import (
    ABOUT,
    add,
    content,
    file_of,
    flip,
    node_of,
    on_disk,
    opened,
    used,
)

# Limits and namespaces


def test_bytes_and_room_are_what_the_disk_says(folder: Path) -> None:
    with opened(folder, limit=10 << 20) as kept:
        space = kept.namespace("one", ABOUT)
        made = []
        for n in range(30):
            made.append(add(kept, space, n)[1])
            assert kept.bytes() == used(folder)
        waiting = kept.put_payload(content(31), None)
        assert kept.bytes() == used(folder)
        # The log of the index may be moved into it at any time, and goes on beside it.
        spare = kept.guard.index.may_grow
        assert kept.free_bytes() == (10 << 20) - used(folder) - spare
        flip(file_of(kept, made[0]), 9)
        assert kept.read(made[0]) is None
        assert kept.bytes() == used(folder)
        kept.remove_payloads([waiting.id, *(p.id for p in made[1:10])])
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
        space = kept.namespace("one", ABOUT)
        for n in range(12):
            payload = kept.put_payload(content(n, size=5000), None)
            kept.commit(space, [AddPayload(payload)])
            flip(file_of(kept, payload), 100)
            assert kept.read(payload) is None
        size = sum(p.stat().st_size for p in (folder / "quarantine").iterdir())
        assert 90_000 < size <= (1 << 20) // 8
        assert kept.bytes() == used(folder)


def test_the_index_gives_its_room_back(folder: Path) -> None:
    with opened(folder) as kept:
        space = kept.namespace("one", ABOUT)
        ids = [kept.next_id() for _ in range(3000)]
        kept.commit(space, [AddNode(replace(node_of(i, 1, None), key=bytes(2048))) for i in ids])
        kept.checkpoint()
        assert (folder / "index.sqlite-wal").stat().st_size == 0
        large = kept.bytes()
        assert large > 6_000_000
        kept.commit(space, [RemoveNode(i) for i in ids])
        kept.checkpoint()
        assert kept.bytes() == used(folder) < large // 10


def test_clear_takes_what_it_is_told_to(folder: Path) -> None:
    with opened(folder) as kept:
        spaces = [kept.namespace(f"{i}", {"model": f"m{i % 2}", "salt": f"s{i}"}) for i in range(5)]
        held = {s: sum(add(kept, s, s * 10 + n)[1].nbytes for n in range(3)) for s in spaces}
        (folder / "quarantine" / "old").write_bytes(bytes(1000))
        infos = {info.id: info for info in kept.namespaces()}
        assert [infos[s].digest for s in spaces] == ["0", "1", "2", "3", "4"]
        assert all((i.nodes, i.payloads, i.bytes) == (3, 3, held[i.id]) for i in infos.values())
        assert infos[spaces[3]].about == {"model": "m1", "salt": "s3"}
        assert abs(infos[spaces[0]].used - time.time()) < 60

        kept.checkpoint()
        assert kept.clear(where={"salt": "s1"}) >= held[spaces[1]]
        assert kept.clear(where={"salt": "s1"}) == 0
        assert kept.clear(where={"salt": "nobody"}) == 0
        assert not list((folder / "quarantine").iterdir())
        assert kept.clear(namespace=spaces[0]) >= held[spaces[0]]
        assert [info.id for info in kept.namespaces()] == spaces[2:]
        assert kept.clear(where={"model": "m0"}, namespace=spaces[3]) == 0
        assert len(on_disk(folder)) == 9
        kept.clear()
        assert (kept.namespaces(), on_disk(folder)) == ([], [])
        assert kept.bytes() == used(folder)
        # A namespace in use is there again with its next node.
        id, _ = add(kept, spaces[2], 1)
        assert [info.id for info in kept.namespaces()] == [spaces[2]]
        assert [node.id for node in kept.nodes(spaces[2])[0]] == [id]
        assert kept.namespace("2", {}) == spaces[2]


def test_nothing_of_a_cleared_namespace_is_left_in_the_index(folder: Path) -> None:
    with opened(folder) as kept:
        space = kept.namespace("one", ABOUT)
        secret = b"only this tenant's tokens"
        ids = [kept.next_id() for _ in range(50)]
        kept.commit(space, [AddNode(replace(node_of(i, 1, None), key=secret * 4)) for i in ids])
        add(kept, kept.namespace("two", {"salt": "other"}), 1)
        kept.clear(where=ABOUT)
        for path in folder.rglob("*"):
            assert path.is_dir() or secret not in path.read_bytes(), path


def test_a_large_index_opens_in_a_few_queries(folder: Path) -> None:
    count = 100_000 if SOAK else 20_000
    with opened(folder, limit=1 << 40) as kept:
        space = kept.namespace("one", ABOUT)
        with kept.guard.using() as index, index.transaction():
            above = None
            for n in range(count):
                id, file = kept.next_id(), kept.next_id()
                name = struct.pack(">QQ", n * 0x9E3779B97F4A7C15 % (1 << 64), n).hex()
                written = Written(name, 1000, xxhash.xxh3_128_digest(name.encode()))
                index.add_payload(PayloadRow(file, space, written, (n, n)))
                above = None if n % 20 == 0 else above
                node = replace(node_of(id, n, file, above), key=bytes(256))
                index.put_node(space, node, new=True)
                above = id
    statements: list[str] = []
    real = sqlite3.connect

    def traced(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        db: sqlite3.Connection = real(*args, **kwargs)
        db.set_trace_callback(statements.append)
        return db

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", traced)
        patch.setattr(files, "shards", lambda _: pytest.fail("the files are not looked at"))
        patch.setattr(files, "place", lambda *_: pytest.fail("nor is any one of them"))
        began = time.perf_counter()
        kept = opened(folder, limit=1 << 40)
        middle = time.perf_counter()
        nodes, payloads = kept.nodes(space)
        done = time.perf_counter()
    print(f"{count} nodes: open {middle - began:.2f} s, nodes {done - middle:.2f} s")
    assert len(nodes) == len(payloads) == count
    assert len(statements) < 60
    kept.close()
