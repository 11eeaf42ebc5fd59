"""Payload files: safetensors, written whole or not at all.

A file's name is a random number and tells nothing. Its content carries a seal (`seal.py`), which is
checked above the tier: reading a file only makes sure that it is a safetensors file of the right
size.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..base import Sealed
from ..codec import Received, StoredArray
from .errors import Damaged
from .folder import make_folder, size_of, sync_folder

log = logging.getLogger("rewarm")

CODES = ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8")
DTYPES = {f"{code[0].upper()}{8 * int(code[1])}": np.dtype(f"<{code}") for code in CODES}
DTYPES["BOOL"] = np.dtype("?")
NAMES = {dtype: name for name, dtype in DTYPES.items()}

SUFFIX, TEMPORARY = ".safetensors", ".tmp"
OURS = re.compile(r"(?:[0-9a-f]{16}|[0-9a-f]{32})\.(safetensors|tmp)")
"""Names of payload files, of this version and of earlier ones."""
ALIGNED = 64
"""The data begins at a multiple of this, so that arrays of every dtype are aligned."""
HEAD = 8 << 10
"""Bytes that are read at once; most headers are shorter."""
DAMAGE = (errno.ENOENT, errno.EIO, errno.EISDIR, errno.ELOOP)
"""Errors of reading that mean damage. After others, such as too many open files, a later try may
work."""


def place(folder: Path, id: int) -> str:
    name = f"{id:016x}"
    return f"{folder}/{name[:2]}/{name}{SUFFIX}"


def encode(arrays: Sealed) -> list[memoryview]:
    """Return the parts of a safetensors file in order. No contiguous array is copied."""
    header: dict[str, Any] = {"__metadata__": {"format": "rewarm"}}
    data: list[memoryview] = []
    at = 0
    # The widest first: every array begins at a multiple of its width, and there are no gaps.
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].itemsize):
        dtype = array.dtype.newbyteorder("<")
        if name == "__metadata__" or dtype not in NAMES:
            raise TypeError(
                f"the array {name!r} of {array.dtype} has no place in a safetensors file"
            )
        offsets = [at, at + array.nbytes]
        header[name] = {"dtype": NAMES[dtype], "shape": array.shape, "data_offsets": offsets}
        at += array.nbytes
        if array.nbytes:
            plain = np.ascontiguousarray(array, dtype)
            data.append(plain.reshape(-1).view(np.uint8).data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    return [memoryview(len(text).to_bytes(8, "little") + text), *data]


def decode(header: bytes, size: int) -> list[StoredArray]:
    """Return the arrays of a file in order. Their bytes are `size` in all.

    The header may be damaged. This raises unless every byte belongs to one array: so no more memory
    is asked for than the file has bytes."""
    found = []
    at = 0
    for name, entry in json.loads(header).items():
        if name == "__metadata__":
            continue
        array = StoredArray(name, DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"]))
        if min((0, *array.shape)) < 0 or entry["data_offsets"] != [at, at + array.nbytes]:
            raise ValueError(f"the array {name!r} is not {array.nbytes:,} bytes after the last one")
        found.append(array)
        at += array.nbytes
    if at != size:
        raise ValueError(f"its arrays take {at:,} of {size:,} bytes")
    return found


def write(folder: Path, id: int, arrays: Sealed) -> int:
    """Write a file and return its size. It is complete and synced under its name, or not there."""
    parts = encode(arrays)
    path = Path(place(folder, id))
    temporary = path.with_suffix(TEMPORARY)
    make_folder(path.parent)
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb", buffering=0):
            os.fchmod(fd, 0o600)
            # In large pieces: after each, this thread takes Python's lock from the model's.
            for part in parts:
                while part:
                    part = part[os.write(fd, part) :]
            # On macOS this leaves the drive's cache to the commit of the index, which flushes it.
            os.fsync(fd)
            size = os.fstat(fd).st_size
        os.rename(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        for leftover in (temporary, path):
            with suppress(OSError):
                leftover.unlink()
        raise
    return size


def read(folder: Path, id: int, size: int) -> Received:
    """Read a file of `size` bytes. Raises `Damaged`, and `OSError` where it cannot be read now."""
    try:
        fd = os.open(place(folder, id), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return _read(fd, size)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in DAMAGE:
            raise Damaged(os.strerror(error.errno or 0)) from error
        raise


def _read(fd: int, size: int) -> Received:
    has = os.fstat(fd).st_size
    if has != size:
        raise Damaged(f"it has {has} bytes instead of {size}")
    head = os.pread(fd, HEAD, 0)
    length = 8 + int.from_bytes(head[:8], "little")
    if HEAD < length <= size:
        head = os.pread(fd, length, 0)
    try:
        found = decode(head[8:length], size - length)
        arrays = Received(found)
        parts = [arrays[a.name].reshape(-1).view(np.uint8).data for a in found if a.nbytes]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"its header cannot be read ({error})") from error
    os.lseek(fd, length, os.SEEK_SET)
    for part in parts:
        while part:
            count = os.readv(fd, [part])
            if not count:
                raise Damaged("it ends too early")
            part = part[count:]
    return arrays


def remove(path: Path | str) -> int:
    """Remove a file and return the bytes that this frees. A restart removes what stays."""
    size = size_of(path)
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("the file of a payload that is gone stays for now: %s", error)
        return 0
    return size


def stored(folder: Path) -> Iterator[Path]:
    """Yield the payload files in a folder, temporary ones too, and nothing that is not ours."""
    for shard in (folder / f"{n:02x}" for n in range(256)):
        with suppress(FileNotFoundError, NotADirectoryError):
            yield from [shard / name for name in os.listdir(shard) if OURS.fullmatch(name)]
