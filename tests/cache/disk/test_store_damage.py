"""A store on files and an index that somebody damaged."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rewarm.cache.tiers.disk import files
from rewarm.cache.tiers.disk.database import FORMAT
from rewarm.cache.tiers.disk.folder import SUSPECT
from rewarm.cache.tiers.disk.records import (
    AddNode,
    AddPayload,
    StoreBroken,
    StoredNode,
)
from rewarm.cache.tiers.disk.store import Store
from rewarm.errors import RewarmError
from tests.sets import SOAK

from .stores import (
    ABOUT,
    add,
    content,
    cut,
    file_of,
    flip,
    n_of,
    node_of,
    on_disk,
    opened,
    same,
    used,
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
