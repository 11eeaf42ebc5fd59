"""The messages that an engine takes: all that changes its cache or its queue.

A message is plain data, and carries what would differ where it is taken again: times, seeds and
estimates. So the turns of an engine depend on its messages and on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rewarm.cache.views.miss import Missed
from rewarm.values import Boundary, Match, Tokens

from .request import Request


@dataclass(frozen=True, eq=False)
class Submit:
    """Answer a request, which was checked, and has its seed."""

    request: Request
    at: float
    """When it was posted, by `time.perf_counter`."""
    pace: float | None = None
    """The seconds that a prompt token takes to compute, as far as was known then; None where there
    is no tier below memory that could give it instead."""


@dataclass(frozen=True)
class Cancel:
    """Stop a request. What was computed is kept."""

    request: int
    """Its `Request.id`."""


@dataclass(frozen=True, eq=False)
class Path:
    """A prompt, as the cache is asked for it."""

    tokens: Tokens
    boundaries: Sequence[Boundary] = ()
    salt: str | None = None


@dataclass(frozen=True)
class Warm:
    """Prefill all of these tokens once there is nothing else to do."""

    path: Path


@dataclass(frozen=True)
class MarkIdle:
    """The chat that this prompt belongs to waits for a person."""

    path: Path


@dataclass(frozen=True)
class FindMatch:
    """Say how much of a prompt could be reused now."""

    path: Path
    answer: Future[Match] = field(default_factory=Future)


@dataclass(frozen=True)
class Explain:
    """Say why not more of a prompt could be reused now."""

    path: Path
    other_salts: Sequence[str] = ()
    answer: Future[Missed] = field(default_factory=Future)


@dataclass(frozen=True)
class Clear:
    """Forget everything that is stored."""

    give_back: bool = True
    answer: Future[None] = field(default_factory=Future)


@dataclass(frozen=True)
class Resize:
    """Give the cache another budget."""

    nbytes: int
    answer: Future[None] = field(default_factory=Future)


@dataclass(frozen=True)
class Fetched:
    """Lower tiers have answered for a prompt."""

    sequence: int
    came: bool
    """They gave something. Where not, the prompt is computed."""


@dataclass(frozen=True)
class FetchLate:
    """Compute a prompt that is still being fetched: that is the faster way now. What comes later is
    kept for later requests."""

    sequence: int


@dataclass(frozen=True)
class FetchMoved:
    """Tell how far a prompt is that is being fetched."""

    sequence: int


@dataclass(frozen=True)
class Close:
    """End everything that runs. What was computed is kept."""


Question = FindMatch | Explain | Clear | Resize
"""The messages that have an answer."""

Message = Submit | Cancel | Warm | MarkIdle | Question | Fetched | FetchLate | FetchMoved | Close


def refuse(message: Any, error: BaseException) -> None:
    """Tell whoever waits for the answer of a message that there is none."""
    if isinstance(message, Question) and not message.answer.done():
        message.answer.set_exception(error)
