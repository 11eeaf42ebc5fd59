"""A depthwise convolution in a CUDA kernel (docs/accel.md).

MLX leaves it to cuDNN, which takes 200 ms to plan for a number of tokens that it has not seen.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx

from . import is_off
from .device import is_cuda
from .launch import FLOATS, Launch, agree, kernel
from .replace import note

nn: Any = importlib.import_module("mlx.nn")  # its names come by a star, which mypy does not follow

MOST_TOKENS = 1 << 16
"""That a launch has room for."""

_stock: list[Callable[..., mx.array]] = []

SOURCE = """
    const int length = x_shape[1], channels = x_shape[2];
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    const T* from = x + ((long long)blockIdx.z * length + blockIdx.y) * channels + channel;
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < TAPS; ++i)
        sum += static_cast<float>(from[(long long)i * channels]) *
               static_cast<float>(weight[channel * TAPS + i]);
    y[((long long)blockIdx.z * (length - TAPS + 1) + blockIdx.y) * channels + channel] =
        static_cast<T>(sum);
"""


def install() -> bool:
    """Make MLX use it on CUDA; says whether it does."""
    if is_off() or not is_cuda():
        return False
    if not _stock:
        _stock.append(nn.Conv1d.__call__)
        note(_convolution, _stock[0])
        nn.Conv1d.__call__ = _convolution
    return True


def convolution(x: mx.array, weight: mx.array) -> mx.array:
    """Depthwise, of x [B, T, C] with weight [C, K, 1], without padding."""
    return cast(mx.array, _launched(x, weight))


@mx.custom_function
def _launched(x: mx.array, weight: mx.array) -> mx.array:
    batch, length, channels = x.shape
    taps = weight.shape[1]
    (y,) = _kernel()(
        inputs=[x, weight],
        template=[("T", x.dtype), ("TAPS", taps)],
        grid=(-(-channels // 256) * 256, length - taps + 1, batch),
        threadgroup=(256, 1, 1),
        output_shapes=[(batch, length - taps + 1, channels)],
        output_dtypes=[x.dtype],
    )
    return y


@_launched.vjp
def _gradients(given: Sequence[mx.array], cotangent: mx.array, _: mx.array) -> list[mx.array]:
    """Those of MLX's own."""
    return mx.vjp(lambda *given: [_convolved(*given)], list(given), [cotangent])[1]


def _convolved(x: mx.array, weight: mx.array) -> mx.array:
    return mx.conv1d(x, weight, groups=x.shape[-1])


def _convolution(self: Any, x: mx.array) -> mx.array:
    channels, taps, depth = self.weight.shape
    plain = (self.stride, self.padding, self.dilation) == (1, 0, 1)
    if (
        not (plain and depth == 1 and self.groups == channels == x.shape[-1])
        or not taps <= x.shape[1] < MOST_TOKENS
        or x.dtype not in FLOATS
        or self.weight.dtype != x.dtype
        or not is_cuda()
        or not agrees(x.dtype, taps)
    ):
        return _stock[0](self, x)
    y = convolution(x, self.weight)
    return y + self.bias if "bias" in self else y


@functools.cache
def agrees(dtype: mx.Dtype, taps: int) -> bool:
    """Whether the kernel gives what MLX's own does for a few tokens."""
    x = mx.random.normal((2, 37, 48), key=mx.random.key(0)).astype(dtype)
    weight = mx.random.normal((48, taps, 1), key=mx.random.key(1)).astype(dtype)
    return agree(
        "depthwise convolutions are left to MLX",
        lambda: [convolution(x, weight)],
        lambda: [_convolved(x, weight)],
    )


@functools.cache
def _kernel() -> Launch:
    return kernel("convolution", ("x", "weight"), ("y",), SOURCE)
