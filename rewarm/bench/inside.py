"""Scenarios that run in this process, with a peer's server beside it: memory and overhead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import stream_generate

import rewarm
from rewarm.cache import PrefixCache
from rewarm.session import Session

from .bench import NO_WARM, Bench, Messages, in_turns, user
from .client import Answered
from .figures import Spread, ratios, trie_size
from .result import Plot, Sheet
from .sides import Side, other


def memory(bench: Bench, conversations: int, turns: int, answer: int) -> None:
    """Bytes for each distinct token as conversations grow over one system prompt. A peer is sent
    the same prompts, with our answers in them."""
    sheet = bench.result.sheet(
        f"{conversations} conversations over one system prompt",
        *("turn", "distinct tokens", "held MB", "bytes a token", "rows alone", "checkpoints"),
        *(["peer's MB"] if bench.peer else []),
    )
    plot = bench.result.plot("Bytes a distinct token", "turn", "KB")
    with _peer(bench) as peer, bench.steps("turns", conversations * turns) as step:
        model, tokenizer = rewarm.load(bench.place)
        session = Session(model, tokenizer)
        system = {"role": "system", "content": bench.text(300)}
        chats: list[Messages] = [[system] for _ in range(conversations)]
        held: list[list[int]] = []
        for turn in range(turns):
            for chat in chats:
                chat.append({"role": "user", "content": bench.text(30)})
                reply = session.chat(chat, max_tokens=answer)
                if peer is not None:
                    peer.ask(chat, answer)
                held.append([*bench.tokens(chat), *reply.tokens])
                chat.append({"role": "assistant", "content": reply.text})
                step()
            stats = session.cache.stats()
            kinds = stats.memory.kinds
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
                *([_peers_bytes(peer, plot, turn + 1, distinct)] if peer is not None else []),
            )


@contextmanager
def _peer(bench: Bench) -> Iterator[Side | None]:
    if bench.peer is None:
        yield None
        return
    with other(bench.peer, bench.place) as side:
        with bench.steps(f"starting {side.name}", 1):
            side.wake(bench.place)
        yield side


def _peers_bytes(peer: Side, plot: Plot, turn: int, distinct: int) -> str:
    held = peer.held()
    if held is None:
        return "-"
    plot.add(peer.name, turn, held / distinct / 1e3)
    return f"{held / 1e6:.2f}"


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


class OverHttp(NamedTuple):
    """What one server answered, by the kind of prompt, round by round."""

    side: Side
    replies: dict[str, list[Answered]]


def overhead(bench: Bench, length: int, messages: int, answer: int) -> None:
    """Cold prompts and decoding, against plain mlx-lm without any cache, in turns; then the same
    over HTTP."""
    sheet = bench.result.sheet(
        "against mlx-lm without a cache", "what", "rewarm", "mlx-lm", "rewarm / mlx-lm"
    )
    plot = bench.result.plot(f"Time to the first token of {length:,}, cold", "round", "s")
    prompts: dict[str, Callable[[], Messages]] = {
        f"one message of {length:,}": lambda: [user(bench.text(length))],
        f"{messages} messages": lambda: _history(bench, messages, max(length // messages - 6, 4)),
    }
    pairs: dict[str, list[Pair]] = {name: [] for name in prompts}
    with (
        bench.ending(partial(_overhead_rows, sheet, plot, pairs)),
        bench.steps("rounds", bench.rounds + 1) as step,
    ):
        model, tokenizer = rewarm.load(bench.place)
        for i in range(bench.rounds + 1):  # the first one warms up
            for name, prompt in prompts.items():
                chat = prompt()
                ours = _session_run(model, tokenizer, chat, answer) if i % 2 else None
                theirs = _plain_run(model, tokenizer, chat, answer)
                ours = ours or _session_run(model, tokenizer, chat, answer)
                if i:
                    pairs[name].append(Pair(ours, theirs))
            step()
    over = bench.result.sheet("over HTTP", "what", "side", "s", "times rewarm's")
    with bench.sides(NO_WARM) as sides:
        got = [OverHttp(side, {name: [] for name in prompts}) for side in sides]
        with (
            bench.ending(partial(_http_rows, over, got, pairs)),
            bench.steps("rounds over HTTP", bench.rounds * len(sides)) as step,
        ):
            for i in range(bench.rounds):
                chats = {name: prompt() for name, prompt in prompts.items()}
                for each in in_turns(got, i):
                    for name, chat in chats.items():
                        each.replies[name].append(each.side.ask(chat, answer))
                    each.side.clear()
                    step()


def _history(bench: Bench, messages: int, tokens: int) -> Messages:
    said: Messages = []
    for at in range(messages - 1):
        role = "assistant" if at % 2 else "user"
        said.append({"role": role, "content": bench.text(tokens)})
    return [*said, user(bench.text(10))]


def _overhead_rows(sheet: Sheet, plot: Plot, pairs: dict[str, list[Pair]]) -> None:
    for name, found in pairs.items():
        if found:
            ours, theirs = [p.ours for p in found], [p.theirs for p in found]
            _row(sheet, f"TTFT s, {name}", [r.ttft for r in ours], [r.ttft for r in theirs])
            _row(sheet, "… processor s", [r.busy for r in ours], [r.busy for r in theirs])
    one = next(iter(pairs.values()))
    if one:
        _row(sheet, "s a token", [p.ours.each for p in one], [p.theirs.each for p in one])
    for i, pair in enumerate(one):
        plot.add("rewarm", i + 1, pair.ours.ttft)
        plot.add("mlx-lm", i + 1, pair.theirs.ttft)


def _http_rows(sheet: Sheet, got: list[OverHttp], pairs: dict[str, list[Pair]]) -> None:
    parts: dict[str, Callable[[OverHttp], list[float]]] = {
        f"TTFT, {name}": partial(_ttfts, name) for name in pairs
    }
    long = next(iter(pairs))
    # One token, or a server that does not count them, says nothing of the next.
    parts["a token"] = lambda over: [
        _each(r) for r in over.replies[long] if min(r.tokens, len(r.times)) > 1
    ]
    for what, values in parts.items():
        ours = values(got[0])
        for over in got:
            found = values(over)
            if found:
                times = "" if over is got[0] or not ours else ratios(ours, found)
                sheet.add(what, over.side.name, f"{Spread.of(found).median:.4f}", times)
    inside = Spread.of(pair.ours.each for pair in pairs[long])
    sheet.add("… not over HTTP", "rewarm", f"{inside.median:.4f}", "")


def _ttfts(prompt: str, over: OverHttp) -> list[float]:
    return [reply.ttft for reply in over.replies[prompt]]


def _each(reply: Answered) -> float:
    """Seconds a token, after the first."""
    return (reply.times[-1] - reply.times[0]) / max(reply.tokens - 1, 1)


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
