"""Profiles: the bytes of a model's state and the FLOPs of its tokens, without running the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from rewarm.cache.layout import Layout

from .archs import build, text_config


@dataclass(frozen=True)
class Profile:
    """Bytes are those of Rewarm's packed payloads on a CPU, without rounding to pages."""

    name: str
    row_bytes: int
    """The bytes of a token in all layers with full attention."""
    window_bytes: int
    """The bytes of a token in all sliding windows."""
    window: int
    """The tokens that the longest window reaches back."""
    state_bytes: int
    """The bytes of one checkpoint of recurrent state."""
    flops: float
    """FLOPs of a prompt token without attention: two for each weight that it meets."""
    flops_attention: float
    """FLOPs of a prompt token for each token of context, in all layers with full attention."""
    flops_window: float
    """The same in all sliding windows, whose context is never longer than `window`."""

    def prefill_flops(self, start: int, stop: int) -> float:
        """Count the FLOPs of computing the tokens `start` to `stop` of a prompt."""
        n = stop - start
        context = (start + stop) / 2 * n
        inside = max(0, min(stop, self.window) - start)
        windowed = (start + start + inside) / 2 * inside + (n - inside) * self.window
        return n * self.flops + context * self.flops_attention + windowed * self.flops_window


@lru_cache
def profile(name: str) -> Profile:
    """Make the profile of one of `archs.ARCHS`, from the shapes of its model, which is not
    evaluated."""
    model = build(name)
    caches = list(make_prompt_cache(model))
    layout = Layout(caches)
    model(mx.zeros((1, 4), mx.int32), cache=caches)
    text = text_config(name)
    queries = text["num_attention_heads"]
    # The scores, and their sum over the values: a multiplication and an addition each.
    per_layer = {
        group: 4.0 * queries * _width(layout, caches, group) for group in ("rows", "window")
    }
    return Profile(
        name=name,
        row_bytes=layout.packing("rows", caches, 0, 4).nbytes(1) if layout.has_rows else 0,
        window_bytes=layout.packing("window", caches, 0, 4).nbytes(1) if layout.has_window else 0,
        window=layout.longest_window if layout.has_window else 0,
        state_bytes=layout.state_bytes(caches) if layout.has_state else 0,
        flops=_weight_flops(model, text),
        flops_attention=per_layer["rows"] * len(layout.groups["rows"]),
        flops_window=per_layer["window"] * len(layout.groups["window"]),
    )


def _width(layout: Layout, caches: Sequence[Any], group: str) -> int:
    """Give the length of a row of a head."""
    found = [caches[i] for i in layout.groups[cast("Any", group)]]
    return int(found[0].keys.shape[3]) if found else 0


def _weight_flops(model: Any, text: dict[str, Any]) -> float:
    """Count the FLOPs of a token for all weights but the embedding, the head, and experts that are
    not chosen."""
    total = 0.0
    for name, value in cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())):
        if value.ndim < 2 or "embed" in name or "lm_head" in name:
            continue
        share = 1.0
        if value.ndim == 3 and "experts" in name:
            share = text["num_experts_per_tok"] / value.shape[0]
        total += 2.0 * value.size * share
    return total
