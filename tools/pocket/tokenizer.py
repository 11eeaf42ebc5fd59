"""Make Pocket's tokenizer: a byte-level BPE learned from its own training conversations.

    python -m tools.pocket.tokenizer

The tokenizer keeps words, digits and spaces apart, so that a name has the same tokens after a
newline in a table, inside a question and in quotation marks. No piece reaches across a piece of
Qwen's splitting, which transformers uses instead where a config says `qwen3_5`. So both give the
same tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rewarm.pocket import FOLDER

from . import words
from .draw import Draw
from .skills import SKILLS, World

SIZE = 1536
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
PIECES = r"[\p{L}\p{M}]+|\p{N}|[^\s\p{L}\p{M}\p{N}]+|\n+|\s"


def texts(worlds: int) -> Iterator[str]:
    for seed in range(worlds):
        draw = Draw(Random(seed), held_out=False)
        world = World.make(draw, lines=8, tools=draw.of((0, 1, 3)), prose=4)
        for _ in range(16):
            world.say(draw.of(list(SKILLS)))
        yield world.system + json.dumps(world.schemas())
        for message in world.messages():
            yield message.get("reasoning_content", "") + "\n" + str(message["content"])
            yield json.dumps(message.get("tool_calls", ""))
    yield "system user assistant tool " * 1000
    everyday = (*words.THINGS, *words.QUALITIES, *words.PEOPLE, *words.PLACES)
    for word in everyday:
        if not words.held_out(word):
            yield " ".join((word, word.capitalize()) * 8)


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(SPECIAL) - len(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(1500), trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(list(MARKS))
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
        "tool_parser_type": "json_tools",
    }
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens in {FOLDER}")


if __name__ == "__main__":
    main()
