"""Depthwise convolutions by a CUDA kernel (docs/accel.md).

MLX leaves them to cuDNN, which takes 200 ms to plan for a number of tokens that it has not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx

from . import is_off
from .depthwise import is_depthwise, with_bias
from .device import is_cuda
from .launch import CHECKED, FLOATS, Launch, agree, kernel
from .replacement import nn, swap

MOST_TOKENS = 1 << 16
"""The most tokens that a launch takes: CUDA limits the blocks of this dimension."""

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
    """Make MLX use the kernel on CUDA; return true where it does."""
    if is_off() or not is_cuda():
        return False
    if not _stock:
        _stock.append(swap(nn.Conv1d, "__call__", _convolution))
    return True


def convolution(x: mx.array, weight: mx.array) -> mx.array:
    """Compute a depthwise convolution of x [B, T, C] with weight [C, K, 1], without padding."""
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
    """Compute the gradients of MLX's own convolution."""
    return mx.vjp(lambda *given: [_convolved(*given)], list(given), [cotangent])[1]


def _convolved(x: mx.array, weight: mx.array) -> mx.array:
    return mx.conv1d(x, weight, groups=x.shape[-1])


def _convolution(self: Any, x: mx.array) -> mx.array:
    taps = self.weight.shape[1]
    if (
        is_depthwise(self, x)
        and taps <= x.shape[1] < MOST_TOKENS
        and x.dtype in FLOATS
        and is_cuda()
        and agrees(x.dtype, taps)
    ):
        return with_bias(self, convolution(x, self.weight))
    return _stock[0](self, x)


@functools.cache
def agrees(dtype: mx.Dtype, taps: int) -> bool:
    """Try the kernel on a few tokens, and return true where it agrees with MLX's own."""
    x = mx.random.normal((2, CHECKED, 48), key=mx.random.key(0)).astype(dtype)
    weight = mx.random.normal((48, taps, 1), key=mx.random.key(1)).astype(dtype)
    return agree(
        "depthwise convolutions are left to MLX",
        lambda: [convolution(x, weight)],
        lambda: [_convolved(x, weight)],
    )


@functools.cache
def _kernel() -> Launch:
    return kernel("convolution", ("x", "weight"), ("y",), SOURCE)
