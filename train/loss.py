"""Cross-entropy and unlikelihood over the vocabulary, a slice of tokens at a time: the logits never exist at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SLICE = 512  # its logits fit the last-level cache
ODDS_MAX = 10.0  # of an unwanted token: beyond it, one would outweigh a row


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
        losses = hidden.new_empty(hidden.shape[0])
        for start in range(0, hidden.shape[0], SLICE):
            part = slice(start, min(start + SLICE, hidden.shape[0]))
            logits = hidden[part] @ head.mT
            lse = torch.logsumexp(logits, -1, keepdim=True)
            target = targets[part, None]
            losses[part] = (lse - logits.gather(1, target))[:, 0]
            probabilities = logits.sub_(lse).exp_()
            # -log(1 - p) has the same gradient, times p / (1 - p) and the other way.
            chance = probabilities.gather(1, target)[:, 0]
            unwanted = weights[part] < 0
            scale = torch.where(unwanted, (chance / (1 - chance)).clamp(max=ODDS_MAX), chance.new_ones(()))
            losses[part] = torch.where(unwanted, torch.log1p(-chance.clamp(max=1 - 1e-6)), losses[part])
            probabilities.scatter_add_(1, target, probabilities.new_full(target.shape, -1.0))
            probabilities.mul_((weights[part] * scale)[:, None])
            torch.mm(probabilities, head, out=grad_hidden[part])
            grad_head.addmm_(probabilities.mT, hidden[part])
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad, grad_head * grad, None, None


def cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(weighted sum of losses, each token's loss in nats). Shapes: hidden [N,D]; head [V,D]; targets, weights [N].

    A target of negative weight is unwanted: its loss is log(1 - p), so that the sum grows with p.
    """
    result: tuple[Tensor, Tensor] = _CrossEntropy.apply(hidden, head, targets, weights)  # type: ignore[no-untyped-call]
    return result
