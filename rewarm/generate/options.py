"""The options of a generation. Nothing here imports a model library."""

from __future__ import annotations

from dataclasses import dataclass, field

from rewarm.values import Sampling

RETURNING = 2.0
"""The hint of a prompt that says by itself that it will be asked for again."""


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
    """Above 1: this prompt is likelier than others to be asked for again."""
    stream: bool = False
    """Tell the text as it comes."""
    every_token: bool = False
    """Tell every token as it comes, those that add no text too."""
