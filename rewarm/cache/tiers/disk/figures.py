"""What the disk tier says of itself, for metrics and live views."""

from __future__ import annotations

from dataclasses import dataclass

from .tier import DiskTier


@dataclass(frozen=True)
class DiskFigures:
    budget: int
    held: int
    reads: int
    """Spans that were brought up to memory since the start."""
    written: int
    """Bytes written since the start."""
    unwritten: int
    """Bytes that wait to be written."""
    evictions: int
    paused: bool
    """Whether the disk refused a write a moment ago."""


def disk_figures(disk: DiskTier) -> DiskFigures:
    return DiskFigures(
        budget=disk.store.limit,
        held=disk.nbytes(),
        reads=disk.loads,
        written=disk.writer.written,
        unwritten=disk.writer.waiting,
        evictions=disk.evictions,
        paused=disk.writer.paused,
    )
