"""Loading models: the built-in one, a path, or a Hugging Face id."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm
from mlx_lm.utils import hf_repo_to_path
from transformers import PreTrainedConfig

from rewarm import accel
from rewarm.errors import InvalidOption
from rewarm.pocket import BUILT_IN, FOLDER

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Loaded(NamedTuple):
    model: Any
    tokenizer: Any


def load(
    model: str | Path = BUILT_IN,
    *,
    adapter_path: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Loaded:
    """A model and its tokenizer, by mlx-lm's own loader."""
    accel.install(loaded=False)
    built_in = str(model) == BUILT_IN
    if built_in:
        model = FOLDER
        # transformers puts Qwen's own way of splitting text, and of changing accents, on whatever
        # says that it is a Qwen. Pocket's tokenizer says all there is to say itself.
        options["tokenizer_config"] = {"config": PreTrainedConfig()}
    if not Path(model).is_dir() and not HUB_ID.fullmatch(str(model)):
        raise InvalidOption(
            f"model={str(model)!r} is neither a folder nor a Hugging Face id such as "
            '"mlx-community/Qwen3.5-9B-4bit"'
        )
    if adapter_path is not None and not Path(adapter_path).is_dir():
        raise InvalidOption(f"adapter_path={adapter_path!r} is not a folder")
    if trust_remote_code and not built_in:
        options["tokenizer_config"] = {"trust_remote_code": True}
    loaded = mlx_lm.load(str(model), adapter_path=adapter_path, **options)
    if built_in:
        # Its weights are stored in half the bytes. It is small enough to be run in full ones.
        loaded[0].set_dtype(mx.float32)
        mx.eval(loaded[0].parameters())  # here: another thread could not
    accel.install()
    # For people: `rewarm cache ls` shows it.
    place = Path(model) if Path(model).is_dir() else hf_repo_to_path(str(model))
    loaded[0].rewarm_source = str(place)
    return Loaded(loaded[0], loaded[1])
