"""Pumps: they turn the engine's loop until an event is there."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Protocol

from rewarm.engine.core import Core

from .generation import Event


class Pump(Protocol):
    def next(self, events: SimpleQueue[Event]) -> Event | None:
        """Wait for the next event, on the reader's thread; None where it may take longer yet."""


class ThreadPump:
    """The engine has a thread of its own."""

    def next(self, events: SimpleQueue[Event]) -> Event:
        return events.get()


class CallerPump:
    """The reader's own thread turns the engine.

    What interrupts a turn ends all that runs, and is raised to the reader.
    """

    def __init__(self, core: Core) -> None:
        self.core = core

    def next(self, events: SimpleQueue[Event]) -> Event | None:
        if events.empty():
            self.turn()
        return None if events.empty() else events.get()

    def warm_up(self) -> None:
        """Turn until all that was asked for ahead is computed."""
        while self.core.stats().warm_waiting:
            self.turn()

    def turn(self) -> None:
        self.core.wait()  # what lies below memory may still be on its way
        try:
            self.core.turn()
        except BaseException as error:
            self.core.recover(error, keep=False)
            raise
