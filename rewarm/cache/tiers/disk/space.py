"""Space on disk: what goes so that something else can be written."""

from __future__ import annotations

import logging

from ...layout import Layout
from ...retention import Evictor, Retention
from ...tree import Node
from ...worth import Appraiser
from .records import NamespaceInfo
from .store import Store
from .trees import SECOND, UNLIMITED, DiskTrees, clock
from .writer import Job, Writer

log = logging.getLogger("rewarm")

MARGIN = 16 << 10
"""Bytes that what waits may take beyond its estimate."""
FRESH = 60 * SECOND
"""What was written or read so lately stays while there is anything older: writing it was for
nothing otherwise, and who flushed it counts on it."""
AT_ONCE = 64
"""Nodes that are appraised while there is room."""


class DiskSpace:
    """What other models have here goes first, then what the policy of memory says."""

    def __init__(
        self, store: Store, writer: Writer, trees: DiskTrees, layout: Layout, policy: Retention
    ) -> None:
        self._store = store
        self._writer = writer
        self._trees = trees
        self._evictor = Evictor(
            policy,
            trees.ledger,
            clock,
            Appraiser(layout.longest_window, layout.has_state),
            on_evict=trees.evicted,
            by_request=False,
            unit=SECOND,
            fresh=FRESH,
        )
        self._strangers = self._find_strangers()
        """The longest unused last. Nobody but us writes here, so there will be no others."""
        self._read_all = False

    @property
    def evictions(self) -> int:
        return self._evictor.evictions

    def forget(self) -> None:
        """The trees are gone."""
        self._evictor.forget()

    def make(self, nbytes: int, holding: list[Node]) -> bool:
        """Make space for so many bytes by the time that they are written."""
        while self._strangers and self._lacking(nbytes) > 0:
            stranger = self._strangers.pop()
            if self._trees.is_ours(stranger):
                continue  # the model became this one meanwhile
            name = stranger.about.get("name", stranger.digest)
            log.info("the disk tier is full: what %s has in it goes", name)
            self._writer.put(Job(clears=stranger))
        if self._lacking(nbytes) <= 0:
            # Of what came since, a little each time: all of it on a full disk would take seconds.
            self._evictor.take_in(AT_ONCE)
            return True
        if not self._read_all:
            self._trees.read_all()
            self._read_all = True
        ledger = self._trees.ledger
        for node in holding:
            node.pins += 1
        try:
            # What goes may free less than it seems: two nodes may share a file.
            while (lacking := self._lacking(nbytes)) > 0:
                before = self._evictor.evictions
                self._evictor.trim(ledger.held.total - lacking)
                if self._evictor.evictions == before:
                    break
        finally:
            for node in holding:
                node.pins -= 1
        return self._lacking(nbytes) <= 0

    def _lacking(self, nbytes: int) -> int:
        try:
            return nbytes + MARGIN - self._writer.free_bytes()
        except OSError:  # the folder is gone, or the store is broken: there is no room at all
            return UNLIMITED

    def _find_strangers(self) -> list[NamespaceInfo]:
        try:
            known = self._store.namespaces()
        except OSError:
            return []
        others = [n for n in known if n.bytes and not self._trees.is_ours(n)]
        return sorted(others, key=lambda n: -n.used)
