"""The lease that `acquire` returns."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from rewarm.values import Cost, Cut, Tokens

from .pins import Pin
from .tree import encode

if TYPE_CHECKING:
    import mlx.core as mx

    from .prefix import PrefixCache


class Lease:
    """A running request's hold on its path, and the caches it computes with.

    Prefill goes through `cuts`: compute up to each, then `cache.commit(lease, cut.stop,
    checkpoint=cut.checkpoint)`. The path is unpinned when the lease ends in any way: by `release`,
    at the end of its `with` block, or when nothing refers to it any more.
    """

    def __init__(
        self,
        cache: PrefixCache,
        tokens: Tokens,
        caches: list[Any],
        pin: Pin,
        cuts: list[Cut],
        cost: Cost,
        *,
        warm: bool,
        hint: float,
    ) -> None:
        self.cache = cache
        self.tokens = tokens
        self.data = encode(tokens)
        self.caches = caches
        self.logits: mx.array | None = None
        """The logits after the last token, where prefill computed that, too."""
        self.cost = cost
        """The match, and what it took to find and restore it."""
        self.position = cost.match.resume
        self.stored = cost.match.resume
        """The position up to which the tree holds this path for the lease."""
        self.stopped_storing = False
        """True once something did not fit or failed: nothing after it can be stored either."""
        self.cuts = cuts
        self.pin = pin
        self.hint = hint
        self.warm = warm
        """True for warm-ahead: no request has asked for this yet, and it evicts only warm-ahead."""
        # The finalizer may run at any moment in any thread, so it only notes the pin.
        self._finalizer = weakref.finalize(self, cache.memory.pins.dropped.append, pin)

    def extend(self, tokens: list[int] | Tokens) -> None:
        """Add tokens that were decoded after the prompt."""
        more = np.asarray(tokens, dtype=np.int32)
        self.tokens = np.concatenate([self.tokens, more])
        self.data += encode(more)

    def release(self) -> None:
        if self._finalizer.detach() is not None:
            self.cache._release(self.pin)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
