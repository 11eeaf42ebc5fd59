"""`--model` of the bench: any model that Rewarm loads, and `random:ARCH`."""

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
from mlx_lm.utils import hf_repo_to_path, load_tokenizer, save_model
from transformers import AutoTokenizer, PreTrainedConfig

from rewarm import pocket

from .archs import build, config, dtype, vocabulary

RANDOM = "random:"


@contextmanager
def placed(model: str) -> Iterator[str]:
    """Yield the model as servers take it: a folder or a Hugging Face id. A folder made here is
    removed at the end."""
    if model != pocket.BUILT_IN and not model.startswith(RANDOM):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="rewarm-bench-") as made:
        folder = Path(made)
        for path in pocket.FOLDER.iterdir():
            if path.is_file() and path.suffix != ".safetensors":
                shutil.copy(path, folder)
        if model == pocket.BUILT_IN:
            _write_pocket(folder)
        else:
            _write_random(model.removeprefix(RANDOM), folder)
        yield made


def tokenizer_of(location: str) -> TokenizerWrapper:
    """Load the tokenizer alone: counting a prompt's tokens needs no model."""
    path = Path(location)
    if path.is_dir():
        return TokenizerWrapper(AutoTokenizer.from_pretrained(path, config=PreTrainedConfig()))
    return TokenizerWrapper(load_tokenizer(hf_repo_to_path(location))._tokenizer)


def _write_pocket(folder: Path) -> None:
    """Write Pocket's weights in full precision, as Rewarm runs it. In half precision MLX's CPU
    backend takes six times as long for a prompt."""
    for path in pocket.FOLDER.glob("*.safetensors"):
        weights = cast("dict[str, mx.array]", mx.load(str(path)))
        full = {name: value.astype(mx.float32) for name, value in weights.items()}
        mx.save_safetensors(str(folder / path.name), full, {"format": "mlx"})


def _write_random(name: str, folder: Path) -> None:
    model = build(name, dtype())
    tokenizer = tokenizer_of(str(folder))
    _bound_vocabulary(model, tokenizer, vocabulary(name))
    save_model(folder, model, donate_model=True)
    made = {**config(name), "eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(made))


def _bound_vocabulary(model: Any, tokenizer: TokenizerWrapper, size: int) -> None:
    """Let a greedy random model write letters only, so that every token is text at once. A model
    whose head is its embedding stays as it is."""
    head = getattr(getattr(model, "language_model", model), "lm_head", None)
    if head is not None:
        vocabulary = tokenizer.get_vocab().items()
        letters = [i for token, i in vocabulary if token.isascii() and token.isalpha()]
        kept = mx.zeros((size, 1), head.weight.dtype)
        kept[mx.array(letters)] = 1
        head.weight = head.weight * kept
