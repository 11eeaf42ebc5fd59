"""The common part of all scenarios: a model, servers, progress and a result."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper
from rich.progress import Progress

from rewarm.prompt.render.renderer import ChatRenderer

from .archs import vocabulary
from .figures import ratios
from .models import RANDOM, placed, tokenizer_of
from .result import Result
from .sides import Side, other, rewarm

TTFT_BY_REQUEST = "TTFT: {peer} over {ours}, by request"
"""The name of a figure for `Bench.compare`."""

WORDS = ["river", "stone", "winter", "market", "garden", "letter", "window", "harbour", "bridge"]
WORDS += ["summer", "lantern", "copper", "island", "morning", "thunder", "basket", "mirror"]

Messages = list[dict[str, Any]]

NO_WARM = ("--no-warm-ahead",)
PAUSE = 0.05
"""Seconds between the answer of one side and the request to the next. A server may still be at work
when its answer is out."""

T = TypeVar("T")


@dataclass
class Bench:
    """One run of a scenario."""

    result: Result
    model: str
    peer: str | None
    rounds: int
    progress: Progress
    stack: ExitStack
    """It is closed at the end of the run."""
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    @cached_property
    def location(self) -> str:
        """The folder or the Hugging Face id of the model, as servers take it."""
        with self.steps(f"preparing {self.model}", 1):
            return self.stack.enter_context(placed(self.model))

    @contextmanager
    def sides(self, *options: Sequence[str]) -> Iterator[list[Side]]:
        """Start a Rewarm server for each set of options, and the peer. Yield them when all are
        ready."""
        starting = [rewarm(self.location, each) for each in options or ((),)]
        if self.peer:
            starting.append(other(self.peer, self.location))
        with ExitStack() as stack:
            found = [stack.enter_context(side) for side in starting]
            for side in self.each("starting servers", found):
                side.wait_until_ready(self.location)
            yield found

    @cached_property
    def tokenizer(self) -> TokenizerWrapper:
        return tokenizer_of(self.location)

    @cached_property
    def _renderer(self) -> ChatRenderer:
        return ChatRenderer(self.tokenizer)

    def tokens(self, messages: Messages) -> list[int]:
        """Give the prompt of a chat as tokens, to count how many are distinct."""
        return [int(t) for t in self._renderer.render(messages).tokens]

    def text(self, tokens: int) -> str:
        """Make random words of about so many tokens."""
        sample = " ".join(self.draw.choices(WORDS, k=64))
        each = len(self.tokenizer.encode(sample, add_special_tokens=False)) / 64
        return " ".join(self.draw.choices(WORDS, k=max(1, round(tokens / each)))) + "."

    def user(self, tokens: int) -> dict[str, Any]:
        """Make a message of a user with about so many tokens of text."""
        return user(self.text(tokens))

    def question(self, tokens: int) -> str:
        """Make a random question of about so many tokens. A trained model may answer random words
        with anything; Pocket replies to this question at some length that it writes no stories."""
        if self.model.startswith(RANDOM):
            return self.text(tokens)
        return f"Write a story about {self.text(tokens - 10)}"

    def ending_fields(self, answer: int) -> dict[str, Any]:
        """Request fields with which a random model ends its answers after about `answer` tokens.

        Its thinking ends somewhere before. Only an answer that ends by itself has a next turn to
        prepare. The lengths are random, so a single turn says little, and forty turns enough."""
        if not self.model.startswith(RANDOM):
            return {}
        even = math.log(vocabulary(self.model.removeprefix(RANDOM)) / answer)
        bias = {str(self.tokenizer.eos_token_id): round(even, 3)}
        if self.tokenizer.has_thinking:
            (closes,) = self.tokenizer.encode(self.tokenizer.think_end, add_special_tokens=False)
            bias[str(closes)] = round(even + math.log(2), 3)
        return {"temperature": 1.0, "logit_bias": bias}

    @contextmanager
    def concluding(self, summary: Callable[[], None]) -> Iterator[None]:
        """Call `summary` at the end, and after Ctrl-C for what was measured before it."""
        try:
            yield
        except KeyboardInterrupt:
            summary()
            raise
        summary()

    @contextmanager
    def steps(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """Show the progress of so many steps. The yielded function counts one."""
        task = self.progress.add_task(what, total=total)
        try:
            yield lambda: self.progress.advance(task)
        finally:
            self.progress.remove_task(task)

    def each(self, what: str, found: Sequence[T]) -> Iterator[T]:
        """Go through a sequence and show the progress."""
        with self.steps(what, len(found)) as step:
            for one in found:
                yield one
                step()

    def in_turns(
        self, what: str, sides: Sequence[T], rounds: int, *, first: int = 0
    ) -> Iterator[tuple[int, T]]:
        """Yield every round with every side, and pause between two of them.

        Each round begins with another side, the first one with the side at `first`. So a
        disturbance of the machine hits all sides alike."""
        count = len(sides)
        order = [(i, sides[(first + i + j) % count]) for i in range(rounds) for j in range(count)]
        for i, side in self.each(what, order):
            time.sleep(PAUSE)
            yield i, side

    def compare(self, times: Sequence[tuple[Side, Sequence[float]]], name: str) -> None:
        """Note the ratio of every peer's times to every Rewarm's, one by one.

        `name` is the name of such a figure, with `{peer}` and `{ours}` in it."""
        for peer, theirs in times:
            for side, ours in times:
                if side.ours and not peer.ours and ours and theirs:
                    figure = name.format(peer=peer.name, ours=side.name)
                    self.result.figures[figure] = str(ratios(ours, theirs))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}
