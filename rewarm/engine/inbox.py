"""The place where messages wait for the next turn."""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from .messages import Message


class Inbox:
    """Messages in the order in which they were posted; some become due only at a later time."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """The lock of the inbox. No message comes while a thread holds it."""
        self._posted: deque[Message] = deque()
        self._later: list[tuple[float, int, Message]] = []
        self._count = 0

    def post(self, message: Message, at: float | None = None) -> None:
        """Leave a message, from any thread. It becomes due at the time `at` of
        `time.monotonic`."""
        with self.changed:
            if at is None:
                self._posted.append(message)
            else:
                self._count += 1
                heapq.heappush(self._later, (at, self._count, message))
            self.changed.notify_all()

    def waiting(self) -> Sequence[Message]:
        """Give the messages that are due now. They stay here until each is `taken`."""
        if not self._posted and not self._later:
            return ()  # every turn asks this: it must not take the lock for nothing
        with self.changed:
            while self._later and self._later[0][0] <= time.monotonic():
                self._posted.append(heapq.heappop(self._later)[2])
            return list(self._posted)

    def taken(self) -> None:
        """Drop the first message: the engine has taken it."""
        with self.changed:
            self._posted.popleft()

    def wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Block until a message is due or something is `ready`; False where it took too long."""
        until = None if timeout is None else time.monotonic() + timeout
        with self.changed:
            while not (ready() or self.waiting()):
                limits = [until] if until is not None else []
                limits += [at for at, _, _ in self._later[:1]]
                left = min(limits) - time.monotonic() if limits else None
                if until is not None and time.monotonic() >= until:
                    return False
                self.changed.wait(left)
            return True
