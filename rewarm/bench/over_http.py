"""Scenarios that run over HTTP, as a client would see them: chat, burst, agent, branch, restart."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rewarm.errors import InvalidOption

from .bench import Bench, Messages
from .client import Answered, ask
from .figures import Spread, amplification, ratios
from .sides import Side, running

SHOWN_TURNS = (1, 5, 10, 20, 30, 40)
NO_WARM = ("--no-warm-ahead",)


def chat(bench: Bench, turns: int, answer: int, memory: str | None = None) -> None:
    """A chat that goes on; every turn sends the whole history again. `memory`: another Rewarm with
    just this budget beside the others."""
    options: list[Sequence[str]] = [(), NO_WARM]
    if memory is not None:
        options.append((*NO_WARM, "--memory", memory))
    questions = [bench.text(24) for _ in range(turns)]
    system = {"role": "system", "content": bench.text(200)}
    sheet = bench.result.sheet(
        f"{turns} turns of {answer} tokens",
        "turn",
        "side",
        "prompt",
        "hit",
        "best",
        "TTFT ms",
        "held MB",
    )
    hits = bench.result.plot("Hit by turn", "turn", "%")
    first = bench.result.plot("Time to the first token by turn", "turn", "ms")
    held = bench.result.plot("Bytes held by turn", "turn", "MB")
    with bench.sides(*options) as sides, bench.steps("turns", turns * len(sides)) as step:
        said: dict[str, Messages] = {side.name: [system] for side in sides}
        got: dict[str, list[Answered]] = {side.name: [] for side in sides}
        before: dict[str, list[int]] = {side.name: [] for side in sides}
        for turn in range(turns):
            for side in _in_turns(sides, turn):
                history = said[side.name]
                history.append({"role": "user", "content": questions[turn]})
                endings = bench.endings(answer)
                reply = ask(side.url, history, 4 * answer if endings else answer, endings)
                history.append(reply.message)
                got[side.name].append(reply)
                side.settle()
                asked = bench.tokens(history[:-1])
                best = _common(asked, before[side.name]) / len(asked)
                before[side.name] = asked
                nbytes = side.held() or 0
                hits.add(side.name, turn + 1, 100 * reply.hit)
                first.add(side.name, turn + 1, 1e3 * reply.ttft)
                held.add(side.name, turn + 1, nbytes / 1e6)
                if turn + 1 in SHOWN_TURNS or turn + 1 == turns:
                    sheet.add(
                        turn + 1,
                        side.name,
                        reply.prompt,
                        f"{reply.hit:.1%}",
                        f"{best:.1%}",
                        f"{1e3 * reply.ttft:.0f}",
                        f"{nbytes / 1e6:.2f}",
                    )
                step()
        total = bench.result.sheet(
            "all turns", "side", "tokens skipped", "prefill s", "generation s", "ahead of requests"
        )
        for side in sides:
            replies = got[side.name]
            prompt = sum(r.prompt for r in replies)
            total.add(
                side.name,
                f"{sum(r.cached for r in replies) / prompt:.1%}" if prompt else "-",
                f"{sum(r.ttft for r in replies):.2f}",
                f"{sum(r.total - r.ttft for r in replies):.2f}",
                f"{side.warm_tokens():,}",
            )
        _compare_ttft(bench, got, sides)


def burst(bench: Bench, parallel: int, system: int, answer: int) -> None:
    """Requests at the same moment over one system prompt: cold, and other ones again."""
    sheet = bench.result.sheet(
        f"{parallel} at once over {system:,} tokens",
        *("round", "side", "hit", "prefilled", "amplification"),
        *("first TTFT ms", "last TTFT ms", "seconds"),
    )
    seconds: dict[tuple[str, str], list[float]] = {}
    with (
        bench.sides(NO_WARM) as sides,
        bench.steps("bursts", 2 * bench.rounds * len(sides)) as step,
    ):
        for i in range(bench.rounds):
            shared = {"role": "system", "content": bench.text(system)}
            for again in (False, True):
                chats = [
                    [shared, {"role": "user", "content": bench.text(20)}] for _ in range(parallel)
                ]
                for side in _in_turns(sides, i):
                    with ThreadPoolExecutor(parallel) as pool:
                        replies = list(pool.map(lambda c, s=side: ask(s.url, c, answer), chats))
                    name = "again" if again else "cold"
                    prompts = [bench.tokens(c) for c in chats]
                    took = max(r.total for r in replies)
                    seconds.setdefault((side.name, name), []).append(took)
                    prefilled = sum(r.prefilled for r in replies)
                    sheet.add(
                        f"{i + 1} {name}",
                        side.name,
                        f"{sum(r.cached for r in replies) / sum(r.prompt for r in replies):.1%}",
                        f"{prefilled:,}",
                        # Again, the system prompt is known, and no trie of these prompts alone.
                        "" if again else f"{amplification(prefilled, prompts):.3f}",
                        f"{1e3 * min(r.ttft for r in replies):.0f}",
                        f"{1e3 * max(r.ttft for r in replies):.0f}",
                        f"{took:.2f}",
                    )
                    step()
    for peer in [s for s in sides if not s.ours]:
        for name in ("cold", "again"):
            ours = seconds[(sides[0].name, name)]
            bench.result.figures[f"{name}: {peer.name} takes so many times longer"] = str(
                ratios(ours, seconds[(peer.name, name)])
            )


def agent(bench: Bench, file: Path, conversations: int, answer: int) -> None:
    """Recorded tool loops, each request with the recorded history, taking turns."""
    recorded = _conversations(file)[:conversations]
    sheet = bench.result.sheet(
        f"{len(recorded)} conversations of {file.name}",
        *("side", "requests", "prompt tokens", "hit", "amplification", "TTFT ms", "held MB"),
    )
    steps = list(_taking_turns(recorded))
    with (
        bench.sides((), NO_WARM) as sides,
        bench.steps("requests", len(steps) * len(sides)) as step,
    ):
        got: dict[str, list[Answered]] = {side.name: [] for side in sides}
        for i, messages in enumerate(steps):
            for side in _in_turns(sides, i):
                got[side.name].append(ask(side.url, messages, answer))
                side.settle()
                step()
        prompts = [bench.tokens(messages) for messages in steps]
        for side in sides:
            replies = got[side.name]
            prompt = sum(r.prompt for r in replies)
            sheet.add(
                side.name,
                len(replies),
                f"{prompt:,}",
                f"{sum(r.cached for r in replies) / prompt:.1%}",
                f"{amplification(sum(r.prefilled for r in replies), prompts):.3f}",
                f"{1e3 * Spread.of(r.ttft for r in replies).median:.0f}",
                f"{(side.held() or 0) / 1e6:.1f}",
            )
        _compare_ttft(bench, got, sides)


def branch(bench: Bench, turns: int, answer: int) -> None:
    """A chat, then edits of its earlier turns, other last questions, and the last one again."""
    sheet = bench.result.sheet(
        f"after {turns} turns", "what", "side", "prompt", "hit", "best", "TTFT ms"
    )
    with bench.sides(NO_WARM) as sides, bench.steps("requests", (turns + 5) * len(sides)) as step:
        system = {"role": "system", "content": bench.text(200)}
        questions = [bench.text(30) for _ in range(turns)]
        others = [bench.text(30) for _ in range(4)]
        for side in sides:
            history: Messages = [system]
            asked: list[list[int]] = []
            for turn in range(turns):
                history.append({"role": "user", "content": questions[turn]})
                reply = ask(side.url, history, answer)
                asked.append(bench.tokens(history))
                _branch_row(bench, sheet, f"turn {turn + 1}", side, reply, asked)
                history.append(reply.message)
                step()
            third = 1 + 2 * (turns // 3)
            last = len(history) - 2
            forks = {
                "the last question again": history[: last + 1],
                "another last question": [*history[:last], _user(others[0])],
                f"turn {turns // 3 + 1} edited": [*history[:third], _user(others[1])],
                f"turn {turns // 3 + 1} edited again": [*history[:third], _user(others[2])],
                "another first question": [system, _user(others[3])],
            }
            for name, messages in forks.items():
                reply = ask(side.url, messages, answer)
                asked.append(bench.tokens(messages))
                _branch_row(bench, sheet, name, side, reply, asked)
                step()


def restart(bench: Bench, turns: int, answer: int) -> None:
    """The same chat over a restart, with the disk tier."""
    sheet = bench.result.sheet(
        f"{turns} turns, a restart, and the next", "what", "prompt", "hit", "TTFT ms"
    )
    history: Messages = [{"role": "system", "content": bench.text(400)}]
    with tempfile.TemporaryDirectory(prefix="rewarm-bench-") as disk:
        options = ("--disk", disk, *NO_WARM)
        with bench.steps("turns", turns + 2) as step:
            with running("rewarm", bench.place, options) as side:
                for turn in range(turns):
                    history.append(_user(bench.text(30)))
                    reply = ask(side.url, history, answer)
                    history.append(reply.message)
                    _restart_row(sheet, f"turn {turn + 1}", reply)
                    step()
            history.append(_user(bench.text(30)))
            with running("rewarm", bench.place, options) as side:
                warm = ask(side.url, history, answer)
                _restart_row(sheet, "after the restart, with the disk", warm)
                step()
            with running("rewarm", bench.place, NO_WARM) as side:
                cold = ask(side.url, history, answer)
                _restart_row(sheet, "after a restart, without", cold)
                step()
    bench.result.figures["TTFT after the restart"] = f"{cold.ttft / warm.ttft:.2f} times less"


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _in_turns(sides: Sequence[Side], i: int) -> list[Side]:
    """Another one first each time: what disturbs the machine disturbs all of them."""
    at = i % len(sides)
    return [*sides[at:], *sides[:at]]


def _compare_ttft(bench: Bench, got: dict[str, list[Answered]], sides: Sequence[Side]) -> None:
    for peer in [s for s in sides if not s.ours]:
        for side in [s for s in sides if s.ours]:
            found = ratios([r.ttft for r in got[side.name]], [r.ttft for r in got[peer.name]])
            bench.result.figures[f"TTFT: {peer.name} over {side.name}, by request"] = str(found)


def _branch_row(
    bench: Bench, sheet: Any, name: str, side: Side, reply: Answered, asked: list[list[int]]
) -> None:
    # What no cache can beat: the longest beginning that any earlier prompt had too.
    *earlier, prompt = asked
    best = max((_common(prompt, p) for p in earlier), default=0)
    sheet.add(
        name,
        side.name,
        reply.prompt,
        f"{reply.hit:.1%}",
        f"{min(best, len(prompt) - 1) / len(prompt):.1%}",
        f"{1e3 * reply.ttft:.0f}",
    )


def _restart_row(sheet: Any, name: str, reply: Answered) -> None:
    sheet.add(name, reply.prompt, f"{reply.hit:.1%}", f"{1e3 * reply.ttft:.0f}")


def _common(a: list[int], b: list[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def _conversations(file: Path) -> list[Messages]:
    """Lists of OpenAI messages: a JSON list of them, or of objects that hold one."""
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidOption(f"{file} is no file of conversations: {error}") from error
    if document and isinstance(document[0], dict) and "role" in document[0]:
        document = [document]
    found: list[Messages] = []
    for each in document:
        held = (
            each
            if isinstance(each, list)
            else next(
                (v for v in each.values() if isinstance(v, list) and v and "role" in v[0]), []
            )
        )
        found.append([{k: v for k, v in m.items() if v is not None} for m in held])
    return found


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
