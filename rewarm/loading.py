"""Load a model: the built-in one, a folder, or a Hugging Face id.

mlx-lm builds a model of the sizes in config.json before it reads a weight. A config with a million
layers would take all memory, and loading would never end. So the sizes are first compared with the
headers of the weight files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm
from mlx_lm.utils import _download
from transformers import PreTrainedConfig

from rewarm import accel
from rewarm.accel.device import device_bytes, machine_bytes
from rewarm.errors import CannotLoad, InvalidOption
from rewarm.pocket import BUILT_IN, FOLDER

LONGEST_REASON = 300
"""Characters of an error that are shown. Some errors list every weight of a model."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

WEIGHTS = "model*.safetensors"
TOKENIZERS = ("tokenizer*", "tokenization*.py", "*.tiktoken", "*.model", "vocab*", "tekken.json")
"""The files of tokenizers. A model's folder must have at least one."""
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""The parts of a config that hold the sizes, for a model that takes more than text."""
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
POSITIVE = (*LAYERS, "vocab_size", "hidden_size", "max_position_embeddings", "n_positions")
LARGEST = (1 << 31) - 1
"""The largest size. MLX counts the elements along one axis, and positions, in 32 bits."""
LONGEST_HEADER = 100_000_000
"""Bytes that the format allows for a header."""
COMPLETE = "give a folder as mlx-lm saves it: config.json, model*.safetensors and a tokenizer"


class LoadedModel(NamedTuple):
    model: Any
    tokenizer: Any


def load(
    model: str | Path = BUILT_IN,
    *,
    adapter_path: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> LoadedModel:
    """Load a model and its tokenizer by mlx-lm's own loader. Raises `CannotLoad`."""
    accel.install(loaded=False)
    built_in = str(model) == BUILT_IN
    if built_in:
        model = FOLDER
        # For a config that names a Qwen, transformers sets Qwen's own splitting and normalisation
        # of text. Pocket's tokenizer is complete without them.
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
    try:
        # It is a folder, or comes from Hugging Face, or from ModelScope if mlx-lm is set to it.
        folder = _download(str(model), options.get("revision"))
    except Exception as error:
        raise CannotLoad(
            f"{model} cannot be had: {_reason(error)}. Look whether the id is right"
        ) from error
    _check_folder(folder, options.get("model_config") or {})
    try:
        loaded = LoadedModel(*mlx_lm.load(str(folder), adapter_path=adapter_path, **options)[:2])
        knows_words = bool(loaded.tokenizer.encode("Hello world"))
    except Exception as error:
        raise CannotLoad(
            f"{model} cannot be loaded: {_reason(error)}. Its files are not complete, do not "
            f"belong together, or are of a kind that mlx-lm {mlx_lm.__version__} does not know"
        ) from error
    if not knows_words:
        raise CannotLoad(f"the tokenizer in {folder} knows no words: its files are not complete")
    if built_in:
        # Its weights are stored in 16 bits, and it is small enough to run in 32.
        loaded.model.set_dtype(mx.float32)
        mx.eval(loaded.model.parameters())  # another thread could not do it
    accel.install()
    loaded.model.rewarm_source = str(folder)  # `rewarm cache ls` shows it
    return loaded


def _reason(error: Exception) -> str:
    """Give an error's text in one line, with the error's name: some texts are only one word."""
    text = " ".join(str(error).split())
    if len(text) > LONGEST_REASON:
        text = text[:LONGEST_REASON] + " ..."
    return f"{text} ({type(error).__name__})" if " " in text else f"{type(error).__name__}: {text}"


def _check_folder(folder: Path, overrides: Mapping[str, Any]) -> None:
    """Raise `CannotLoad` for a folder that this machine cannot load a model from.

    `overrides` replace values of the config, as in mlx-lm."""
    config = {**_config(folder), **overrides}
    weights = _weights(folder)
    nbytes, most = sum(weights.values()), max(device_bytes(), machine_bytes())
    if nbytes > most:
        raise CannotLoad(
            f"the weights in {folder} take {nbytes / 1e9:,.1f} GB, and this machine has "
            f"{most / 1e9:,.1f} GB of memory: choose a smaller model, or one with fewer bits"
        )
    nested = (config.get(name) for name in TEXT_CONFIGS)
    text = next((part for part in nested if isinstance(part, dict)), config)
    _check_sizes(folder / "config.json", text, len(weights))
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise CannotLoad(f"{folder} has no tokenizer, such as tokenizer.json: {COMPLETE}")


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CannotLoad(f"{folder} has no config.json: {COMPLETE}") from None
    except (OSError, ValueError) as error:
        raise CannotLoad(f"{path} cannot be read ({error}): get it again") from error
    if not isinstance(config, dict):
        raise CannotLoad(f"{path} is not a JSON object: get it again")
    if not isinstance(config.get("model_type"), str) and "model_file" not in config:
        raise CannotLoad(f"{path} names no model_type: it is not the config of a model")
    return config


def _weights(folder: Path) -> dict[str, int]:
    """Give the bytes of each weight, as the headers of the files tell them."""
    files = sorted(folder.glob(WEIGHTS))
    if not files:
        raise CannotLoad(f"{folder} has no weights ({WEIGHTS}): {COMPLETE}")
    return {name: nbytes for path in files for name, nbytes in _weights_in(path).items()}


def _weights_in(path: Path) -> dict[str, int]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, LONGEST_HEADER):
                raise ValueError("it has no header of a safetensors file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        spans = {name: tensor["data_offsets"] for name, tensor in header.items()}
        end = 8 + length + max((stop for _, stop in spans.values()), default=0)
        if size < end:
            raise ValueError(f"it has {size:,} of {end:,} bytes")
        return {name: stop - start for name, (start, stop) in spans.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CannotLoad(f"{path} cannot be read ({error}): get it again") from error


def _check_sizes(path: Path, config: Mapping[str, Any], tensors: int) -> None:
    for name in POSITIVE:
        value = config.get(name)
        if not isinstance(value, int):
            continue
        if not 1 <= value <= LARGEST:
            raise CannotLoad(f"{path} says {name} = {value:,}: no model has that")
        if name in LAYERS and value > tensors:
            raise CannotLoad(
                f"{path} says {name} = {value:,}, and there are {tensors:,} weights in all: they "
                "do not belong together"
            )
