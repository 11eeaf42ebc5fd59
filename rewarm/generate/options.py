"""The options of a generation. Nothing here imports a model library."""

from __future__ import annotations

from dataclasses import dataclass, field

from rewarm.values import Sampling

RETURNING = 2.0
"""The hint of a prompt whose client says that it will come again."""


@dataclass(frozen=True)
class GenerationOptions:
    """The options of an answer."""

    max_tokens: int | None = None
    """The longest answer; None for the generator's own limit."""
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    """Answers to each prompt."""
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    """Alternatives to report for each token; None for no logprobs at all."""
    one_call: bool = False
    """The answer ends with its first tool call."""
    salt: str | None = None
    """Prompts with different salts share nothing."""
    hint: float = 1.0
    """A value above 1 means that this prompt is likelier than others to come again."""
    stream: bool = False
    """Give the text as it comes."""
    every_token: bool = False
    """Give every token as it comes, also those that add no text."""
