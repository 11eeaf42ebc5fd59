"""The disk store on real files: killed, damaged, full, held by another, and large."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import multiprocessing
import os
import random
import shutil
import sqlite3
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from rewarm.cache.tiers.disk import files, sweep
from rewarm.cache.tiers.disk.database import FORMAT
from rewarm.cache.tiers.disk.files import Written
from rewarm.cache.tiers.disk.folder import SUSPECT
from rewarm.cache.tiers.disk.records import (
    AddNode,
    AddPayload,
    PayloadRow,
    RemoveNode,
    RemovePayload,
    StoreBroken,
    StoredNode,
    StoredPayload,
    StoreError,
    StoreHeld,
    StoreUnusable,
    UpdateNode,
    Verified,
)
from rewarm.cache.tiers.disk.store import Store
from rewarm.errors import RewarmError

SOAK = os.environ.get("REWARM_SOAK") == "1"
LIMIT = 64 << 20
ABOUT = {"model": "tiny", "salt": "none"}

# Children are forked from a process that has imported everything once, and holds nothing of ours.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.cache.test_disk_store", "tests.cache.test_disk_restart"])


def opened(folder: Path, limit: int = LIMIT, reserve: int = 0) -> Store:
    return Store.open(folder, limit=limit, reserve=reserve)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def kept(folder: Path) -> Iterator[Store]:
    with opened(folder) as found:
        yield found


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


# What is stored comes back

EVERY = sorted(files.DTYPES)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", [(3, 5), (), (0,), (4, 0, 2)])
def test_every_dtype_and_shape_comes_back(kept: Store, name: str, shape: tuple[int, ...]) -> None:
    dtype = files.DTYPES[name]
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(1).integers(0, 2, size, dtype=np.uint8)  # valid bits for bool, too
    array = np.frombuffer(raw.tobytes(), dtype).reshape(shape)
    payload = kept.put_payload({"x": array}, (1, 1))
    assert same(kept.read(payload), {"x": array})


def test_a_payload_is_a_plain_safetensors_file(kept: Store) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {"bytes": np.arange(3, dtype=np.uint8), "wide": np.arange(5.0), **content(1)}
    payload = kept.put_payload(arrays, None)
    found = safetensors.load_file(file_of(kept, payload))
    assert same({name: found[name] for name in arrays}, arrays)


def test_arrays_are_read_into_what_the_caller_makes_for_them(kept: Store) -> None:
    arrays = {
        "odd": np.arange(3, dtype=np.uint8),
        "wide": np.arange(5.0),
        "nothing": np.ones((2, 0), "<f2"),
    }
    made: dict[str, np.ndarray[Any, Any]] = {}

    def new(entries: Sequence[files.Entry]) -> dict[str, np.ndarray[Any, Any]]:
        made.update({entry.name: np.zeros(entry.shape, entry.dtype) for entry in entries})
        return dict(made)

    found = kept.read(kept.put_payload(arrays, None), new)
    assert same(found, arrays)
    assert found is not None
    assert all(found[name] is made[name] for name in arrays)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}},
        {"a": {"dtype": "F32", "shape": [4, -1, -1], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}},
        {"a": {"dtype": "F64", "shape": [4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "Q4", "shape": [4], "data_offsets": [0, 16]}},
        {"a": [1]},
        ["a"],
        {
            "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
            "b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        },
    ],
)
def test_a_header_that_lies_gets_no_memory(header: Any) -> None:
    """It is read before its checksum can be known."""
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        files.entries(json.dumps(header).encode(), 16)


def test_strided_and_big_endian_arrays_come_back_equal(kept: Store) -> None:
    strided = np.arange(24, dtype=np.int32).reshape(4, 6)[::2, ::-1].T
    swapped = np.arange(4, dtype=">i8")
    found = kept.read(kept.put_payload({"s": strided, "b": swapped}, None))
    assert same(found, {"s": strided, "b": swapped.astype("<i8")})


def test_an_array_that_no_file_can_hold_is_refused(kept: Store, folder: Path) -> None:
    for arrays in ({"x": np.array(["a"])}, {"__metadata__": np.ones(1)}, {"x": np.array([None])}):
        with pytest.raises(TypeError, match="safetensors"):
            kept.put_payload(arrays, None)
    assert on_disk(folder) == []
    assert kept.verify().clean


def test_nodes_come_back_parents_first_with_every_column(folder: Path) -> None:
    with opened(folder) as kept:
        space = kept.namespace("one", ABOUT)
        top, first = add(kept, space, 1)
        below, second = add(kept, space, 2, parent=top)
        # A split puts a younger node above an older one.
        middle = kept.next_id()
        lower = replace(node_of(below, 3, second.id, middle), window=first.id, state=second.id)
        kept.commit(space, [AddNode(node_of(middle, 4, None, top)), UpdateNode(lower)])
    with opened(folder) as kept:
        assert kept.namespace("one", ABOUT) == space
        nodes, payloads = kept.nodes(space)
        upper = node_of(top, 1, first.id)
        assert nodes == [upper, node_of(middle, 4, None, top), lower]
        assert payloads == {first.id: first, second.id: second}
        assert same(kept.read(second), content(2))
        assert kept.verify() == Verified(3, 2, first.nbytes + second.nbytes, 0, 0, 0)


def test_numbers_that_are_numpys_come_back_as_plain_ones(kept: Store) -> None:
    space = kept.namespace("one", ABOUT)
    odd: Any = np.int64(4)
    node = replace(node_of(kept.next_id(), 1, None), hits=odd, start=odd, used=7, hint=-0.0)
    kept.commit(space, [AddNode(node)])
    (found,) = kept.nodes(space)[0]
    assert found == node
    assert (type(found.hits), type(found.start), type(found.used)) == (int, int, float)


def test_ids_grow_beyond_everything_in_the_index(folder: Path) -> None:
    with opened(folder) as kept:
        space = kept.namespace("one", ABOUT)
        id = kept.next_id() + 100
        kept.commit(space, [AddNode(replace(node_of(id, 1, None), rows=id + 7))])
    with opened(folder) as kept:
        assert kept.next_id() == id + 8  # what a node still names is not given to another
        assert kept.next_id() == id + 9


def test_a_commit_is_all_or_nothing(kept: Store, folder: Path) -> None:
    space = kept.namespace("one", ABOUT)
    id, payload = add(kept, space, 1)
    fresh = kept.put_payload(content(2), (2, 2))
    with pytest.raises(StoreError, match="refused"):  # the last change names a number twice
        kept.commit(
            space,
            [
                RemoveNode(id),
                RemovePayload(payload.id),
                AddPayload(fresh),
                AddNode(node_of(90, 1, None)),
                AddNode(node_of(90, 1, None)),
            ],
        )
    nodes, payloads = kept.nodes(space)
    assert [n.id for n in nodes] == [id]
    assert list(payloads) == [payload.id]
    assert same(kept.read(payload), content(1))
    kept.commit(space, [AddPayload(fresh), AddNode(node_of(91, 2, fresh.id))])
    assert same(kept.read(fresh), content(2))


def test_a_removed_payload_takes_its_file_along(kept: Store, folder: Path) -> None:
    space = kept.namespace("one", ABOUT)
    first, payload = add(kept, space, 1)
    _, other = add(kept, space, 2)
    waiting = kept.put_payload(content(3), None)
    assert len(on_disk(folder)) == 3
    kept.commit(0, [RemoveNode(first), RemovePayload(payload.id)])  # no namespace is needed for it
    kept.remove_payloads([waiting.id, 12345])
    assert on_disk(folder) == [file_of(kept, other)]
    assert kept.read(payload) is None
    assert kept.read(waiting) is None


def test_only_what_was_written_here_can_be_committed(kept: Store) -> None:
    space = kept.namespace("one", ABOUT)
    with pytest.raises(StoreError, match="not written here"):
        kept.commit(space, [AddPayload(StoredPayload(77, Written("0" * 32, 10, bytes(16))))])
    with pytest.raises(StoreError, match="no namespace 5"):
        kept.commit(5, [AddNode(node_of(1, 1, None))])


# Who may look


def test_nobody_else_can_read_anything(folder: Path) -> None:
    before = os.umask(0)
    try:
        with opened(folder) as kept:
            add(kept, kept.namespace("one", ABOUT), 1)
            add(kept, kept.namespace("one", ABOUT), 2)
            flip(file_of(kept, add(kept, kept.namespace("one", ABOUT), 3)[1]), 40)
            kept.verify()
            found = [folder, *folder.rglob("*")]
            names = {p.name for p in found}
            assert {"index.sqlite", "index.sqlite-wal", "lock", "quarantine"} <= names
            for path in found:
                mode = stat.S_IMODE(path.stat().st_mode)
                assert mode == (0o700 if path.is_dir() else 0o600), path
    finally:
        os.umask(before)


def test_a_strict_umask_takes_nothing_from_us(folder: Path) -> None:
    before = os.umask(0o777)
    try:
        with opened(folder) as kept:
            _, payload = add(kept, kept.namespace("one", ABOUT), 1)
            modes = {stat.S_IMODE(p.stat().st_mode) for p in (folder, file_of(kept, payload))}
            assert modes == {0o700, 0o600}
    finally:
        os.umask(before)


def test_a_folder_with_other_things_in_it_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "letter").write_text("dear")
    with opened(tmp_path) as kept:
        add(kept, kept.namespace("one", ABOUT), 1)
        kept.clear()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "payloads").stat().st_mode) == 0o700
    assert (tmp_path / "letter").read_text() == "dear"


# Kills


@dataclass
class Told:
    """What a child said before it was killed."""

    sure: dict[int, int] = field(default_factory=dict)
    """Nodes whose commit had returned, and their n."""
    maybe: set[int] = field(default_factory=set)
    """Nodes whose removal had begun."""


def churn(folder: str, seed: int, pipe: Connection) -> None:
    """Write, change and remove, and tell of it, until killed."""
    draw = random.Random(seed)
    kept = Store.open(Path(folder), limit=1 << 30, reserve=0)
    space = kept.namespace("one", ABOUT)
    nodes, _ = kept.nodes(space)
    live = {node.id: node for node in nodes}
    numbers = iter(range(seed * 100_000, (seed + 1) * 100_000))
    while True:
        what = draw.random()
        leaves = set(live) - {node.parent for node in live.values()}
        if what < 0.6 or len(live) < 4:
            changes: list[Any] = []
            batch = {}
            for n in (next(numbers) for _ in range(draw.randrange(1, 4))):
                payload = kept.put_payload(content(n), (n, n))
                parent = draw.choice([None, *live])
                node = node_of(kept.next_id(), n, payload.id, parent)
                changes += [AddPayload(payload), AddNode(node)]
                batch[node.id] = node
            kept.commit(space, changes)
            live |= batch
            pipe.send(("added", {id: node.hits for id, node in batch.items()}))
        elif what < 0.85:
            id = draw.choice(sorted(leaves))
            pipe.send(("removing", [id]))
            rows = live.pop(id).rows
            assert rows is not None
            kept.commit(space, [RemoveNode(id), RemovePayload(rows)])
        elif what < 0.9:
            kept.put_payload(content(next(numbers)), None)  # never committed
        elif what < 0.95:
            id = draw.choice(sorted(live))
            live[id] = replace(live[id], used=float(draw.randrange(100)))
            kept.commit(space, [UpdateNode(live[id])])
        else:
            kept.checkpoint()


def run_and_kill(folder: Path, seed: int, told: Told) -> bool:
    ours, theirs = processes.Pipe(duplex=False)
    child = processes.Process(target=churn, args=(str(folder), seed, theirs))
    child.start()
    theirs.close()
    # Some are killed while they open, most while they write.
    deadline = time.monotonic() + random.Random(seed).choice([0.01, 0.1, 0.15, 0.2, 0.3])
    killed = False
    try:
        while True:
            if not killed and not ours.poll(max(0.0, deadline - time.monotonic())):
                child.kill()
                killed = True
            if not killed and time.monotonic() > deadline:
                child.kill()
                killed = True
            what, nodes = ours.recv()
            if what == "added":
                told.sure |= nodes
            else:
                told.maybe |= set(nodes)
    except EOFError:
        pass
    child.join()
    assert child.exitcode == -9, "the child failed by itself"
    return killed


def test_a_kill_at_any_instant_leaves_what_was_committed_and_nothing_wrong(folder: Path) -> None:
    told = Told()
    orphans = 0
    for seed in range(1, (2000 if SOAK else 20) + 1):
        run_and_kill(folder, seed, told)
        with opened(folder, 1 << 30) as kept:
            space = kept.namespace("one", ABOUT)
            nodes, payloads = kept.nodes(space)
            there = {node.id: node.hits for node in nodes}
            for node in nodes:
                assert node.rows is not None
                n = n_of(payloads[node.rows])
                assert (n, node.key) == (node.hits, key_of(n))
                assert same(kept.read(payloads[node.rows]), content(n))
            missing = set(told.sure) - told.maybe - set(there)
            assert not missing, f"lost though committed: {missing}"
            assert all(there[id] == n for id, n in told.sure.items() if id in there)
            found = kept.verify()
            assert (found.damaged, found.dropped) == (0, 0)
            orphans += found.orphans
            assert kept.verify().clean
            assert len(on_disk(folder)) == len(payloads)
            kept.checkpoint()
            assert kept.bytes() == used(folder)
            told.sure, told.maybe = there, set()
            if len(nodes) > 150:
                kept.clear()
                told = Told()
    assert orphans, "no kill ever hit a write: the test shows nothing"


def test_a_file_is_synced_before_it_has_its_name(
    kept: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill does not show it, a power cut does: data first, then the name, then the folder."""
    kept.put_payload(content(1), None)
    calls: list[str] = []

    def spy(name: str, say: Callable[..., str]) -> None:
        real = getattr(os, name)

        def told(*args: Any) -> Any:
            calls.append(say(*args))
            return real(*args)

        monkeypatch.setattr(os, name, told)

    spy("fsync", lambda fd: "sync " + ("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"))
    spy("rename", lambda a, b: f"rename {Path(a).suffix} {Path(b).suffix}")
    kept.put_payload(content(1), None)
    wanted = ["sync file", "rename .tmp .safetensors", "sync folder"]
    assert calls[-3:] == wanted
    with kept.guard.using() as index:
        assert index._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert index._db.execute("PRAGMA synchronous").fetchone() == (2,)


def test_leftovers_of_a_kill_go_in_the_background(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as kept:
        _, payload = add(kept, kept.namespace("one", ABOUT), 1)
        known = file_of(kept, payload)
        waiting = file_of(kept, kept.put_payload(content(2), None))
        (known.parent / ("0" * 32 + ".tmp")).write_bytes(b"half")
        (known.parent / "note.txt").write_text("not ours")
    monkeypatch.setattr(sweep, "SWEEP_AFTER", 0.0)
    with opened(folder) as kept:
        kept.sweeper.thread.join(10)
        assert on_disk(folder) == sorted([known, known.parent / "note.txt"])
        assert not waiting.exists()


def test_the_sweep_leaves_what_is_being_written(folder: Path) -> None:
    with opened(folder) as kept:
        space = kept.namespace("one", ABOUT)
        stop = threading.Event()

        def sweep() -> None:
            while not stop.is_set():
                kept.sweeper.remove(kept.sweeper.find())

        sweeper = threading.Thread(target=sweep)
        sweeper.start()
        try:
            made = [add(kept, space, n)[1] for n in range(60)]
        finally:
            stop.set()
            sweeper.join()
        for n, payload in enumerate(made):
            assert same(kept.read(payload), content(n))


# Damage


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flip in the header's length": lambda p: flip(p, 1, 3),
    "a flip in the header": lambda p: flip(p, 70, 1),
    "a flip in the data": lambda p: flip(p, p.stat().st_size // 2, 5),
    "a flip in the last byte": lambda p: flip(p, p.stat().st_size - 1, 7),
    "half of it": lambda p: cut(p, p.stat().st_size // 2),
    "a byte less": lambda p: cut(p, p.stat().st_size - 1),
    "more": grow,
    "empty": lambda p: cut(p, 0),
    "missing": lambda p: p.unlink(),
    "a folder in its place": replaced_by_a_folder,
    "another's content": lambda p: p.write_bytes(
        next(q for q in sorted(p.parents[1].rglob("*.safetensors")) if q != p).read_bytes()
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("how", ["read", "verify"])
def test_a_damaged_file_is_never_served(
    folder: Path, damage: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(folder) as kept:
        space = kept.namespace("one", ABOUT)
        top, _ = add(kept, space, 1)
        middle, payload = add(kept, space, 2, parent=top)
        below, _ = add(kept, space, 3, parent=middle)
        beside, other = add(kept, space, 4, parent=top)
        path = file_of(kept, payload)
        DAMAGE[damage](path)
        with caplog.at_level(logging.WARNING, "rewarm"):
            if how == "read":
                assert kept.read(payload) is None
            else:
                told: list[tuple[int, int]] = []
                # Looking changes nothing.
                for _ in range(2):
                    found = kept.verify(repair=False)
                    assert (found.nodes, found.damaged, found.dropped) == (2, 1, 2)
                    assert path.exists() == (damage != "missing")
                found = kept.verify(lambda done, all: told.append((done, all)))
                assert (found.nodes, found.payloads, found.damaged, found.dropped) == (2, 2, 1, 2)
                assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
        assert len(caplog.records) == 1
        assert "damaged" in caplog.text
        assert kept.read(payload) is None
        assert len(caplog.records) == 1, "said once"
        assert not path.exists()
        assert len(list((folder / "quarantine").iterdir())) == (damage != "missing")
        assert same(kept.read(other), content(4))
    with opened(folder) as kept:
        nodes, payloads = kept.nodes(space)
        assert {node.id for node in nodes} == {top, beside}
        assert all(same(kept.read(p), content(n_of(p))) for p in payloads.values())
        assert kept.verify().clean
        assert below not in {node.id for node in nodes}


def test_a_disk_that_cannot_be_read_now_loses_nothing(
    kept: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, payload = add(kept, kept.namespace("one", ABOUT), 1)

    def refuse(code: int) -> Callable[..., Any]:
        def fail(*_: Any) -> Any:
            raise OSError(code, os.strerror(code))

        return fail

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "rewarm"):
        patch.setattr(os, "readv", refuse(errno.EMFILE))
        assert kept.read(payload) is None
    assert "cannot be read now" in caplog.text
    assert same(kept.read(payload), content(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", refuse(errno.EIO))  # a bad block
        assert kept.read(payload) is None
    assert kept.read(payload) is None
    assert kept.nodes(kept.namespace("one", ABOUT))[0] == []


def test_a_payload_removed_while_it_is_read_is_no_damage(
    kept: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, payload = add(kept, kept.namespace("one", ABOUT), 1)
    real = files.read

    def late(*args: Any) -> Any:
        kept.remove_payloads([payload.id])
        return real(*args)

    monkeypatch.setattr(files, "read", late)
    with caplog.at_level(logging.WARNING, "rewarm"):
        assert kept.read(payload) is None
    assert caplog.records == []


@pytest.fixture(scope="module")
def forest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 nodes in two namespaces: a store that was closed, and as it was `live`, with its log."""
    place = tmp_path_factory.mktemp("forest")
    with opened(place / "closed") as kept:
        spaces = [kept.namespace(digest, ABOUT) for digest in ("one", "two")]
        ids: list[int | None] = [None]
        for n in range(60):
            space, parent = spaces[n % 2], None if n < 10 else ids[n - 1]
            ids.append(add(kept, space, n, parent)[0])
        shutil.copytree(place / "closed", place / "live")
    assert (place / "live" / "index.sqlite-wal").stat().st_size > 200_000
    return place


def known_nodes(folder: Path, scratch: Path) -> dict[str, dict[int, StoredNode]]:
    shutil.copytree(folder, scratch)
    with opened(scratch) as kept:
        found = {}
        for digest in ("one", "two"):
            nodes, _ = kept.nodes(kept.namespace(digest, ABOUT))
            found[digest] = {node.id: node for node in nodes}
    return found


@pytest.mark.parametrize(
    "part", ["closed/index.sqlite", "live/index.sqlite-wal", "live/index.sqlite"]
)
def test_a_flip_anywhere_in_the_index_shows_nothing_that_was_not_stored(
    forest: Path, tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    which, name = part.split("/")
    caplog.set_level(logging.CRITICAL, "rewarm")
    whole = known_nodes(forest / which, tmp_path / "whole")
    assert sum(map(len, whole.values())) == 60
    draw = random.Random(part)
    size = (forest / part).stat().st_size
    outcomes = {"same": 0, "less": 0, "broken": 0}
    for round in range(3000 if SOAK else 15 if part == "live/index.sqlite" else 40):
        scratch = tmp_path / "scratch"
        shutil.copytree(forest / which, scratch)
        # A quarter of them in the first bytes: all depends on these.
        at = draw.randrange(100) if round % 4 == 0 else draw.randrange(size)
        flip(scratch / name, at, draw.randrange(8))
        found = []
        for _ in range(2):  # what was found broken is usable after a restart
            with opened(scratch) as kept:
                try:
                    for digest in ("one", "two"):
                        nodes, payloads = kept.nodes(kept.namespace(digest, ABOUT))
                        for node in nodes:
                            assert node == whole[digest][node.id], f"{part}: byte {at}"
                        for payload in draw.sample(list(payloads.values()), min(3, len(payloads))):
                            assert same(kept.read(payload), content(n_of(payload)))
                        found.append(len(nodes))
                    id, _ = add(kept, kept.namespace("one", ABOUT), 1000)
                    assert id in {n.id for n in kept.nodes(kept.namespace("one", ABOUT))[0]}
                    break
                except StoreBroken:
                    outcomes["broken"] += 1
        else:
            pytest.fail(f"{part}: byte {at}: still broken after a restart")
        outcomes["same" if sum(found) == 60 else "less"] += 1
        shutil.rmtree(scratch)
    print(part, outcomes)
    assert outcomes["less"] or part == "live/index.sqlite", (
        "no flip ever did anything: the test shows nothing"
    )


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE payload SET start = 3 WHERE id = 2",
        "UPDATE payload SET name = (SELECT name FROM payload WHERE id = 4) || 'x' WHERE id = 2",
        "UPDATE payload SET namespace = 99 WHERE id = 2",
        "UPDATE payload SET nbytes = nbytes + 1 WHERE id = 2",
        "UPDATE node SET key = zeroblob(4) WHERE id = 3",
        "UPDATE node SET parent = NULL, start = 0 WHERE id = 3",
        'UPDATE node SET "rows" = 4 WHERE id = 3',
        "UPDATE node SET origin = CAST(x'ff41' AS TEXT) WHERE id = 3",
        "UPDATE node SET hits = 'many' WHERE id = 3",
        "UPDATE namespace SET digest = 'two'",
        "UPDATE namespace SET id = 9",
    ],
)
def test_a_row_that_is_not_as_it_was_written_is_not_there(folder: Path, change: str) -> None:
    with opened(folder) as kept:
        space = kept.namespace("one", ABOUT)
        id, payload = add(kept, space, 1)
        assert (space, payload.id, id) == (1, 2, 3)
        other, _ = add(kept, space, 2)
    with sqlite3.connect(folder / "index.sqlite") as db:
        db.execute(change)
    db.close()
    with opened(folder) as kept:
        for digest in ("one", "two"):
            nodes, payloads = kept.nodes(kept.namespace(digest, ABOUT))
            gone = "namespace SET" in change and "payload" not in change
            assert [node.id for node in nodes] == ([] if gone or digest == "two" else [other])
            assert all(same(kept.read(p), content(n_of(p))) for p in payloads.values())
            assert payload.id not in payloads
        kept.verify()
        assert kept.verify().clean


def garbage(folder: Path) -> None:
    (folder / "index.sqlite").write_bytes(os.urandom(50_000))


def other_format(folder: Path) -> None:
    with sqlite3.connect(folder / "index.sqlite") as db:
        db.execute(f"PRAGMA user_version = {FORMAT + 1}")
    db.close()


def other_tables(folder: Path) -> None:
    with sqlite3.connect(folder / "index.sqlite") as db:
        db.execute("ALTER TABLE node ADD COLUMN more")
    db.close()


def lost_chain(folder: Path) -> None:
    """A long key's pages lead nowhere: only a check of the whole file sees it."""
    with opened(folder) as kept:
        long = replace(node_of(kept.next_id(), 1, None), key=b"\xab" * 40_000)
        kept.commit(kept.namespace("one", ABOUT), [AddNode(long)])
    path = folder / "index.sqlite"
    data = path.read_bytes()
    page = data.index(b"\xab" * 8000 + b"\xab" * 188)
    zero(path, page // 8192 * 8192, page // 8192 * 8192 + 4)


INDEX_DAMAGE: dict[str, Callable[[Path], None]] = {
    "garbage": garbage,
    "empty": lambda f: cut(f / "index.sqlite", 0),
    "truncated": lambda f: cut(f / "index.sqlite", (f / "index.sqlite").stat().st_size // 2 + 9),
    "another format": other_format,
    "other tables": other_tables,
    "found damaged while in use": lambda f: (f / SUSPECT).touch(),
    "a chain of pages that ends too early": lost_chain,
    "zeros in the middle": lambda f: zero(f / "index.sqlite", 8192, 40_000),
}


def zero(path: Path, start: int, stop: int) -> None:
    data = bytearray(path.read_bytes())
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)


@pytest.mark.parametrize("damage", INDEX_DAMAGE)
def test_an_index_that_cannot_be_used_is_set_aside(
    forest: Path, folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(forest / "closed", folder)
    INDEX_DAMAGE[damage](folder)
    with caplog.at_level(logging.WARNING, "rewarm"):
        kept = opened(folder)
    assert len(caplog.records) == 1
    assert "begins anew" in caplog.text
    assert "quarantine" in caplog.text
    with kept:
        assert kept.namespaces() == []
        assert kept.nodes(kept.namespace("one", ABOUT)) == ([], {})
        _, payload = add(kept, kept.namespace("one", ABOUT), 1)
        kept.sweeper.thread.join(10)
        assert on_disk(folder) == [file_of(kept, payload)]
        assert any("index" in path.name for path in (folder / "quarantine").iterdir())
        assert kept.verify().clean
        kept.checkpoint()
        assert kept.bytes() == used(folder)
    caplog.clear()
    with opened(folder) as kept:
        assert kept.verify().payloads == 1
    assert caplog.records == []


def test_a_log_never_meets_another_index(forest: Path, folder: Path) -> None:
    shutil.copytree(forest / "live", folder)
    (folder / "index.sqlite").unlink()
    with opened(folder) as kept:
        assert kept.namespaces() == []
        assert kept.verify().nodes == 0


def test_damage_found_in_use_silences_the_store(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = opened(folder)
    space = kept.namespace("one", ABOUT)
    payloads = [add(kept, space, n)[1] for n in range(200)]
    kept.checkpoint()
    with kept.guard.using() as index:
        index._db.execute("PRAGMA shrink_memory")
    index_file = folder / "index.sqlite"
    with index_file.open("r+b") as file:
        file.seek(8192)
        file.write(os.urandom(index_file.stat().st_size - 8192))
    with caplog.at_level(logging.WARNING, "rewarm"), pytest.raises(StoreBroken):
        kept.nodes(space)
    assert kept.guard.broken
    for call in (
        lambda: kept.nodes(space),
        lambda: kept.commit(space, []),
        lambda: kept.namespace("one", ABOUT),
        lambda: kept.put_payload(content(1), None),
        lambda: kept.remove_payloads([1]),
        kept.namespaces,
        kept.bytes,
        kept.free_bytes,
        kept.clear,
        kept.verify,
        kept.checkpoint,
    ):
        with pytest.raises(StoreBroken):
            call()
    assert kept.read(payloads[0]) is None
    assert len(caplog.records) == 1
    kept.close()
    with opened(folder) as kept:
        assert kept.namespaces() == []
    assert issubclass(StoreBroken, (RewarmError, OSError))


def test_what_hangs_on_nothing_is_dropped(kept: Store, folder: Path) -> None:
    space = kept.namespace("one", ABOUT)
    other = kept.namespace("two", ABOUT)
    top, first = add(kept, space, 1)
    _, foreign = add(kept, other, 2)
    ids = [kept.next_id() for _ in range(6)]
    spare = kept.put_payload(content(3), None)
    kept.commit(
        space,
        [
            AddPayload(spare),
            AddNode(node_of(ids[0], 1, spare.id, parent=999)),  # no such parent
            AddNode(node_of(ids[1], 2, 998, parent=top)),  # no such payload
            AddNode(node_of(ids[2], 3, first.id, parent=ids[1])),  # below it
            AddNode(node_of(ids[3], 4, foreign.id, parent=top)),  # another namespace's payload
            AddNode(node_of(ids[4], 5, None, parent=ids[5])),  # a ring
            AddNode(node_of(ids[5], 6, None, parent=ids[4])),
        ],
    )
    for _ in range(2):
        nodes, payloads = kept.nodes(space)
        assert [node.id for node in nodes] == [top]
        assert list(payloads) == [first.id]
    assert kept.read(spare) is None, "nobody's any more"
    assert len(on_disk(folder)) == 2
    assert kept.verify().clean


# No room, no permission, no folder


def mounted(path: Path, *options: str) -> None:
    path.mkdir(exist_ok=True)
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting needs root")
    done = subprocess.run(["mount", *options, str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    mounted(path, "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def until_refused(call: Callable[[], object]) -> int | None:
    for _ in range(5000):
        try:
            call()
        except OSError as error:
            return error.errno
    pytest.fail("it goes on and on")


def test_a_disk_that_fills_up_loses_nothing_and_goes_on(small_disk: Path) -> None:
    folder = small_disk / "cache"
    (small_disk / "somebody's").write_bytes(bytes(400_000))
    with opened(folder) as kept:
        space = kept.namespace("one", ABOUT)
        made: list[tuple[int, StoredPayload]] = []
        assert until_refused(lambda: made.append(add(kept, space, len(made)))) == errno.ENOSPC
        assert len(made) > 20
        assert len(on_disk(folder)) in (len(made), len(made) + 1)
        assert kept.free_bytes() < 64 << 10
        # Now not even the index can grow.
        node = node_of(0, 89, None)

        def more() -> None:
            kept.commit(space, [AddNode(replace(node, id=kept.next_id()))])

        assert until_refused(more) == errno.ENOSPC
        assert not kept.guard.broken
        for n, (_, payload) in enumerate(made):
            assert same(kept.read(payload), content(n))
        (small_disk / "somebody's").unlink()
        gone, made = made[:10], made[10:]
        kept.commit(space, [RemovePayload(payload.id) for _, payload in gone])
        kept.commit(space, [RemoveNode(id) for id, _ in gone])
        n = 5000
        _, payload = add(kept, space, n)
        assert same(kept.read(payload), content(n))
    with opened(folder) as kept:
        _, payloads = kept.nodes(space)
        assert {p.id for _, p in made} | {payload.id} == set(payloads)
        assert kept.verify().damaged == 0
        assert kept.verify().clean


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "open"])
def test_a_write_that_fails_leaves_nothing_behind(
    kept: Store, folder: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = kept.namespace("one", ABOUT)
    _, payload = add(kept, space, 1)
    before, size = on_disk(folder), kept.bytes()
    real = getattr(os, call)

    def fail(*args: Any) -> Any:
        if call == "fsync" and not stat.S_ISDIR(os.fstat(args[0]).st_mode):
            return real(*args)  # the file is fine, its folder is not
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="space"):
            kept.put_payload(content(2), None)
    assert on_disk(folder) == before
    assert kept.bytes() == size
    assert kept.verify().clean
    assert same(kept.read(payload), content(1))


def test_a_read_only_file_system_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    opened(folder).close()
    mounted(folder, "--bind", str(folder))
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        with pytest.raises(StoreUnusable, match=r"cache: .*read-only: choose"):
            opened(folder)
        with pytest.raises(StoreUnusable, match="read-only"):
            opened(folder / "deeper")
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    opened(folder).close()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (errno.EACCES, "no permission"),
        (errno.EROFS, "read-only"),
        (errno.ENOSPC, "full"),
        (errno.ENOLCK, "locks"),
        (errno.EIO, "choose another"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(
    folder: Path, code: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", fail)
        with pytest.raises(StoreUnusable, match=text) as error:
            opened(folder)
    assert str(folder) in str(error.value)
    opened(folder).close()  # and nothing is left locked


def test_a_file_where_the_folder_should_be_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreUnusable, match="not a folder"):
            opened(folder)
    assert (tmp_path / "file").read_text() == "hello"


def test_an_index_that_cannot_be_opened_now_is_not_set_aside(
    forest: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(forest / "closed", folder)
    blocker = sqlite3.connect(folder / "index.sqlite", isolation_level=None)
    blocker.execute("PRAGMA locking_mode = EXCLUSIVE")
    blocker.execute("BEGIN EXCLUSIVE")
    real = sqlite3.connect
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", lambda *a, **k: real(*a, **{**k, "timeout": 0.1}))
        with pytest.raises(StoreUnusable, match="locked"):
            opened(folder)
    blocker.close()
    with opened(folder) as kept:
        assert sum(info.nodes for info in kept.namespaces()) == 60


# One process at a time


def hold(folder: str, pipe: Connection) -> None:
    with Store.open(Path(folder), limit=LIMIT, reserve=0):
        pipe.send(os.getpid())
        pipe.recv()


def test_a_folder_is_one_processs(folder: Path) -> None:
    ours, theirs = processes.Pipe()
    child = processes.Process(target=hold, args=(str(folder), theirs))
    child.start()
    pid = ours.recv()
    with pytest.raises(StoreHeld, match=rf"{folder.name} is held by process {pid} on \S+ since 20"):
        opened(folder)
    child.kill()
    child.join()
    with opened(folder):  # however it ended
        with pytest.raises(StoreHeld, match=f"process {os.getpid()} "):
            opened(folder)
        assert json.loads((folder / "lock").read_text())["pid"] == os.getpid()
    opened(folder).close()


def test_a_closed_store_says_so(folder: Path) -> None:
    kept = opened(folder)
    kept.close()
    kept.close()
    with pytest.raises(StoreError, match="closed"):
        kept.nodes(1)
    with pytest.raises(StoreError, match="closed"):
        kept.put_payload({}, None)


def test_threads_share_a_store(kept: Store) -> None:
    space = kept.namespace("one", ABOUT)
    failed: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for n in range(first, first + 15):
                id, payload = add(kept, space, n)
                assert same(kept.read(payload), content(n))
                if n % 3 == 0:
                    kept.commit(space, [RemoveNode(id), RemovePayload(payload.id)])
                kept.bytes()
                kept.nodes(space)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i * 100,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(kept.nodes(space)[0]) == 40
    assert kept.verify().clean


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
