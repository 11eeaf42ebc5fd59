"""Train two small tokenizers of the kinds that chat models have. They are always the same.

Both are BPE over bytes. Like those of real models they merge across the edges that a template
draws: a word with the space or the bracket before it, a full stop with the newlines after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.normalizers import NFC
from transformers import PreTrainedTokenizerFast

from . import agents

END = "<|endoftext|>"
SPECIAL = {
    "chatml": (END, "<|im_start|>", "<|im_end|>"),
    "harmony": (
        *("<|startoftext|>", END, "<|return|>", "<|constrain|>", "<|channel|>"),
        *("<|start|>", "<|end|>", "<|message|>", "<|call|>"),
    ),
}
ADDED = {
    "chatml": (
        *("<think>", "</think>", "<tool_call>", "</tool_call>"),
        *("<tool_response>", "</tool_response>"),
    ),
    "harmony": (),
}
"""Added tokens that are part of a model's answer, such as tags of thinking."""

SPLITS = {
    # A word includes one character before it, of any kind; a number is split into digits.
    "chatml": r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    # A word begins with its capitals; up to three digits are one token; a slash joins newlines.
    "harmony": r"[^\r\n\p{L}\p{N}]?\p{Lu}*[\p{Ll}\p{M}\p{Lo}]+|[^\r\n\p{L}\p{N}]?\p{Lu}+"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
SIZE = 2500
TEMPLATES = Path(__file__).parent / "templates"


def _texts() -> Iterator[str]:
    for conversation in agents.conversations(12):
        for message in conversation:
            yield message["content"] or "{}"
    yield from (path.read_text() for path in sorted(TEMPLATES.glob("*.jinja")))
    yield "The tide is high at noon.\n\nThank you.\nWell?\n\nYes, it is. \n" * 20
    yield "<tool_call>\n<function=tide>\n<parameter=port>\nAyr\n</parameter>\n" * 20
    yield "<turn:user>\nWell?</turn>\n<turn:model>\nYes.</turn>\n" * 20
    yield "system\nuser\nassistant\nassistant to=functions.tide commentary json analysis " * 20


@cache
def trained(name: str) -> PreTrainedTokenizerFast:
    """Train the tokenizer of this name, `chatml` or `harmony`, without a template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = NFC() if name == "chatml" else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLITS[name]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_special_tokens(list(SPECIAL[name]))
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED[name]])
    ends = {"chatml": "<|im_end|>", "harmony": "<|return|>"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=ends[name], pad_token=END)
    if name == "harmony":
        made.bos_token = "<|startoftext|>"
    return made
