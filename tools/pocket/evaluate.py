"""An exam of Pocket on names and values that training never showed.

    python -m tools.pocket.evaluate

Questions go through an engine with its cache, several of them over one conversation."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rewarm import PrefixCache, load
from rewarm.engine import Engine, EngineParts
from rewarm.errors import InvalidOption, NotReady, RewarmError
from rewarm.generate.generation import Reading
from rewarm.generate.generator import Generator
from rewarm.generate.options import GenerationOptions
from rewarm.options import EngineOptions, ServerOptions
from rewarm.prompt.chat import chat_of
from rewarm.prompt.parse.answer import Answer
from rewarm.prompt.render.renderer import ChatRenderer
from rewarm.values import Message

from .conversations import conversation
from .draw import Draw
from .skills import Turn, World

ASKED = ("lookup", "memory", "arithmetic", "tools", "unknown", "talk")
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
PER_CONVERSATION = 5
AT_ONCE = 16
LONGEST_ANSWER = 256


@dataclass
class Question:
    """A turn that is asked at the end of a conversation."""

    world: World
    turn: Turn
    replies: list[Message] = field(default_factory=list)
    right: bool = False

    def messages(self) -> list[Message]:
        """Write the chat as a client sends it, with the replies that Pocket gave so far."""
        said = [*self.world.messages(), {"role": "user", "content": self.turn.question}]
        for step, reply in zip(self.turn.steps, self.replies, strict=False):
            said += [reply, {"role": "tool", "content": step.result}]
        return said

    def take(self, answer: Answer) -> bool:
        """Note an answer, and return whether another step of the turn is to be asked."""
        step = self.turn.steps[len(self.replies)]
        self.replies.append(answer.message())
        if step.call is None:
            self.right = answer.text.strip() == step.text and not answer.calls
        else:
            called = [call["function"] for call in answer.calls]
            wanted = {"name": step.call.name, "arguments": step.call.arguments}
            self.right = [{**c, "arguments": json.loads(c["arguments"])} for c in called] == [
                wanted
            ]
        return self.right and len(self.replies) < len(self.turn.steps)


class Examiner:
    """Asks an engine questions, many at a time."""

    def __init__(self, engine: Engine) -> None:
        self.generator = Generator(engine, ServerOptions(warm_ahead=False))

    def ask(self, questions: list[Question]) -> Iterator[Question]:
        """Ask all questions and yield each one when its answer is complete."""
        for at in range(0, len(questions), AT_ONCE):
            asked = [(q, self._start(q)) for q in questions[at : at + AT_ONCE]]
            while asked:
                again = []
                for question, generation in asked:
                    for _ in self.generator.events(generation):
                        pass
                    (run,) = generation.runs
                    if run.error is None and question.take(run.choices[0].answer):
                        again.append((question, self._start(question)))
                    else:
                        yield question
                asked = again

    def _start(self, question: Question) -> Reading:
        chat = chat_of(question.messages(), question.world.schemas())
        return self.generator.start(chat, GenerationOptions(max_tokens=LONGEST_ANSWER))


def questions(tokenizer: Any, skill: str, length: int, count: int, seed: int = 0) -> list[Question]:
    """Ask about the beginning of conversations of almost `length` tokens, at their end."""
    draw = Draw(Random(f"{seed} {skill} {length}"), held_out=True)
    renderer = ChatRenderer(tokenizer)
    found: list[Question] = []
    wanted = length * 9 // 10
    while len(found) < count:
        world = conversation(draw, skill, wanted, far=True)
        question = Question(world, world.ask(skill))
        size = len(renderer.render(question.messages(), world.schemas()).tokens)
        if size > length - 8 * (skill == "tools"):
            wanted = max(wanted * 95 // 100, length // 4)
            continue
        found.append(question)
        more = min(PER_CONVERSATION - 1, count - len(found)) if length > 256 else 0
        found += [Question(world, world.ask(skill)) for _ in range(more)]
    return found


def start(model: str) -> Engine:
    def loaded() -> EngineParts:
        found = load(model)
        return EngineParts(found.model, found.tokenizer, PrefixCache(found.model))

    engine = Engine(loaded, EngineOptions(max_batch=AT_ONCE))
    engine.start()
    if engine.wait() != "ready":
        raise NotReady(engine.detail)
    return engine


def main(
    model: Annotated[str, typer.Option(help="pocket, or a folder with another one.")] = "pocket",
    questions_: Annotated[
        int, typer.Option("--questions", min=1, help="Of each skill, at each length.")
    ] = 50,
    lengths: Annotated[str, typer.Option(help="Prompt tokens, separated by commas.")] = ",".join(
        map(str, LENGTHS)
    ),
    skills: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(ASKED),
    seed: Annotated[int, typer.Option(help="Another seed asks other questions.")] = 0,
    wrong: Annotated[int, typer.Option(help="Show so many wrong answers of each skill.")] = 0,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
) -> None:
    """Ask Pocket questions with one right answer, about names and values that are held out."""
    try:
        sizes = [int(length) for length in lengths.split(",")]
    except ValueError as error:
        raise InvalidOption(f"--lengths {lengths!r}: give numbers, such as 256,1024") from error
    asked_skills = skills.split(",")
    if strange := [skill for skill in asked_skills if skill not in ASKED]:
        raise InvalidOption(f"--skills {strange[0]!r}: give some of {', '.join(ASKED)}")
    console = Console()
    engine = start(model)
    examiner = Examiner(engine)
    right: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    shown: dict[str, int] = defaultdict(int)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
            task = progress.add_task("", total=len(sizes) * len(asked_skills) * questions_)
            for length in sizes:
                for skill in asked_skills:
                    progress.update(task, description=f"{skill}, {length:,} tokens")
                    asked = questions(engine.core.tokenizer, skill, length, questions_, seed)
                    for question in examiner.ask(asked):
                        right[skill][length] += question.right
                        if not question.right and shown[skill] < wrong:
                            shown[skill] += 1
                            _show(progress.console, question)
                        progress.advance(task)
    except KeyboardInterrupt:
        console.print("stopped; what was asked so far:")
    finally:
        engine.stop()
    table = Table("skill", *(f"{length:,}" for length in sizes), "all", box=None)
    for skill, by_length in right.items():
        shares = [f"{by_length[n] / questions_:.1%}" if n in by_length else "" for n in sizes]
        mean = sum(by_length.values()) / (questions_ * len(by_length))
        table.add_row(skill, *shares, f"{mean:.1%}")
    console.print(table)
    if out is not None:
        figures = {s: {n: c / questions_ for n, c in by.items()} for s, by in right.items()}
        out.write_text(json.dumps({"questions": questions_, "right": figures}, indent=2) + "\n")


def _show(console: Console, question: Question) -> None:
    console.print(f"[dim]{question.turn.skill}:[/] {question.turn.question}", highlight=False)
    for step, reply in zip(question.turn.steps, question.replies, strict=False):
        console.print(f"   wanted {step.call or step.text!r}", markup=False, highlight=False)
        console.print(f"   said   {reply}", markup=False, highlight=False)


if __name__ == "__main__":
    try:
        typer.run(main)
    except RewarmError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        sys.exit(2)
