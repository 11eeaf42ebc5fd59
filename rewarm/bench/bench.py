"""What every scenario is given: a model, the servers beside one another, progress, a result."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rewarm.prompt import ChatRenderer

from .archs import vocabulary
from .models import RANDOM, placed, tokenizer_of
from .result import Result, machine
from .sides import Side, running

WORDS = ["river", "stone", "winter", "market", "garden", "letter", "window", "harbour", "bridge"]
WORDS += ["summer", "lantern", "copper", "island", "morning", "thunder", "basket", "mirror"]

Messages = list[dict[str, Any]]


@dataclass
class Bench:
    """One run of a scenario."""

    result: Result
    model: str
    peer: str | None
    rounds: int
    progress: Progress
    place: str = ""
    """The model as servers take it."""
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    _tokenizer: TokenizerWrapper | None = None
    _renderer: ChatRenderer | None = None

    @contextmanager
    def sides(self, *extra: Sequence[str]) -> Iterator[list[Side]]:
        """Rewarm, once for each set of options, and the peer, all running."""
        with ExitStack() as stack:
            found = []
            for options in extra or ((),):
                name = " ".join(["rewarm", *options])
                found.append(stack.enter_context(running(name, self.place, options)))
            if self.peer:
                found.append(stack.enter_context(running(self.peer, self.place)))
            yield found

    @property
    def tokenizer(self) -> TokenizerWrapper:
        if self._tokenizer is None:
            self._tokenizer = tokenizer_of(self.place)
        return self._tokenizer

    def tokens(self, messages: Messages, tools: list[Any] | None = None) -> list[int]:
        """A chat as a prompt's tokens, to count what is distinct."""
        if self._renderer is None:
            self._renderer = ChatRenderer(self.tokenizer)
        return [int(t) for t in self._renderer.render(messages, tools).tokens]

    def text(self, tokens: int) -> str:
        """Words of about so many tokens, other ones each time."""
        sample = " ".join(self.draw.choices(WORDS, k=64))
        each = len(self.tokenizer.encode(sample, add_special_tokens=False)) / 64
        return " ".join(self.draw.choices(WORDS, k=max(1, round(tokens / each)))) + "."

    def endings(self, answer: int) -> dict[str, Any]:
        """Fields with which a random model ends its answers by itself, after `answer` tokens or so:
        only such an answer is followed by anything that could be prepared for."""
        if not self.model.startswith(RANDOM):
            return {}
        size = vocabulary(self.model.removeprefix(RANDOM))
        bias = math.log(size / answer)
        return {
            "temperature": 1.0,
            "logit_bias": {str(self.tokenizer.eos_token_id): round(bias, 3)},
        }

    @contextmanager
    def steps(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        task = self.progress.add_task(what, total=total)
        try:
            yield lambda: self.progress.advance(task)
        finally:
            self.progress.remove_task(task)


def run(
    scenario: Callable[[Bench], None],
    name: str,
    model: str,
    *,
    peer: str | None = None,
    rounds: int = 3,
    json: Path | None = None,
    plot: Path | None = None,
    options: dict[str, Any] | None = None,
) -> Result:
    """Run a scenario; what is done is shown and kept, however it ends."""
    from .svg import draw_all

    console = Console()
    result = Result(name, model, {k: v for k, v in (options or {}).items() if v}, machine())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    began = time.perf_counter()
    try:
        with Progress(
            *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
        ) as progress:
            bench = Bench(result, model, peer, rounds, progress)
            if model:
                with bench.steps(f"preparing {model}", 1), placed(model) as place:
                    bench.place = place
                    scenario(bench)
            else:
                scenario(bench)
        result.complete = True
    except KeyboardInterrupt:
        pass
    finally:
        result.seconds = time.perf_counter() - began
        result.show(console)
        if json is not None:
            result.save(json)
        if plot is not None:
            plot.parent.mkdir(parents=True, exist_ok=True)
            plot.write_text(draw_all(result.plots))
    return result
