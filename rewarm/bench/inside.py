"""Scenarios that run in this process, where a request begins with its tokens: prefix, memory and
overhead."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.generate import stream_generate

import rewarm
from rewarm.cache import Boundary, PrefixCache
from rewarm.cache.payload import detached
from rewarm.engine import Engine, EngineOptions, Finish, Loaded, Report, Request, Sampled
from rewarm.session import Session

from .bench import Bench, Messages
from .client import ask
from .figures import Spread, ratios, trie_size

TAIL = 64
"""Tokens in which a prompt differs from its neighbour, at its end."""


class Waiting:
    """A sink that waits for the end."""

    def __init__(self) -> None:
        self.report: Report | None = None
        self.error: Exception | None = None
        self._over = threading.Event()

    def prefilled(self, done: int, total: int) -> None: ...
    def token(self, choice: int, sampled: Sampled) -> bool:
        return False

    def ended(self, choice: int, reason: Finish) -> None: ...
    def done(self, report: Report) -> None:
        self.report = report
        self._over.set()

    def failed(self, error: Exception) -> None:
        self.error = error
        self._over.set()

    def wait(self) -> Report:
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


def prefix(bench: Bench, lengths: list[int], http: bool) -> None:
    """A prompt cold, then one that begins with all of it, then one that leaves it near its end."""
    sheet = bench.result.sheet(
        "from tokens",
        *("tokens", "what", "TTFT ms", "faster", "cached", "replayed"),
        *("lookup ms", "restore ms", "prefill ms"),
    )
    speed = bench.result.sheet(
        "restore", "tokens", "MB", "restore ms", "one copy ms", "times one copy"
    )
    total = len(lengths) * bench.rounds
    with engine(bench.place) as running, bench.steps("prompts", total) as step:
        vocabulary = len(bench.tokenizer)
        for length in lengths:
            rounds: dict[str, list[Report]] = {"cold": [], "exact": [], "nearest": []}
            for _ in range(bench.rounds):
                draw = np.random.default_rng(bench.draw.randrange(1 << 30))
                tokens = draw.integers(10, vocabulary - 10, length + TAIL, dtype=np.int32)
                tail = draw.integers(10, vocabulary - 10, TAIL, dtype=np.int32)
                prompts = {
                    "cold": tokens[:length],
                    "exact": tokens,
                    "nearest": np.concatenate([tokens[: length - TAIL], tail]),
                }
                for name, prompt in prompts.items():
                    rounds[name].append(_ask(running, prompt, [Boundary(length - TAIL, "turn")]))
                _restore_row(speed, running, rounds["exact"][-1], length)
                running.cache.clear()
                gc.collect()
                step()
            _prefix_rows(bench, sheet, length, rounds)
    if http:
        _prefix_over_http(bench, lengths)


def memory(bench: Bench, conversations: int, turns: int, answer: int) -> None:
    """Bytes for each distinct token as conversations grow over one system prompt."""
    sheet = bench.result.sheet(
        f"{conversations} conversations over one system prompt",
        *("turn", "distinct tokens", "held MB", "bytes a token", "rows alone", "checkpoints"),
    )
    plot = bench.result.plot("Bytes a distinct token", "turn", "KB")
    with bench.steps("turns", conversations * turns) as step:
        model, tokenizer = rewarm.load(bench.place)
        session = Session(model, tokenizer)
        system = {"role": "system", "content": bench.text(300)}
        chats: list[Messages] = [[system] for _ in range(conversations)]
        held: list[list[int]] = []
        for turn in range(turns):
            for chat in chats:
                chat.append({"role": "user", "content": bench.text(30)})
                reply = session.chat(chat, max_tokens=answer)
                held.append([*bench.tokens(chat), *reply.tokens])
                chat.append({"role": "assistant", "content": reply.text})
                step()
            stats = session.cache.stats()
            kinds = stats.bytes["memory"]
            distinct = trie_size(held)
            each = stats.held / distinct
            plot.add("all", turn + 1, each / 1e3)
            plot.add(
                "rows and windows", turn + 1, (kinds["rows"] + kinds["window"]) / distinct / 1e3
            )
            sheet.add(
                turn + 1,
                f"{distinct:,}",
                f"{stats.held / 1e6:.2f}",
                f"{each:,.0f}",
                f"{(kinds['rows'] + kinds['window']) / distinct:,.0f}",
                f"{kinds['checkpoint'] / max(stats.held, 1):.0%}",
            )


def overhead(bench: Bench, length: int, messages: int, answer: int) -> None:
    """Cold prompts and decoding, against plain mlx-lm without any cache, in turns."""
    sheet = bench.result.sheet(
        "against mlx-lm without a cache", "what", "rewarm", "mlx-lm", "rewarm / mlx-lm"
    )
    with bench.steps("rounds", 2 * bench.rounds + 1) as step:
        model, tokenizer = rewarm.load(bench.place)
        one: list[_Pair] = []
        many: list[_Pair] = []
        for i in range(bench.rounds + 1):  # the first one warms up
            long = [{"role": "user", "content": bench.text(length)}]
            history: Messages = []
            for at in range(messages - 1):
                role = "assistant" if at % 2 else "user"
                history.append(
                    {"role": role, "content": bench.text(max(length // messages - 6, 4))}
                )
            history.append({"role": "user", "content": bench.text(10)})
            for chat, pairs in ((long, one), (history, many)):
                ours = _session_run(model, tokenizer, chat, answer) if i % 2 else None
                theirs = _plain_run(model, tokenizer, chat, answer)
                ours = ours or _session_run(model, tokenizer, chat, answer)
                if i:
                    pairs.append(_Pair(ours, theirs))
            step()
        for name, pairs in (
            (f"TTFT s, one message of {length:,}", one),
            (f"TTFT s, {messages} messages", many),
        ):
            _pair_row(sheet, name, [p.ours.ttft for p in pairs], [p.theirs.ttft for p in pairs])
        _pair_row(
            sheet,
            "s a token",
            [p.ours.each for p in one],
            [p.theirs.each for p in one],
        )
        with bench.sides(("--no-warm-ahead",)) as sides:
            over = []
            for _ in range(bench.rounds):
                reply = ask(sides[0].url, [{"role": "user", "content": bench.text(20)}], answer)
                times = reply.times
                over.append((times[-1] - times[0]) / max(reply.tokens - 1, 1))
                step()
        inside = Spread.of(p.ours.each for p in one).median
        sheet.add(
            "s a token over HTTP", f"{Spread.of(over).median:.5f}", f"{inside:.5f} (in process)", ""
        )


class _Run(NamedTuple):
    ttft: float
    each: float
    """Seconds a token, after the first."""


class _Pair(NamedTuple):
    ours: _Run
    theirs: _Run


def _session_run(model: Any, tokenizer: Any, chat: Messages, answer: int) -> _Run:
    session = Session(model, tokenizer, PrefixCache(model))
    began = time.perf_counter()
    times = [
        time.perf_counter()
        for event in session.stream(chat, max_tokens=answer)
        if event.token is not None
    ]
    return _timed(began, times)


def _plain_run(model: Any, tokenizer: Any, chat: Messages, answer: int) -> _Run:
    began = time.perf_counter()
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    chunk = 512 if mx.default_device() == mx.cpu else 2048
    times = [
        time.perf_counter()
        for _ in stream_generate(
            model, tokenizer, tokens, max_tokens=answer, prefill_step_size=chunk
        )
    ]
    return _timed(began, times)


def _timed(began: float, times: list[float]) -> _Run:
    return _Run(times[0] - began, (times[-1] - times[0]) / max(len(times) - 1, 1))


def _pair_row(sheet: Any, name: str, ours: list[float], theirs: list[float]) -> None:
    sheet.add(
        name,
        f"{Spread.of(ours).median:.4f}",
        f"{Spread.of(theirs).median:.4f}",
        ratios(theirs, ours),
    )


def _ask(running: Engine, prompt: Any, boundaries: list[Boundary]) -> Report:
    sink = Waiting()
    running.submit(Request(prompt, sink, max_tokens=2, boundaries=boundaries))
    return sink.wait()


def _prefix_rows(bench: Bench, sheet: Any, length: int, rounds: dict[str, list[Report]]) -> None:
    cold = [r.ttft_ms for r in rounds["cold"]]
    for name, reports in rounds.items():
        faster = ratios([r.ttft_ms for r in reports], cold)
        if name != "cold":
            bench.result.figures[f"{length:,} tokens, {name}: times faster than cold"] = str(faster)
        sheet.add(
            f"{length:,}",
            name,
            f"{Spread.of(r.ttft_ms for r in reports).median:.1f}",
            "" if name == "cold" else faster,
            f"{reports[-1].match.resume:,}",
            f"{reports[-1].match.replay:,}",
            f"{Spread.of(r.match_ms for r in reports).median:.2f}",
            f"{Spread.of(r.restore_ms for r in reports).median:.2f}",
            f"{Spread.of(r.prefill_ms for r in reports).median:.1f}",
        )


def _restore_row(sheet: Any, running: Engine, report: Report, length: int) -> None:
    """A restore beside one copy of as many bytes on the same machine."""
    kinds = running.cache.stats().bytes["memory"]
    each = running.cache.stats().tokens
    # All rows of the path and one checkpoint; the tree holds little else now.
    nbytes = int(kinds["rows"] * report.match.resume / max(each, 1))
    nbytes += kinds["checkpoint"] // max(running.cache.stats().checkpoints, 1)
    source = mx.zeros((max(nbytes // 4, 1),), mx.float32)
    mx.eval(source)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        mx.eval(detached([source], 0))
        took.append((time.perf_counter() - began) * 1e3)
    copy = Spread.of(took).median
    sheet.add(
        f"{length:,}",
        f"{nbytes / 1e6:.1f}",
        f"{report.restore_ms:.2f}",
        f"{copy:.2f}",
        f"{report.restore_ms / copy:.2f}",
    )


def _prefix_over_http(bench: Bench, lengths: list[int]) -> None:
    sheet = bench.result.sheet(
        "over HTTP: a system prompt and a question",
        "tokens",
        "what",
        "side",
        "TTFT ms",
        "faster",
        "hit",
    )
    with (
        bench.sides(("--no-warm-ahead",)) as sides,
        bench.steps("requests", len(lengths) * bench.rounds * len(sides)) as step,
    ):
        for length in lengths:
            for side in sides:
                took: dict[str, list[float]] = {"cold": [], "exact": [], "nearest": []}
                hits: dict[str, float] = {}
                for _ in range(bench.rounds):
                    system = {"role": "system", "content": bench.text(length)}
                    first = [system, {"role": "user", "content": bench.text(TAIL)}]
                    cold = ask(side.url, first, 2)
                    side.settle()
                    goes_on = [*first, cold.message, {"role": "user", "content": bench.text(16)}]
                    other = [system, {"role": "user", "content": bench.text(TAIL)}]
                    answers = {
                        "cold": cold,
                        "exact": ask(side.url, goes_on, 2),
                        "nearest": ask(side.url, other, 2),
                    }
                    for name, reply in answers.items():
                        took[name].append(1e3 * reply.ttft)
                        hits[name] = reply.hit
                    side.clear()
                    step()
                for name, values in took.items():
                    sheet.add(
                        f"{length:,}",
                        name,
                        side.name,
                        f"{Spread.of(values).median:.1f}",
                        "" if name == "cold" else ratios(values, took["cold"]),
                        f"{hits[name]:.1%}",
                    )
