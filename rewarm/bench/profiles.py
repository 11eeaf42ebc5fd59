"""Profiles: what a model's state weighs and what its tokens cost, without running the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from rewarm.cache.layout import Layout

from .archs import build, config, parameters


@dataclass(frozen=True)
class Profile:
    """Bytes are those that Rewarm's packed payloads take on a CPU: no rounding to pages."""

    name: str
    row_bytes: int
    """Full attention, a token."""
    window_bytes: int
    """Sliding windows, a token."""
    window: int
    """Tokens that the longest window reaches back."""
    state_bytes: int
    """Recurrent state: one checkpoint."""
    flops: float
    """A prompt token, without attention: two for each weight that it meets."""
    flops_attention: float
    """More for each token of context, over all layers with full attention."""
    flops_window: float
    """Likewise over all sliding windows, whose context is never longer than `window`."""

    def prefill_flops(self, start: int, stop: int) -> float:
        """What computing the tokens `start` to `stop` of a prompt takes."""
        n = stop - start
        context = (start + stop) / 2 * n
        inside = max(0, min(stop, self.window) - start)
        windowed = (start + start + inside) / 2 * inside + (n - inside) * self.window
        return n * self.flops + context * self.flops_attention + windowed * self.flops_window


@lru_cache
def profile(name: str) -> Profile:
    """The profile of one of `archs.ARCHS`, read from the shapes of mlx-lm's own, unevaluated."""
    model = build(name)
    caches = list(make_prompt_cache(model))
    layout = Layout(caches)
    model(mx.zeros((1, 4), mx.int32), cache=caches)
    made = config(name)
    text = made.get("text_config", made)
    queries = text["num_attention_heads"]
    # Scores and their sum over the values: two multiplications and additions each.
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
    """The length of a head's row."""
    found = [caches[i] for i in layout.groups[cast("Any", group)]]
    return int(found[0].keys.shape[3]) if found else 0


def _weight_flops(model: Any, text: dict[str, Any]) -> float:
    """Every matrix meets every token, but the embedding, the last layer's head, and the experts
    that were not chosen."""
    total = 0.0
    for name, value in parameters(model).items():
        if value.ndim < 2 or "embed" in name or "lm_head" in name:
            continue
        share = 1.0
        if value.ndim == 3 and "experts" in name:
            share = text["num_experts_per_tok"] / value.shape[0]
        total += 2.0 * value.size * share
    return total
