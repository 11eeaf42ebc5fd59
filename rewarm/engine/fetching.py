"""Fetch the state of prompts from lower tiers, while other requests go on."""

from __future__ import annotations

import logging

from rewarm.cache import PrefixCache
from rewarm.cache.tiers.fetch import Fetch
from rewarm.cache.tiers.lower import SILENCE

from .messages import AboutFetch, Fetched, FetchLate, FetchMoved, Inbox
from .request import Running
from .scheduler import Scheduler

log = logging.getLogger("rewarm.engine")

TELL_EVERY = 0.25
"""The seconds between two reports to a client on a fetch."""


class Fetching:
    """Begin fetches, and take the messages about them, on the engine's thread.

    What a clock or another thread decides is posted as a message, and takes effect only when the
    message is taken.
    """

    def __init__(self, cache: PrefixCache, scheduler: Scheduler[Running], inbox: Inbox) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._inbox = inbox
        self._late: dict[int, Fetch] = {}
        """Fetches that came too late, by the sequence that waited for them."""

    def begin(self, running: Running) -> None:
        """Ask lower tiers for a prompt. It waits no longer than computing it would take."""
        number, pace = running.id, running.pace or 0.0

        def late_after(tokens: int) -> None:
            self._inbox.post(FetchLate(number), tokens * pace)

        def worth(tokens: int, nbytes: int) -> bool:
            late_after(tokens)  # only now is their number known
            return True

        def ended(fetch: Fetch) -> None:
            self._inbox.post(Fetched(number, fetch.future.result() and fetch.tokens > 0))

        running.pace = None  # once is enough
        running.fetching = self._cache.fetch(
            running.tokens, running.salt, running.request.boundaries, worth=worth
        )
        self._scheduler.fetching(running)
        running.tell_progress()
        late_after(running.stop - running.known)
        self._inbox.post(FetchMoved(number), TELL_EVERY)
        running.fetching.on_done(ended)

    def take(self, message: AboutFetch) -> None:
        number = message.sequence
        if isinstance(message, Fetched) and number in self._late:
            late = self._late.pop(number)
            try:
                if message.came:
                    self._cache.take_in(late)
            except Exception:
                log.debug("what came late could not be kept", exc_info=True)
            return
        running = self._scheduler.jobs.get(number)
        if running is None or running.stage != "fetching" or running.fetching is None:
            return
        fetch = running.fetching
        match message:
            case Fetched(came=came):
                known = fetch.tokens if came and fetch.future.result() else 0
                if not known:
                    running.stop_fetching()
                self._scheduler.fetched(running, known)
            case FetchLate():
                self._late[number], running.fetching = fetch, None
                self._scheduler.fetched(running)
            case FetchMoved(nbytes=nbytes, silent=silent):
                running.tell_progress()
                done = fetch.progress.done
                silent = 0.0 if done > nbytes else silent + TELL_EVERY
                if silent < SILENCE:
                    self._inbox.post(FetchMoved(number, done, silent), TELL_EVERY)
                else:
                    log.warning("a tier is silent: its part of %s is computed again", running)
                    self._inbox.post(FetchLate(number))

    def close(self) -> None:
        """Cancel the fetches that no sequence waits for."""
        for fetch in self._late.values():
            fetch.cancel()
