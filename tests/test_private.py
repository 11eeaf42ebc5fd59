"""A private folder stays private on a machine that others use as well."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from rewarm.errors import NotPrivate
from rewarm.private import check_file, check_folder, private_folder

NOBODY = 65534
"""The id of another user, who owns nothing."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_new_folder_is_closed_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert made == tmp_path / "a" / "b"
    assert mode(made) == 0o700
    assert mode(made.parent) == 0o755
    assert private_folder(made) == made


def test_an_empty_folder_of_ours_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    private_folder(folder)
    assert mode(folder) == 0o700


@pytest.mark.parametrize("writable", [0o777, 0o707])
def test_what_lies_where_others_can_write_may_be_theirs(writable: int, tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    (folder / "planted").touch()
    folder.chmod(writable)
    with pytest.raises(NotPrivate, match=rf"others can write in {folder} .*chmod 700 {folder}"):
        private_folder(folder)
    assert mode(folder) == writable


def test_others_may_look_at_names(tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    folder.mkdir(mode=0o755)
    (folder / "ours").touch()
    private_folder(folder)
    assert mode(folder) == 0o755


def test_a_parent_that_others_can_write_in_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(NotPrivate, match=rf"{parent} is on the way .*mode 0777"):
        private_folder(parent / "folder")
    assert not (parent / "folder").exists()
    parent.chmod(0o1777)  # like /tmp: users can rename only their own files
    assert mode(private_folder(parent / "folder")) == 0o700


def test_a_link_of_ours_is_followed_and_its_target_checked(tmp_path: Path) -> None:
    target = tmp_path / "big" / "disk"
    target.mkdir(parents=True)
    (tmp_path / "link").symlink_to("big/../big/disk")
    assert private_folder(tmp_path / "link") == target
    assert private_folder(tmp_path / "link" / ".." / "new") == tmp_path / "big" / "new"
    (target / "planted").touch()
    target.chmod(0o777)
    with pytest.raises(NotPrivate, match=str(target)):
        private_folder(tmp_path / "link")


def test_links_that_lead_nowhere_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        private_folder(tmp_path / "a")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError):
            private_folder(path)


@as_root
def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(NotPrivate, match=f"{folder} belongs to user .*chown"):
        private_folder(folder)
    with pytest.raises(NotPrivate, match=f"{folder} is on the way"):
        private_folder(folder / "below")
    assert not list(folder.iterdir())


@as_root
def test_another_users_link_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    ours = tmp_path / "ours"
    ours.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(ours)
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(NotPrivate, match=f"{link} is a link that user"):
        private_folder(link)


@as_root
def test_a_group_of_others_may_not_write(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "planted").touch()
    folder.chmod(0o770)
    os.chown(folder, 0, NOBODY)
    with pytest.raises(NotPrivate, match="others can write"):
        private_folder(folder)
    os.chown(folder, 0, 0)  # a group with no other member
    private_folder(folder)


def make_link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def make_second_name(path: Path) -> None:
    path.with_name("first").touch()
    path.hardlink_to(path.with_name("first"))


def make_writable(path: Path) -> None:
    path.touch()
    path.chmod(0o666)


@pytest.mark.parametrize("make", [make_link, make_second_name, make_writable, os.mkfifo, os.mkdir])
def test_a_file_that_is_not_ours_alone_is_refused(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    make(path)
    with pytest.raises(NotPrivate, match=str(path)):
        check_file(path)


def test_a_file_of_ours_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o600)
    check_file(tmp_path / "file")
    check_folder(tmp_path)


@pytest.mark.parametrize("make", [make_link, make_writable, os.mkfifo])
def test_what_should_be_a_folder_and_is_none_is_refused(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "folder")
    with pytest.raises(NotPrivate, match="where a folder should be"):
        check_folder(tmp_path / "folder")
