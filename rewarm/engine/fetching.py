"""Fetch the state of prompts from lower tiers, while other requests go on."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from rewarm.cache import PrefixCache
from rewarm.cache.tiers.fetch import Fetch
from rewarm.cache.tiers.lower import SILENCE

from .messages import AboutFetch, Fetched, FetchLate, FetchMoved, Message
from .running import Running
from .scheduler import Scheduler

log = logging.getLogger("rewarm.engine")

TELL_EVERY = 0.25
"""The seconds between two reports to a client on a fetch."""


class Post(Protocol):
    def __call__(self, message: Message, at: float | None = None, /) -> None:
        """Leave a message. It becomes due at the time `at` of `time.monotonic`."""


def unheard(message: Message, at: float | None = None) -> None:
    """Post nothing: a loop uses this if it learns the end of its fetches elsewhere, or has none."""


class Fetching:
    """Begin fetches, and take the messages about them, on the engine's thread.

    What a clock or another thread decides is posted as a message, and takes effect only when the
    message is taken.
    """

    def __init__(self, cache: PrefixCache, scheduler: Scheduler[Running], post: Post) -> None:
        """`post` leaves a message for a later turn, from any thread."""
        self._cache = cache
        self._scheduler = scheduler
        self._post = post
        self._late: dict[int, Fetch] = {}
        """Fetches that came too late, by the sequence that waited for them."""

    def begin(self, running: Running) -> None:
        """Ask lower tiers for a prompt. It waits no longer than computing it would take."""
        number, pace = running.id, running.pace or 0.0

        def late_after(tokens: int) -> None:
            self._post(FetchLate(number), time.monotonic() + tokens * pace)

        def worth(tokens: int, nbytes: int) -> bool:
            late_after(tokens)  # only now is their number known
            return True

        running.pace = None  # once is enough
        fetch = self._cache.fetch(
            running.tokens, running.salt, running.request.boundaries, worth=worth
        )
        running.fetching = fetch
        self._scheduler.fetching(number)
        running.tell_progress()
        late_after(running.stop - running.known)
        self._post(FetchMoved(number), time.monotonic() + TELL_EVERY)
        fetch.on_done(lambda f: self._post(Fetched(number, f.future.result() and f.tokens > 0)))

    def take(self, message: AboutFetch) -> None:
        number = message.sequence
        late = self._late.pop(number, None) if isinstance(message, Fetched) else None
        if isinstance(message, Fetched) and late is not None and message.came:
            self._take_in(late)
        running = self._scheduler.jobs.get(number)
        if running is None or running.stage != "fetching" or running.fetching is None:
            return
        fetch = running.fetching
        match message:
            case Fetched(came=came):
                known = fetch.tokens if came and fetch.future.result() else 0
                if not known:
                    running.stop_fetching()
                self._scheduler.fetched(number, known)
            case FetchLate():
                self._late[number], running.fetching = fetch, None
                self._scheduler.fetched(number)
            case FetchMoved(nbytes=nbytes, silent=silent):
                running.tell_progress()
                done = fetch.progress.done
                silent = 0.0 if done > nbytes else silent + TELL_EVERY
                if silent < SILENCE:
                    moved = FetchMoved(number, done, silent)
                    self._post(moved, time.monotonic() + TELL_EVERY)
                else:
                    log.warning("a tier is silent: its part of %s is computed again", running)
                    self._post(FetchLate(number))

    def close(self) -> None:
        """Cancel the fetches that no sequence waits for."""
        for fetch in self._late.values():
            fetch.cancel()

    def _take_in(self, fetch: Fetch) -> None:
        try:
            self._cache.take_in(fetch)
        except Exception:
            log.debug("what came late could not be kept", exc_info=True)
