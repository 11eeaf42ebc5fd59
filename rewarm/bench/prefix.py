"""The scenario `prefix`: a prompt cold, one that continues it, one that differs near its end."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Annotated, NamedTuple

import mlx.core as mx
import numpy as np
import typer

import rewarm
from rewarm.cache import PrefixCache
from rewarm.cache.payload import detached
from rewarm.engine import Engine, EngineParts, Request, Sink
from rewarm.options import EngineOptions
from rewarm.values import Boundary, Cost, Tokens

from .bench import NO_WARM, Bench, system
from .client import Answered, hit
from .figures import Parts, Spread, random_tokens, ratios
from .result import Plot, Sheet
from .scenario import Answer, numbers, scenario
from .sides import Side

TAIL = 64
"""Tokens at the end of a prompt in which it differs from its neighbour."""

USUAL = (2000, 20_000, 100_000)
"""The prompt lengths where none are given. The last one is for GPUs."""

ANSWERED = 1024
"""An upper bound of the tokens that a prompt has beside its length, with its answer."""

RESTORES = 5
"""Restores in each round, each beside two copies of as many bytes."""


def usual(bench: Bench, context: int) -> list[int]:
    """Give the usual lengths that fit into the context."""
    wanted = list(USUAL) if mx.default_device() != mx.cpu else list(USUAL[:-1])
    fitting = [n for n in wanted if n + ANSWERED <= context]
    if fitting != wanted:
        left = " and ".join(f"{n:,}" for n in wanted if n not in fitting)
        bench.result.figures[f"left out, since the context is {context:,}"] = f"{left} tokens"
    return fitting or [context // 2]


class TimedRequest(NamedTuple):
    """The cost of a request, and the time until its whole answer was there."""

    cost: Cost
    total_ms: float


Rounds = dict[str, list[TimedRequest]]
"""The requests of all rounds, by the kind of prompt."""


@scenario("model", "peer", "rounds")
def prefix(
    bench: Bench,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Prompt lengths in tokens, with commas. "
            "Without it 2000 and 20000, on a GPU 100000 too, as far as the context reaches."
        ),
    ] = None,
    answer: Answer = 2,
    http: Annotated[bool, typer.Option(help="Over HTTP as well.")] = True,
) -> None:
    """A prompt cold, one that continues it, and one that differs near its end."""
    wanted = numbers("--lengths", lengths, TAIL + 1) if lengths is not None else None
    sheet = bench.result.sheet(
        "from tokens",
        *("tokens:,", "what", "TTFT ms:.1f", "faster", "total ms:.1f", "cached:,", "replayed:,"),
        *("lookup ms:.2f", "restore ms:.2f", "prefill ms:.1f"),
    )
    speed = bench.result.sheet(
        "restore, beside one copy of its bytes: the least (the median)",
        *("tokens:,", "MB:.1f", "restore ms", "one copy ms", "into memory at hand"),
        "times one copy:.2f",
    )
    plot = bench.result.plot("Time to the first token by length", "tokens", "ms", log_x=True)
    with _engine(bench.location) as running:
        wanted = wanted or usual(bench, running.core.context)
        for length in wanted:
            rounds: Rounds = {"cold": [], "exact": [], "nearest": []}
            restores: list[Parts] = []
            with (
                bench.concluding(partial(_rows, bench, sheet, plot, length, rounds)),
                bench.concluding(partial(_restore_row, speed, length, restores)),
            ):
                for _ in bench.each(f"{length:,} tokens", range(bench.rounds)):
                    _round(bench, running, length, answer, rounds, restores)
    if http:
        _over_http(bench, wanted, answer)


def _round(
    bench: Bench,
    running: Engine,
    length: int,
    answer: int,
    rounds: Rounds,
    restores: list[Parts],
) -> None:
    size, seed = len(bench.tokenizer), bench.draw.randrange(1 << 30)
    tokens, tail = random_tokens(length + TAIL, size, seed), random_tokens(TAIL, size, seed + 1)
    prompts = {
        "cold": tokens[:length],
        "exact": tokens,
        "nearest": np.concatenate([tokens[: length - TAIL], tail]),
    }
    turn = [Boundary(length - TAIL, "turn")]
    for name, prompt in prompts.items():
        rounds[name].append(_ask(running, prompt, turn, answer))
    restores += [_restore(running, tokens, turn) for _ in range(RESTORES)]
    running.core.cache.clear(give_back=False)  # a running server has that memory, too
    gc.collect()


class Waiting(Sink):
    """A sink that keeps the cost of its request for the thread that waits for it."""

    def __init__(self) -> None:
        self.cost: Future[Cost] = Future()

    def done(self, cost: Cost) -> None:
        self.cost.set_result(cost)

    def failed(self, error: Exception) -> None:
        self.cost.set_exception(error)


@contextmanager
def _engine(location: str) -> Iterator[Engine]:
    def load() -> EngineParts:
        model, tokenizer = rewarm.load(location)
        return EngineParts(model, tokenizer, PrefixCache(model))

    running = Engine(load, EngineOptions())
    running.start()
    try:
        if running.wait() != "ready":
            raise RuntimeError(running.detail)
        yield running
    finally:
        running.stop()


def _ask(running: Engine, prompt: Tokens, boundaries: list[Boundary], answer: int) -> TimedRequest:
    sink = Waiting()
    began = time.perf_counter()
    running.core.submit(Request(prompt, sink, max_tokens=answer, boundaries=boundaries))
    return TimedRequest(sink.cost.result(), (time.perf_counter() - began) * 1e3)


def _rows(bench: Bench, sheet: Sheet, plot: Plot, length: int, rounds: Rounds) -> None:
    cold = [each.cost.ttft_ms for each in rounds["cold"]]
    for name, timed in rounds.items():
        if not timed:
            continue
        costs = [each.cost for each in timed]
        faster = ratios([c.ttft_ms for c in costs], cold)
        if name != "cold":
            bench.result.figures[f"{length:,} tokens, {name}: times faster than cold"] = str(faster)
        ttft, total = median(c.ttft_ms for c in costs), median(each.total_ms for each in timed)
        plot.add(name, length, ttft)
        match = costs[-1].match
        parts = [(c.match_ms, c.restore_ms, c.prefill_ms) for c in costs]
        sheet.add(
            *(length, name, ttft, "" if name == "cold" else faster, total),
            *(match.resume, match.replay, *map(median, zip(*parts, strict=True))),
        )


def _restore(running: Engine, prompt: Tokens, boundaries: list[Boundary]) -> Parts:
    """Measure one restore, and two copies of as many bytes.

    MLX copies into new memory, as a restore does; on a CPU the system hands that out page by page,
    which takes longer than the copy itself. A plain copy goes into memory that the process has,
    which shows the machine's bandwidth. On a GPU MLX keeps such memory by itself."""
    cost = _ask(running, prompt, boundaries, 1).cost
    parts = Parts({"bytes": cost.restored_bytes, "restore": cost.restore_ms})
    # Numbers of eight bytes, since MLX counts the numbers of an array in 32 bits.
    array = mx.ones(max(cost.restored_bytes // 8, 1), mx.int64)
    mx.eval(array)
    if mx.default_device() == mx.cpu:
        source = np.array(array)
        into = np.ones_like(source)
        with parts.timed("at hand"):
            np.copyto(into, source)
    else:
        with parts.timed("at hand"):
            mx.eval(detached([array], 0))
    mx.clear_cache()
    with parts.timed("new"):
        mx.eval(detached([array], 0))
    return parts


def _restore_row(sheet: Sheet, length: int, restores: list[Parts]) -> None:
    if restores:
        names = ("restore", "new", "at hand")
        took = [Spread.of(parts[name] for parts in restores) for name in names]
        sheet.add(
            length,
            restores[-1]["bytes"] / 1e6,
            *(f"{spread.least:.2f} ({spread.median:.2f})" for spread in took),
            # The least, since disturbances only add time.
            took[0].least / took[1].least,
        )


def _over_http(bench: Bench, lengths: list[int], answer: int) -> None:
    sheet = bench.result.sheet(
        "over HTTP: a system prompt and a question",
        *("tokens:,", "what", "side", "TTFT ms:.1f", "faster", "total ms:.1f", "hit:.1%"),
    )
    with bench.sides(NO_WARM) as sides:
        for length in lengths:
            got: dict[str, list[dict[str, Answered]]] = {side.name: [] for side in sides}
            prompts = [
                (system(bench.text(length)), bench.user(TAIL), bench.user(16), bench.user(TAIL))
                for _ in range(bench.rounds)
            ]
            with bench.concluding(partial(_http_rows, bench, sheet, length, sides, got)):
                for i, side in bench.in_turns(f"{length:,} over HTTP", sides, bench.rounds):
                    beginning, first, more, another = prompts[i]
                    cold = side.ask([beginning, first], answer)
                    exact = side.ask([beginning, first, cold.message, more], answer)
                    nearest = side.ask([beginning, another], answer)
                    got[side.name].append({"cold": cold, "exact": exact, "nearest": nearest})
                    side.clear()


def _http_rows(
    bench: Bench,
    sheet: Sheet,
    length: int,
    sides: list[Side],
    got: dict[str, list[dict[str, Answered]]],
) -> None:
    for name in ("cold", "exact", "nearest"):
        times = [(side, [answers[name].ttft for answers in got[side.name]]) for side in sides]
        for side, took in times:
            if not took:
                continue
            replies = [answers[name] for answers in got[side.name]]
            cold = [answers["cold"].ttft for answers in got[side.name]]
            faster = "" if name == "cold" else ratios(took, cold)
            ttft, total = 1e3 * median(took), 1e3 * median(r.total for r in replies)
            sheet.add(length, name, side.name, ttft, faster, total, hit(replies[-1]))
        bench.compare(times, f"{length:,} tokens over HTTP, {name}: {{peer}} over {{ours}}")
