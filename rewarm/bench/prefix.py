"""The scenario `prefix`: a prompt cold, one that goes on from it, one that leaves it at its end."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

import rewarm
from rewarm.cache import PrefixCache
from rewarm.cache.payload import detached
from rewarm.engine import Engine, Loaded, Request
from rewarm.errors import InvalidOption
from rewarm.options import EngineOptions
from rewarm.values import Boundary, Cost, Finish, Sampled

from .bench import NO_WARM, Bench, in_turns, user
from .client import Answered, hit, shown
from .figures import Spread, ratios
from .result import Sheet
from .sides import Side

TAIL = 64
"""Tokens in which a prompt differs from its neighbour, at its end."""

USUAL = (2000, 20_000, 100_000)
"""Lengths, the last one for GPUs."""

ANSWERED = 1024
"""Tokens that a prompt has beside its length over HTTP, and more."""

PLOT = "Time to the first token by length"

RESTORES = 5
"""So many restores are timed in each round, a copy of as many bytes beside each."""


def lengths(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= TAIL:
        raise InvalidOption(f"--lengths {text!r}: give numbers above {TAIL}, commas between them")
    return found


def usual(bench: Bench, context: int) -> list[int]:
    """The lengths that are measured where none are given."""
    wanted = list(USUAL) if mx.default_device() != mx.cpu else list(USUAL[:-1])
    fitting = [n for n in wanted if n + ANSWERED <= context]
    if fitting != wanted:
        left = " and ".join(f"{n:,}" for n in wanted if n not in fitting)
        bench.result.figures[f"left out, since the context is {context:,}"] = f"{left} tokens"
    return fitting or [context // 2]


class Asked(NamedTuple):
    """A request, and until its whole answer was there."""

    report: Cost
    total_ms: float


def prefix(bench: Bench, lengths: list[int] | None, answer: int, http: bool) -> None:
    sheet = bench.result.sheet(
        "from tokens",
        *("tokens", "what", "TTFT ms", "faster", "total ms", "cached", "replayed"),
        *("lookup ms", "restore ms", "prefill ms"),
    )
    speed = bench.result.sheet(
        "restore, beside one copy of its bytes: the least (the median)",
        *("tokens", "MB", "restore ms", "one copy ms", "into memory at hand", "times one copy"),
    )
    with engine(bench.place) as running:
        lengths = lengths or usual(bench, running.context)
        with bench.steps("prompts", len(lengths) * bench.rounds) as step:
            for length in lengths:
                rounds: dict[str, list[Asked]] = {"cold": [], "exact": [], "nearest": []}
                restores = _Restores()
                with (
                    bench.ending(partial(_rows, bench, sheet, length, rounds)),
                    bench.ending(partial(restores.row, speed, length)),
                ):
                    for _ in range(bench.rounds):
                        _round(bench, running, length, answer, rounds, restores)
                        step()
    if http:
        _over_http(bench, lengths, answer)


def _round(
    bench: Bench,
    running: Engine,
    length: int,
    answer: int,
    rounds: dict[str, list[Asked]],
    restores: _Restores,
) -> None:
    vocabulary = len(bench.tokenizer)
    draw = np.random.default_rng(bench.draw.randrange(1 << 30))
    tokens = draw.integers(10, vocabulary - 10, length + TAIL, dtype=np.int32)
    tail = draw.integers(10, vocabulary - 10, TAIL, dtype=np.int32)
    prompts = {
        "cold": tokens[:length],
        "exact": tokens,
        "nearest": np.concatenate([tokens[: length - TAIL], tail]),
    }
    turn = [Boundary(length - TAIL, "turn")]
    for name, prompt in prompts.items():
        rounds[name].append(_ask(running, prompt, turn, answer))
    for _ in range(RESTORES):
        restores.take(running, tokens, turn)
    running.cache.clear(give_back=False)  # a running server has it
    gc.collect()


class Waiting:
    """A sink that waits for the end."""

    def __init__(self) -> None:
        self.report: Cost | None = None
        self.error: Exception | None = None
        self._over = threading.Event()

    def prefilled(self, done: int, total: int) -> None: ...
    def token(self, choice: int, sampled: Sampled) -> bool:
        return False

    def ended(self, choice: int, reason: Finish) -> None: ...
    def done(self, report: Cost) -> None:
        self.report = report
        self._over.set()

    def failed(self, error: Exception) -> None:
        self.error = error
        self._over.set()

    def wait(self) -> Cost:
        while not self._over.wait(0.2):  # in steps, so that Ctrl-C is heard
            pass
        if self.report is None:
            raise self.error or RuntimeError("no answer")
        return self.report


@contextmanager
def engine(place: str, memory: str | int = "auto") -> Iterator[Engine]:
    def load() -> Loaded:
        model, tokenizer = rewarm.load(place)
        return Loaded(model, tokenizer, PrefixCache(model, memory=memory))

    running = Engine(load, EngineOptions())
    running.start()
    try:
        if running.wait() != "ready":
            raise RuntimeError(running.detail)
        yield running
    finally:
        running.stop()


def _ask(running: Engine, prompt: Any, boundaries: list[Boundary], answer: int) -> Asked:
    sink = Waiting()
    began = time.perf_counter()
    running.submit(Request(prompt, sink, max_tokens=answer, boundaries=boundaries))
    return Asked(sink.wait(), (time.perf_counter() - began) * 1e3)


def _rows(bench: Bench, sheet: Sheet, length: int, rounds: dict[str, list[Asked]]) -> None:
    cold = [asked.report.ttft_ms for asked in rounds["cold"]]
    plot = next((p for p in bench.result.plots if p.title == PLOT), None)
    plot = plot or bench.result.plot(PLOT, "tokens", "ms", log_x=True)
    for name, each in rounds.items():
        if not each:
            continue
        reports = [asked.report for asked in each]
        faster = ratios([r.ttft_ms for r in reports], cold)
        if name != "cold":
            bench.result.figures[f"{length:,} tokens, {name}: times faster than cold"] = str(faster)
        ttft = Spread.of(r.ttft_ms for r in reports).median
        plot.add(name, length, ttft)
        sheet.add(
            f"{length:,}",
            name,
            f"{ttft:.1f}",
            "" if name == "cold" else faster,
            f"{Spread.of(asked.total_ms for asked in each).median:.1f}",
            f"{reports[-1].match.resume:,}",
            f"{reports[-1].match.replay:,}",
            f"{Spread.of(r.match_ms for r in reports).median:.2f}",
            f"{Spread.of(r.restore_ms for r in reports).median:.2f}",
            f"{Spread.of(r.prefill_ms for r in reports).median:.1f}",
        )


class _Restores:
    """Restores and copies in turns: MLX's into fresh memory, which a restore needs too and which a
    CPU pays for page by page, more dearly than for the copy itself; and a plain one into memory
    that is at hand, which is the machine's bandwidth."""

    def __init__(self) -> None:
        self.took: list[float] = []
        self.copies: list[float] = []
        self.fresh: list[float] = []
        self.nbytes = 0

    def take(self, running: Engine, prompt: Any, boundaries: list[Boundary]) -> None:
        report = _ask(running, prompt, boundaries, 1).report
        self.took.append(report.restore_ms)
        self.nbytes = report.restored_bytes
        # Eight bytes to a number: MLX counts the numbers of an array in 32 bits.
        array = mx.ones(max(self.nbytes // 8, 1), mx.int64)
        mx.eval(array)
        at_hand = _at_hand(array)
        for _ in range(3):
            self.copies.append(_ms(at_hand))
            mx.clear_cache()
            self.fresh.append(_ms(lambda: mx.eval(detached([array], 0))))

    def row(self, sheet: Sheet, length: int) -> None:
        if self.took:
            took, copy, fresh = (Spread.of(v) for v in (self.took, self.copies, self.fresh))
            sheet.add(
                f"{length:,}",
                f"{self.nbytes / 1e6:.1f}",
                f"{took.least:.2f} ({took.median:.2f})",
                f"{fresh.least:.2f} ({fresh.median:.2f})",
                f"{copy.least:.2f} ({copy.median:.2f})",
                # What disturbs a run only adds to it.
                f"{took.least / fresh.least:.2f}",
            )


def _at_hand(array: mx.array) -> Callable[[], object]:
    """A copy into memory that was there before: on a GPU MLX keeps it, on a CPU it is ours."""
    if mx.default_device() != mx.cpu:
        return lambda: mx.eval(detached([array], 0))
    source = np.array(array)
    into = np.ones_like(source)
    return lambda: np.copyto(into, source)


def _ms(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return (time.perf_counter() - began) * 1e3


def _over_http(bench: Bench, lengths: list[int], answer: int) -> None:
    sheet = bench.result.sheet(
        "over HTTP: a system prompt and a question",
        *("tokens", "what", "side", "TTFT ms", "faster", "total ms", "hit"),
    )
    with (
        bench.sides(NO_WARM) as sides,
        bench.steps("requests", len(lengths) * bench.rounds * len(sides)) as step,
    ):
        for length in lengths:
            got: dict[str, list[dict[str, Answered]]] = {side.name: [] for side in sides}
            with bench.ending(partial(_http_rows, bench, sheet, length, sides, got)):
                for i in range(bench.rounds):
                    system = {"role": "system", "content": bench.text(length)}
                    first, more, another = (user(bench.text(n)) for n in (TAIL, 16, TAIL))
                    for side in in_turns(sides, i):
                        cold = side.ask([system, first], answer)
                        got[side.name].append(
                            {
                                "cold": cold,
                                "exact": side.ask([system, first, cold.message, more], answer),
                                "nearest": side.ask([system, another], answer),
                            }
                        )
                        side.clear()
                        step()


def _http_rows(
    bench: Bench,
    sheet: Sheet,
    length: int,
    sides: list[Side],
    got: dict[str, list[dict[str, Answered]]],
) -> None:
    ours = sides[0].name
    for name in ("cold", "exact", "nearest"):
        for side in sides:
            replies = [answers[name] for answers in got[side.name]]
            if not replies:
                continue
            took = [r.ttft for r in replies]
            cold = [answers["cold"].ttft for answers in got[side.name]]
            sheet.add(
                f"{length:,}",
                name,
                side.name,
                f"{1e3 * Spread.of(took).median:.1f}",
                "" if name == "cold" else ratios(took, cold),
                f"{1e3 * Spread.of(r.total for r in replies).median:.1f}",
                shown(hit(replies[-1])),
            )
            if side.name != ours and got[ours]:
                mine = [answers[name].ttft for answers in got[ours]]
                bench.result.figures[
                    f"{length:,} tokens over HTTP, {name}: {side.name} over {ours}"
                ] = str(ratios(mine, took))
