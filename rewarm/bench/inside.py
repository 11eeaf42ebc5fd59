"""Scenarios that run in this process: memory and overhead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import stream_generate

import rewarm
from rewarm.cache import PrefixCache
from rewarm.session import Session

from .bench import NO_WARM, Bench, Messages, user
from .figures import Spread, ratios, trie_size
from .result import Sheet


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


class Run(NamedTuple):
    ttft: float
    busy: float
    """Of this process' processor time, until the first token: what others do on the machine is not
    in it."""
    each: float
    """Seconds a token, after the first."""


class Pair(NamedTuple):
    ours: Run
    theirs: Run


def overhead(bench: Bench, length: int, messages: int, answer: int) -> None:
    """Cold prompts and decoding, against plain mlx-lm without any cache, in turns."""
    sheet = bench.result.sheet(
        "against mlx-lm without a cache", "what", "rewarm", "mlx-lm", "rewarm / mlx-lm"
    )
    pairs: dict[str, list[Pair]] = {f"one message of {length:,}": [], f"{messages} messages": []}
    over: list[float] = []
    with (
        bench.ending(lambda: _overhead_rows(sheet, pairs, over)),
        bench.steps("rounds", 2 * bench.rounds + 1) as step,
    ):
        model, tokenizer = rewarm.load(bench.place)
        for i in range(bench.rounds + 1):  # the first one warms up
            long = [user(bench.text(length))]
            history = _history(bench, messages, max(length // messages - 6, 4))
            for name, chat in zip(pairs, (long, history), strict=True):
                ours = _session_run(model, tokenizer, chat, answer) if i % 2 else None
                theirs = _plain_run(model, tokenizer, chat, answer)
                ours = ours or _session_run(model, tokenizer, chat, answer)
                if i:
                    pairs[name].append(Pair(ours, theirs))
            step()
        with bench.sides(NO_WARM) as sides:
            for _ in range(bench.rounds):
                reply = sides[0].ask([user(bench.text(20))], answer)
                over.append((reply.times[-1] - reply.times[0]) / max(reply.tokens - 1, 1))
                step()


def _history(bench: Bench, messages: int, tokens: int) -> Messages:
    said: Messages = []
    for at in range(messages - 1):
        role = "assistant" if at % 2 else "user"
        said.append({"role": role, "content": bench.text(tokens)})
    return [*said, user(bench.text(10))]


def _overhead_rows(sheet: Sheet, pairs: dict[str, list[Pair]], over: list[float]) -> None:
    for name, found in pairs.items():
        if found:
            ours, theirs = [p.ours for p in found], [p.theirs for p in found]
            _row(sheet, f"TTFT s, {name}", [r.ttft for r in ours], [r.ttft for r in theirs])
            _row(sheet, "… processor s", [r.busy for r in ours], [r.busy for r in theirs])
    one = next(iter(pairs.values()))
    if one:
        _row(sheet, "s a token", [p.ours.each for p in one], [p.theirs.each for p in one])
    if over:
        inside = Spread.of(p.ours.each for p in one).median
        sheet.add(
            "s a token over HTTP", f"{Spread.of(over).median:.5f}", f"{inside:.5f} (in process)", ""
        )


def _session_run(model: Any, tokenizer: Any, chat: Messages, answer: int) -> Run:
    session = Session(model, tokenizer, PrefixCache(model))
    return _timed(
        lambda: (e for e in session.stream(chat, max_tokens=answer) if e.token is not None)
    )


def _plain_run(model: Any, tokenizer: Any, chat: Messages, answer: int) -> Run:
    chunk = 512 if mx.default_device() == mx.cpu else 2048

    def answered() -> Iterable[object]:
        tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        return stream_generate(model, tokenizer, tokens, max_tokens=answer, prefill_step_size=chunk)

    return _timed(answered)


def _timed(answered: Callable[[], Iterable[object]]) -> Run:
    began, busy = time.perf_counter(), time.process_time()
    times: list[float] = []
    first = 0.0
    for _ in answered():
        times.append(time.perf_counter())
        first = first or time.process_time() - busy
    return Run(times[0] - began, first, (times[-1] - times[0]) / max(len(times) - 1, 1))


def _row(sheet: Sheet, name: str, ours: list[float], theirs: list[float]) -> None:
    sheet.add(
        name,
        f"{Spread.of(ours).median:.4f}",
        f"{Spread.of(theirs).median:.4f}",
        ratios(theirs, ours),
    )
