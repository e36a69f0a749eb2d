"""The drafter's loss over the vocabulary, a slice of slots at a time: the logits never exist at once.

Source: DSpark, arXiv 2607.05147: 0.1 cross-entropy + 0.9 L1 distance to the target's law (acceptance at temperature 1
is 1 - L1 / 2), with the cross-entropy taken to the law itself, which a drawn token is only a sample of.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

SLICE = 512  # its logits fit the last-level cache


class Losses(NamedTuple):
    """total: a scalar to differentiate. Each slot's: overlap [slots], the chance 1 - L1 / 2 that a draw is accepted;
    matched [slots] bool: the likeliest token is the law's."""

    total: Tensor
    overlap: Tensor
    matched: Tensor


class _Overlap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        joint: Tensor,
        head: Tensor,
        w2: Tensor,
        law_ids: Tensor,
        aims: Tensor,
        chances: Tensor,
        weights: Tensor,
        ce_share: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        table = torch.cat([head, w2], 1)
        grad_joint, grad_w2 = torch.empty_like(joint), torch.zeros_like(w2)
        overlap, total = joint.new_empty(len(joint)), joint.new_zeros(())
        matched = torch.empty(len(joint), dtype=torch.bool)
        for start in range(0, len(joint), SLICE):
            part = slice(start, min(start + SLICE, len(joint)))
            ids, aim, weight = law_ids[part], aims[part], weights[part, None]
            logits = joint[part] @ table.mT
            matched[part] = logits.argmax(-1) == ids[:, 0]
            lse = torch.logsumexp(logits, -1, keepdim=True)
            absent, ids = ids < 0, ids.clamp(min=0)
            logs = logits.gather(1, ids) - lse
            p = logits.sub_(lse).exp_()
            shortlist = logs.exp().masked_fill_(absent, 0.0)
            overlap[part] = torch.minimum(shortlist, chances[part]).sum(-1)
            signs = (shortlist - aim).sign()
            outside = 1.0 - shortlist.sum(-1, keepdim=True)
            mean = (signs * shortlist).sum(-1, keepdim=True) + outside
            distance = (shortlist - aim).abs().sum(-1, keepdim=True) + outside
            mass = aim.sum(-1, keepdim=True)
            entropy = -(aim * logs).sum(-1, keepdim=True)
            total += ((ce_share * entropy + (1 - ce_share) * distance) * weight).sum()
            # d L1 / d logit = p (sign - mean): +1 for all that the law leaves out, corrected on its shortlist.
            inside = (1 - ce_share) * shortlist * (signs - 1.0) - ce_share * aim
            p.mul_((ce_share * mass + (1 - ce_share) * (1.0 - mean)) * weight)
            p.scatter_add_(1, ids, inside * weight)
            torch.mm(p, table, out=grad_joint[part])
            grad_w2.addmm_(p.mT, joint[part, head.shape[1] :])
        ctx.save_for_backward(grad_joint, grad_w2)
        ctx.mark_non_differentiable(overlap, matched)
        return total, overlap, matched

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_joint, grad_w2 = ctx.saved_tensors
        return grad_joint * grad, None, grad_w2 * grad, None, None, None, None, None


def overlap_loss(
    hidden: Tensor,
    markov: Tensor,
    head: Tensor,
    w2: Tensor,
    law_ids: Tensor,
    aims: Tensor,
    chances: Tensor,
    weights: Tensor,
    ce_share: float,
) -> Losses:
    """Distance of each slot's law, softmax(hidden @ head.T + markov @ w2.T), to the one aimed at.

    Shapes: hidden [N,D]; markov [N,R]; head [V,D] (frozen); w2 [V,R]; law_ids [N,top] int64, likeliest first, -1 for
    none; aims [N,top]: what the loss pulls these tokens' probabilities to; chances [N,top]: the target's own (both 0
    where there is none); weights [N].
    """
    joint = torch.cat([hidden, markov], 1)
    total, overlap, matched = _Overlap.apply(  # type: ignore[no-untyped-call]
        joint, head, w2, law_ids, aims, chances, weights, ce_share
    )
    return Losses(total, overlap, matched)
