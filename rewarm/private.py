"""Make and check folders and files that no other user of the machine can change.

A user who can write in a folder can replace the files in it, and one who can write in its parent
can replace the folder. So a path is walked from the root, and each step is checked before the next
one is taken: then no other user can change a folder that was checked. A parent must belong to root
or to this user. Others may write in it only if its sticky bit protects files that are not theirs,
as in /tmp.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from pathlib import Path

from rewarm.errors import NotPrivate

MOST_LINKS = 40
"""Links that are followed on the way to a file: as many as Linux follows."""


def private_folder(path: Path) -> Path:
    """Make a folder that is this user's alone, or check one; return its path without links.

    Links on the way to it are followed where root or this user made them. An empty folder that
    others can write in is closed to them. Raises `NotPrivate` for a folder that others can change,
    and `OSError` where no folder can be made."""
    folder = _walk(Path(path).absolute())
    found = os.lstat(folder)
    _check_owner(folder, found)
    is_empty = not os.listdir(folder)  # raises an error where it is a file
    if not _others_may_write(found):
        return folder
    if is_empty:
        folder.chmod(0o700)
    if not is_empty or os.listdir(folder):  # another user may have been faster than the new mode
        raise NotPrivate(
            f"others can write in {folder} ({_mode(found)}): if all in it is yours, "
            f"`chmod 700 {folder}`; otherwise choose another folder"
        )
    return folder


def check_folder(path: Path) -> None:
    """Check a folder inside a private one. Raises `NotPrivate`."""
    _check(path, os.lstat(path), "a folder")


def check_file(path: Path, found: os.stat_result | None = None) -> None:
    """Check a file inside a private folder: it is no link, and no other file's second name.

    `found` is the status of the file where it is open already. Raises `NotPrivate`."""
    _check(path, os.lstat(path) if found is None else found, "a file")


def _walk(path: Path) -> Path:
    """Go down a path and make its missing folders; return it without links."""
    at, left, links = Path(path.anchor), list(path.parts[:0:-1]), 0
    while left:
        _check_parent(at, path)
        part = left.pop()
        if part == "..":
            at = at.parent
            continue
        step = at / part
        try:
            found = os.lstat(step)
        except FileNotFoundError:
            # The umask must not decide: a folder that others can write in is refused the next time.
            mode = 0o755 if left else 0o700
            os.mkdir(step, mode)
            step.chmod(mode)
            found = os.lstat(step)
        if not stat.S_ISLNK(found.st_mode):
            at = step
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if found.st_uid not in (0, os.geteuid()):
            raise NotPrivate(
                f"{step} is a link that {_name(found.st_uid)} made: they can let it lead anywhere. "
                "Choose another folder"
            )
        target = Path(os.readlink(step))
        at /= target.anchor  # the root, where the link is absolute
        left += target.relative_to(target.anchor).parts[::-1]
    return at


def _check_parent(folder: Path, path: Path) -> None:
    found = os.lstat(folder)
    if found.st_uid not in (0, os.geteuid()):
        who = f"{_name(found.st_uid)}, whose it is,"
    elif _others_may_write(found) and not found.st_mode & stat.S_ISVTX:
        who = f"others can write in it ({_mode(found)}) and"
    else:
        return
    raise NotPrivate(
        f"{folder} is on the way to {path}, and {who} can put another folder there: "
        f"`chmod go-w {folder}` if it is yours, or choose another place"
    )


def _check(path: Path, found: os.stat_result, expected: str) -> None:
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFREG: "a file"}
    kind = kinds.get(stat.S_IFMT(found.st_mode), "a special file")
    if kind != expected:
        raise NotPrivate(f"{path} is {kind} where {expected} should be: remove it")
    if kind == "a file" and found.st_nlink > 1:
        raise NotPrivate(f"{path} is another file's second name (a hard link): remove it")
    _check_owner(path, found)
    if _others_may_write(found):
        raise NotPrivate(
            f"others can write in {path} ({_mode(found)}): `chmod go-w {path}` if it is yours, "
            "or remove it"
        )


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise NotPrivate(
            f"{path} belongs to {_name(found.st_uid)}, and this process is "
            f"{_name(os.geteuid())}: choose another folder, or `chown` it with all that is in it"
        )


def _others_may_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_own_group(found.st_gid)


def _is_own_group(gid: int) -> bool:
    """Say whether the group has no other user. Many systems make such a group for each user."""
    try:
        us, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    is_users_own = us.pw_gid == gid and group.gr_name == us.pw_name
    return is_users_own and set(group.gr_mem) <= {us.pw_name}


def _name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _mode(found: os.stat_result) -> str:
    return f"mode {stat.S_IMODE(found.st_mode):04o}"
