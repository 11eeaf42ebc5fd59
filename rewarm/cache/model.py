"""The model of a cache: its sizes, its blank caches, its tokens, and its namespace."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from rewarm.errors import InvalidPrompt, ModelMismatch, UnsupportedModel
from rewarm.values import Namespace, Tokens

from .identity import Description, Watch, execution, keeps_memos, run_once
from .layer_kinds import leaves

MakeCaches = Callable[[], list[Any]]
TokenIds = Sequence[int] | npt.NDArray[Any]

_unknown = itertools.count(1)


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


def cache_maker(
    model: Any, max_kv_size: int | None, kv_bits: int | None, kv_group_size: int
) -> MakeCaches:
    """Return a function that makes mlx-lm's own caches for a model.

    With `kv_bits`, full attention is quantised from token 0."""

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


class Binding:
    """Gives the namespace that a model's state is kept in, and notices when the model changes.

    Without an identity, the namespace is valid only in this process and for the model as it is.
    """

    def __init__(
        self, model: Any, blank: MakeCaches, *, kv: str, adapter: str, exact: bool, chunk: int
    ) -> None:
        self.model = model
        self.blank = blank
        self._exact, self._chunk = exact, chunk
        # A folder may be moved, so its path is no name. The model's identity covers its content.
        named = "" if Path(adapter).is_dir() else adapter
        self.namespace = Namespace("", named, kv, _form_of(blank()))
        self.start_anew()

    def start_anew(self) -> None:
        """Take a new namespace: nothing is shared with what was computed before."""
        self.namespace = replace(self.namespace, base=f"unknown {next(_unknown)}")
        self._watch = Watch(self.model)

    def is_same(self) -> bool:
        """True where the model's modules still hold the same objects.

        Some models replace values whenever they run. Such a change does not count.
        """
        changes = set(self._watch.changes())
        if not changes:
            return True
        besides = self._watch.besides
        before = Watch(self.model, besides)
        run_once(self.model, self.blank)
        written = set(before.changes())
        if changes <= written:
            self._watch = Watch(self.model, besides | written)
        return changes <= written

    def describe(self) -> Description:
        """Describe the model as it is now. Call it on a thread that may run the model."""
        if keeps_memos(self.model):
            run_once(self.model, self.blank)
        self._watch = Watch(self.model, self._watch.besides)
        return Description.of(self.model)

    def identified(self, description: Description) -> Namespace:
        """Return the namespace of a described model. This is slow, because it reads all weights."""
        base = description.identity(execution(exact=self._exact, chunk=self._chunk))
        return replace(self.namespace, base=base)

    def check(self, other: Any) -> None:
        """Raise unless another model object computes the same."""
        if keeps_memos(other):
            run_once(other, self.blank)
        mine, theirs = (self.identified(d) for d in (self.describe(), Description.of(other)))
        if mine != theirs:
            raise ModelMismatch(
                f"this cache was made for another model ({type(self.model).__module__}): "
                "make one for this model with PrefixCache(model)"
            )


def _form_of(caches: Sequence[Any]) -> str:
    """Digest the classes of a model's caches, and their settings."""
    plain = (bool, int, float, str, type(None))
    described = []
    for cache in leaves(list(caches)):
        values = getattr(cache, "__dict__", {}).items()
        settings = sorted((name, value) for name, value in values if isinstance(value, plain))
        described.append(f"{type(cache).__qualname__} {settings!r}")
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
