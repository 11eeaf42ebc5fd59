"""The folder of a store: its privacy, its lock, its quarantine, and why it cannot be used."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from rewarm.errors import NotPrivate
from rewarm.private import check_file, check_folder, private_folder

from .errors import StoreHeld

QUARANTINE_SHARE = 8
"""The quarantine takes at most the store's limit divided by this. The oldest file goes first."""
SHARD = re.compile(r"[0-9a-f]{2}")

PAYLOADS, QUARANTINE, LOCK, INDEX = "payloads", "quarantine", "lock", "index.sqlite"
SUSPECT = "suspect"
"""A file that tells the next start of damage that a quick check does not see."""


def size_of(path: Path | str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Make a folder that only this user can look into, whatever the umask. It survives a crash."""
    try:
        path.mkdir(mode=0o700)
        path.chmod(0o700)
        sync_folder(path.parent)
    except FileExistsError:
        check_folder(path)


def prepare(folder: Path) -> Path:
    """Make a folder for a store, or check one that is there. Return its path without links.

    The files in it that have our names are checked as well: until a moment ago other users may
    have been able to write there. From here on nobody else can change any of it."""
    folder = private_folder(folder)
    # A folder with other things in it keeps its mode: what we put into it is private anyway.
    if not any(folder.iterdir()) or (folder / LOCK).exists():
        with suppress(PermissionError):
            folder.chmod(0o700)
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # the process that holds the folder removed it
            if path.name in (PAYLOADS, QUARANTINE):
                check_folder(path)
            elif path.name in (LOCK, SUSPECT) or path.name.startswith(INDEX):
                check_file(path)
    with suppress(FileNotFoundError):
        for shard in (folder / PAYLOADS).iterdir():
            if SHARD.fullmatch(shard.name):
                check_folder(shard)
    return folder


def why_not(folder: Path, error: Exception) -> str:
    if isinstance(error, NotPrivate):
        return f"no cache can be kept in {folder}: {error}"
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.EEXIST, errno.ENOTDIR):
        why = "it is not a folder: choose another place"
    elif code in (errno.EACCES, errno.EPERM):
        why = "there is no permission to write in it: change its owner or mode, or choose another"
    elif code == errno.EROFS:
        why = "its file system is read-only: choose another folder"
    elif code == errno.ENOSPC:
        why = "its disk is full: make room, or choose another folder"
    elif code in (errno.ENOLCK, errno.ENOTSUP):
        why = "its file system has no locks: choose a folder on a local disk"
    else:
        why = f"{error}: choose another folder"
    return f"no cache can be kept in {folder}: {why}"


class Quarantine:
    """Keeps some damaged files for people to look at. The store never reads them again."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder / QUARANTINE
        self.limit = limit // QUARANTINE_SHARE
        make_folder(self.folder)
        self.nbytes = sum(map(size_of, self.folder.iterdir()))

    def take(self, *paths: Path) -> str:
        """Move files here. Returns what was done with them, in words."""
        with suppress(OSError):
            make_folder(self.folder)
        stamp = f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}"
        done = "there is nothing left of it"
        for path in paths:
            try:
                os.rename(path, self.folder / f"{stamp}-{path.name}")
                done = f"moved to {self.folder.name}/"
            except FileNotFoundError:
                continue
            except OSError as error:
                done = (
                    f"it cannot be moved to {self.folder.name}/ ({os.strerror(error.errno or 0)})"
                )
                with suppress(OSError):
                    path.unlink()
                    done = "removed"
        self._shrink(self.limit)
        return done

    def clear(self) -> None:
        self._shrink(-1)

    def _shrink(self, limit: int) -> None:
        """Keep the newest files up to a limit."""
        self.nbytes = total = 0
        with suppress(OSError):
            for path in sorted(self.folder.iterdir(), reverse=True):
                total += size_of(path)
                if total > limit:
                    path.unlink()
                else:
                    self.nbytes = total


class FolderLock:
    """Holds a folder until `release`, or until the process ends in any way."""

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            check_file(path, os.fstat(fd))
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = self._holder(os.pread(fd, 1024, 0))
                raise StoreHeld(
                    f"{folder} is held by {holder}: stop it, or choose another folder"
                ) from None
            os.fchmod(fd, 0o600)
            us = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(us).encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        self._fd: int | None = fd

    @staticmethod
    def _holder(text: bytes) -> str:
        try:
            holder = json.loads(text)
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
            return f"process {holder['pid']} on {holder['host']} since {since}"
        except (ValueError, KeyError, TypeError):
            return "another process"  # it has not written its name yet

    def release(self) -> None:
        if self._fd is not None:
            # A forked child has this descriptor as well: closing ours alone would not unlock.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None
