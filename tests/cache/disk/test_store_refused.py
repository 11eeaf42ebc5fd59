"""A store says why it cannot use a folder: no space, no permission, another process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sqlite3
import stat
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from rewarm.cache.tiers.disk.errors import StoreHeld, StoreUnusable
from rewarm.cache.tiers.disk.index import FileRow, new_id
from rewarm.cache.tiers.disk.store import Store

from .stores import (
    LIMIT,
    ONE,
    add,
    commit,
    content,
    node_of,
    on_disk,
    opened,
    processes,
    read,
    same,
    write,
)

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
        made: list[tuple[int, FileRow]] = []
        assert until_refused(lambda: made.append(add(kept, len(made)))) == errno.ENOSPC
        assert len(made) > 20
        assert len(on_disk(folder)) in (len(made), len(made) + 1)
        assert kept.free_bytes() < 64 << 10

        # Now not even the index can grow.
        def more() -> None:
            commit(kept, node_of(new_id(), 89, None))

        assert until_refused(more) == errno.ENOSPC
        assert not kept.index.broken
        for n, (_, file) in enumerate(made):
            assert same(read(kept, file), content(n))
        (small_disk / "somebody's").unlink()
        gone, made = made[:10], made[10:]
        ids, files = [id for id, _ in gone], {file.id: 0 for _, file in gone}
        commit(kept, gone_nodes=ids, gone_files=files)
        _, file = add(kept, 5000)
        assert same(read(kept, file), content(5000))
    with opened(folder) as kept:
        assert {f.id for _, f in made} | {file.id} == set(kept.index.load(ONE).files)
        assert kept.verify().damaged == 0
        assert kept.verify().clean


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "open"])
def test_a_write_that_fails_leaves_nothing_behind(
    kept: Store, folder: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, file = add(kept, 1)
    before, size = on_disk(folder), kept.bytes()
    real = getattr(os, call)

    def fail(*args: Any) -> Any:
        if call == "fsync" and not stat.S_ISDIR(os.fstat(args[0]).st_mode):
            return real(*args)  # the file is fine, its folder is not
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="space"):
            write(kept, 2)
    assert on_disk(folder) == before
    assert kept.bytes() == size
    assert kept.verify().clean
    assert same(read(kept, file), content(1))


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
    opened(folder).close()  # nothing is left locked


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
        assert sum(info.nodes for info in kept.index.namespaces()) == 60


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
