"""A fetch: what a tier has of a prompt, on its way into memory."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Protocol

from ..find import Query
from ..payload import PackedState
from ..pins import Pin
from .base import FetchCancelled, Found, Sealed
from .lane import Lane
from .seal import BrokenSeal, Piece, Unsealer

log = logging.getLogger("rewarm")


class Worth(Protocol):
    """The caller's opinion on a fetch, from the thread that found it: be quick, and never wait."""

    def __call__(self, tokens: int, nbytes: int) -> bool:
        """Say whether `nbytes` are fetched sooner than `tokens` are computed."""


@dataclass(frozen=True)
class Progress:
    done: int
    """Bytes that are in memory."""
    total: int
    """Bytes that were promised; 0 until a tier was chosen."""


class Fetch:
    """One prompt's payloads on their way from a tier to memory.

    `PrefixCache.fetch` makes it, `PrefixCache.take_in` puts what it brought into the memory tree.
    Every attribute may be read from any thread at any time, and no call here waits.

    It pins the path that memory has of the prompt, so that what is fetched has something to go on
    from. `take_in` and `cancel` end that, and so does forgetting it.
    """

    def __init__(
        self,
        query: Query,
        resume: int,
        pin: Pin,
        dropped: deque[Pin],
        epoch: int,
        worth: Worth | None = None,
    ) -> None:
        """`resume` is where the model could go on from without it."""
        self.future: Future[bool] = Future()
        """Resolved, on any thread, once there is nothing left to wait for: True where `take_in`
        has something to put into memory; False where the tiers have nothing of use, where it was
        not worth it, where all of them failed, and after `cancel`. It never raises."""
        self.tokens = 0
        """The position that the model could go on from once this is in memory; 0 as long as no
        tier was chosen, and where nothing came."""
        self.tier: str | None = None
        """The name of the tier that it comes from; None as long as none was chosen."""
        self.progress = Progress(0, 0)
        self.query = query
        self.epoch = epoch
        """The cache was cleared so often when this began."""
        self.known: Found | None = None
        """The answer of the tier that knows most of the prompt."""
        self.found: Found | None = None
        """The answer that the fetch relies on."""
        self._resume = resume
        self._worth = worth
        self._lanes: Sequence[Lane] = ()
        self._answers: list[Found | None] = []
        self._pieces: list[Piece] = []
        self._unsealer = Unsealer(query)
        self._calls: list[Callable[[Fetch], None]] = []
        self._ended = False
        self._lock = threading.Lock()
        # It may run at any moment in any thread, so it only leaves a note.
        self._unpin = weakref.finalize(self, dropped.append, pin)

    def begin(self, lanes: Sequence[Lane]) -> Fetch:
        """Ask the tiers, from fast to slow."""
        self._lanes = lanes
        self._ask()
        return self

    def cancel(self) -> None:
        """Give it up. `future` is resolved by the time this returns; what a tier still delivers is
        thrown away. After `future` was resolved this forgets what came."""
        self._end(False)
        with self._lock:
            self._pieces, self.tokens = [], 0
        self._unpin()

    def on_done(self, call: Callable[[Fetch], None]) -> None:
        """Call it once `future` is resolved: at once where it is, and on any thread otherwise."""
        with self._lock:
            if not self._ended:
                self._calls.append(call)
                return
        call(self)

    def wait(self, silence: float) -> bool:
        """Wait for it as long as something comes: it is cancelled after so many seconds without a
        byte. For a caller's own thread."""
        before = None
        while not wait([self.future], silence).done:
            if self.progress == before:
                log.warning("a tier was silent for %g s: its part is computed again", silence)
                self.cancel()
            before = self.progress
        return self.future.result()

    def taken(self) -> list[Piece]:
        """Hand out the pieces that came. They are here no more after it."""
        with self._lock:
            pieces, self._pieces = self._pieces, []
        return pieces

    def _ask(self) -> None:
        """Ask the next tier, unless one of those before can give all there is to have."""
        asked = len(self._answers)
        last = self._answers[-1] if self._answers else None
        if asked < len(self._lanes) and (last is None or last.resume < self.query.length - 1):
            self._lanes[asked].find(self.query).add_done_callback(self._answered)
        else:
            self._choose()

    def _answered(self, answer: Future[Found | None]) -> None:
        found = answer.result()
        self._answers.append(found)
        if found is not None and (self.known is None or found.shared > self.known.shared):
            self.known = found
        self._ask()

    def _choose(self) -> None:
        """Fetch from the tier that gives most, of equal ones from the fastest."""
        best: Found | None = None
        for found in self._answers:
            if found is not None and found.resume > max(self._resume, best.resume if best else 0):
                best = found
        if best is None or self._ended:
            return self._end(False)
        lane = self._lanes[self._answers.index(best)]
        self._answers[self._answers.index(best)] = None
        if self._worth is not None and not self._is_worth(best):
            return self._choose()
        self.found, self.tier, self.tokens = best, lane.tier.name, best.resume
        self.progress = Progress(0, best.nbytes)
        lane.fetch(best, self._take).add_done_callback(self._fetched)

    def _is_worth(self, found: Found) -> bool:
        try:
            assert self._worth is not None
            return self._worth(found.resume - self._resume, found.nbytes)
        except Exception:
            log.exception("nobody could say whether a fetch is worth it: it is not made")
            return False

    def _take(self, arrays: Sealed) -> bool:
        if self._ended:
            raise FetchCancelled
        try:
            piece = self._unsealer.piece(arrays)
        except BrokenSeal as broken:
            log.warning("a payload of the tier %r is not used: %s", self.tier, broken)
            return False
        nbytes = sum(array.nbytes for array in arrays.values())
        with self._lock:
            if not self._ended:
                self._pieces.append(piece)
            self.progress = Progress(self.progress.done + nbytes, self.progress.total)
        return True

    def _fetched(self, _: Future[None]) -> None:
        """Go on with what came, or with another tier: it may be less than was promised."""
        self.tokens = min(self.tokens, self._reachable())
        if self.tokens > self._resume:
            return self._end(True)
        if self.known is self.found:
            self.known = None  # it does not know what it said
        self.taken()
        self.tokens, self.tier = 0, None
        self._choose()

    def _reachable(self) -> int:
        """The position up to which there is all of what cannot be left out."""
        at, layout = self.query.known, self.query.layout
        for piece in sorted(self._pieces, key=lambda piece: piece.start):
            if piece.what == "rows" and piece.start <= at:
                at = max(at, piece.stop)
        if not layout.has_rows:
            at = self.query.length
        states = [p.start for p in self._pieces if isinstance(p.value, PackedState)]
        return max((p for p in states if p <= at), default=0) if layout.has_state else at

    def _end(self, came: bool) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
            calls, self._calls = self._calls, []
            if not came:
                self.tokens = 0
        # Without the lock: who is told of it may ask, or cancel.
        self.future.set_result(came)
        for call in calls:
            call(self)
