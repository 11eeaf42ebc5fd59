"""Make chats for the corpus's templates, and load its tokenizers as mlx-lm does."""

from __future__ import annotations

import importlib
import json
from functools import cache
from typing import Any

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    TokenizerWrapper,
    _infer_tool_parser,
)

from rewarm.values import Message

from . import corpus
from .tiny import tiny_tokenizer

TOKENIZERS = ("chatml", "harmony", "tiny")

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "tide",
            "description": "When the tide is high.",
            "parameters": {
                "type": "object",
                "properties": {"port": {"type": "string", "description": "The port's name."}},
                "required": ["port"],
            },
        },
    }
]


@cache
def _wrapped(name: str) -> TokenizerWrapper:
    return tiny_tokenizer() if name == "tiny" else TokenizerWrapper(corpus.tokenizer(name))


def tokenizer_of(name: str, template: str | None = None) -> TokenizerWrapper:
    """Return one of TOKENIZERS with a named template or its own. All calls give the same object."""
    wrapper = _wrapped(name)
    if template is not None:
        wrapper.chat_template = corpus.template(template)
    elif name == "tiny":
        wrapper.chat_template = tiny_tokenizer().chat_template
    else:
        wrapper.chat_template = corpus.own_template(name)
    return wrapper


def system(text: str = "You keep the harbour. Answer briefly.") -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def call(port: str = "Ullapool", identity: str = "abcdefghi", text: str = "") -> Message:
    function = {"name": "tide", "arguments": json.dumps({"port": port})}
    return assistant(text, tool_calls=[{"id": identity, "type": "function", "function": function}])


def result(text: str, identity: str = "abcdefghi") -> Message:
    return {"role": "tool", "tool_call_id": identity, "content": text}


def chat_of(turns: int, *, thinking: bool = True) -> list[Message]:
    """Make a chat of so many turns that ends with a question."""
    more = {"reasoning_content": "Let me think about it."} if thinking else {}
    chat = [system("You keep the harbour. " * 20)]
    for turn in range(turns):
        chat.append(user(f"Question {turn}: " + "when is the tide? " * 20))
        chat.append(assistant(f"Answer {turn}: " + "at noon, roughly. " * 20, **more))
    return chat[:-1]


@cache
def answering(name: str) -> TokenizerWrapper:
    """Wrap a tokenizer with the detokenizer and tool parser that mlx-lm's `load` picks for it."""
    if name == "tiny":
        return tiny_tokenizer()
    tokenizer = corpus.tokenizer(name)
    parser = _infer_tool_parser(tokenizer)
    found = importlib.import_module(f"mlx_lm.tool_parsers.{parser}") if parser else None
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["<|endoftext|>"])]
    if name == "harmony":  # as GPT-OSS's generation_config.json says
        ends += tokenizer.convert_tokens_to_ids(["<|call|>"])
    return TokenizerWrapper(
        tokenizer,
        BPEStreamingDetokenizer,
        eos_token_ids=ends,
        tool_parser=found and found.parse_tool_call,
        tool_call_start=found and found.tool_call_start,
        tool_call_end=found and found.tool_call_end,
    )
