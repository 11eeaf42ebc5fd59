"""Payload files: safetensors, written whole or not at all, and read back checked.

A file's name is random and says nothing. Its checksum is the index's to keep: a file that does not
match it is damaged, whatever it looks like.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from rewarm.private import check_folder

log = logging.getLogger("rewarm")

Arrays = dict[str, npt.NDArray[Any]]

DTYPES = {
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

SUFFIX, TEMPORARY = ".safetensors", ".tmp"
OURS = re.compile(r"[0-9a-f]{32}\.(safetensors|tmp)")
SHARD = re.compile(r"[0-9a-f]{2}")
ALIGNED = 64
"""Where the data begins, so that arrays are aligned for every dtype."""
BLOCK = 1 << 20
"""Bytes that are checked while they are still in the processor's cache."""
HEAD = 8 << 10
"""Most headers are shorter, and read at once."""


class Damaged(Exception):
    """A file, or a row of the index, that is not what was written."""


class Written(NamedTuple):
    """A file that is complete and synced."""

    name: str
    nbytes: int
    checksum: bytes


def new_name() -> str:
    return secrets.token_hex(16)


def make_folder(path: Path) -> None:
    """For nobody but us, whatever the umask; there after a crash, too."""
    try:
        path.mkdir(mode=0o700)
        path.chmod(0o700)
        sync_folder(path.parent)
    except FileExistsError:
        check_folder(path)


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def encode(arrays: Arrays) -> list[memoryview]:
    """The parts of a safetensors file, in order; no array is copied that is contiguous."""
    header: dict[str, Any] = {"__metadata__": {"format": "rewarm"}}
    places: dict[str, tuple[int, int]] = {}
    plain: Arrays = {}
    for name, array in arrays.items():
        dtype = array.dtype.newbyteorder("<")
        if name == "__metadata__" or dtype not in NAMES:
            raise TypeError(
                f"the array {name!r} of {array.dtype} has no place in a safetensors file"
            )
        plain[name] = np.ascontiguousarray(array, dtype)
    # The widest first: every array begins at a multiple of its width, and there are no gaps.
    order = sorted(plain, key=lambda name: -plain[name].itemsize)
    at = 0
    for name in order:
        places[name] = (at, at + plain[name].nbytes)
        at += plain[name].nbytes
    for name, array in arrays.items():
        header[name] = {
            "dtype": NAMES[plain[name].dtype],
            "shape": list(array.shape),
            "data_offsets": list(places[name]),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    parts = [memoryview(len(text).to_bytes(8, "little") + text)]
    parts += [plain[n].reshape(-1).view(np.uint8).data for n in order if plain[n].nbytes]
    return parts


@dataclass(frozen=True)
class Entry:
    """An array of a file, as its header describes it."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    """Its first byte, after the header."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def entries(header: bytes, size: int) -> list[Entry]:
    """The arrays of a file, whose bytes are `size` in all. The header may be damaged: whatever it
    says, every byte is one array's, and no more is asked for than there is."""
    found = []
    for name, entry in json.loads(header).items():
        if name == "__metadata__":
            continue
        shape = tuple(int(n) for n in entry["shape"])
        start, stop = entry["data_offsets"]
        found.append(Entry(name, DTYPES[entry["dtype"]], shape, start))
        if min((0, *shape)) < 0 or found[-1].nbytes != stop - start:
            raise ValueError(f"the array {name!r} has another size than its shape")
    at = 0
    for each in sorted(found, key=_place):
        if each.start != at:
            raise ValueError(f"the array {each.name!r} does not begin where the last one ends")
        at += each.nbytes
    if at != size:
        raise ValueError(f"its arrays take {at:,} of {size:,} bytes")
    return found


def _place(entry: Entry) -> tuple[int, int]:
    return entry.start, entry.nbytes


def blank(found: Sequence[Entry]) -> Arrays:
    return {entry.name: np.empty(entry.shape, entry.dtype) for entry in found}


def write(folder: Path, name: str, parts: Sequence[memoryview]) -> Written:
    """Complete and synced under its name, or not there at all."""
    path = Path(place(folder, name))
    temporary = path.with_suffix(TEMPORARY)
    make_folder(path.parent)
    checksum, nbytes = xxhash.xxh3_128(), 0
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            # In large pieces: after each of them Python's lock is taken from who runs the model.
            for part in parts:
                checksum.update(part)
                nbytes += len(part)
                while part:
                    part = part[os.write(fd, part) :]
            # On macOS this leaves the drive's cache to the commit of the index, which flushes it.
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        for leftover in (temporary, path):
            with suppress(OSError):
                leftover.unlink()
        raise
    return Written(name, nbytes, checksum.digest())


def read(
    folder: Path, written: Written, new: Callable[[Sequence[Entry]], Arrays] = blank
) -> Arrays:
    """The arrays of a file, read into what `new` makes for them, and checked."""
    with _opened(folder, written) as fd:
        head = os.pread(fd, HEAD, 0)
        length = 8 + int.from_bytes(head[:8], "little")
        if HEAD < length <= written.nbytes:
            head = os.pread(fd, length, 0)
        head = head[:length]
        try:
            found = entries(head[8:], written.nbytes - length)
            arrays = new(found)
            order = [e for e in sorted(found, key=_place) if e.nbytes]
            parts = [arrays[e.name].reshape(-1).view(np.uint8).data for e in order]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"its header cannot be read ({error})") from error
        checksum, at = xxhash.xxh3_128(head), os.lseek(fd, length, os.SEEK_SET)
        for part in parts:
            while part:
                n = os.readv(fd, [part])
                if n == 0:
                    raise Damaged(f"it ends after {at:,} of {written.nbytes:,} bytes")
                checksum.update(part[:n])
                part, at = part[n:], at + n
    if checksum.digest() != written.checksum:
        raise Damaged("its checksum is another")
    return arrays


def check(folder: Path, written: Written) -> None:
    """As `read`, but holds no more than a block of it in memory."""
    with _opened(folder, written) as fd:
        checksum, block = xxhash.xxh3_128(), np.empty(BLOCK, np.uint8).data
        while n := os.readv(fd, [block]):
            checksum.update(block[:n])
    if checksum.digest() != written.checksum:
        raise Damaged("its checksum is another")


@contextmanager
def _opened(folder: Path, written: Written) -> Iterator[int]:
    fd = os.open(place(folder, written.name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size != written.nbytes:
            raise Damaged(f"it has {size:,} bytes instead of {written.nbytes:,}")
        yield fd
    finally:
        os.close(fd)


def place(folder: Path, name: str) -> str:
    return f"{folder}/{name[:2]}/{name}{SUFFIX}"


def remove(folder: Path, name: str) -> None:
    """What cannot be removed now is an orphan, and removed after the next start."""
    try:
        os.unlink(place(folder, name))
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("the file of a payload that is gone stays for now: %s", error)


def shards(folder: Path) -> Iterator[list[Path]]:
    """The files of each sub-folder, temporary ones too; nothing that is not ours."""
    for shard in (folder / f"{n:02x}" for n in range(256)):
        with suppress(FileNotFoundError, NotADirectoryError):
            yield [shard / name for name in os.listdir(shard) if OURS.fullmatch(name)]


def size_of(path: Path | str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def is_damage(error: OSError) -> bool:
    """A bad block is damage; too many open files, or a folder that went away, is not."""
    return error.errno in (errno.ENOENT, errno.EIO, errno.EISDIR, errno.ELOOP)
