"""The messages that an engine takes, and the inbox where they wait for the next turn.

Every change of an engine's cache or queue is a message. It carries the times, seeds and estimates
that would differ in another run. So the turns of an engine depend on its messages and on nothing
else.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rewarm.cache import PrefixCache
from rewarm.values import Boundary, Tokens

from .request import Request

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class PromptPath:
    """The part of a prompt that the cache needs."""

    tokens: Tokens
    boundaries: Sequence[Boundary] = ()
    salt: str | None = None


@dataclass(frozen=True, eq=False)
class Submit:
    """Answer a request. It was checked, and its seed is set."""

    request: Request
    at: float
    """The time at which it was posted, by `time.perf_counter`."""
    pace: float | None = None
    """The seconds that a prompt token takes to compute, as estimated at that time; None where the
    cache has no lower tier."""


@dataclass(frozen=True)
class Cancel:
    """Stop a request. What was computed is kept."""

    request: int
    """The request's `id`."""


@dataclass(frozen=True)
class Warm:
    """Prefill all of these tokens once there is nothing else to do."""

    path: PromptPath


@dataclass(frozen=True, eq=False)
class Question(Generic[T]):
    """Call the cache, and give the result to the one who asked."""

    call: Callable[[PrefixCache], T]
    answer: Future[T] = field(default_factory=Future)


@dataclass(frozen=True)
class Fetched:
    """Lower tiers have answered for a prompt."""

    sequence: int
    came: bool
    """They gave something. If not, the prompt is computed."""


@dataclass(frozen=True)
class FetchLate:
    """Compute a prompt that is still being fetched, since that is faster now. What still comes is
    kept for later requests."""

    sequence: int


@dataclass(frozen=True)
class FetchMoved:
    """Report how far the fetch of a prompt is."""

    sequence: int
    nbytes: int = 0
    """The bytes that had come when this was posted."""
    silent: float = 0.0
    """The seconds without another byte until then."""


@dataclass(frozen=True)
class Close:
    """End everything that runs. What was computed is kept."""


AboutFetch = Fetched | FetchLate | FetchMoved
Message = Submit | Cancel | Warm | Question[Any] | AboutFetch | Close


class Inbox:
    """Messages in the order in which they become due."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """The lock of the inbox. No message comes while a thread holds it."""
        self._messages: list[tuple[float, int, Message]] = []
        """A heap. Each message has the time from which it is due, by `time.monotonic`."""
        self._numbers = itertools.count()

    def post(self, message: Message, delay: float = 0.0) -> None:
        """Leave a message, from any thread. It becomes due after `delay` seconds."""
        with self.changed:
            # The clock is read under the lock: no later message may come before one that is due.
            due = time.monotonic() + delay
            heapq.heappush(self._messages, (due, next(self._numbers), message))
            self.changed.notify_all()

    def waiting(self) -> Sequence[Message]:
        """Give the messages that are due now. They stay here until each is `taken`."""
        if not self._messages:
            return ()  # every turn asks this: it must not take the lock for nothing
        with self.changed:
            now = time.monotonic()
            return [message for due, _, message in sorted(self._messages) if due <= now]

    def taken(self) -> None:
        """Drop the first message: the engine has taken it."""
        with self.changed:
            heapq.heappop(self._messages)

    def wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Block until a message is due or something is `ready`; False where it took too long."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        with self.changed:
            while not (ready() or self.waiting()):
                now = time.monotonic()
                if now >= until:
                    return False
                next_due = self._messages[0][0] if self._messages else math.inf
                left = min(until, next_due) - now
                self.changed.wait(left if left < math.inf else None)
            return True
