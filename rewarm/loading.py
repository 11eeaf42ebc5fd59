"""Loading models: a path, or a Hugging Face id."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import mlx_lm

from rewarm.errors import InvalidOption


class Loaded(NamedTuple):
    model: Any
    tokenizer: Any


def load(model: str | Path, *, adapter_path: str | None = None, **options: Any) -> Loaded:
    """A model and its tokenizer, by mlx-lm's own loader."""
    if str(model) == "pocket":
        raise InvalidOption(
            'model="pocket": the built-in model is not in this version; give the path of a model '
            "folder or a Hugging Face id"
        )
    loaded = mlx_lm.load(str(model), adapter_path=adapter_path, **options)
    return Loaded(loaded[0], loaded[1])
