"""The scenarios `memory` and `overhead`. They run in this process, with a peer's server beside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Annotated, Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import stream_generate

import rewarm
from rewarm.cache import PrefixCache
from rewarm.session import Session

from .bench import NO_WARM, Bench, Messages, system
from .client import Answered
from .figures import Spread, ratios, trie_size
from .result import Plot, Sheet
from .scenario import Answer, Turns, at_least, scenario
from .sides import other


@scenario("model", "peer")
def memory(
    bench: Bench,
    conversations: Annotated[int, at_least(1, "Conversations at the same time.")] = 4,
    turns: Turns = 10,
    answer: Answer = 32,
) -> None:
    """Bytes held for each distinct token as conversations grow."""
    sheet = bench.result.sheet(
        f"{conversations} conversations over one system prompt",
        *("turn", "distinct tokens:,", "held MB:.2f", "bytes a token:,.0f", "rows alone:,.0f"),
        *("checkpoints:.0%", *(["peer's MB:.2f"] if bench.peer else [])),
    )
    plot = bench.result.plot("Bytes a distinct token", "turn", "KB")
    starting = other(bench.peer, bench.location) if bench.peer else nullcontext()
    with starting as peer, bench.steps("turns", conversations * turns) as step:
        if peer is not None:
            peer.wait_until_ready(bench.location)
        session = Session(*rewarm.load(bench.location))
        chats: list[Messages] = [[system(bench.text(300))]] * conversations
        prompts: list[list[int]] = []
        for turn in range(turns):
            for i, chat in enumerate(chats):
                asked = [*chat, bench.user(30)]
                reply = session.chat(asked, max_tokens=answer)
                if peer is not None:
                    peer.ask(asked, answer)
                prompts.append([*bench.tokens(asked), *reply.tokens])
                chats[i] = [*asked, {"role": "assistant", "content": reply.text}]
                step()
            stats = session.cache.stats()
            kinds = stats.memory.kinds
            distinct, rows = trie_size(prompts), kinds["rows"] + kinds["window"]
            plot.add("all", turn + 1, stats.held / distinct / 1e3)
            plot.add("rows and windows", turn + 1, rows / distinct / 1e3)
            ours = (stats.held / 1e6, stats.held / distinct, rows / distinct)
            share = kinds["checkpoint"] / max(stats.held, 1)
            theirs = []
            if peer is not None:
                theirs = [peer.held_bytes() / 1e6]
                plot.add(peer.name, turn + 1, theirs[0] * 1e3 / distinct)
            sheet.add(turn + 1, distinct, *ours, share, *theirs)


class Generated(NamedTuple):
    """The times of one answer in this process."""

    ttft: float
    busy: float
    """Processor seconds of this process until the first token. Other programs do not count."""
    each: float
    """Seconds a token after the first one."""


Cold = dict[str, dict[str, list[Generated]]]
"""The answers to cold prompts in this process, by the kind of prompt and the side."""

Replies = dict[str, dict[str, list[Answered]]]
"""The answers over HTTP, by the side and the kind of prompt."""


@scenario("model", "peer", rounds=5)
def overhead(
    bench: Bench,
    length: Annotated[int, at_least(1, "Tokens of the long message.")] = 4000,
    messages: Annotated[int, at_least(2, "Messages of the history.")] = 200,
    answer: Annotated[int, at_least(2, "Tokens of an answer.")] = 64,
) -> None:
    """The cost of the cache where nothing is cached: cold prompts and decoding, against mlx-lm."""
    sheet = bench.result.sheet(
        "against mlx-lm without a cache",
        *("what", "rewarm:.4f", "mlx-lm:.4f", "rewarm / mlx-lm"),
    )
    plot = bench.result.plot(f"Time to the first token of {length:,}, cold", "round", "s")
    one, many = f"one message of {length:,}", f"{messages} messages"

    def chats() -> list[dict[str, Messages]]:
        each = max(length // messages - 6, 4)
        return [
            {one: [bench.user(length)], many: _history(bench, messages, each)}
            for _ in range(bench.rounds + 1)
        ]

    runs = {"rewarm": _with_session, "mlx-lm": _with_mlx_lm}
    cold: Cold = {name: {side: [] for side in runs} for name in (one, many)}
    with bench.concluding(partial(_cold_rows, sheet, plot, cold)):
        model, tokenizer = rewarm.load(bench.location)
        given = chats()
        for i, side in bench.in_turns("rounds", list(runs), bench.rounds + 1):
            for name, chat in given[i].items():
                found = runs[side](model, tokenizer, chat, answer)
                if i:  # the first round warms up
                    cold[name][side].append(found)
    over = bench.result.sheet("over HTTP", "what", "side", "s:.4f", "times rewarm's")
    with bench.sides(NO_WARM) as sides:
        got: Replies = {side.name: {name: [] for name in cold} for side in sides}
        with bench.concluding(partial(_http_rows, over, got, cold)):
            given = chats()
            for i, server in bench.in_turns("rounds over HTTP", sides, bench.rounds):
                for name, chat in given[i].items():
                    got[server.name][name].append(server.ask(chat, answer))
                server.clear()


def _history(bench: Bench, messages: int, tokens: int) -> Messages:
    roles = ("user", "assistant")
    said = [{"role": roles[at % 2], "content": bench.text(tokens)} for at in range(messages - 1)]
    return [*said, bench.user(10)]


def _cold_rows(sheet: Sheet, plot: Plot, cold: Cold) -> None:
    for name, found in cold.items():
        _row(sheet, f"TTFT s, {name}", found, "ttft")
        _row(sheet, "… processor s", found, "busy")
    long = next(iter(cold.values()))
    _row(sheet, "s a token", long, "each")
    for side, answers in long.items():
        for i, generated in enumerate(answers):
            plot.add(side, i + 1, generated.ttft)


def _row(sheet: Sheet, name: str, found: dict[str, list[Generated]], figure: str) -> None:
    ours, theirs = ([getattr(each, figure) for each in answers] for answers in found.values())
    if ours and theirs:
        sheet.add(name, Spread.of(ours).median, Spread.of(theirs).median, ratios(theirs, ours))


def _http_rows(sheet: Sheet, got: Replies, cold: Cold) -> None:
    long = next(iter(cold))
    times: dict[str, dict[str, list[float]]] = {
        f"TTFT, {name}": {side: [r.ttft for r in got[side][name]] for side in got} for name in cold
    }
    times["a token"] = {
        side: [r.per_token for r in replies[long] if r.per_token] for side, replies in got.items()
    }
    for what, by_side in times.items():
        ours, *_ = by_side.values()
        for side, values in by_side.items():
            if values:
                ratio = ratios(ours, values) if values is not ours and ours else ""
                sheet.add(what, side, Spread.of(values).median, ratio)
    inside = Spread.of(each.each for each in cold[long]["rewarm"])
    sheet.add("… not over HTTP", "rewarm", inside.median, "")


def _with_session(model: Any, tokenizer: Any, chat: Messages, answer: int) -> Generated:
    session = Session(model, tokenizer, PrefixCache(model))
    return _timed(
        lambda: (e for e in session.stream(chat, max_tokens=answer) if e.token is not None)
    )


def _with_mlx_lm(model: Any, tokenizer: Any, chat: Messages, answer: int) -> Generated:
    chunk = 512 if mx.default_device() == mx.cpu else 2048

    def answered() -> Iterable[object]:
        tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        return stream_generate(model, tokenizer, tokens, max_tokens=answer, prefill_step_size=chunk)

    return _timed(answered)


def _timed(answered: Callable[[], Iterable[object]]) -> Generated:
    began, busy = time.perf_counter(), time.process_time()
    times: list[float] = []
    first = 0.0
    for _ in answered():
        times.append(time.perf_counter())
        first = first or time.process_time() - busy
    return Generated(times[0] - began, first, (times[-1] - times[0]) / max(len(times) - 1, 1))
