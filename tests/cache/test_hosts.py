"""On a shared machine, other users cannot read, plant or replace what we keep.

The other user is a real one (65534). Where the tests do not run as root, the tests that need
it are skipped. Links and modes are tested without it.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rewarm.cache.tiers.disk.errors import StoreUnusable
from rewarm.cache.tiers.disk.store import Store
from tests import zoo
from tests.cache.disk.caches import cache_on
from tests.cache.disk.stores import ONE, add, opened, read
from tests.cli.test_chat import chatting
from tests.runs import prompt, run
from tests.test_private import NOBODY, as_root

SECRET = "ours, and nobody else's business"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a store's folder with something in it."""
    with opened(tmp_path / "cache") as kept:
        add(kept, 1)
    return tmp_path / "cache"


@pytest.fixture
def shared() -> Iterator[Path]:
    """Make a folder like /tmp, where others may make files."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o1777)
    yield made
    shutil.rmtree(made)


def by_another_user(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", command], cwd=folder, user=NOBODY, group=NOBODY, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# The folder


@as_root
@pytest.mark.parametrize("mode", ["0777", "0700"])
def test_a_folder_that_another_user_prepared_gets_nothing(
    mode: str, shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = shared / "cache"
    done = by_another_user(f"mkdir cache && chmod {mode} cache", shared)
    assert done.returncode == 0, done.stderr
    model = zoo.tiny("llama")
    with caplog.at_level(logging.WARNING):
        kept = cache_on(prepared, model)
        run(model, kept, prompt(100))
        kept.flush()
        kept.close()
    assert not kept.tiers
    assert f"{prepared} belongs to user" in caplog.text
    assert not list(prepared.iterdir())


@as_root
def test_a_folder_in_another_users_folder_is_refused(shared: Path) -> None:
    by_another_user("mkdir -m 755 theirs", shared)
    with pytest.raises(StoreUnusable, match=r"theirs is on the way to .*can put another folder"):
        opened(shared / "theirs" / "cache")
    assert not list((shared / "theirs").iterdir())


@as_root
def test_a_link_of_another_user_is_not_followed(shared: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.mkdir(mode=0o700)
    by_another_user(f"ln -s {ours} link", shared)
    with pytest.raises(StoreUnusable, match="link is a link that user"):
        opened(shared / "link")
    assert not list(ours.iterdir())


@as_root
def test_nobody_else_can_read_change_or_replace_a_store(shared: Path) -> None:
    with opened(shared / "cache") as kept:
        add(kept, 1)
        before = everything(shared)
        for command in (
            "ls cache",
            "cat cache/index.sqlite",
            "cat cache/lock",
            "touch cache/index.sqlite-wal",
            "ln -sf /dev/null cache/lock",
            "mv cache away",
            "rm -rf cache",
        ):
            assert by_another_user(command, shared).returncode != 0, command
        assert everything(shared) == before
    with opened(shared / "cache") as kept:
        assert kept.verify().clean


def test_a_folder_that_others_can_write_in_is_refused_and_says_what_to_do(folder: Path) -> None:
    folder.chmod(0o777)
    before = everything(folder)
    with pytest.raises(StoreUnusable, match=rf"mode 0777.*chmod 700 {folder}"):
        opened(folder)
    assert everything(folder) == before
    folder.chmod(0o700)
    with opened(folder) as kept:
        assert kept.verify().files == 1


def test_a_parent_that_others_can_write_in_is_refused(folder: Path) -> None:
    folder.parent.chmod(0o777)
    with pytest.raises(StoreUnusable, match=f"{folder.parent} is on the way .*chmod go-w"):
        opened(folder)


def test_a_link_of_ours_may_lead_to_the_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    with opened(tmp_path / "link") as kept:
        assert kept.folder == folder
        assert kept.verify().files == 1


def test_the_program_says_whose_the_folder_is(folder: Path) -> None:
    folder.chmod(0o777)
    command = [sys.executable, "-m", "rewarm", "cache", "stats", "--disk", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "others can write in" in done.stderr
    assert "Traceback" not in done.stderr


# The contents: planted while others could still write there


NAMES = (
    "lock",
    "suspect",
    "index.sqlite",
    "index.sqlite-wal",
    "index.sqlite-shm",
    "index.sqlite-journal",
    "index.sqlite.new",
)


@pytest.mark.parametrize("plant", [os.symlink, os.link])
@pytest.mark.parametrize("name", NAMES)
def test_no_file_of_ours_is_reached_through_a_planted_name(
    name: str, plant: Callable[[Path, Path], None], folder: Path, tmp_path: Path
) -> None:
    ours = tmp_path / "letter"
    ours.write_text(SECRET)
    (folder / name).unlink(missing_ok=True)
    plant(ours, folder / name)
    with pytest.raises(StoreUnusable, match=f"{folder / name} is .*link.*: remove it"):
        opened(folder)
    assert ours.read_text() == SECRET
    (folder / name).unlink()
    opened(folder).close()


@pytest.mark.parametrize("name", ["payloads", "payloads/00", "quarantine"])
def test_no_folder_of_ours_is_reached_through_a_planted_link(
    name: str, folder: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / f"{'0' * 32}.safetensors").write_text(SECRET)  # the sweep would remove it
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(StoreUnusable, match=f"{folder / name} is a link"):
        opened(folder)
    assert [p.read_text() for p in elsewhere.iterdir()] == [SECRET]


@pytest.mark.parametrize("name", ["index.sqlite", "payloads", "quarantine"])
def test_what_others_can_write_is_not_used(name: str, folder: Path) -> None:
    (folder / name).chmod(0o777)
    with pytest.raises(StoreUnusable, match=f"others can write in {folder / name}"):
        opened(folder)


@as_root
@pytest.mark.parametrize("name", ["lock", "index.sqlite", "payloads", "quarantine"])
def test_what_another_user_left_there_is_not_used(name: str, folder: Path) -> None:
    os.chown(folder / name, NOBODY, NOBODY)
    with pytest.raises(StoreUnusable, match=f"{folder / name} belongs to user"):
        opened(folder)


def test_a_payload_that_became_a_link_is_damaged(folder: Path, tmp_path: Path) -> None:
    (file,) = folder.rglob("*.safetensors")
    copy = tmp_path / "copy"
    shutil.copy(file, copy)  # the bytes are equal
    file.unlink()
    file.symlink_to(copy)
    with opened(folder) as kept:
        (payload,) = kept.index.load(ONE).files.values()
        assert read(kept, payload) is None
        assert kept.verify().damaged == 1
        assert not kept.index.load(ONE).nodes
    assert copy.exists()


def test_a_lock_that_is_swapped_in_between_is_not_followed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tmp_path / "letter"
    ours.write_text(SECRET)
    (folder / "lock").unlink()
    (folder / "lock").symlink_to(ours)
    monkeypatch.setattr("rewarm.cache.tiers.disk.store.prepare", lambda path: path)
    with pytest.raises(OSError, match="lock"):
        Store.open(folder, limit=1 << 20)
    assert ours.read_text() == SECRET


# Other files with names that can be guessed


def test_what_is_typed_in_a_chat_goes_into_no_file_that_others_chose(tmp_path: Path) -> None:
    ours = tmp_path / "letter"
    ours.write_text(SECRET)
    (tmp_path / "rewarm").mkdir(mode=0o700)
    (tmp_path / "rewarm" / "history").symlink_to(ours)
    with chatting(tmp_path) as terminal:
        terminal.until(r"what is typed is not kept:[^>]*rewarm/history\s+is\s+a\s+link")
        terminal.at_the_prompt("/help\r")
        terminal.until("Ctrl-C stops an answer")
        terminal.at_the_prompt("\x04")
        assert terminal.exit_code() == 0
    assert ours.read_text() == SECRET
