"""Scenarios of many conversations, over HTTP as their clients would see them: burst and agent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rewarm.errors import InvalidOption

from .bench import NO_WARM, Bench, Messages, compare_ttft, in_turns, user
from .client import Answered, hit, shown
from .figures import Spread, amplification, ratios
from .sides import Side


def burst(bench: Bench, parallel: int, system: int, answer: int) -> None:
    """Requests at the same moment over one system prompt: cold, and other ones again."""
    sheet = bench.result.sheet(
        f"{parallel} at once over {system:,} tokens",
        *("round", "side", "hit", "prefilled", "amplification"),
        *("first TTFT ms", "last TTFT ms", "seconds"),
    )
    plot = bench.result.plot("A burst's seconds, cold and again", "burst", "s")
    seconds: dict[tuple[str, str], list[float]] = {}
    with (
        bench.sides(NO_WARM) as sides,
        bench.ending(lambda: _compare_bursts(bench, sides, seconds)),
        bench.steps("bursts", 2 * bench.rounds * len(sides)) as step,
    ):
        for i in range(2 * bench.rounds):
            again = bool(i % 2)
            if not again:
                shared = {"role": "system", "content": bench.text(system)}
            chats = [[shared, user(bench.text(20))] for _ in range(parallel)]
            name = "again" if again else "cold"
            for side in in_turns(sides, i // 2):
                replies = _at_once(side, chats, answer)
                took = max(r.total for r in replies)
                seconds.setdefault((side.name, name), []).append(took)
                plot.add(side.name, i + 1, took)
                prefilled = sum(r.prefilled for r in replies)
                known = all(r.counted for r in replies)
                # Again, the system prompt is known, and no trie of these prompts alone.
                amplified = known and not again
                prompts = [bench.tokens(c) for c in chats] if amplified else []
                sheet.add(
                    f"{i // 2 + 1} {name}",
                    side.name,
                    shown(hit(*replies)),
                    f"{prefilled:,}" if known else "-",
                    f"{amplification(prefilled, prompts):.3f}" if amplified else "",
                    f"{1e3 * min(r.ttft for r in replies):.0f}",
                    f"{1e3 * max(r.ttft for r in replies):.0f}",
                    f"{took:.2f}",
                )
                step()


def _at_once(side: Side, chats: list[Messages], answer: int) -> list[Answered]:
    pool = ThreadPoolExecutor(len(chats))
    try:
        return list(pool.map(lambda chat: side.ask(chat, answer), chats))
    finally:
        # After Ctrl-C nobody waits for the answers: they end with their server.
        pool.shutdown(wait=False, cancel_futures=True)


def _compare_bursts(
    bench: Bench, sides: list[Side], seconds: dict[tuple[str, str], list[float]]
) -> None:
    ours = sides[0].name
    for side, name in seconds:
        if side != ours and (ours, name) in seconds:
            bench.result.figures[f"{name}: {side} takes so many times longer"] = str(
                ratios(seconds[(ours, name)], seconds[(side, name)])
            )


def agent(bench: Bench, name: str, recorded: list[Messages], answer: int) -> None:
    """Recorded tool loops, each request with the recorded history, taking turns."""
    sheet = bench.result.sheet(
        f"{len(recorded)} conversations of {name}",
        *("side", "requests", "prompt tokens", "hit", "amplification", "TTFT ms", "held MB"),
    )
    hits = bench.result.plot("Hit by request", "request", "%")
    times = bench.result.plot("Time to the first token by request", "request", "ms")
    prompts = list(_taking_turns(recorded))
    with bench.sides((), NO_WARM) as sides:
        got: dict[str, list[Answered]] = {side.name: [] for side in sides}

        def whole() -> None:
            for side in sides:
                replies = got[side.name]
                if not replies:
                    continue
                tokens = [bench.tokens(messages) for messages in prompts[: len(replies)]]
                prefilled = sum(r.prefilled for r in replies)
                counted = all(r.counted for r in replies)
                held = side.held()
                sheet.add(
                    side.name,
                    len(replies),
                    f"{sum(r.prompt for r in replies):,}",
                    shown(hit(*replies)),
                    f"{amplification(prefilled, tokens):.3f}" if counted else "-",
                    f"{1e3 * Spread.of(r.ttft for r in replies).median:.0f}",
                    "-" if held is None else f"{held / 1e6:.1f}",
                )
            compare_ttft(bench, [(side, got[side.name]) for side in sides])

        with bench.ending(whole), bench.steps("requests", len(prompts) * len(sides)) as step:
            for i, messages in enumerate(prompts):
                for side in in_turns(sides, i):
                    reply = side.ask(messages, answer)
                    side.settle(reply)
                    got[side.name].append(reply)
                    hits.add(side.name, i + 1, 100 * hit(reply))
                    times.add(side.name, i + 1, 1e3 * reply.ttft)
                    step()


def conversations(file: Path) -> list[Messages]:
    """Lists of OpenAI messages: a JSON list of them, or of objects that hold one."""
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidOption(f"{file} is no file of conversations: {error}") from error
    if document and isinstance(document, list) and _is_message(document[0]):
        document = [document]
    found: list[Messages] = []
    for each in document if isinstance(document, list) else []:
        lists = each.values() if isinstance(each, dict) else [each]
        held = next((v for v in lists if isinstance(v, list) and v and _is_message(v[0])), [])
        if held:
            found.append([{k: v for k, v in m.items() if v is not None} for m in held])
    if not any(True for _ in _taking_turns(found)):
        raise InvalidOption(
            f"{file} holds no conversation with an answer: give a JSON list of lists of messages"
        )
    return found


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and "role" in value


def _taking_turns(recorded: list[Messages]) -> Iterator[Messages]:
    """Every prompt of every conversation; the conversations take turns."""
    prompts = [
        [chat[:i] for i, m in enumerate(chat) if m["role"] == "assistant" and i]
        for chat in recorded
    ]
    for turn in range(max(map(len, prompts), default=0)):
        for each in prompts:
            if turn < len(each):
                yield each[turn]
