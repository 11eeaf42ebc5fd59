"""The model of a cache: its sizes, its blank caches, and the tokens that it can take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from rewarm.errors import InvalidPrompt, UnsupportedModel
from rewarm.values import Tokens

MakeCaches = Callable[[], list[Any]]
TokenIds = Sequence[int] | npt.NDArray[Any]


def vocabulary_size(model: Any) -> int | None:
    """Return the number of tokens that a model knows, by its arguments or its token embedding.

    Prompts are checked by it: MLX does not check, and a token beyond the embedding reads foreign
    memory.
    """
    size = _argument(model, "vocab_size")
    if size is not None:
        return size
    embeddings = [m for m in model.modules() if isinstance(m, (Embedding, QuantizedEmbedding))]
    return max((int(m.weight.shape[0]) for m in embeddings), default=None)


def context_size(model: Any) -> int:
    """Return the length of the longest sequence that a model was made for, by its arguments."""
    found = _argument(model, "max_position_embeddings") or _argument(model, "n_positions")
    return found or 1 << 31


def most_heads(model: Any) -> int:
    """Return the largest number of heads of a layer, by the model's arguments."""
    names = ("num_attention_heads", "num_heads", "n_heads", "n_head")
    return max((n for n in (_argument(model, name) for name in names) if n), default=64)


def checked_tokens(tokens: TokenIds, vocabulary: int) -> Tokens:
    """Return a prompt as an array, or raise an error that says what is wrong with it."""
    try:
        given = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidPrompt(f"a prompt is a flat sequence of whole numbers: {error}") from error
    if given.size == 0:
        raise InvalidPrompt("the prompt is empty: it needs at least one token")
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise InvalidPrompt(
            f"a prompt is a flat sequence of whole numbers, not {given.dtype} of shape "
            f"{given.shape}"
        )
    low, high = int(given.min()), int(given.max())
    if low < 0 or high >= vocabulary:
        raise InvalidPrompt(
            f"token {low if low < 0 else high} is outside the vocabulary (0 to {vocabulary - 1})"
        )
    return given.astype(np.int32)


def blank_caches(
    model: Any, max_kv_size: int | None, kv_bits: int | None, kv_group_size: int
) -> list[Any]:
    """Make mlx-lm's own caches for a model. With `kv_bits`, full attention is quantised from token
    0."""
    try:
        caches = list(make_prompt_cache(model, max_kv_size))
    except (AttributeError, TypeError) as error:
        raise UnsupportedModel(
            f"{type(model).__name__} offers no prompt cache ({error}): it needs "
            "`make_cache()` or `layers`, as mlx-lm's models have"
        ) from error
    if kv_bits is None:
        return caches
    # mlx-lm begins to quantise at token 5,000: a span of two forms could not be joined.
    return [
        QuantizedKVCache(group_size=kv_group_size, bits=kv_bits) if type(c) is KVCache else c
        for c in caches
    ]


def _argument(model: Any, name: str) -> int | None:
    """Look up a size in a model's arguments, or in those of its text part."""
    for where in ("args", "config"):
        args = getattr(model, where, None)
        while args is not None:
            named = args if isinstance(args, dict) else getattr(args, "__dict__", {})
            size = named.get(name)
            if isinstance(size, int) and size > 0:
                return size
            args = named.get("text_config")
    return None
