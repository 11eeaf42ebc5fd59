"""Give MLX a private folder for the libraries that it compiles on Linux (docs/accel.md).

MLX compiles C++ while a model runs, into `mlx/` under the system's folder for temporary files. It
loads whatever lies there under the right name. Where other users can write in that folder, it can
load their code.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rewarm.errors import NotPrivate
from rewarm.private import private_folder

log = logging.getLogger("rewarm")

VARIABLES = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
"""The variables in which C++ looks for the folder for temporary files, in its order. The first one
that is set counts. MLX looks again for every function that it compiles or loads."""

PROCESSOR = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")
"""The lines of /proc/cpuinfo that tell which instructions a compiler may use."""


def prepare() -> Path | None:
    """Have MLX compile into a folder that is this user's alone, and load nothing from elsewhere.

    The folder is kept, so that later processes need not compile. Where no folder can be kept, this
    process has one to itself. Where that is not possible either, MLX compiles nothing. Never
    raises.
    """
    if sys.platform != "linux":
        return None
    try:
        folder = _checked(_kept())
    except Exception as error:
        try:
            folder = _checked(_passing())
        except Exception as other:
            os.environ["MLX_DISABLE_COMPILE"] = "1"
            log.warning("MLX compiles nothing, and is a few percent slower: %s; %s", error, other)
            return None
        log.warning("what MLX compiles is not kept for the next start: %s", error)
    # C++ looks at TEMPDIR last, and Python, compilers and shells do not look at it. os.environ is
    # not changed: where it has to be TMPDIR, Python's own temporary files stay where they were.
    name = next((name for name in VARIABLES if name in os.environ), VARIABLES[-1])
    os.putenv(name, str(folder))
    return folder


def _kept() -> Path:
    """Return the folder that this user's processes share where they compile alike.

    MLX's file names do not tell compilers and processors apart, so the folder's name does."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):
        cache = os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        raise OSError("there is no home folder")
    key = hashlib.sha256("\n".join(_compilation()).encode()).hexdigest()[:12]
    return Path(cache, "rewarm", "mlx", key)


def _passing() -> Path:
    """Make a folder for this process. It is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="rewarm-mlx-"))
    us = os.getpid()

    def remove() -> None:
        if os.getpid() == us:  # a fork may end while its parent still compiles
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _checked(folder: Path) -> Path:
    """Make a folder that is ours alone and that programs can be loaded from, or raise."""
    folder = private_folder(folder)
    folder.chmod(0o700)
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise NotPrivate(f"{folder} is on a file system that runs no programs (noexec)")
    return folder


def _compilation() -> Iterator[str]:
    """Yield everything that the compiled libraries depend on, as texts."""
    yield platform.machine()
    compiler = shutil.which("g++")
    if compiler is not None:
        path = os.path.realpath(compiler)
        found = os.stat(path)
        yield f"{path} {found.st_size} {found.st_mtime_ns}"
    # MLX puts its version into the path by itself, but its users can build others of one version.
    package = importlib.util.find_spec("mlx")
    for place in (package and package.submodule_search_locations) or ():
        library = Path(place, "lib", "libmlx.so")
        if library.exists():
            yield str(library.stat().st_size)
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.isspace():  # the other processors are alike
                break
            if line.startswith(PROCESSOR):
                yield line.strip()
