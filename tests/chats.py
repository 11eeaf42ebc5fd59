"""Real tokenizers and templates, and chats to put through them."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    TokenizerWrapper,
    _infer_tool_parser,
)
from transformers import PreTrainedTokenizerFast

from rewarm.values import Message

from .support import shared
from .tiny import tiny_tokenizer

TOKENIZERS = ("qwen3.5", "gpt-oss", "tiny")

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


def template_names() -> list[str]:
    root = Path(os.environ.get("REWARM_SHARED", Path(__file__).parents[2] / "shared"))
    return sorted(str(p.relative_to(root / "templates")) for p in root.glob("templates/*/*.jinja"))


@cache
def fast(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer as its model's authors made it, with its own template."""
    folder = shared(f"tokenizers/{name}")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    options = {k: config[k] for k in ("bos_token", "eos_token", "pad_token") if config.get(k)}
    packed = folder / "tokenizer.json.gz"
    if packed.exists():
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            file.write(gzip.decompress(packed.read_bytes()))
            file.flush()
            made = PreTrainedTokenizerFast(tokenizer_file=file.name, **options)
    else:
        made = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **options)
    made.chat_template = (folder / "chat_template.jinja").read_text()
    return made


@cache
def _wrapped(name: str) -> TokenizerWrapper:
    return tiny_tokenizer() if name == "tiny" else TokenizerWrapper(fast(name))


def tokenizer_of(name: str, template: str | None = None) -> TokenizerWrapper:
    """One of TOKENIZERS, with a template by name or with its own. The last call counts for all."""
    wrapper = _wrapped(name)
    if template is not None:
        wrapper.chat_template = shared(f"templates/{template}").read_text()
    elif name == "tiny":
        wrapper.chat_template = tiny_tokenizer().chat_template
    else:
        wrapper.chat_template = (shared(f"tokenizers/{name}") / "chat_template.jinja").read_text()
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


@cache
def answering(name: str) -> TokenizerWrapper:
    """A tokenizer with the detokenizer and the tool parser that mlx-lm's `load` picks for it."""
    if name == "tiny":
        return tiny_tokenizer()
    tokenizer = fast(name)
    tokenizer.chat_template = (shared(f"tokenizers/{name}") / "chat_template.jinja").read_text()
    parser = _infer_tool_parser(tokenizer)
    found = importlib.import_module(f"mlx_lm.tool_parsers.{parser}") if parser else None
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["<|endoftext|>"])]
    if name == "gpt-oss":  # as its generation_config.json says
        ends += tokenizer.convert_tokens_to_ids(["<|call|>"])
    return TokenizerWrapper(
        tokenizer,
        BPEStreamingDetokenizer,
        eos_token_ids=ends,
        tool_parser=found and found.parse_tool_call,
        tool_call_start=found and found.tool_call_start,
        tool_call_end=found and found.tool_call_end,
    )
