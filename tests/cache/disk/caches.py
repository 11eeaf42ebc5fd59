"""Caches with a disk tier for tests, and a watch on the size of a folder."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from rewarm.cache import PrefixCache
from rewarm.cache.tiers.disk import folder
from rewarm.cache.tiers.disk.tier import DiskTier
from tests.runs import (
    CHUNK,
)

ARCHITECTURES = ("qwen3_5", "nemotron_h", "gpt_oss", "llama", "gemma3_text", "deepseek_v3")


def cache_on(
    folder: Path, model: Any, *, memory: str = "64MB", disk_size: str = "1GB", **options: Any
) -> PrefixCache:
    return PrefixCache(
        model, memory=memory, disk=str(folder), disk_size=disk_size, chunk=CHUNK, **options
    )


def disk_of(cache: PrefixCache) -> DiskTier:
    """Return the disk tier of a cache that was given a folder."""
    (disk,) = (tier for tier in cache.tiers if isinstance(tier, DiskTier))
    return disk


class Watch:
    """A thread that finds the largest size that a folder has at any moment."""

    def __init__(self, watched: Path) -> None:
        self.folder = watched
        self.most = self.largest = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._stop.is_set():
            sizes = [folder.size_of(path) for path in self.folder.rglob("*") if path.is_file()]
            self.most = max(self.most, sum(sizes))
            self.largest = max(self.largest, *sizes, 0)
            time.sleep(0.001)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class Failing:
    """A function that raises on its first calls, and then works."""

    def __init__(self, works: Any, times: int) -> None:
        self.works, self.times = works, times

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.times:
            self.times -= 1
            raise OSError(28, "no space left on device")
        return self.works(*args, **options)
