"""The same inputs, recorded or published: files that lie beside the repository."""

from __future__ import annotations

import gzip
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.sets import FOLDER, shared

TOKENIZERS = {"chatml": "qwen3.5", "harmony": "gpt-oss"}


@cache
def conversations() -> list[list[dict[str, Any]]]:
    found = json.loads(shared("traces/tau-bench/gpt-4o-airline.json").read_text())
    return [each["traj"] for each in found]


def template_names() -> list[str]:
    root = FOLDER / "templates"
    return sorted(str(path.relative_to(root)) for path in root.glob("*/*.jinja"))


def template(name: str) -> str:
    return shared(f"templates/{name}").read_text()


def own_template(tokenizer: str) -> str:
    return shared(f"tokenizers/{TOKENIZERS[tokenizer]}/chat_template.jinja").read_text()


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Load a tokenizer as its model's authors made it."""
    folder = shared(f"tokenizers/{TOKENIZERS[name]}")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    options = {k: config[k] for k in ("bos_token", "eos_token", "pad_token") if config.get(k)}
    packed = folder / "tokenizer.json.gz"
    if not packed.exists():
        file = str(folder / "tokenizer.json")
        return PreTrainedTokenizerFast(tokenizer_file=file, **options)
    with tempfile.NamedTemporaryFile(suffix=".json") as unpacked:
        unpacked.write(gzip.decompress(packed.read_bytes()))
        unpacked.flush()
        return PreTrainedTokenizerFast(tokenizer_file=unpacked.name, **options)


def sessions() -> list[Path]:
    """Take six of the sixty sessions of coding agents."""
    return sorted(shared("traces/claude-code").glob("*.json.gz"))[1::10]
