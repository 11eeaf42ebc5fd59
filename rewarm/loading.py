"""Loading models: the built-in one, a path, or a Hugging Face id."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm
from mlx_lm.utils import (  # type: ignore[attr-defined]
    DEFAULT_ALLOW_PATTERNS,
    snapshot_download,  # Hugging Face's, or ModelScope's where mlx-lm was told so
)
from transformers import PreTrainedConfig

from rewarm import accel
from rewarm.device import device_bytes, machine_bytes
from rewarm.errors import CannotLoad, InvalidOption
from rewarm.model_folder import check_folder
from rewarm.pocket import BUILT_IN, FOLDER

LONGEST_REASON = 300
"""Characters. Some errors list every weight of a model."""

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
    """A model and its tokenizer, by mlx-lm's own loader. Raises `CannotLoad`."""
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
    folder = _folder(str(model), options.get("revision"))
    most = max(device_bytes(), machine_bytes())
    check_folder(folder, options.get("model_config") or {}, most)
    try:
        loaded = mlx_lm.load(str(folder), adapter_path=adapter_path, **options)
        knows_words = bool(loaded[1].encode("Hello world"))
    except Exception as error:
        raise CannotLoad(
            f"{model} cannot be loaded: {_reason(error)}. Its files are not complete, do not "
            f"belong together, or are of a kind that mlx-lm {mlx_lm.__version__} does not know"
        ) from error
    if not knows_words:
        raise CannotLoad(f"the tokenizer in {folder} knows no words: its files are not complete")
    if built_in:
        # Its weights are stored in half the bytes. It is small enough to be run in full ones.
        loaded[0].set_dtype(mx.float32)
        mx.eval(loaded[0].parameters())  # here: another thread could not
    accel.install()
    # For people: `rewarm cache ls` shows it.
    loaded[0].rewarm_source = str(folder)
    return Loaded(loaded[0], loaded[1])


def _folder(model: str, revision: str | None) -> Path:
    if Path(model).is_dir():
        return Path(model)
    try:
        found = snapshot_download(model, revision=revision, allow_patterns=DEFAULT_ALLOW_PATTERNS)
    except Exception as error:
        reason = _reason(error)
        raise CannotLoad(
            f"{model} cannot be had: {reason}. Look whether the id is right"
        ) from error
    return Path(found)


def _reason(error: Exception) -> str:
    """One line of what an error says; some say no more than a name."""
    text = " ".join(str(error).split())
    if len(text) > LONGEST_REASON:
        text = text[:LONGEST_REASON] + " ..."
    return f"{text} ({type(error).__name__})" if " " in text else f"{type(error).__name__}: {text}"
