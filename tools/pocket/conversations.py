"""Conversations of a given length, with room for one more question at their end."""

from __future__ import annotations

from .draw import Draw
from .skills import LINES, Turn, World

# Measured on words that training shows. Held-out words have more tokens.
TOKENS_PER_LINE = 16
TOKENS_PER_TOOL = 56
CHARACTERS_PER_TOKEN = 2.6


def conversation(
    draw: Draw, skill: str, tokens: int, far: bool = False, capitals: bool = False
) -> World:
    """Make a conversation of about `tokens` tokens that a question of this skill can follow.

    With `far`, the facts that the question needs are at its very beginning."""
    tools = draw.of((1, 1, 2, 3, 4)) if skill == "tools" else draw.of((0, 0, 0, 1, 3))
    tools = min(tools, tokens // TOKENS_PER_TOOL // 2)
    if skill == "tools":
        tools = max(tools, 1)
    room = tokens - TOKENS_PER_TOOL * tools - 60
    most = max(min(LINES, room // TOKENS_PER_LINE), 1)
    lines = most if far or draw.often(0.3) else draw.random.randint(0, most)
    if skill == "lookup":
        lines = max(lines, 1)
    wordy = draw.often(0.2) and not far
    prose = int(draw.random.random() * room / 40) if wordy else draw.of((0, 1, 1, 2, 3))
    prose = min(prose, max(room - lines * TOKENS_PER_LINE, 0) // 16)
    world = World.make(draw, lines, tools, prose, capitals)
    limit = room * CHARACTERS_PER_TOKEN
    size = len(world.system)
    if skill == "memory":
        size += _size(world.say("tell"))
    told = dict(world.told)
    while size < limit:
        kind = draw.of(("lookup", "lookup", "memory", "unknown", "talk", "arithmetic", "tools"))
        if far and kind == "memory":
            kind = "lookup"
        size += _size(world.say(kind))
    if far:
        world.told = told
    return world


def _size(turn: Turn) -> int:
    """Count the characters of a turn, with an estimate of those that the template adds."""
    steps = sum(
        len(step.text) + len(step.result or "") + 100 * bool(step.call) for step in turn.steps
    )
    return len(turn.question) + steps + 30
