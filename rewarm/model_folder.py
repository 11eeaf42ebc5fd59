"""What a model's folder must have, looked at before anything is built from it.

mlx-lm builds whatever sizes config.json asks for before it looks at a weight: a million layers take
all memory and never end. The weights' headers say what there is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewarm.errors import CannotLoad

WEIGHTS = "model*.safetensors"
TOKENIZERS = ("tokenizer*", "tokenization*.py", "*.tiktoken", "*.model", "vocab*", "tekken.json")
"""Files of which a tokenizer has at least one."""

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Where the sizes stand, for models that take more than text."""
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
POSITIVE = (*LAYERS, "vocab_size", "hidden_size", "max_position_embeddings", "n_positions")
LARGEST = (1 << 31) - 1
"""MLX counts an array's elements along one axis in 32 bits, and so do positions."""
LONGEST_HEADER = 100_000_000
"""Bytes that the format allows for a header."""
COMPLETE = "give a folder as mlx-lm saves it: config.json, model*.safetensors and a tokenizer"


@dataclass
class Weights:
    """All of a model's weights, by what their files say."""

    nbytes: int = 0
    tensors: int = 0


def check_folder(folder: Path, overrides: Mapping[str, Any], most: int) -> None:
    """Raise `CannotLoad` for what no model can be made of, or not one of at most so many bytes.

    `overrides` are set in the config, as mlx-lm does it."""
    config = {**_config(folder), **overrides}
    weights = _weights(folder)
    if weights.nbytes > most:
        raise CannotLoad(
            f"the weights in {folder} take {weights.nbytes / 1e9:,.1f} GB, and this machine has "
            f"{most / 1e9:,.1f} GB of memory: choose a smaller model, or one with fewer bits"
        )
    nested = (config.get(name) for name in TEXT_CONFIGS)
    text = next((part for part in nested if isinstance(part, dict)), config)
    _check_sizes(folder, text, weights)
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


def _weights(folder: Path) -> Weights:
    found = Weights()
    paths = sorted(folder.glob(WEIGHTS))
    if not paths:
        raise CannotLoad(f"{folder} has no weights ({WEIGHTS}): {COMPLETE}")
    for path in paths:
        try:
            _add(found, path)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CannotLoad(f"{path} cannot be read ({error}): get it again") from error
    return found


def _add(found: Weights, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, LONGEST_HEADER):
            raise ValueError("it has no header of a safetensors file")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if size < 8 + length + end:
        raise ValueError(f"it has {size:,} of {8 + length + end:,} bytes")
    found.nbytes += end
    found.tensors += len(header)


def _check_sizes(folder: Path, config: Mapping[str, Any], weights: Weights) -> None:
    path = folder / "config.json"
    for name in POSITIVE:
        value = config.get(name)
        if isinstance(value, int) and not 1 <= value <= LARGEST:
            raise CannotLoad(f"{path} says {name} = {value:,}: no model has that")
    for name in LAYERS:
        value = config.get(name)
        if isinstance(value, int) and value > weights.tensors:
            raise CannotLoad(
                f"{path} says {name} = {value:,}, and there are {weights.tensors:,} weights in "
                "all: they do not belong together"
            )
