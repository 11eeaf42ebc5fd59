"""The memory that the system counts against this process, and the most that it may take.

macOS ends processes by their physical footprint, Linux by their cgroup's memory. Neither number is
the resident set, and MLX knows neither."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .device import device_bytes, is_cuda, machine_bytes

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
STATUS = Path("/proc/self/status")
COUNTED = ("RssAnon", "RssShmem", "VmSwap")
"""The lines of Linux's status whose memory only this process can give back."""
RUSAGE_V0_BYTES = 96
PHYS_FOOTPRINT_AT = 72
"""The size of macOS's `rusage_info_v0`, and the place of `ri_phys_footprint` in it."""


class Footprint(NamedTuple):
    used: int
    limit: int

    @property
    def share(self) -> float:
        return self.used / self.limit


def footprint() -> Footprint:
    """Measure what this process takes. Of several limits, the one that is nearest counts."""
    return max(_readings(), key=lambda reading: reading.share)


def _readings() -> Iterator[Footprint]:
    # A CUDA GPU has memory of its own, which the system does not count.
    limit = machine_bytes() if is_cuda() else min(machine_bytes(), device_bytes())
    yield Footprint(_of_process(), limit)
    yield from _of_cgroups()


def _of_process() -> int:
    if sys.platform == "darwin":
        return _phys_footprint()
    found = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    return sum(int(found.get(name, "0 kB").split()[0]) << 10 for name in COUNTED)


def _phys_footprint() -> int:
    info = ctypes.create_string_buffer(RUSAGE_V0_BYTES)
    if ctypes.CDLL(None).proc_pid_rusage(os.getpid(), 0, info) != 0:
        return 0
    return int.from_bytes(info.raw[PHYS_FOOTPRINT_AT : PHYS_FOOTPRINT_AT + 8], sys.byteorder)


def _of_cgroups() -> Iterator[Footprint]:
    """Read the memory of this process's cgroup and of those above it, where they have a limit."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return  # there are none here
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for files in (VERSION_2,) if not controllers else (VERSION_1,):
            if files is VERSION_1 and "memory" not in controllers.split(","):
                continue
            group = files.root / path.lstrip("/")
            for each in (group, *group.parents):
                if each.is_relative_to(files.root) and (found := files.read(each)) is not None:
                    yield found


class CgroupFiles(NamedTuple):
    """The files of one version of cgroups."""

    root: Path
    limit: str
    used: str
    droppable: str
    """The line of `memory.stat` with file pages that the system can drop at once."""

    def read(self, group: Path) -> Footprint | None:
        try:
            limit = int((group / self.limit).read_text())
            used = int((group / self.used).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            return None  # it is not there, or has no limit
        return Footprint(used - int(stat.get(self.droppable, 0)), limit)


VERSION_1 = CgroupFiles(
    CGROUPS / "memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)
VERSION_2 = CgroupFiles(CGROUPS, "memory.max", "memory.current", "inactive_file")
