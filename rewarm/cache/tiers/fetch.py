"""A fetch: what a tier has of a prompt, on its way into memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol


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

    def __init__(self, tokens: int = 0, tier: str | None = None) -> None:
        self.future: Future[bool] = Future()
        """Resolved, on any thread, once there is nothing left to wait for: True where `take_in`
        has something to put into memory; False where the tiers have nothing of use, where it was
        not worth it, where all of them failed, and after `cancel`. It never raises."""
        self.tokens = tokens
        """The position that the model could go on from once this is in memory; 0 as long as no
        tier was chosen, and where nothing came."""
        self.tier = tier
        """The name of the tier that it comes from; None as long as none was chosen."""
        self.progress = Progress(0, 0)
        self.query: Any = None

    def cancel(self) -> None:
        """Give it up. `future` is resolved by the time this returns; what a tier still delivers is
        thrown away. After `future` was resolved this forgets what came."""
        if not self.future.done():
            self.future.set_result(False)
        self.tokens = 0

    def on_done(self, call: Callable[[Fetch], None]) -> None:
        """Call it once `future` is resolved: at once where it is, and on any thread otherwise."""
        self.future.add_done_callback(lambda _: call(self))
