"""Causal softmax attention for training, in blocks of queries that skip keys they cannot see.

The published CPU kernels need equal key and value widths and compute both halves of the mask; this one does half.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

QUERY_BLOCK = 256


def naive(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
    """Token t of sequence b attends to first[b,t] .. t.

    Shapes: q k [B,H,T,D]; v, out [B,H,T,V]; first [B,T] int64.
    """
    position = torch.arange(q.shape[2])
    seen = (position[None, None, :] <= position[None, :, None]) & (position[None, None, :] >= first[:, :, None])
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    out: Tensor = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v
    return out


def _blocks(first: Tensor) -> list[tuple[int, int, int, int]]:
    """(sequence, first query, end query, first key) of every block of queries."""
    length = first.shape[1]
    starts = range(0, length, QUERY_BLOCK)
    lowest = [[int(row[start]) for start in starts] for row in first]  # `first` never falls along a sequence
    return [
        (b, start, min(start + QUERY_BLOCK, length), lowest[b][i])
        for b in range(first.shape[0])
        for i, start in enumerate(starts)
    ]


def _scores(q: Tensor, k: Tensor, first: Tensor, block: tuple[int, int, int, int]) -> Tensor:
    b, start, end, low = block
    scores = torch.bmm(q[b, :, start:end], k[b, :, low:end].mT).mul_(q.shape[-1] ** -0.5)
    key, query = torch.arange(low, end), torch.arange(start, end)[:, None]
    hidden = (key > query) | (key < first[b, start:end, None])
    return scores.masked_fill_(hidden, -torch.inf)


@torch.library.custom_op("moonrelay::causal_attention", mutates_args=())
def causal_attention(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """As `naive`, with the log-sum-exp [B,H,T] that the backward pass needs."""
    out, total = torch.empty_like(v), q.new_empty(q.shape[:3])
    for block in _blocks(first):
        b, start, end, low = block
        scores = _scores(q, k, first, block)
        lse = torch.logsumexp(scores, -1, keepdim=True)
        out[b, :, start:end] = torch.bmm(scores.sub_(lse).exp_(), v[b, :, low:end])
        total[b, :, start:end] = lse[..., 0]
    return out, total


@causal_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), q.new_empty(q.shape[:3])


@torch.library.custom_op("moonrelay::causal_attention_backward", mutates_args=())
def causal_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, first: Tensor, out: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; the probabilities are computed anew."""
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    centre = (grad * out).sum(-1)
    for block in _blocks(first):
        b, start, end, low = block
        weights = _scores(q, k, first, block).sub_(total[b, :, start:end, None]).exp_()
        grad_out = grad[b, :, start:end]
        grad_v[b, :, low:end].baddbmm_(weights.mT, grad_out)
        inner = torch.bmm(grad_out, v[b, :, low:end].mT).sub_(centre[b, :, start:end, None])
        inner.mul_(weights).mul_(q.shape[-1] ** -0.5)
        torch.bmm(inner, k[b, :, low:end], out=grad_q[b, :, start:end])
        grad_k[b, :, low:end].baddbmm_(inner.mT, q[b, :, start:end])
    return grad_q, grad_k, grad_v


@causal_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, first: Tensor, out: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *causal_attention_backward(grad.contiguous(), *ctx.saved_tensors), None


causal_attention.register_autograd(_backward, setup_context=_setup)
