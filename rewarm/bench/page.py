"""The scenario `page`: the work of a server for an open page in a browser."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Annotated

import typer

from rewarm.errors import InvalidOption

from .bench import NO_WARM, Bench
from .client import get
from .figures import ratios
from .scenario import at_least, scenario
from .sides import Side

LIVE, TREE = "/v1/live", "/v1/cache?limit=250"
FILLING = 70
"""Prompts that fill every list of `/v1/live`."""

QUESTIONS = {LIVE: 200, TREE: 50}
"""The number of requests over which the processor time is averaged."""

EVERY = 1.0
"""Seconds between two polls of the page, and between two changes of the cache. The page asks for
the tree after every other poll."""


@scenario("model", rounds=6)
def page(
    bench: Bench,
    answer: Annotated[int, at_least(2, "Tokens of an answer.")] = 400,
    polls: Annotated[float, typer.Option(min=0.1, help="Polls a second; the page has 1.")] = 1.0,
) -> None:
    """The cost of an open page: processor time, and the decode rate with its polls and without."""
    # The loss is divided by the number of polls a second: the cost of one poll a second is less
    # than the noise of a busy machine.
    with bench.sides(NO_WARM) as (side, *_):

        def change() -> None:
            side.ask([bench.user(20)], 1)

        for _ in bench.each("filling the tree", range(FILLING)):
            change()
        tasks = Path(f"/proc/{side.process.pid}/task")
        if tasks.exists():
            sheet = bench.result.sheet("processor time of the server", "question", "ms:.2f")
            for path, times in QUESTIONS.items():
                took = [_cost(side, path, tasks, change) for _ in bench.each(path, range(times))]
                sheet.add(path, 1e3 * sum(took) / times)
        questions = cycle((LIVE, TREE))

        def poll() -> None:
            get(side.url + next(questions))

        rates: dict[str, list[float]] = {"alone": [], "polled": []}
        with bench.concluding(partial(_rows, bench, rates, polls)):
            for _, way in bench.in_turns("streams", list(rates), bench.rounds):
                polling = _repeated(poll, EVERY / polls) if way == "polled" else nullcontext()
                with _repeated(change, EVERY), polling:
                    rates[way].append(_rate(bench, side, answer))


def _rows(bench: Bench, rates: dict[str, list[float]], polls: float) -> None:
    sheet = bench.result.sheet("tokens/s of one stream", "round", *(f"{way}:.1f" for way in rates))
    for i, pair in enumerate(zip(*rates.values(), strict=False)):
        sheet.add(i + 1, *pair)
    if rates["polled"]:
        share = ratios(rates["alone"], rates["polled"])
        bench.result.figures["polled, of the rate alone"] = str(share)
        lost = (1 - share.median) / polls
        bench.result.figures["an open page takes, of the decode rate"] = f"{lost:.2%}"


def _cost(side: Side, path: str, tasks: Path, change: Callable[[], None]) -> float:
    """Measure the seconds of processor time that the server takes for a question after a change."""
    change()
    time.sleep(0.05)  # the server still works after its answer
    before = _busy(tasks)
    get(side.url + path)
    return _busy(tasks) - before


def _busy(tasks: Path) -> float:
    """Read the processor seconds of all threads of a process. `schedstat` counts in nanoseconds;
    the usual counters have ticks that are longer than a poll."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


@contextmanager
def _repeated(do: Callable[[], None], every: float) -> Iterator[None]:
    """Call `do` every so many seconds on another thread."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(every):
            do()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _rate(bench: Bench, side: Side, answer: int) -> float:
    """Measure the tokens a second of one answer that does not end before its limit."""
    never = {"logit_bias": {str(bench.tokenizer.eos_token_id): -100}}
    each = side.ask([bench.user(20)], answer, never).per_token
    if not each:
        raise InvalidOption(f"--model {bench.model!r}: its tokens do not come one by one as text")
    return 1 / each
