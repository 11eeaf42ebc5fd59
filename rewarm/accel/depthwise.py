"""Depthwise convolutions: the functions that the CPU's and CUDA's versions share."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def is_depthwise(layer: Any, x: mx.array) -> bool:
    """True where a `mlx.nn.Conv1d` convolves each channel of x [B, T, C] alone, without padding."""
    channels, _, depth = layer.weight.shape
    is_plain = (layer.stride, layer.padding, layer.dilation) == (1, 0, 1)
    is_by_channel = depth == 1 and layer.groups == channels == x.shape[-1]
    return is_plain and is_by_channel and bool(layer.weight.dtype == x.dtype)


def with_bias(layer: Any, y: mx.array) -> mx.array:
    return y + layer.bias if "bias" in layer else y
