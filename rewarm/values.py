"""The plain data that several rooms speak of. Nothing here imports MLX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

Message = dict[str, Any]
"""A chat message in OpenAI's shape."""

Origin = Literal["prefill", "decode"]
"""The way in which a span of the tree was computed."""

Kind = Literal["system", "mark", "user", "turn", "junction", "end", "answer", "sparse"]
"""The kind of place that a checkpoint is taken at."""

Finish = Literal["stop", "length", "cancelled"]
"""The reason why an answer ended."""

Reason = Literal[
    "cold",
    "diverged",
    "no_checkpoint",
    "evicted",
    "salt",
    "other_model",
    "exact_mode",
    "disabled",
    "failed",
]
"""The reason why no more of a prompt was reused."""

Missing = Literal["never_taken", "evicted", "other_origin"]
"""The reason why there is no checkpoint where one was needed."""


@dataclass(frozen=True)
class Boundary:
    """A position where a message of the chat ends.

    `kind` tells placement what ends here: the system prompt, a user message, or the turn before the
    last user message. It is None where only the grid of `exact` uses the position.
    """

    position: int
    kind: Kind | None = None
    durable: bool = True


class Cut(NamedTuple):
    """The end of a prefill chunk, and the checkpoint to take there."""

    stop: int
    checkpoint: Kind | None


@dataclass(frozen=True)
class Match:
    """The length that a prompt shares with the tree, and the position where the model resumes."""

    tokens: int
    shared: int = 0
    resume: int = 0
    reason: Reason | None = None
    """The reason why no more is reused; None where all that the tree knows of it is reused."""
    tier: str | None = None
    """The name of the tier that the state came from; None where nothing is reused."""

    @property
    def replay(self) -> int:
        """Tokens that the tree knows and that are computed again."""
        return self.shared - self.resume


@dataclass(frozen=True)
class Miss:
    """The reason why no more of a prompt was reused. Several may apply: it is the costliest one."""

    reason: Reason
    shared: int
    """The position of the first token that differs from what is stored."""
    resume: int
    held: int = 0
    """`evicted`: the tokens of the prompt that were once held. `salt`: the tokens that it could
    reuse under another salt."""
    why: Missing | None = None
    """`no_checkpoint`: the reason why there is no checkpoint between `resume` and `shared`."""
    other: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    """`diverged`: the tokens that are stored from `shared` on."""
    origin: Origin | None = None
    """The way in which the tokens of `other` were computed."""


@dataclass(frozen=True)
class Cost:
    """The work that a prompt took. It is complete once the first token is there."""

    match: Match
    resumed_at: Kind | None = None
    """The kind of checkpoint that the model resumed from."""
    prefilled: int = 0
    """Prompt tokens computed; `match.resume + prefilled == match.tokens` once all are."""
    queued_ms: float = 0.0
    match_ms: float = 0.0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    """From the end of the restore to the first token, with other work of the engine between."""
    ttft_ms: float = 0.0
    """From the request's arrival at the engine to the first token."""
    restored_bytes: int = 0
    """The bytes that the tree holds of the prefix that was restored."""
    miss: Miss | None = None
    """The reason why no more of the prompt was reused."""

    @property
    def timings(self) -> dict[str, float]:
        """The times in milliseconds, by their names in a reply."""
        names = ("queue_ms", "match_ms", "restore_ms", "prefill_ms", "ttft_ms")
        times = (self.queued_ms, self.match_ms, self.restore_ms, self.prefill_ms, self.ttft_ms)
        return dict(zip(names, times, strict=True))

    @property
    def replayed(self) -> int:
        """Tokens that the tree knew and that were computed again, before a cancel if there was
        one."""
        return min(self.match.replay, self.prefilled)


@dataclass(frozen=True)
class Namespace:
    """Everything that must be equal for two prompts to share state."""

    base: str
    """The identity of what computes; where none was taken, a name within this process."""
    adapter: str = ""
    """A name that the user gave. The arrays of an adapter are part of `base`."""
    kv: str = "plain"
    """The format of the K/V: "plain", or its bits and group size."""
    layout: str = ""
    """A digest of the kinds of caches that the model has."""
    rank: str = ""
    """The share of a model that is spread over several processes."""
    salt: str = ""

    @property
    def weights(self) -> str:
        """The digest of the weights alone, where an identity was taken."""
        return self.base.partition("-")[0]

    def salted(self, salt: str | None) -> Namespace:
        return replace(self, salt=salt or "")


@dataclass(frozen=True)
class Sampling:
    """The way in which tokens are chosen. The defaults are greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """The penalty for the last tokens of prompt and answer. 1 is no penalty."""
    presence_penalty: float = 0.0
    """This one and the frequency penalty count the answer so far, as OpenAI defines them."""
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None


class Alternative(NamedTuple):
    """A token that might have been chosen."""

    token: int
    logprob: float


class Sampled(NamedTuple):
    """A token of an answer."""

    token: int
    logprob: float | None = None
    """None where the request asked for no logprobs."""
    top: Sequence[Alternative] = ()
