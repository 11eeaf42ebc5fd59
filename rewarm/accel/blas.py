"""Put a fast BLAS under MLX on Linux, before MLX is loaded (docs/blas.md)."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import platform
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

log = logging.getLogger("rewarm")

GEMMS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
"""All functions of a CBLAS that MLX calls."""
PREFIXES = ("", "scipy_")
"""Prefixes that these names have in the libraries that are known."""
# Functions of OpenBLAS that tell about it. The first one gives its name and version.
SETTINGS = (
    ("openblas_get_config", ctypes.c_char_p),
    ("openblas_get_corename", ctypes.c_char_p),
    ("openblas_get_num_threads", ctypes.c_int),
)
MACHINES = {"x86_64": 62, "aarch64": 183}
"""The machines that MLX has Linux wheels for, with ELF's numbers for them."""
# On Fedora the name with a `p` is the threaded build, and the plain one has a single thread.
SYSTEM_NAMES = ("libopenblasp.so.0", "libopenblas.so.0", "libopenblas.so")


@dataclass(frozen=True)
class Blas:
    """The BLAS that MLX's CPU matrix products run on."""

    name: str
    path: str | None
    note: str | None
    """One line that says how to get a fast BLAS, or why the one that was asked for is not used."""


@dataclass(frozen=True)
class Candidate:
    library: str
    """A path, or a name that the dynamic loader looks up."""
    origin: str


class UnusableError(Exception):
    """A library cannot stand in for MLX's BLAS. The message says why."""


OWN = Blas("MLX's own (reference)", None, None)

_decided: Blas | None = None
_deciding = threading.Lock()


def load() -> Blas:
    """Put the fastest BLAS at hand under MLX. It is chosen once in a process. Never raises."""
    global _decided
    if _decided is not None:
        return _decided
    with _deciding:
        if _decided is None:
            try:
                blas = _decide()
            except Exception as error:  # a slow matrix product is better than a failed import
                blas = replace(OWN, note=f"no fast BLAS: {error!r}")
            log.info("BLAS: %s", blas.name)
            if blas.note:
                log.warning("BLAS: %s", blas.note)
            _decided = blas
    return _decided


def current() -> Blas:
    """Return the BLAS in use. It is chosen now where it was not chosen before."""
    return load()


def settings() -> str:
    """Give everything about this BLAS that can change the bits of a product, as one text."""
    used = current()
    threads = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("VECLIB_")]
    found = [used.name, *threads, " ".join(platform.mac_ver()[:1])]
    if used.path is not None:
        library = ctypes.CDLL(used.path)
        answers = (_answer(library, name, kind) for name, kind in SETTINGS)
        found += [str(answer) for answer in answers if answer is not None]
    return " ".join(found)


def _decide() -> Blas:
    if sys.platform == "darwin":
        return Blas("Accelerate", None, None)
    if sys.platform != "linux" or os.uname().machine not in MACHINES:
        return Blas("MLX's own", None, None)  # its user has built it, with a BLAS of their choice

    wanted = os.environ.get("REWARM_BLAS", "").strip()
    off = wanted.lower() in ("off", "0")
    if inherited := _inherited():
        if wanted and not off and not inherited.note:
            late = f"REWARM_BLAS={wanted} has no effect: {inherited.path} was loaded before rewarm"
            return replace(inherited, note=late)
        return inherited
    if off:
        return OWN
    if "mlx.core" in sys.modules:
        return replace(OWN, note="import rewarm before mlx: MLX is already bound to its slow BLAS")

    problems: list[str] = []
    candidates = list(_candidates(wanted))
    for candidate in candidates:
        try:
            return replace(_take(candidate), note="; ".join(problems) or None)
        except (OSError, UnusableError) as error:
            if candidate.origin != "system":  # that the system has none is no problem
                problems.append(f"{candidate.origin} {candidate.library} not used: {error}")
    if not any(candidate.origin == "scipy-openblas32" for candidate in candidates):
        problems.append("MLX's own BLAS is slow: pip install scipy-openblas32")
    return replace(OWN, note="; ".join(problems))


def _candidates(wanted: str) -> Iterator[Candidate]:
    if wanted:
        yield Candidate(os.path.expanduser(wanted), "REWARM_BLAS")
    try:
        package = importlib.util.find_spec("scipy_openblas32")
    except (ImportError, ValueError):
        package = None
    for folder in (package and package.submodule_search_locations) or ():
        library = os.path.join(folder, "lib", "libscipy_openblas.so")
        yield Candidate(library, "scipy-openblas32")
    for name in SYSTEM_NAMES:
        yield Candidate(name, "system")


def _inherited() -> Blas | None:
    """Return the BLAS that is process-wide already, for instance by LD_PRELOAD, or None.

    The loader takes the first definition of a name, so no other BLAS can take its place.
    """
    everything = ctypes.CDLL(None)
    sgemm = _address(everything, "cblas_sgemm")
    if sgemm is None:
        return None
    path = _file_of(sgemm)
    name = f"{_title(path)} (already loaded)"
    if _takes_64_bit_ints(everything, ""):
        return Blas(name, path, f"{path} takes 64-bit integers, MLX passes 32: do not preload it")
    return Blas(name, path, None)


def _take(candidate: Candidate) -> Blas:
    # CDLL's default is RTLD_LOCAL. Only the GEMMs become process-wide, so that LAPACK and other
    # extension modules keep the libraries they were built with.
    library = ctypes.CDLL(candidate.library)
    for prefix in PREFIXES:
        found = {name: _address(library, prefix + name) for name in GEMMS}
        sgemm = found["cblas_sgemm"]
        if sgemm is not None:
            break
    else:
        raise UnusableError("it has no cblas_sgemm")
    if _takes_64_bit_ints(library, prefix):
        raise UnusableError("it takes 64-bit integers, MLX passes 32")
    _publish({name: address for name, address in found.items() if address is not None})
    if _address(ctypes.CDLL(None), "cblas_sgemm") != sgemm:
        raise UnusableError("the dynamic loader does not show its cblas_sgemm")
    path = _file_of(sgemm)
    return Blas(f"{_title(path)} ({candidate.origin})", path, None)


def _takes_64_bit_ints(library: ctypes.CDLL, prefix: str) -> bool:
    """Find out by asking for the largest of 3 - 2**32 numbers.

    A function that reads 32 bits sees 3 numbers, and one that reads 64 sees none."""
    try:
        isamax = library[prefix + "cblas_isamax"]
    except AttributeError:
        return False
    isamax.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    isamax.restype = ctypes.c_int
    numbers = (ctypes.c_float * 3)(1, 2, 3)
    return bool(isamax(3 - 2**32, numbers, 1) != 2)


def _publish(symbols: Mapping[str, int]) -> None:
    """Make each name process-wide, at the given address."""
    # Pythons that were built on an old glibc, as uv's and conda's, have no os.memfd_create.
    # The file stays open: the loader knows an object by its path, which no other file may get.
    close_on_exec = 1
    memory = ctypes.CDLL(None, use_errno=True).memfd_create(b"rewarm-blas", close_on_exec)
    if memory < 0:
        raise UnusableError(f"no memory file: {os.strerror(ctypes.get_errno())}")
    os.write(memory, _shim(symbols))
    path = f"/proc/self/fd/{memory}"
    # It is loaded privately first: a loader that reads the addresses as offsets (musl) must not
    # show wrong ones to MLX.
    private = ctypes.CDLL(path)
    if any(_address(private, name) != address for name, address in symbols.items()):
        raise UnusableError("the dynamic loader does not know absolute symbols")
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def _shim(symbols: Mapping[str, int]) -> bytes:
    """Make an ELF shared object that is only a symbol table: names for addresses in this process.

    It holds no code, so it needs no compiler, and one layout serves both kinds of machine.
    """
    names = b"\0"
    table = bytes(24)  # symbol 0 is no symbol
    for name, address in symbols.items():
        # It is a global function in SHN_ABS: the loader adds no load address to its value.
        table += struct.pack("<IBBHQQ", len(names), 0x12, 0, 0xFFF1, address, 0)
        names += name.encode() + b"\0"
    count = len(symbols) + 1
    chain = [0, *range(2, count), 0]  # one bucket: a lookup walks all the symbols
    buckets = struct.pack(f"<{3 + count}I", 1, count, 1, *chain)

    header_size, segment_size = 64, 56
    parts = [part + bytes(-len(part) % 8) for part in (table, buckets, names)]
    table_at = header_size + 3 * segment_size
    buckets_at = table_at + len(parts[0])
    names_at = buckets_at + len(parts[1])
    dynamic_at = names_at + len(parts[2])
    hash_, strtab, symtab, strsz, syment = 4, 5, 6, 10, 11
    dynamic = struct.pack(
        "<12Q",
        *(hash_, buckets_at, strtab, names_at, symtab, table_at),
        *(strsz, len(names), syment, 24, 0, 0),
    )
    size = dynamic_at + len(dynamic)

    def segment(kind: int, start: int, length: int, align: int) -> bytes:
        # Writable, because glibc relocates the dynamic section in place. Nothing is executable.
        return struct.pack("<IIQQQQQQ", kind, 6, start, start, start, length, length, align)

    load, dynamic_kind, stack = 1, 2, 0x6474E551  # without `stack`, the stack becomes executable
    segments = (
        segment(load, 0, size, 0x10000)  # aarch64 pages can be 64 KiB
        + segment(dynamic_kind, dynamic_at, len(dynamic), 8)
        + segment(stack, 0, 0, 16)
    )
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH",
        *(3, MACHINES[os.uname().machine], 1, 0, header_size, 0, 0),
        *(header_size, segment_size, 3, 64, 0, 0),
    )
    return header + segments + b"".join(parts) + dynamic


def _address(library: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(library[name], ctypes.c_void_p).value
    except AttributeError:
        return None


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )
    file: bytes | None


def _file_of(address: int) -> str:
    info = _DlInfo()
    ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(info))
    return os.fsdecode(info.file or b"?")


def _title(path: str) -> str:
    try:
        library = ctypes.CDLL(path)
    except OSError:  # linked into the executable
        return os.path.basename(path)
    config = _answer(library, *SETTINGS[0])
    if config is None:
        return os.path.basename(path)
    words = os.fsdecode(config).split()  # OpenBLAS 0.3.34 DYNAMIC_ARCH ...
    return " ".join(words[:2]) if words[:1] == ["OpenBLAS"] else "OpenBLAS"


def _answer(library: ctypes.CDLL, name: str, kind: Any) -> Any:
    """Call a function of OpenBLAS that has no arguments; None where the library has none."""
    for prefix in PREFIXES:
        try:
            function = library[prefix + name]
        except AttributeError:
            continue
        function.restype = kind
        return function()
    return None
