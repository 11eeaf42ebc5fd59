"""Pocket's training examples: conversations of any length, as tokens with a weight for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from rewarm.pocket import FOLDER

from .conversations import conversation
from .draw import Draw
from .skills import World

MIX = {
    "lookup": 0.22,
    "unknown": 0.12,
    "memory": 0.11,
    "arithmetic": 0.10,
    "tools": 0.33,
    "talk": 0.10,
    "tell": 0.02,
}
HISTORY_WEIGHT = 0.2
"""The weight of answers before the last user message, which appear there without thinking."""
WITHOUT_THINKING = 0.1
IN_QUESTION = 0.07
CAPITALS = 0.15


@dataclass(frozen=True)
class Example:
    tokens: np.ndarray[Any, np.dtype[np.int64]]
    weights: np.ndarray[Any, np.dtype[np.float32]]


class Reader:
    """Turns conversations into tokens, with the weight that each token has in training."""

    def __init__(self) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(str(FOLDER))
        self.assistant = self._ids("<|im_start|>assistant\n")
        self.user = self._ids("<|im_start|>user\n")
        self.end = self._ids("<|im_end|>")[0]
        self.thinking = self._ids("<think>\n")
        self.no_thinking = self._ids("<think>\n\n</think>\n\n")

    def pieces(self) -> list[str]:
        """List the tokens of the vocabulary that consist of letters only."""
        return [
            token for token in self.tokenizer.get_vocab() if token.isascii() and token.isalpha()
        ]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def read(self, world: World, skill: str, thinks: bool, bare: bool = False) -> Example:
        """Turn the conversation with one more question at its end into tokens.

        `bare` moves the system prompt's text to the beginning of the first question."""
        messages = world.messages() + world.ask(skill).messages()
        if bare and world.system:
            messages[1]["content"] = f"{world.system}\n\n{messages[1]['content']}"
            messages = messages[1:]
        if not thinks:
            messages = [
                {key: value for key, value in message.items() if key != "reasoning_content"}
                for message in messages
            ]
        text = self.tokenizer.apply_chat_template(messages, tools=world.schemas(), tokenize=False)
        tokens = np.array(self._ids(text), dtype=np.int64)
        weights = np.zeros(len(tokens), dtype=np.float32)
        last_user = _places(tokens, self.user)[-1]
        ends = np.flatnonzero(tokens == self.end)
        for place in _places(tokens, self.assistant):
            start = place + len(self.assistant)
            for opening in (self.no_thinking, self.thinking):
                if tokens[start : start + len(opening)].tolist() == opening:
                    start += len(opening)
                    break
            stop = ends[np.searchsorted(ends, start)] + 1
            weights[start:stop] = 1.0 if place > last_user else HISTORY_WEIGHT
        return Example(tokens, weights)


def _places(tokens: np.ndarray[Any, Any], wanted: list[int]) -> list[int]:
    found = np.flatnonzero(tokens[: len(tokens) - len(wanted) + 1] == wanted[0])
    return [int(i) for i in found if tokens[i : i + len(wanted)].tolist() == wanted]


def examples(
    seed: int, length: int, shortest: int = 0, mix: dict[str, float] = MIX
) -> Iterator[Example]:
    """Give an endless stream of examples of at most `length` tokens."""
    random = Random(seed)
    reader = Reader()
    draw = Draw(random, held_out=False, pieces=reader.pieces())
    while True:
        skill = random.choices(list(mix), list(mix.values()))[0]
        wanted = random.randint(shortest, length) if random.random() < 0.7 else length
        world = conversation(
            draw, skill, max(wanted, 64), far=draw.often(0.2), capitals=draw.often(CAPITALS)
        )
        example = reader.read(
            world, skill, thinks=not draw.often(WITHOUT_THINKING), bare=draw.often(IN_QUESTION)
        )
        if len(example.tokens) <= length:
            yield example
