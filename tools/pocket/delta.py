"""The gated delta rule for training, in matrix products only.

The reference in transformers solves each chunk row by row, which is slow on a GPU. This version
builds the triangular inverse from blocks and passes the state on by one product for each chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5

CHUNK = 64


def chunked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Do the same as transformers' `torch_chunk_gated_delta_rule`, on [batch, time, head, size]."""
    time = query.shape[1]
    if time % CHUNK:
        raise ValueError(f"{time} tokens are not whole chunks of {CHUNK}")
    with torch.autocast(query.device.type, enabled=False):
        u, w, step, gain, read, attention = _prepare(query, key, value, g.float(), beta.float())
        states = _Scan.apply(step, gain)
        return _finish(u, w, states, read, attention).to(value.dtype), None


def _chunks(x: Any) -> Any:
    """Reshape [batch, time, head, size] to [batch, head, chunk, time in the chunk, size]."""
    x = x.transpose(1, 2).unflatten(2, (-1, CHUNK))
    return x.to(torch.float32, memory_format=torch.contiguous_format)


def _prepare(q: Any, k: Any, v: Any, g: Any, beta: Any) -> tuple[Any, ...]:
    """Compute everything a chunk needs except the state before it."""
    size = q.shape[-1]
    # A norm without a weight divides by the root of the mean, not of the sum.
    q = F.rms_norm(_chunks(q), (size,), eps=1e-6 / size) / size
    k = F.rms_norm(_chunks(k), (size,), eps=1e-6 / size) * size**-0.5
    v, beta = _chunks(v), _chunks(beta[..., None])
    decay = _chunks(g[..., None]).cumsum(3)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (decay - decay.mT).masked_fill(~lower, -torch.inf).exp()
    # The share of each earlier token of the chunk in a token's value.
    written = beta * k
    inverse = _inverse((written @ k.mT) * between)
    since = decay.exp()
    u = inverse @ (beta * v)
    w = inverse @ (since * written)
    last = decay[:, :, :, -1:]
    kept = (k * (last - decay).exp()).mT
    step = torch.eye(size, device=q.device) * last.exp() - kept @ w
    return u, w, step, kept @ u, q * since, (q @ k.mT) * between


def _inverse(a: Any) -> Any:
    """Build the inverse (1 + a)^-1 of a strictly lower triangle from blocks of 4 upwards.

    A series over a whole chunk would not do: where keys repeat, its powers of `a` overflow."""
    x = -_diagonal(a, 4).tril(-1)
    one = torch.eye(4, device=a.device)
    inverse = (one + x) @ (one + x @ x)
    size = 4
    while size < a.shape[-1]:
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        beside = _diagonal(a, 2 * size)[..., size:, :size]
        corner = -(lower @ beside @ upper)
        inverse = torch.cat((F.pad(upper, (0, size)), torch.cat((corner, lower), -1)), -2)
        size *= 2
    return inverse[..., 0, :, :]


def _diagonal(a: Any, size: int) -> Any:
    """Return the blocks of this size on the diagonal of a matrix."""
    count = a.shape[-1] // size
    blocks = a.unflatten(-1, (count, size)).unflatten(-3, (count, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _finish(u: Any, w: Any, states: Any, read: Any, attention: Any) -> Any:
    out = read @ states + attention @ (u - w @ states)
    return out.flatten(2, 3).transpose(1, 2)


class _Scan(torch.autograd.Function):
    """The state before each chunk: s[n + 1] = step[n] s[n] + gain[n]."""

    @staticmethod
    def forward(ctx: Any, step: Any, gain: Any) -> Any:
        batch, heads, count = step.shape[:3]
        step, gain = step.flatten(0, 1), gain.flatten(0, 1)
        states = torch.zeros_like(gain)
        for at in range(count - 1):
            torch.baddbmm(gain[:, at], step[:, at], states[:, at], out=states[:, at + 1])
        ctx.save_for_backward(step, states)
        return states.unflatten(0, (batch, heads))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, Any]:
        step, states = ctx.saved_tensors
        shape = grads[0].shape
        grad = grads[0].flatten(0, 1)
        # grad_gain[n] is the gradient of s[n + 1], whose own sources are s[n + 2] and its output.
        grad_gain = torch.zeros_like(grad)
        for at in range(grad.shape[1] - 2, -1, -1):
            torch.baddbmm(
                grad[:, at + 1],
                step[:, at + 1].mT,
                grad_gain[:, at + 1],
                out=grad_gain[:, at],
            )
        grad_step = grad_gain @ states.mT
        return grad_step.unflatten(0, shape[:2]), grad_gain.unflatten(0, shape[:2])


def convolved(x: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Compute the short causal convolution on [batch, channel, time] as a few shifted products.

    The result keeps the channels last in memory, as the input has them."""
    size, time = weight.shape[1], x.shape[2]
    padded = F.pad(x.mT, (0, 0, size - 1, 0))
    weight = weight.to(x.dtype)
    out = padded[:, :time] * weight[:, 0]
    for at in range(1, size):
        out = torch.addcmul(out, padded[:, at : at + time], weight[:, at])
    return F.silu(out).mT


def normed(self: Any, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight, self.eps).to(x.dtype)


def install() -> None:
    """Replace transformers' own functions by those of this module."""
    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunked
    modeling_qwen3_5.causal_conv1d_fn = convolved
    modeling_qwen3_5.Qwen3_5RMSNorm.forward = normed
