"""A store never serves damaged files, nor what a damaged index says."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rewarm.cache.tiers.disk.database import FORMAT
from rewarm.cache.tiers.disk.errors import Damaged, StoreBroken
from rewarm.cache.tiers.disk.folder import SUSPECT
from rewarm.cache.tiers.disk.index import Changes, NodeRow, new_id
from rewarm.cache.tiers.disk.store import Store
from rewarm.cache.tiers.seal import is_whole
from rewarm.errors import RewarmError
from tests.sets import SOAK

from .stores import (
    ONE,
    TWO,
    add,
    commit,
    content,
    cut,
    file_of,
    flip,
    n_of,
    node_of,
    on_disk,
    opened,
    read,
    same,
    used,
    write,
)


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
def test_a_damaged_file_is_found_and_goes_with_all_that_needs_it(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(folder) as kept:
        top, _ = add(kept, 1)
        middle, file = add(kept, 2, parent=top)
        add(kept, 3, parent=middle)
        beside, other = add(kept, 4, parent=top)
        path = file_of(kept, file)
        DAMAGE[damage](path)
        assert damage == "another's content" or read(kept, file) is None
        told: list[tuple[int, int]] = []
        with caplog.at_level(logging.WARNING, "rewarm"):
            # Looking changes nothing.
            for _ in range(2):
                found = kept.verify(repair=False)
                assert (found.nodes, found.damaged, found.dropped) == (2, 1, 2)
                assert path.exists() == (damage != "missing")
            found = kept.verify(lambda done, all: told.append((done, all)))
            assert (found.nodes, found.files, found.damaged, found.dropped) == (2, 2, 1, 2)
            assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
        assert len(caplog.records) == 1
        assert "damaged" in caplog.text
        assert not path.exists()
        assert len(list((folder / "quarantine").iterdir())) == (damage != "missing")
        assert same(read(kept, other), content(4))
    with opened(folder) as kept:
        stored = kept.index.load(ONE)
        assert {node.id for node in stored.nodes} == {top, beside}
        assert all(same(read(kept, f), content(n_of(f))) for f in stored.files.values())
        assert kept.verify().clean


def test_a_file_that_cannot_be_read_now_is_not_damaged(
    kept: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, file = add(kept, 1)

    def refuse(code: int) -> Callable[..., Any]:
        def fail(*_: Any) -> Any:
            raise OSError(code, os.strerror(code))

        return fail

    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", refuse(errno.EMFILE))
        with pytest.raises(OSError, match="Too many open files"):
            kept.read(file.id, file.nbytes)
        patch.setattr(os, "readv", refuse(errno.EIO))  # a bad block
        with pytest.raises(Damaged):
            kept.read(file.id, file.nbytes)
    assert same(read(kept, file), content(1))


def known_nodes(folder: Path, scratch: Path) -> dict[int, NodeRow]:
    shutil.copytree(folder, scratch)
    with opened(scratch) as kept:
        return {node.id: node for id in (ONE, TWO) for node in kept.index.load(id).nodes}


def check_stored(kept: Store, whole: dict[int, NodeRow], where: str) -> int:
    """Check that a wrong row has only its own cells wrong, and leads to no other payload."""
    same_rows = 0
    for space in (ONE, TWO):
        stored = kept.index.load(space)
        for node in stored.nodes:
            before = whole[node.id]
            same_rows += node == before
            assert (node.namespace, node.files) == (before.namespace, before.files), where
            assert node.parent in (before.parent, None), where
        for file in stored.files.values():
            found = read(kept, file)
            assert found is None or file.start is None or is_whole(found), where
    return same_rows


@pytest.mark.parametrize(
    "part", ["closed/index.sqlite", "live/index.sqlite-wal", "live/index.sqlite"]
)
def test_a_flip_anywhere_in_the_index_shows_nothing_that_was_not_stored(
    forest: Path, tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    which, name = part.split("/")
    caplog.set_level(logging.CRITICAL, "rewarm")
    whole = known_nodes(forest / which, tmp_path / "whole")
    assert len(whole) == 60
    draw = random.Random(part)
    size = (forest / part).stat().st_size
    outcomes = {"same": 0, "less": 0, "broken": 0}
    for round in range(3000 if SOAK else 15 if part == "live/index.sqlite" else 40):
        scratch = tmp_path / "scratch"
        shutil.copytree(forest / which, scratch)
        # A quarter of the flips are in the first bytes, on which everything depends.
        at = draw.randrange(100) if round % 4 == 0 else draw.randrange(size)
        flip(scratch / name, at, draw.randrange(8))
        found = 0
        for _ in range(2):  # after a restart, a broken one is usable again
            try:
                with opened(scratch) as kept:
                    found = check_stored(kept, whole, f"{part}: byte {at}")
                    id, _ = add(kept, 1000)
                    assert id in {node.id for node in kept.index.load(ONE).nodes}
                    break
            except StoreBroken:
                outcomes["broken"] += 1
        else:
            pytest.fail(f"{part}: byte {at}: still broken after a restart")
        outcomes["same" if found == 60 else "less"] += 1
        shutil.rmtree(scratch)
    print(part, outcomes)
    assert outcomes["less"] or part == "live/index.sqlite", (
        "no flip ever did anything: the test shows nothing"
    )


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE node SET key = zeroblob(5)",
        "UPDATE node SET key = x''",
        "UPDATE node SET key = 'text'",
        "UPDATE node SET parent = id",
        "UPDATE node SET namespace = 99",
        "UPDATE node SET rows_file = 4",
        "UPDATE node SET origin = CAST(x'ff41' AS TEXT)",
        "UPDATE node SET kind = 'king'",
        "UPDATE node SET hits = 'many'",
        "UPDATE node SET hits = -1",
        "UPDATE node SET used = 9e999",
        "UPDATE node SET hint = 0",
        "UPDATE file SET nbytes = -1",
        "UPDATE file SET nbytes = 'much'",
        "UPDATE file SET nbytes = 1 << 60",
        "UPDATE file SET start = 3, stop = 3",
        "UPDATE file SET stop = NULL",
        "UPDATE file SET namespace = 99",
        "UPDATE file SET id = 9",
        "UPDATE namespace SET id = 9",
    ],
)
def test_a_row_that_means_nothing_is_not_there(folder: Path, change: str) -> None:
    with opened(folder) as kept:
        add(kept, 1)
        _, other = add(kept, 2, space=TWO)
    with sqlite3.connect(folder / "index.sqlite") as db:
        db.execute(f"{change} WHERE {'id' if 'namespace SET' in change else 'namespace'} = {ONE}")
    db.close()
    with opened(folder) as kept:
        assert kept.index.load(ONE).nodes == []
        assert list(kept.index.load(TWO).files) == [other.id]
        assert kept.bytes() > 0
        kept.verify()
        assert kept.verify().clean
        assert on_disk(folder) == [file_of(kept, other)]


@pytest.mark.parametrize("about", ["", "7", "[1]", "{"])
def test_a_namespace_that_cannot_be_described_is_a_strangers(folder: Path, about: str) -> None:
    with opened(folder) as kept:
        add(kept, 1)
    with sqlite3.connect(folder / "index.sqlite") as db:
        db.execute("UPDATE namespace SET about = ?, used = 'never'", (about,))
    db.close()
    with opened(folder) as kept:
        (info,) = kept.index.namespaces()
        assert (info.about, info.used, info.files) == ({}, 0.0, 1)


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
    """Make a long key's pages lead nowhere: only a check of the whole file finds it."""
    with opened(folder) as kept:
        commit(kept, node_of(new_id(), 1, None)._replace(key=b"\xab" * 40_000))
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
        assert kept.index.is_new
        assert kept.index.namespaces() == []
        _, file = add(kept, 1)
        kept.sweep()
        assert on_disk(folder) == [file_of(kept, file)]
        assert any("index" in path.name for path in (folder / "quarantine").iterdir())
        assert kept.verify().clean
        kept.index.checkpoint()
        assert kept.bytes() == used(folder)
    caplog.clear()
    with opened(folder) as kept:
        assert kept.verify().files == 1
    assert caplog.records == []


def test_a_log_never_meets_another_index(forest: Path, folder: Path) -> None:
    shutil.copytree(forest / "live", folder)
    (folder / "index.sqlite").unlink()
    with opened(folder) as kept:
        assert kept.index.namespaces() == []
        assert kept.verify().nodes == 0


def test_damage_found_in_use_silences_the_store(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = opened(folder)
    made = [add(kept, n)[1] for n in range(200)]
    kept.index.checkpoint()
    with kept.index.using() as db:
        db.execute("PRAGMA shrink_memory")
    index_file = folder / "index.sqlite"
    with index_file.open("r+b") as file:
        file.seek(8192)
        file.write(os.urandom(index_file.stat().st_size - 8192))
    with caplog.at_level(logging.WARNING, "rewarm"), pytest.raises(StoreBroken):
        kept.index.load(ONE)
    assert kept.index.broken
    for call in (
        lambda: kept.index.load(ONE),
        lambda: kept.commit(Changes()),
        lambda: kept.write(1, content(1)),
        lambda: kept.read(made[0].id, made[0].nbytes),
        kept.index.namespaces,
        kept.bytes,
        kept.free_bytes,
        kept.clear,
        kept.verify,
        kept.sweep,
        kept.index.checkpoint,
    ):
        with pytest.raises(StoreBroken):
            call()
    assert len(caplog.records) == 1
    kept.close()
    with opened(folder) as kept:
        assert kept.index.namespaces() == []
    assert issubclass(StoreBroken, (RewarmError, OSError))


def test_what_hangs_on_nothing_is_dropped(kept: Store, folder: Path) -> None:
    top, first = add(kept, 1)
    _, foreign = add(kept, 2, space=TWO)
    ids = [new_id() for _ in range(6)]
    spare = write(kept, 3)
    commit(
        kept,
        node_of(ids[0], 1, spare.id, parent=999),  # no such parent
        node_of(ids[1], 2, 998, parent=top),  # no such file
        node_of(ids[2], 3, first.id, parent=ids[1]),  # below it
        node_of(ids[3], 4, foreign.id, parent=top),  # another namespace's file
        node_of(ids[4], 5, None, parent=ids[5]),  # a ring
        node_of(ids[5], 6, None, parent=ids[4]),
        files=[spare],
    )
    found = kept.index.load(ONE)
    assert [node.id for node in found.nodes] == [top]
    assert (sorted(found.lost), found.unused) == (sorted(ids), [spare.id])
    assert kept.verify().dropped == 6
    assert read(kept, spare) is None, "nobody's any more"
    assert len(on_disk(folder)) == 2
    assert kept.verify().clean
