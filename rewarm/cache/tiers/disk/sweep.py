"""Orphans: payload files that no row of the index knows, left by a kill.

Nobody counts them, so they go before anything is written: in a loop of crashes each process would
otherwise fill the disk up to its limit beside what the ones before it left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from . import files
from .records import StoreError

SWEEP_AFTER = 5.0
"""Seconds from opening to the look for orphans, or until something is to be written: whoever opened
has better things to read first."""


class Sweeper:
    """Looks for orphans once, in a thread of its own, and whenever it is asked to."""

    def __init__(self, folder: Path, known: Callable[[str], set[str]], *, at_once: bool) -> None:
        """`known`: the names of files, written or being written, that begin with two digits."""
        self.nbytes = 0
        """What has been found and not yet removed."""
        self._folder = folder
        self._known = known
        self._stop = False
        self._hurry = threading.Event()
        wait = 0.0 if at_once else SWEEP_AFTER
        self.thread = threading.Thread(
            target=self._run, args=(wait,), name="rewarm-sweep", daemon=True
        )
        self.thread.start()

    def find(self) -> list[Path]:
        found = []
        for paths in files.shards(self._folder):
            # Listed first and asked for then: a file that nobody knows by now is old.
            known = self._known(paths[0].parent.name) if paths else set()
            found += [path for path in paths if path.name not in known]
        return found

    def remove(self, paths: Iterable[Path]) -> None:
        sizes = {path: files.size_of(path) for path in paths}
        self.nbytes = sum(sizes.values())
        for path, size in sizes.items():
            if self._stop:
                return
            with suppress(OSError):
                path.unlink(missing_ok=True)
                self.nbytes -= size

    def _run(self, wait: float) -> None:
        self._hurry.wait(wait)
        if not self._stop:
            with suppress(StoreError, OSError):
                self.remove(self.find())

    def finish(self) -> None:
        """Wait until the first look is over, and begin it now."""
        self._hurry.set()
        self.thread.join()

    def stop(self) -> None:
        self._stop = True
        self._hurry.set()
