"""The scenarios `burst` and `agent`: many conversations over HTTP, as their clients see them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from rewarm.errors import InvalidOption

from .bench import NO_WARM, TTFT_BY_REQUEST, Bench, Messages, system
from .client import Answered, hit
from .figures import Spread, amplification
from .scenario import Answer, SystemLength, at_least, scenario
from .sides import Side


@scenario("model", "peer", "rounds")
def burst(
    bench: Bench,
    parallel: Annotated[int, at_least(1, "Requests at once.")] = 5,
    shared: SystemLength = 2700,
    answer: Answer = 16,
) -> None:
    """Parallel requests over one system prompt, cold and again."""
    sheet = bench.result.sheet(
        f"{parallel} at once over {shared:,} tokens",
        *("round", "side", "hit:.1%", "prefilled:,", "amplification:.3f"),
        *("first TTFT ms:.0f", "last TTFT ms:.0f", "seconds:.2f", "tokens/s:.1f"),
    )
    plot = bench.result.plot("A burst's seconds, cold and again", "burst", "s")
    seconds: dict[str, dict[str, list[float]]] = {
        "cold": defaultdict(list),
        "again": defaultdict(list),
    }

    def summary() -> None:
        for name, by_side in seconds.items():
            times = [(side, by_side[side.name]) for side in sides]
            bench.compare(times, f"{name}: {{peer}} takes so many times longer")

    with bench.sides(NO_WARM) as sides, bench.concluding(summary):
        for i in range(bench.rounds):
            prompt = system(bench.text(shared))
            for name, by_side in seconds.items():
                chats = [[prompt, bench.user(20)] for _ in range(parallel)]
                for _, side in bench.in_turns(f"round {i + 1}, {name}", sides, 1, first=i):
                    replies = _at_once(side, chats, answer)
                    took = max(r.total for r in replies)
                    by_side[side.name].append(took)
                    plot.add(side.name, 2 * i + 1 + (name == "again"), took)
                    # The second burst shares its system prompt with the first one. The trie of its
                    # own prompts does not show that.
                    prompts = [bench.tokens(c) for c in chats] if name == "cold" else []
                    firsts = [1e3 * r.ttft for r in replies]
                    each = [r.per_token for r in replies]
                    rate = sum(1 / e for e in each if e) if all(each) else None
                    times = (min(firsts), max(firsts), took)
                    sheet.add(f"{i + 1} {name}", side.name, *_work(replies, prompts), *times, rate)


def _work(replies: list[Answered], prompts: list[list[int]]) -> tuple[object, object, object]:
    """Give the hit, the tokens that were prefilled, and the amplification over these prompts."""
    if not all(r.counted for r in replies):
        return None, None, None
    prefilled = sum(r.prefilled for r in replies)
    return hit(*replies), prefilled, amplification(prefilled, prompts) if prompts else ""


def _at_once(side: Side, chats: list[Messages], answer: int) -> list[Answered]:
    pool = ThreadPoolExecutor(len(chats))
    try:
        return list(pool.map(lambda chat: side.ask(chat, answer), chats))
    finally:
        # After Ctrl-C, the answers are not waited for: they end with their server.
        pool.shutdown(wait=False, cancel_futures=True)


@scenario("model", "peer")
def agent(
    bench: Bench,
    file: Annotated[Path, typer.Argument(help="Conversations as OpenAI messages, JSON.")],
    conversations: Annotated[int, at_least(1, "Conversations to replay.")] = 4,
    answer: Answer = 4,
) -> None:
    """Recorded tool loops, replayed."""
    recorded = _read(file)[:conversations]
    sheet = bench.result.sheet(
        f"{len(recorded)} conversations of {file.name}",
        *("side", "requests", "prompt tokens:,", "hit:.1%", "prefilled:,", "amplification:.3f"),
        *("TTFT ms:.0f", "held MB:.2f"),
    )
    hits = bench.result.plot("Hit by request", "request", "%")
    times = bench.result.plot("Time to the first token by request", "request", "ms")
    prompts = list(_prompts_in_turns(recorded))
    with bench.sides((), NO_WARM) as sides:
        got: dict[str, list[Answered]] = {side.name: [] for side in sides}

        def summary() -> None:
            for side in sides:
                replies = got[side.name]
                if replies:
                    tokens = [bench.tokens(messages) for messages in prompts[: len(replies)]]
                    asked, work = sum(r.prompt for r in replies), _work(replies, tokens)
                    ttft = 1e3 * Spread.of(r.ttft for r in replies).median
                    megabytes = side.held_bytes() / 1e6
                    sheet.add(side.name, len(replies), asked, *work, ttft, megabytes)
            times = [(side, [r.ttft for r in got[side.name]]) for side in sides]
            bench.compare(times, TTFT_BY_REQUEST)

        with bench.concluding(summary):
            for i, side in bench.in_turns("requests", sides, len(prompts)):
                reply = side.ask(prompts[i], answer)
                side.wait_for_warm_ahead(reply)
                got[side.name].append(reply)
                hits.add(side.name, i + 1, 100 * hit(reply))
                times.add(side.name, i + 1, 1e3 * reply.ttft)


def _read(file: Path) -> list[Messages]:
    """Read conversations of OpenAI messages: a JSON list of lists, or of objects that hold a
    list."""
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidOption(f"{file} is no file of conversations: {error}") from error
    if document and isinstance(document, list) and _is_message(document[0]):
        document = [document]
    found: list[Messages] = []
    for each in document if isinstance(document, list) else []:
        lists = each.values() if isinstance(each, dict) else [each]
        chat = next((v for v in lists if isinstance(v, list) and v and _is_message(v[0])), [])
        if chat:
            found.append([{k: v for k, v in m.items() if v is not None} for m in chat])
    if not any(True for _ in _prompts_in_turns(found)):
        raise InvalidOption(
            f"{file} holds no conversation with an answer: give a JSON list of lists of messages"
        )
    return found


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and "role" in value


def _prompts_in_turns(recorded: list[Messages]) -> Iterator[Messages]:
    """Give every prompt of every conversation: the first ones of all, then the second ones."""
    prompts = [
        [chat[:i] for i, m in enumerate(chat) if m["role"] == "assistant" and i]
        for chat in recorded
    ]
    for turn in range(max(map(len, prompts), default=0)):
        for each in prompts:
            if turn < len(each):
                yield each[turn]
