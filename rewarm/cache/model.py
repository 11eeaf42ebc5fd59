"""What the cache asks of a model: its blank caches, its vocabulary, and what tells it apart."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from rewarm.errors import InvalidOption, InvalidPrompt, UnsupportedModel

from .tree import Tokens

MakeCaches = Callable[[], list[Any]]

SAMPLE = 16
"""Values of each parameter that go into a fingerprint."""


@dataclass(frozen=True)
class Namespace:
    """What must be equal for two prompts to share anything."""

    model: str
    dtype: str
    kv: str
    """The form of the K/V: "plain", or its bits and group size."""
    adapter: str = ""
    salt: str = ""

    @staticmethod
    def of(model: Any, kv: str, adapter: str) -> Namespace:
        return Namespace(fingerprint(model), floating_dtype(model), kv, adapter)

    def salted(self, salt: str | None) -> Namespace:
        return replace(self, salt=salt or "")


def fingerprint(model: Any) -> str:
    """A digest of a model's class, its parameters' names and shapes, and some of their values.

    It tells models in one process apart; it does not read all weights.
    """
    digest = hashlib.sha256(f"{type(model).__module__}.{type(model).__qualname__}".encode())
    samples = []
    for name, value in _parameters(model):
        digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        flat = value.reshape(-1)
        samples.append(flat[:: max(1, flat.size // SAMPLE)][:SAMPLE].astype(mx.float32))
    if samples:
        digest.update(np.asarray(mx.concatenate(samples)).tobytes())
    return digest.hexdigest()[:32]


def floating_dtype(model: Any) -> str:
    """The dtype that a model computes in."""
    for _, value in _parameters(model):
        if mx.issubdtype(value.dtype, mx.floating):
            return str(value.dtype).removeprefix("mlx.core.")
    return "none"


def vocabulary_size(model: Any) -> int | None:
    """How many tokens a model knows: by its arguments, or else by its token embedding.

    It matters: MLX does not check, and a token beyond the embedding reads foreign memory.
    """

    size = _argument(model, "vocab_size")
    if size is not None:
        return size
    embeddings = [m for m in model.modules() if isinstance(m, (Embedding, QuantizedEmbedding))]
    return max((int(m.weight.shape[0]) for m in embeddings), default=None)


def context_size(model: Any) -> int:
    """The longest sequence that a model was made for, by its arguments."""
    found = _argument(model, "max_position_embeddings") or _argument(model, "n_positions")
    return found or 1 << 31


def evaluate(model: Any) -> None:
    """Evaluate every array that can be reached from a model, and not only its parameters: what is
    lazy belongs to the stream, and so to the thread, that it was made in."""
    seen: set[int] = set()
    arrays: list[mx.array] = []
    todo: list[Any] = [model]
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, mx.array):
            arrays.append(each)
        elif isinstance(each, dict):
            todo.extend(each.values())
            todo.extend(getattr(each, "__dict__", {}).values())
        elif isinstance(each, (list, tuple, set)):
            todo.extend(each)
        elif type(each).__module__.startswith(("mlx.", "mlx_lm.")):
            todo.extend(getattr(each, "__dict__", {}).values())
    mx.eval(arrays)


def checked_tokens(tokens: Sequence[int] | npt.NDArray[Any], vocabulary: int) -> Tokens:
    """A prompt as an array, or an error that says what is wrong with it."""
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


def check_kv(kv_bits: int | None, kv_group_size: int) -> None:
    if kv_bits is not None and kv_bits not in (2, 3, 4, 5, 6, 8):
        raise InvalidOption(f"kv_bits={kv_bits!r}: MLX quantises to 2, 3, 4, 5, 6 or 8 bits")
    if kv_bits is not None and kv_group_size not in (32, 64, 128):
        raise InvalidOption(f"kv_group_size={kv_group_size!r}: MLX has groups of 32, 64 or 128")


def cache_maker(
    model: Any, max_kv_size: int | None, kv_bits: int | None, kv_group_size: int
) -> MakeCaches:
    """mlx-lm's own caches for a model; with `kv_bits`, full attention is quantised from token 0."""
    check_kv(kv_bits, kv_group_size)

    def make() -> list[Any]:
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

    return make


def _argument(model: Any, name: str) -> int | None:
    """A size by a model's arguments, or by those of its text part."""

    def sizes(args: Any) -> Iterator[Any]:
        named = args if isinstance(args, dict) else getattr(args, "__dict__", {})
        yield named.get(name)
        if "text_config" in named:
            yield from sizes(named["text_config"])

    for where in ("args", "config"):
        for size in sizes(getattr(model, where, None)):
            if isinstance(size, int) and size > 0:
                return size
    return None


def _parameters(model: Any) -> list[tuple[str, mx.array]]:
    return cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
