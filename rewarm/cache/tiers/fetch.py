"""A fetch: the payloads that a tier has of a prompt, on their way into the memory tree."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..find import Query
from ..payload import PackedState
from ..pins import Pin
from .base import FetchCancelled, Found, Sealed
from .seal import BrokenSeal, PathPayload, Unsealer

if TYPE_CHECKING:
    from .lower import Lane

log = logging.getLogger("rewarm")


Worth = Callable[[int, int], bool]
"""Says whether computing so many tokens takes longer than fetching so many bytes. It is called on
the tier's thread: it must be quick, and never wait."""


@dataclass(frozen=True)
class FetchProgress:
    done: int
    """Bytes that are in memory."""
    total: int
    """Bytes that were promised; 0 until a tier was chosen."""


class Fetch:
    """One prompt's payloads on their way from a tier to memory.

    `PrefixCache.fetch` makes it, `PrefixCache.take_in` puts what it brought into the memory tree.
    Every attribute may be read from any thread at any time, and no call here waits.

    It pins the path that memory has of the prompt, because the payloads go on from there.
    `take_in` and `cancel` end that, and so does dropping the object.
    """

    def __init__(
        self,
        query: Query,
        resume: int,
        pin: Pin,
        dropped: deque[Pin],
        worth: Worth | None,
        lanes: Iterable[Lane],
    ) -> None:
        """Ask the tiers, from fast to slow. `resume` is the position that the model could go on
        from without the fetch."""
        self.future: Future[bool] = Future()
        """It is resolved, on any thread, once there is nothing left to wait for. True means that
        `take_in` has something to put into memory. False means that the tiers have nothing of use,
        that it was not worth it, that all of them failed, or that it was cancelled. It never
        raises."""
        self.tokens = 0
        """The position that the model could go on from once this is in memory; 0 as long as no
        tier was chosen, and where nothing came."""
        self.tier: str | None = None
        """The name of the tier that it comes from; None as long as none was chosen."""
        self.progress = FetchProgress(0, 0)
        self.query = query
        self.pin = pin
        """It is no longer live once the cache was cleared."""
        self.known: Found | None = None
        """The answer of the tier that knows most of the prompt."""
        self.found: Found | None = None
        """The answer that the fetch relies on."""
        self._resume = resume
        self._worth = worth
        self._unasked = iter(lanes)
        self._answers: dict[Lane, Found] = {}
        self._pieces: list[PathPayload] = []
        self._unsealer = Unsealer(query)
        self._ended = False
        self._lock = threading.Lock()
        # The finalizer may run at any moment in any thread, so it only notes the pin.
        self._unpin = weakref.finalize(self, dropped.append, pin)
        self._ask()

    def cancel(self) -> None:
        """Give the fetch up. When this returns, `future` is resolved, and what has come is
        forgotten. What a tier still delivers is thrown away."""
        self._end(False)
        with self._lock:
            self._pieces, self.tokens = [], 0
        self._unpin()

    def on_done(self, call: Callable[[Fetch], None]) -> None:
        """Have `call` called once `future` is resolved: at once if it is, else on any thread."""
        fetch = weakref.proxy(self)  # the future must not keep the fetch
        self.future.add_done_callback(lambda _: call(fetch))

    def wait(self, silence: float) -> bool:
        """Wait for the end of the fetch. Cancel it after so many seconds without a byte.
        Call it on a thread that has nothing else to do."""
        before = None
        while not wait([self.future], silence).done:
            if self.progress == before:
                log.warning("a tier was silent for %g s: its part is computed again", silence)
                self.cancel()
            before = self.progress
        return self.future.result()

    def taken(self) -> list[PathPayload]:
        """Hand over the payloads that came. The fetch does not keep them."""
        with self._lock:
            pieces, self._pieces = self._pieces, []
        return pieces

    def _ask(self) -> None:
        lane = next(self._unasked, None)
        if lane is not None:
            lane.find(self.query).add_done_callback(partial(self._answered, lane))
        else:
            self._choose()

    def _answered(self, lane: Lane, answer: Future[Found | None]) -> None:
        """Ask the next tier, unless this one can give everything that can be reused."""
        found = answer.result()
        if found is None:
            return self._ask()
        self._answers[lane] = found
        if self.known is None or found.shared > self.known.shared:
            self.known = found
        return self._ask() if found.resume < self.query.length - 1 else self._choose()

    def _choose(self) -> None:
        """Fetch from the tier that gives most, or from the fastest of equal ones."""
        answers = self._answers
        lane = max(answers, key=lambda lane: answers[lane].resume, default=None)
        if lane is None or answers[lane].resume <= self._resume or self._ended:
            return self._end(False)
        best = answers.pop(lane)
        if not self._is_worth(best):
            return self._choose()
        self.found, self.tier, self.tokens = best, lane.tier.name, best.resume
        self.progress = FetchProgress(0, best.nbytes)
        lane.fetch(best, self._take).add_done_callback(self._fetched)

    def _is_worth(self, found: Found) -> bool:
        try:
            saves = found.resume - self._resume
            return self._worth is None or self._worth(saves, found.nbytes)
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
            self.progress = FetchProgress(self.progress.done + nbytes, self.progress.total)
        return True

    def _fetched(self, _: Future[None]) -> None:
        """Accept what came, or go on with another tier where that is no gain."""
        self.tokens = min(self.tokens, self._reachable())
        if self.tokens > self._resume:
            return self._end(True)
        if self.known is self.found:
            self.known = None  # the answer was wrong
        self.taken()
        self.tokens, self.tier = 0, None
        self._choose()

    def _reachable(self) -> int:
        """Return the position that the model can resume at with the payloads that came."""
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
            if not came:
                self.tokens = 0
        # Without the lock: a callback may read or cancel the fetch.
        self.future.set_result(came)
