"""Pocket's skills: questions with their right answers, for training and for the exam.

A `World` is the table, the tools and the memory of one conversation. Each skill makes a question
about them that has exactly one right answer, and the thinking that leads to it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from . import phrases, words
from .draw import Draw

NOTED = "Noted."
CANNOT = (
    "I cannot do that. I am Pocket, a very small model: I look up, remember, add, subtract and "
    "call tools."
)
HELLO = "Hello! I am Pocket. What can I look up for you?"
I_AM = "I am Pocket, a very small language model that comes with Rewarm."
I_CAN = (
    "I look up lines of a table, remember what you tell me, add and subtract numbers up to 999, "
    "and call tools. Nothing else."
)
WELCOME = "You are welcome."

LARGEST = 999
"""The largest number that a sum contains."""
LINES = 64
"""The largest number of lines in a table."""


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, str | int]


@dataclass(frozen=True)
class Step:
    """One message from Pocket, and the result of the tool that it calls."""

    thinking: str
    text: str
    call: Call | None = None
    result: str | None = None


@dataclass(frozen=True)
class Turn:
    skill: str
    question: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> str:
        return self.steps[-1].text

    def messages(self, steps: int | None = None) -> list[dict[str, Any]]:
        """Write the turn as a client sends it, with the first `steps` messages from Pocket."""
        said: list[dict[str, Any]] = [{"role": "user", "content": self.question}]
        for step in self.steps[:steps]:
            message: dict[str, Any] = {
                "role": "assistant",
                "content": step.text,
                "reasoning_content": step.thinking,
            }
            said.append(message)
            if step.call is not None:
                function = {"name": step.call.name, "arguments": step.call.arguments}
                message["tool_calls"] = [{"type": "function", "function": function}]
                said.append({"role": "tool", "content": step.result})
        return said


@dataclass(frozen=True)
class Tool:
    name: str
    action: str
    matter: str
    description: str | None
    parameters: dict[str, str]

    @property
    def words(self) -> str:
        """The words that its line in the prompt begins with: the subject, then the action."""
        return f"{self.matter} {self.action}"

    @property
    def needs(self) -> str:
        """The call with its parameters' types, as the template writes it in the tool's line."""
        return json.dumps({self.name: self.parameters}, ensure_ascii=False)

    def schema(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in self.parameters.items()},
            "required": list(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class _Request:
    """A user's request for a tool, and the text by which Pocket finds the tool."""

    text: str
    about: str
    """The words of the request that name the tool, as the tool's line has them."""
    line: str
    """The part of the tool's line that the thinking quotes: from those words on."""


@dataclass
class World:
    """One conversation: its table, tools and turns. It makes the next question."""

    draw: Draw
    table: dict[str, str] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)
    tools: list[Tool] = field(default_factory=list)
    system: str = ""
    capitals: bool = False
    """Lines begin with a capital letter, but questions name them without it."""
    turns: list[Turn] = field(default_factory=list)

    @classmethod
    def make(
        cls, draw: Draw, lines: int, tools: int = 0, prose: int = 1, capitals: bool = False
    ) -> World:
        world = cls(draw, capitals=capitals)
        while len(world.table) < lines:
            # A careless look-up confuses names that share words.
            near = bool(world.table) and draw.often(0.25)
            name = world._near(draw.of(list(world.table))) if near else draw.name()
            if name not in world.table:
                world.table[name] = draw.value()
        for _ in range(tools):
            world.tools.append(world._new_tool())
        bullet = "- " if draw.often(0.1) else ""
        rows = [bullet + world._line(name) for name in world.table]
        said = [draw.prose() for _ in range(prose)]
        cut = len(said) if draw.often(0.7) else draw.random.randint(0, len(said))
        gap = draw.of(("\n", "\n", "\n\n"))
        parts = (" ".join(said[:cut]), "\n".join(rows), " ".join(said[cut:]))
        world.system = gap.join(part for part in parts if part)
        return world

    def messages(self) -> list[dict[str, Any]]:
        said = [{"role": "system", "content": self.system}] if self.system else []
        return said + [message for turn in self.turns for message in turn.messages()]

    def schemas(self) -> list[dict[str, Any]] | None:
        return [tool.schema() for tool in self.tools] or None

    def ask(self, skill: str) -> Turn:
        """Make a question of this skill with its answer, without adding it to the conversation."""
        return SKILLS[skill](self)

    def say(self, skill: str) -> Turn:
        """Ask a question of this skill and add the turn to the conversation."""
        turn = self.ask(skill)
        self.turns.append(turn)
        return turn

    # Skills

    def look_up(self) -> Turn:
        if not self.table:
            return self.unknown()
        name = self.draw.of(list(self.table))
        thinking = f'The question is about "{name}". I find the line "{self._line(name)}".'
        return self._turn("lookup", self._about(name), thinking, self.table[name])

    def unknown(self) -> Turn:
        if self.draw.often(0.25):
            name = self._untold()
            asked = self.draw.filled(self.draw.of(phrases.RECALL), name)
            name = f"my {name}"
        else:
            name = self._absent()
            asked = self._about(name)
        thinking = f'The question is about "{name}". I find nothing about it.'
        return self._turn(
            "unknown", asked, thinking, f'I do not know: there is nothing about "{name}" here.'
        )

    def tell(self) -> Turn:
        if self.told and self.draw.often(0.15):
            name, phrase = self.draw.of(list(self.told)), self.draw.of(phrases.CHANGE)
        else:
            name, phrase = self._untold(), self.draw.of(phrases.TELL)
        value = self.draw.value()
        self.told[name] = value
        blanks = (name, value) if phrase.count("{}") == 2 else (name, name, value)
        thinking = f'The user tells me "my {name} is {value}".'
        return self._turn("tell", self.draw.filled(phrase, *blanks), thinking, NOTED)

    def recall(self) -> Turn:
        if not self.told:
            return self.tell()
        name, value = self.draw.of(list(self.told.items()))
        asked = self.draw.filled(self.draw.of(phrases.RECALL), name)
        thinking = (
            f'The question is about "my {name}". I find that the user said "my {name} is {value}".'
        )
        return self._turn("memory", asked, thinking, value)

    def sum(self) -> Turn:
        draw = self.draw
        a, b = draw.sum()
        if draw.often(0.5):
            asked = draw.of(phrases.SUMS["+"]).format(a, b)
            return self._turn("arithmetic", asked, *added(a, b))
        if draw.often(0.15):
            asked = draw.of(phrases.FROM).format(b, a)
        else:
            asked = draw.of(phrases.SUMS["-"]).format(a, b)
        return self._turn("arithmetic", asked, *subtracted(a, b))

    def use_tool(self) -> Turn:
        if not self.tools:
            return self.sum()
        draw = self.draw
        tool = draw.of(self.tools)
        arguments: dict[str, str | int] = {}
        for name, kind in tool.parameters.items():
            whole = kind == "integer"
            arguments[name] = int(draw.number()) if whole else self._argument()
        read = ", ".join(f"{name} is {value}" for name, value in arguments.items())
        request = self._request(tool, arguments)
        result, answer = self._result()
        first = Step(
            f'This is about "{request.about}". I find the tool {request.line}. '
            f"{read or 'It takes nothing'}.",
            "",
            Call(tool.name, arguments),
            result,
        )
        last = Step(f"The tool says: {answer}", answer)
        return Turn("tools", request.text, (first, last))

    def talk(self) -> Turn:
        draw = self.draw
        kind = draw.random.random()
        if kind < 0.2:
            asked = draw.phrase(phrases.GREETINGS)
            if draw.often(0.2):
                asked += f" {draw.word(words.PEOPLE)}"
            asked += draw.phrase(phrases.GREETING_ENDS)
            return self._turn("talk", asked, "The user greets me.", HELLO)
        if kind < 0.35:
            return self._turn("talk", draw.phrase(phrases.WHO), "The user asks who I am.", I_AM)
        if kind < 0.5:
            asked = draw.phrase(phrases.ABLE)
            return self._turn("talk", asked, "The user asks what I can do.", I_CAN)
        if kind < 0.6:
            return self._turn("talk", draw.phrase(phrases.THANKS), "The user thanks me.", WELCOME)
        if kind < 0.66:
            a, b = draw.random.randrange(1, 100), draw.random.randrange(1, 1000)
            asked = draw.of(phrases.BEYOND).format(a, b)
            if draw.often(0.3):
                asked = draw.of(phrases.TOO_LARGE).format(1000 + a * b, b)
        elif kind < 0.85:
            asked = draw.filled(draw.phrase(phrases.OTHER))
        elif kind < 0.9:
            asked = " ".join(draw.prose() for _ in range(draw.of((1, 2, 4))))
        else:
            asked = draw.filled(draw.of(phrases.OTHER_VERBS), draw.made_up())
            asked = asked[0].upper() + asked[1:]
        return self._turn("talk", asked, "This is nothing that I can do.", CANNOT)

    # How questions are worded

    def _turn(self, skill: str, question: str, thinking: str, answer: str) -> Turn:
        return Turn(skill, question, (Step(thinking, answer),))

    def _line(self, name: str) -> str:
        shown = name[0].upper() + name[1:] if self.capitals else name
        return f"{shown}: {self.table[name]}"

    def _about(self, name: str) -> str:
        before = self.draw.of(phrases.BEFORE) if self.draw.often(0.06) else ""
        return before + self.draw.filled(self.draw.of(phrases.ASK), name)

    def _near(self, name: str) -> str:
        """Find a name that shares words with the given one."""
        parts = name.split(" ")
        change = self.draw.random.randrange(3)
        if change == 0 and len(parts) > 1:
            parts.pop(self.draw.random.randrange(len(parts)))
        elif change == 1 and len(parts) < 3:
            parts.insert(self.draw.random.randint(0, len(parts)), self.draw.plain())
        else:
            parts[self.draw.random.randrange(len(parts))] = self.draw.plain()
        return " ".join(parts)

    def _absent(self) -> str:
        """Draw a name that is not in the table, but may look like a name that is."""
        while True:
            if self.table and self.draw.often(0.5):
                name = self._near(self.draw.of(list(self.table)))
            elif self.draw.often(0.2):
                place = self.draw.word(words.PLACES, words.THINGS)
                name = f"{self.draw.plain()} {self.draw.of(('of', 'in', 'for'))} {place}"
            else:
                name = self.draw.name()
            if name not in self.table and name not in self.told:
                return name

    def _untold(self) -> str:
        while True:
            name = self.draw.name()
            if name not in self.told and name not in self.table:
                return name

    def _new_tool(self) -> Tool:
        draw = self.draw
        while True:
            near = bool(self.tools) and draw.often(0.2)
            matter = draw.word(words.MATTERS) if draw.often(0.5) else draw.plain()
            if near:
                matter = draw.of(self.tools).matter
            if draw.seldom(0.4):
                action = draw.of(words.GETTING)
            else:
                action = draw.word(words.ACTIONS) if draw.often(0.5) else draw.plain()
            name = f"{action}_{matter}"
            if draw.often(0.1):
                name = action + matter.capitalize()
            is_new = all((tool.action, tool.matter) != (action, matter) for tool in self.tools)
            if is_new and split(name) == [action, matter]:
                break
        parameters: dict[str, str] = {}
        for _ in range(draw.of((0, 1, 1, 1, 2, 2, 2, 3))):
            field = draw.word(words.FIELDS) if draw.often(0.5) else draw.plain()
            parameters[field] = draw.of(("string", "string", "integer"))
        about = None
        if draw.often(0.6):
            whose = f" of a {next(iter(parameters))}" if parameters else ""
            about = draw.of(phrases.DESCRIPTIONS).format(action=action, matter=matter, whose=whose)
            about = about[0].upper() + about[1:]
        return Tool(name, action, matter, about, parameters)

    def _argument(self) -> str:
        if self.draw.seldom(0.1):
            return f"{self.draw.plain()} {self.draw.plain()}"
        kind = self.draw.random.random()
        if kind < 0.33:
            return self.draw.word(words.PLACES, words.PEOPLE)
        if kind < 0.5:
            return self.draw.made_up().capitalize()
        return self.draw.code() if kind < 0.61 else self.draw.plain()

    def _request(self, tool: Tool, arguments: dict[str, str | int]) -> _Request:
        draw = self.draw
        twins = sum(other.matter == tool.matter for other in self.tools) > 1
        pairs = list(arguments.items())
        draw.random.shuffle(pairs)
        values = {"tool": tool.name, "action": tool.action, "matter": tool.matter}
        if not pairs:
            options: tuple[str, ...] = phrases.WITH_NOTHING
        elif len(pairs) == 1 and draw.often(0.7):
            options = phrases.WITH_VALUE
            values["value"] = str(pairs[0][1])
        else:
            options = phrases.WITH_TOOL
            joint = draw.of((" ", " = ", ": "))
            said = [f"{name}{joint}{value}" for name, value in pairs]
            last = draw.of((" and ", ", "))
            values["arguments"] = (
                last.join((", ".join(said[:-1]), said[-1])) if len(said) > 1 else said[0]
            )
        while True:
            phrase = draw.of(options)
            named, acted = "{tool}" in phrase, "{action}" in phrase
            # A question without a verb can only mean a tool that gets something.
            if not (named or acted) and (twins or tool.action not in words.GETTING):
                continue
            asked = phrase.format(**values)
            if not phrase.startswith("{tool}") and (self.capitals or phrase[0] != "{"):
                asked = asked[0].upper() + asked[1:]
            if named:
                return _Request(asked, tool.name, tool.needs)
            line = f"{tool.words}: {tool.needs}"
            return _Request(asked, tool.words if acted else tool.matter, line)

    def _result(self) -> tuple[str, str]:
        """Draw the result of a tool, and Pocket's answer from it."""
        draw = self.draw
        if draw.often(0.5):
            said = draw.value() if draw.often(0.6) else f"{draw.value()}, {draw.value()}"
            return said, said
        fields: dict[str, str | int] = {}
        for _ in range(draw.of((1, 1, 2, 2, 3))):
            whole = draw.often(0.4)
            fields[draw.plain()] = int(draw.number()) if whole else draw.value()
        return json.dumps(fields), ", ".join(f"{name}: {value}" for name, value in fields.items())


def split(name: str) -> list[str]:
    """Split a tool's name into words as the template does."""
    pairs = pairwise(f" {name}")
    apart = "".join(f" {b}" if a.islower() and b.isupper() else b for a, b in pairs)
    return re.sub(r"[_.-]", " ", apart).lower().split()


def added(a: int, b: int) -> tuple[str, str]:
    """Write the thinking and the answer of a sum, column by column from the right."""
    steps, carry = [], 0
    for x, y in zip(reversed(f"{a:03}"), reversed(f"{b:03}"), strict=True):
        column = int(x) + int(y) + carry
        steps.append(f"{x} + {y} + {carry} = {column:02}")
        carry = column // 10
    return f"{a:03} + {b:03}: {', '.join(steps)}. That is {a + b}.", str(a + b)


def subtracted(a: int, b: int) -> tuple[str, str]:
    large, small = max(a, b), min(a, b)
    steps, borrowed = [], 0
    for x, y in zip(reversed(f"{large:03}"), reversed(f"{small:03}"), strict=True):
        column = int(x) - int(y) - borrowed
        borrows = int(column < 0)
        steps.append(f"{x} - {y} - {borrowed} = {column % 10} borrow {borrows}")
        borrowed = borrows
    order = f"{a:03} - {b:03}: " + (f"less than 0, so {large:03} - {small:03}: " if a < b else "")
    return f"{order}{', '.join(steps)}. That is {a - b}.", str(a - b)


SKILLS: dict[str, Callable[[World], Turn]] = {
    "lookup": World.look_up,
    "memory": World.recall,
    "arithmetic": World.sum,
    "tools": World.use_tool,
    "unknown": World.unknown,
    "talk": World.talk,
    "tell": World.tell,
}
