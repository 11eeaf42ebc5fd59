"""What every scenario is given: a model, the servers beside one another, progress, a result."""

from __future__ import annotations

import math
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rewarm.prompt.render.renderer import ChatRenderer

from .archs import vocabulary
from .client import Answered
from .figures import ratios
from .models import RANDOM, placed, tokenizer_of
from .result import Result
from .sides import Side, command, other, rewarm

WORDS = ["river", "stone", "winter", "market", "garden", "letter", "window", "harbour", "bridge"]
WORDS += ["summer", "lantern", "copper", "island", "morning", "thunder", "basket", "mirror"]

Messages = list[dict[str, Any]]

NO_WARM = ("--no-warm-ahead",)
WIDE = 120
"""Characters in a line of a table that goes to a file."""

PAUSE = 0.05
"""Seconds between one server's answer and the next one's request."""

T = TypeVar("T")


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
        starting = [rewarm(self.place, options) for options in extra or ((),)]
        if self.peer:
            starting.append(other(self.peer, self.place))
        with ExitStack() as stack:
            found = [stack.enter_context(side) for side in starting]
            with self.steps("starting servers", len(found)) as step:
                for side in found:
                    side.wake(self.place)
                    step()
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

    def question(self, tokens: int) -> str:
        """One of about so many tokens, other words each time. What a trained model says to mere
        words is anybody's guess; Pocket says at some length that it writes no stories."""
        if self.model.startswith(RANDOM):
            return self.text(tokens)
        return f"Write a story about {self.text(tokens - 10)}"

    def endings(self, answer: int) -> dict[str, Any]:
        """Fields with which a random model ends its answers by itself, after `answer` tokens or so,
        and its thoughts somewhere before: only such an answer is followed by anything that could be
        prepared for. Lengths are drawn: what one turn shows is chance, what forty show is not."""
        if not self.model.startswith(RANDOM):
            return {}
        even = math.log(vocabulary(self.model.removeprefix(RANDOM)) / answer)
        bias = {str(self.tokenizer.eos_token_id): round(even, 3)}
        if self.tokenizer.has_thinking:
            (closes,) = self.tokenizer.encode(self.tokenizer.think_end, add_special_tokens=False)
            bias[str(closes)] = round(even + math.log(2), 3)
        return {"temperature": 1.0, "logit_bias": bias}

    @contextmanager
    def ending(self, summary: Callable[[], None]) -> Iterator[None]:
        """`summary` at the end; where Ctrl-C comes first, of what is done by then."""
        try:
            yield
        except KeyboardInterrupt:
            summary()
            raise
        summary()

    @contextmanager
    def steps(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        task = self.progress.add_task(what, total=total)
        try:
            yield lambda: self.progress.advance(task)
        finally:
            self.progress.remove_task(task)


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """Whoever is told to end ends in order too: servers that nobody stops would run on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def in_turns(sides: Sequence[T], i: int) -> Iterator[T]:
    """Another one first each time: what disturbs the machine disturbs all of them. With a pause
    between them, for a server may still be at work when its answer is out."""
    at = i % len(sides)
    for side in (*sides[at:], *sides[:at]):
        time.sleep(PAUSE)
        yield side


def compare_ttft(bench: Bench, got: Sequence[tuple[Side, list[Answered]]]) -> None:
    """Every peer beside every one of ours, request by request, as far as both came."""
    for peer, theirs in got:
        for side, ours in got:
            if side.ours and not peer.ours and ours and theirs:
                found = ratios([r.ttft for r in ours], [r.ttft for r in theirs])
                bench.result.figures[f"TTFT: {peer.name} over {side.name}, by request"] = str(found)


def run(
    scenario: Callable[[Bench], None],
    result: Result,
    *,
    peer: str | None = None,
    rounds: int = 3,
    json: Path | None = None,
    plot: Path | None = None,
) -> Result:
    """Run a scenario; what is done is shown and kept, however it ends."""
    from .svg import draw_all

    if peer is not None:
        command(peer, "", 0)  # what is wrong with it is said before anything is loaded
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    began, interrupted = time.perf_counter(), False
    try:
        with (
            _ended_as_by_ctrl_c(),
            Progress(
                *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
            ) as progress,
        ):
            bench = Bench(result, result.model, peer, rounds, progress)
            with ExitStack() as stack:
                if result.model:
                    with bench.steps(f"preparing {result.model}", 1):
                        bench.place = stack.enter_context(placed(result.model))
                scenario(bench)
        result.complete = True
    except KeyboardInterrupt:
        interrupted = True
    finally:
        result.seconds = time.perf_counter() - began
        if result.measured or interrupted:
            console = Console()
            if not console.is_terminal:
                console.width = max(console.width, WIDE)
            result.show(console)
        if json is not None and result.measured:
            result.save(json)
        if plot is not None and result.measured:
            plot.parent.mkdir(parents=True, exist_ok=True)
            plot.write_text(draw_all(result.plots))
    return result
