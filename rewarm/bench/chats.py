"""The scenarios `chat`, `branch` and `restart`: one chat over HTTP, as its client sees it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any

import typer

from .bench import NO_WARM, TTFT_BY_REQUEST, Bench, Messages, system, user
from .client import Answered, hit
from .figures import common
from .scenario import Answer, SystemLength, Turns, at_least, scenario
from .sides import Side, other, rewarm

SHOWN_TURNS = (1, 5, 10, 20, 30, 40)


class Talk:
    """The chat of one side."""

    def __init__(self, bench: Bench, side: Side, *messages: dict[str, Any]) -> None:
        self.bench, self.side = bench, side
        self.history: Messages = list(messages)
        self.replies: list[Answered] = []
        self.prompts: list[list[int]] = []
        """The prompts so far, as tokens."""

    def ask(self, messages: Messages, answer: int, *, ends: bool = False) -> Answered:
        """Ask without changing the history. With `ends` the answer ends by itself, or is cut."""
        endings = self.bench.ending_fields(answer) if ends else {}
        reply = self.side.ask(messages, 4 * answer if endings else answer, endings)
        self.side.wait_for_warm_ahead(reply)
        self.replies.append(reply)
        self.prompts.append(self.bench.tokens(messages))
        return reply

    def say(self, question: str, answer: int, *, ends: bool = False) -> Answered:
        self.history.append(user(question))
        reply = self.ask(self.history, answer, ends=ends)
        self.history.append(reply.message)
        return reply

    @property
    def best(self) -> float:
        """The best hit of the last prompt for a cache that knows prompts only: the share of its
        longest beginning that an earlier prompt had too."""
        *earlier, prompt = self.prompts
        shared = max((common(prompt, p) for p in earlier), default=0)
        return min(shared, len(prompt) - 1) / len(prompt)


@scenario("model", "peer")
def chat(
    bench: Bench,
    turns: Turns = 40,
    answer: Answer = 64,
    shared: SystemLength = 200,
    memory: Annotated[
        str | None, typer.Option(help="Beside it, a Rewarm with this budget, such as 4MB.")
    ] = None,
) -> None:
    """A long chat: hits, times and bytes by turn, with and without warm-ahead."""
    options: list[Sequence[str]] = [(), NO_WARM]
    if memory is not None:
        options.append((*NO_WARM, "--memory", memory))
    questions = [bench.question(24) for _ in range(turns)]
    first = system(bench.text(shared))
    columns = ("turn", "side", "prompt", "prefilled", "hit:.1%", "best:.1%", "TTFT ms:.0f")
    sheet = bench.result.sheet(f"{turns} turns of {answer} tokens", *columns, "held MB:.2f")
    hits = bench.result.plot("Hit by turn", "turn", "%")
    times = bench.result.plot("Time to the first token by turn", "turn", "ms")
    held = bench.result.plot("Bytes held by turn", "turn", "MB")
    with bench.sides(*options) as sides:
        talks = [Talk(bench, side, first) for side in sides]
        with bench.concluding(lambda: _whole_chats(bench, talks)):
            for turn, talk in bench.in_turns("turns", talks, turns):
                reply, name = talk.say(questions[turn], answer, ends=True), talk.side.name
                megabytes, ttft = talk.side.held_bytes() / 1e6, 1e3 * reply.ttft
                facts = (name, reply.prompt, reply.prefilled, hit(reply), talk.best)
                hits.add(name, turn + 1, 100 * hit(reply))
                times.add(name, turn + 1, ttft)
                held.add(name, turn + 1, megabytes)
                if turn + 1 in SHOWN_TURNS or turn + 1 == turns:
                    sheet.add(turn + 1, *facts, ttft, megabytes)


def _whole_chats(bench: Bench, talks: list[Talk]) -> None:
    sheet = bench.result.sheet(
        "all turns",
        *("side", "tokens skipped:.1%", "prefill s:.2f", "generation s:.2f"),
        "ahead of requests:,",
    )
    for talk in talks:
        prefill = sum(r.ttft for r in talk.replies)
        generation = sum(r.total for r in talk.replies) - prefill
        ahead = talk.side.warm_tokens()
        sheet.add(talk.side.name, hit(*talk.replies), prefill, generation, ahead)
    _compare(bench, talks)


def _compare(bench: Bench, talks: list[Talk]) -> None:
    bench.compare([(talk.side, [r.ttft for r in talk.replies]) for talk in talks], TTFT_BY_REQUEST)


@scenario("model", "peer")
def branch(
    bench: Bench, turns: Annotated[int, at_least(3, "Turns of the chat.")] = 6, answer: Answer = 24
) -> None:
    """Edits and forks at earlier turns of a chat."""
    sheet = bench.result.sheet(
        f"after {turns} turns",
        *("what", "side", "prompt", "hit:.1%", "best:.1%", "TTFT ms:.0f"),
    )
    plot = bench.result.plot("Hit by request: a chat, then its forks", "request", "%")
    first = system(bench.text(200))
    questions = [bench.question(30) for _ in range(turns)]
    others = [bench.question(30) for _ in range(4)]
    edited = turns // 3
    # A fork keeps some turns of the chat, and asks another question after them.
    forks = [
        ("the last question again", turns - 1, questions[-1]),
        ("another last question", turns - 1, others[0]),
        (f"turn {edited + 1} edited", edited, others[1]),
        (f"turn {edited + 1} edited again", edited, others[2]),
        ("another first question", 0, others[3]),
    ]
    with bench.sides(NO_WARM) as sides:
        talks = [Talk(bench, side, first) for side in sides]

        def row(talk: Talk, name: str, reply: Answered) -> None:
            plot.add(talk.side.name, len(talk.replies), 100 * hit(reply))
            ttft = 1e3 * reply.ttft
            sheet.add(name, talk.side.name, reply.prompt, hit(reply), talk.best, ttft)

        with bench.concluding(lambda: _compare(bench, talks)):
            for turn, talk in bench.in_turns("turns", talks, turns):
                row(talk, f"turn {turn + 1}", talk.say(questions[turn], answer))
            for i, talk in bench.in_turns("forks", talks, len(forks)):
                name, kept, question = forks[i]
                messages = [*talk.history[: 1 + 2 * kept], user(question)]
                row(talk, name, talk.ask(messages, answer))


@scenario("model", "peer")
def restart(bench: Bench, turns: Turns = 6, answer: Answer = 24) -> None:
    """The same chat over a restart, with the disk tier."""
    sheet = bench.result.sheet(
        f"{turns} turns, a restart, and the next",
        *("what", "side", "prompt", "hit:.1%", "TTFT ms:.0f"),
    )
    plot = bench.result.plot("Hit by turn, the last one after a restart", "turn", "%")
    first = system(bench.text(400))
    questions = [bench.question(30) for _ in range(turns + 1)]
    after: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory(prefix="rewarm-bench-") as disk,
        bench.steps("turns", (turns + 1) * (3 if bench.peer else 2)) as step,
    ):
        start: dict[str, Callable[[], AbstractContextManager[Side]]] = {
            "with a disk": lambda: rewarm(bench.location, ("--disk", disk, *NO_WARM)),
            "without": lambda: rewarm(bench.location, NO_WARM),
        }
        if bench.peer:
            start[bench.peer] = lambda: other(bench.peer or "", bench.location)
        for name, running in start.items():
            history: Messages = [first]
            for life in (questions[:turns], questions[turns:]):
                with running() as side:
                    side.wait_until_ready(bench.location)
                    for question in life:
                        history.append(user(question))
                        reply = side.ask(history, answer)
                        turn = len(history) // 2
                        what = f"turn {turn}" if turn <= turns else "after the restart"
                        sheet.add(what, name, reply.prompt, hit(reply), 1e3 * reply.ttft)
                        plot.add(name, turn, 100 * hit(reply))
                        history.append(reply.message)
                        after[name] = reply.ttft
                        step()
    warm = after.pop("with a disk")
    for name, cold in after.items():
        bench.result.figures[f"TTFT after the restart, {name} over with a disk"] = (
            f"{cold / warm:.2f}"
        )
