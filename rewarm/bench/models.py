"""`--model` for the bench: anything that Rewarm loads, and `random:ARCH`."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import hf_repo_to_path, load_tokenizer
from transformers import AutoTokenizer, PreTrainedConfig

from rewarm import pocket

from .archs import build, config, parameters, vocabulary

RANDOM = "random:"
SHARD = 2 << 30
"""Bytes in one file of weights."""


@contextmanager
def placed(model: str) -> Iterator[str]:
    """A model as servers take it: a folder, or a Hugging Face id. What is made here goes again."""
    if model.startswith(RANDOM):
        with tempfile.TemporaryDirectory(prefix="rewarm-bench-") as folder:
            _write_random(model.removeprefix(RANDOM), Path(folder))
            yield folder
    elif model == pocket.BUILT_IN:
        with tempfile.TemporaryDirectory(prefix="rewarm-bench-") as folder:
            _write_pocket(Path(folder))
            yield folder
    else:
        yield model


def _write_pocket(folder: Path) -> None:
    """As Rewarm runs it, for any server: in full precision. In half of it, MLX's CPU backend takes
    six times as long for a prompt."""
    for path in pocket.FOLDER.iterdir():
        if path.suffix == ".safetensors":
            weights = cast("dict[str, mx.array]", mx.load(str(path)))
            full = {name: value.astype(mx.float32) for name, value in weights.items()}
            mx.save_safetensors(str(folder / path.name), full, {"format": "mlx"})
        elif path.is_file():
            shutil.copy(path, folder)


def tokenizer_of(folder: str) -> TokenizerWrapper:
    """The tokenizer alone: prompts are counted without a model."""
    path = Path(folder)
    if path.is_dir():
        return TokenizerWrapper(AutoTokenizer.from_pretrained(path, config=PreTrainedConfig()))
    return TokenizerWrapper(load_tokenizer(hf_repo_to_path(folder))._tokenizer)


def dtype() -> mx.Dtype:
    """MLX's CPU backend has no experts in half precision, and is slow at the rest of it."""
    return mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16


def _write_random(name: str, folder: Path) -> None:
    made = config(name)
    model = build(name, dtype())
    _bound_vocabulary(model, _save_tokenizer(folder), vocabulary(name))
    _save(model, folder)
    end = {"eos_token_id": _end(folder)}
    (folder / "config.json").write_text(json.dumps({**made, **end}))


def _save_tokenizer(folder: Path) -> int:
    """Pocket's tokenizer and template; how many tokens it has."""
    tokenizer = AutoTokenizer.from_pretrained(pocket.FOLDER, config=PreTrainedConfig())
    tokenizer.save_pretrained(folder)
    if not (folder / "chat_template.jinja").exists():
        text = (pocket.FOLDER / "chat_template.jinja").read_text()
        (folder / "chat_template.jinja").write_text(text)
    return len(tokenizer)


def _bound_vocabulary(model: Any, known: int, size: int) -> None:
    """Let a random model write only what its tokenizer can read."""
    head = getattr(getattr(model, "language_model", model), "lm_head", None)
    if head is not None and known < size:
        head.weight = head.weight * (mx.arange(size) < known).astype(head.weight.dtype)[:, None]


def _end(folder: Path) -> int | None:
    tokenizer = AutoTokenizer.from_pretrained(folder, config=PreTrainedConfig())
    found: int | None = tokenizer.eos_token_id
    return found


def _save(model: Any, folder: Path) -> None:
    """In shards: the whole of a large model is never in memory at once."""
    shard: dict[str, mx.array] = {}
    size = number = 0
    weights = list(parameters(model).items())
    for i, (name, value) in enumerate(weights):
        shard[name] = value
        size += value.nbytes
        if size >= SHARD or i == len(weights) - 1:
            path = folder / f"model-{number:05}.safetensors"
            mx.save_safetensors(str(path), shard, {"format": "mlx"})
            shard, size, number = {}, 0, number + 1
