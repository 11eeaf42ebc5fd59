"""A request as the engine sees it: tokens in, tokens out. Text is the caller's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from rewarm.cache.lease import Match
from rewarm.cache.placement import Boundary, Kind
from rewarm.cache.tree import Tokens
from rewarm.cache.views.miss import Miss

Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The defaults are greedy; see `checked` for what is allowed."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over the last tokens of prompt and answer; 1 is none."""
    presence_penalty: float = 0.0
    """Over the answer so far, as OpenAI defines it; likewise frequency."""
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None


class Alternative(NamedTuple):
    token: int
    logprob: float


class Sampled(NamedTuple):
    """A token of an answer."""

    token: int
    logprob: float | None = None
    """Where the request asked for logprobs."""
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Report:
    """What a request's prompt cost, known when its first token is."""

    match: Match
    resumed_at: Kind | None
    """The kind of checkpoint that it resumed from."""
    prefilled: int
    """Prompt tokens computed; `match.resume + prefilled == match.tokens`."""
    queued_ms: float
    match_ms: float
    restore_ms: float
    prefill_ms: float
    """From the end of the restore to the first token, with what the engine did in between."""
    ttft_ms: float
    """From `submit` to the first token."""
    restored_bytes: int = 0
    """What the tree holds of the prefix that was restored."""
    miss: Miss | None = None
    """Why not more of it was reused."""


class Sink(Protocol):
    """Where a request's results go. Called on the engine's thread: return soon, never block."""

    def prefilled(self, done: int, total: int) -> None:
        """Prompt tokens that are in the caches, and in all. First called when prefill starts."""

    def token(self, choice: int, sampled: Sampled) -> bool:
        """One token of an answer, its end-of-text token too. True ends this choice here."""

    def ended(self, choice: int, reason: Finish) -> None:
        """No more tokens for this choice."""

    def done(self, report: Report) -> None:
        """Every choice has ended, by itself or by cancel. The last call, unless `failed` is."""

    def failed(self, error: Exception) -> None:
        """The request cannot be answered. The last call."""


class Silent:
    """For whoever takes the steps himself, and asks nothing of the engine."""

    def prefilled(self, done: int, total: int) -> None: ...
    def token(self, choice: int, sampled: Sampled) -> bool:
        return False

    def ended(self, choice: int, reason: Finish) -> None: ...
    def done(self, report: Report) -> None: ...
    def failed(self, error: Exception) -> None: ...


@dataclass(eq=False)
class Request:
    """One prompt and what is wanted for it."""

    tokens: Tokens
    sink: Sink
    max_tokens: int
    sampling: Sampling = Sampling()
    n: int = 1
    """Answers to the same prompt, which is computed once."""
    boundaries: Sequence[Boundary] = ()
    marks: Sequence[int] = ()
    """Positions of explicit checkpoints."""
    top_logprobs: int | None = None
    """How many alternatives to report for each token; None for no logprobs at all."""
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end the answer with "stop"."""
    opening: tuple[int, ...] = ()
    """Tokens that the answer must have after its thinking, e.g. those that open a tool call."""
    opens_after: tuple[int, ...] = ()
    """The end of the thinking; empty where the answer starts with `opening`."""
    salt: str | None = None
    hint: float = 1.0
    """Above 1: this prompt is likelier than others to be asked for again."""
    name: str = ""
    """For the log."""
