"""Space on disk: choose what is removed so that something else can be written."""

from __future__ import annotations

import logging

from ...retention import Evictor
from ...worth import Appraiser, Retention
from .trees import SECOND, UNLIMITED, DiskTrees, clock

log = logging.getLogger("rewarm")

MARGIN = 16 << 10
"""Bytes that the waiting files may take beyond their estimates."""
FRESH = 60 * SECOND
"""The time in which a node that was written or read is not removed while there is an older one.
Otherwise it would be written for nothing, and a `flush` that returned would promise little."""
AT_ONCE = 64
"""Nodes that are appraised at a time while there is room."""


class DiskSpace:
    """Makes room. Payloads of other models go first, then those that memory's policy chooses."""

    def __init__(self, trees: DiskTrees, policy: Retention) -> None:
        self._trees = trees
        self.evictor = Evictor(
            policy,
            trees.ledger,
            clock,
            Appraiser(trees.layout.longest_window, trees.layout.has_state),
            on_evict=trees.evicted,
            by_request=False,
            unit=SECOND,
            fresh=FRESH,
        )

    def make(self, nbytes: int) -> bool:
        """Make space for so many bytes by the time that they are written. Pinned nodes stay."""
        if self._lacking(nbytes) <= 0:
            # File a few new nodes each time: to file all of them on a full disk would take seconds.
            self.evictor.take_in(AT_ONCE)
            return True
        for stranger in self._trees.strangers():
            name = stranger.about.get("name", stranger.digest)
            log.info("the disk tier is full: what %s has in it goes", name)
            self._trees.clear(stranger)
            if self._lacking(nbytes) <= 0:
                return True
        self._trees.read_all()
        # An eviction may free less than it seems: two nodes may share a file.
        while (lacking := self._lacking(nbytes)) > 0:
            before = self.evictor.evictions
            self.evictor.trim(self._trees.ledger.held.total - lacking)
            if self.evictor.evictions == before:
                return False
        return True

    def _lacking(self, nbytes: int) -> int:
        try:
            return nbytes + MARGIN - self._trees.store.unplanned_bytes()
        except OSError:  # the folder is gone, or the store is broken: there is no room at all
            return UNLIMITED
