"""The drafter's loss over the vocabulary, a slice of slots at a time: the logits never exist at once.

Source: DSpark, arXiv 2607.05147: 0.1 cross-entropy + 0.9 L1 distance to the target's law (acceptance at temperature 1
is 1 - L1 / 2), with the cross-entropy taken to the law itself, which a drawn token is only a sample of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

SLICE = 512  # its logits fit the last-level cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens that laws are compared over: `sure` of them stand for themselves, the others for as many as they are
    a sample of.

    Shapes: head [tokens, hidden], w2 [tokens, rank]: their rows of lm_head and of the Markov head; standing [tokens]:
    log of how many tokens each stands for.
    """

    head: Tensor
    w2: Tensor
    standing: Tensor
    sure: int


class Losses(NamedTuple):
    """total: a scalar to differentiate. Each slot's: overlap [slots], the chance 1 - L1 / 2 that a draw is accepted,
    at the slot's temperature; matched [slots] bool: the likeliest token is the law's."""

    total: Tensor
    overlap: Tensor
    matched: Tensor


class _Overlap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        joint: Tensor,
        w2: Tensor,
        vocabulary: Vocabulary,
        states: Tensor,
        sharpness: Tensor,
        weights: Tensor,
        ce_share: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head, sure = vocabulary.head, vocabulary.sure
        table = torch.cat([head, w2], 1)
        grad_joint, grad_w2 = torch.empty_like(joint), torch.zeros_like(w2)
        overlap, total = joint.new_empty(len(joint)), joint.new_zeros(())
        matched = torch.empty(len(joint), dtype=torch.bool)
        for start in range(0, len(joint), SLICE):
            part = slice(start, min(start + SLICE, len(joint)))
            sharp, weight = sharpness[part, None], weights[part]
            law, logs = (states[part] * sharp) @ head.mT, (joint[part] * sharp) @ table.mT
            matched[part] = logs[:, :sure].argmax(-1) == law[:, :sure].argmax(-1)
            law = law.add_(vocabulary.standing).softmax(-1)
            logs.add_(vocabulary.standing)
            logs.sub_(logs.logsumexp(-1, keepdim=True))
            entropy = law @ vocabulary.standing - torch.linalg.vecdot(law, logs)
            p = logs.exp_()
            off = p - law
            distance, signs = off.abs().sum(-1), off.sign()
            overlap[part] = 1.0 - distance / 2
            total += ((ce_share * entropy + (1 - ce_share) * distance) * weight).sum()
            # d L1 / d logit = p (sign - mean sign); d cross-entropy / d logit = p - law.
            grad = signs.sub_(torch.linalg.vecdot(signs, p)[:, None]).mul_(p).mul_(1 - ce_share)
            grad.add_(off, alpha=ce_share).mul_(weight[:, None] * sharp)
            torch.mm(grad, table, out=grad_joint[part])
            grad_w2.addmm_(grad.mT, joint[part, head.shape[1] :])
        ctx.save_for_backward(grad_joint, grad_w2)
        ctx.mark_non_differentiable(overlap, matched)
        return total, overlap, matched

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_joint, grad_w2 = ctx.saved_tensors
        return grad_joint * grad, grad_w2 * grad, None, None, None, None, None


def overlap_loss(
    hidden: Tensor,
    markov: Tensor,
    vocabulary: Vocabulary,
    states: Tensor,
    sharpness: Tensor,
    weights: Tensor,
    ce_share: float,
) -> Losses:
    """Distance of each slot's law, softmax(sharpness (hidden @ head.T + markov @ w2.T)), to the target's,
    softmax(sharpness (states @ head.T)), over `vocabulary`.

    Shapes: hidden, states [slots, hidden]; markov [slots, rank]; sharpness (1 / temperature), weights [slots].
    """
    total, overlap, matched = _Overlap.apply(  # type: ignore[no-untyped-call]
        torch.cat([hidden, markov], 1), vocabulary.w2, vocabulary, states, sharpness, weights, ce_share
    )
    return Losses(total, overlap, matched)
