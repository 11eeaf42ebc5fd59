"""The contract of a decoder: it takes steps for sequences that decode together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import mlx.core as mx

from rewarm.values import Tokens

from .sampling import Processor, Sampler


@dataclass(frozen=True)
class Start:
    """The state in which a sequence begins to decode. Its caches hold everything but the last
    token. Where `logits` is given, the caches hold the last token too, and `logits` follows it."""

    id: int
    caches: list[Any]
    tokens: Tokens
    sampler: Sampler
    processors: list[Processor]
    logits: mx.array | None = None


class Step(NamedTuple):
    id: int
    token: int
    logprobs: mx.array
    given: bool = False
    """`Decoder.first` gave this token before."""


class Decoder(Protocol):
    """A decoder takes steps for a few sequences. A new one holds one sequence and has taken its
    first step, so that an error of a sequence is found while it is alone.

    Everything here runs on the engine's thread. Where a method raises, the decoder must not be used
    again. A step may append more tokens than it gives, to check a draft. It takes back what it does
    not give: `undo.Before` says how.
    """

    most: ClassVar[int]
    """The most tokens that one step gives to a sequence."""

    def __init__(self, model: Any, start: Start) -> None: ...

    @property
    def ids(self) -> list[int]: ...

    @property
    def lengths(self) -> list[int]:
        """The number of tokens that each sequence had when it began to decode."""

    def first(self) -> Step:
        """Give the token of the first step. `step` gives it again, as `given`."""

    def step(self) -> list[Step]:
        """Give every sequence its next token, or its next few, one after the other."""

    def is_ahead(self, sequence: int) -> bool:
        """Say whether the last token given is not in the sequence's caches yet."""

    def caches(self, sequence: int, unused: int = 0) -> list[Any]:
        """Give the caches of a sequence, to be read only.

        They end after the last token that the last step gave it, or before that token where it
        `is_ahead`. With `unused`, they end so many tokens earlier; it is given only between that
        step and `remove`."""

    def join(self, newcomers: Sequence[Any]) -> None:
        """Take over the sequences of other decoders, of one sequence each, in one copy of all
        caches."""

    def remove(self, gone: set[int]) -> None:
        """Forget sequences."""
