"""The drafter's loss over the vocabulary, a slice of blocks at a time: the logits never exist at once.

What a block is worth is how many of its tokens verification keeps. Of a text drawn from the target it keeps at least
i with the chance min(1, R_1, .., R_i), R_i being the drafter's chance of the first i tokens over the target's: so
slot i adds, over all tokens that may stand there, the sum of min(M p, R q), M = min(1, R_1, ..) and R being those of
the tokens before it. Source: Block Verification, arXiv 2403.10444. DSpark's own loss (arXiv 2607.05147), 1 - sum of
min(p, q) in every slot, is the case M = R = 1. Beside it stands the cross-entropy to the target's law, which moves
what overlaps nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

SLICE = 512  # slots whose logits fit the last-level cache
RATIO_MAX = 30.0  # of log q / p, so that what underflows has a ratio too
SLACK_MAX = 8.0  # of R / M: a rare token before, which the drafter thought likely, says little of this slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens that laws are compared over: `sure` of them stand for themselves, the others for as many as they are
    a sample of.

    Shapes: head [tokens, hidden], w2 [tokens, rank]: their rows of lm_head and of the Markov head; standing [tokens]:
    log of how many tokens each stands for; index [vocab]: where a token stands, of those that are sure.
    """

    head: Tensor
    w2: Tensor
    standing: Tensor
    sure: int
    index: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What blocks are measured against.

    Shapes: states [blocks, slots, hidden]; drawn [blocks, slots]: the token that the text has behind each slot, its
    place in the vocabulary; weights [blocks, slots]: 0 where the text ends; greedy [blocks] bool; sharpness [blocks]:
    1 / temperature of both laws. `floor`: of what a slot counts, however unlikely it is to be reached.
    """

    states: Tensor
    drawn: Tensor
    weights: Tensor
    greedy: Tensor
    sharpness: Tensor
    ce_share: float
    floor: float


class Losses(NamedTuple):
    """total: a scalar to differentiate. Each slot's [blocks, slots]: overlap, the sum of min(p, q) at the slot's
    temperature; matched bool: the likeliest token is the one drawn; reach: M."""

    total: Tensor
    overlap: Tensor
    matched: Tensor
    reach: Tensor


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, joint: Tensor, w2: Tensor, vocabulary: Vocabulary, aim: Aim, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        blocks, slots, width = joint.shape
        head = vocabulary.head.to(dtype)
        table = torch.cat([head, w2.to(dtype)], 1)
        grad_joint, grad_w2 = torch.empty_like(joint), torch.zeros_like(w2)
        overlap, reach = joint.new_empty(blocks, slots), joint.new_empty(blocks, slots)
        matched = torch.empty(blocks, slots, dtype=torch.bool)
        total = joint.new_zeros(())
        step = max(1, SLICE // slots)
        for start in range(0, blocks, step):
            part = slice(start, start + step)
            own = joint[part].reshape(-1, width).to(dtype)
            count = len(own)
            sharp = aim.sharpness[part].repeat_interleave(slots)[:, None]
            drawn = aim.drawn[part].reshape(-1, 1)
            law = (aim.states[part].reshape(count, -1).to(dtype) @ head.mT).to(joint.dtype)
            law = law.mul_(sharp).add_(vocabulary.standing).softmax(-1)
            logits = (own @ table.mT).to(joint.dtype).mul_(sharp)
            matched[part] = (logits[:, : vocabulary.sure].argmax(-1) == drawn[:, 0]).view(-1, slots)
            logits.add_(vocabulary.standing)
            norm = logits.logsumexp(-1, keepdim=True)
            entropy = norm[:, 0] - torch.linalg.vecdot(law, logits) + law @ vocabulary.standing
            p = logits.sub_(norm).exp_()
            ratio = (p.gather(1, drawn) / law.gather(1, drawn)).log().clamp(-RATIO_MAX, RATIO_MAX).view(-1, slots)
            weight, slack, reach[part] = _reached(ratio, aim, part)
            overlap[part] = torch.minimum(p, law).sum(-1).view(-1, slots)
            wide = p * slack
            kept = torch.minimum(wide, law).sum(-1)
            lost = 2 * (1 - kept)
            total += ((aim.ce_share * entropy + (1 - aim.ce_share) * lost) * weight).sum()
            # d kept / d logit = slack p (b - sum of b p), b where slack p < law; d cross-entropy / d logit = p - law.
            below = wide.lt(law).to(p.dtype)
            mean = torch.linalg.vecdot(below, p)[:, None]
            grad = below.sub_(mean).mul_(wide).mul_(-2 * (1 - aim.ce_share))
            grad.add_(p.sub_(law), alpha=aim.ce_share).mul_(weight[:, None] * sharp)
            grad = grad.to(dtype)
            grad_joint[part] = (grad @ table).to(joint.dtype).view(-1, slots, width)
            grad_w2 += (grad.mT @ own[:, head.shape[1] :]).to(w2.dtype)
        ctx.save_for_backward(grad_joint, grad_w2)
        ctx.mark_non_differentiable(overlap, matched, reach)
        return total, overlap, matched, reach

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_joint, grad_w2 = ctx.saved_tensors
        return grad_joint * grad, grad_w2 * grad, None, None, None


def _reached(ratio: Tensor, aim: Aim, part: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Of every slot, what it counts and R / M, flat; and M [blocks, slots].

    `ratio` [blocks, slots]: log q / p of what was drawn there. A likeliest token is kept or not, whatever was before:
    greedy text has no slack.
    """
    logs = torch.nn.functional.pad(ratio[:, :-1], (1, 0)).cumsum(1)
    least = logs.cummin(1).values
    reach = least.exp()
    slack = (logs - least).exp().clamp(max=SLACK_MAX)
    slack = torch.where(aim.greedy[part, None], 1.0, slack)
    weight = aim.weights[part] * (aim.floor + (1 - aim.floor) * reach)
    return weight.flatten(), slack.reshape(-1, 1), reach


def block_loss(
    hidden: Tensor, markov: Tensor, vocabulary: Vocabulary, aim: Aim, dtype: torch.dtype = torch.float32
) -> Losses:
    """How far softmax(sharpness (hidden @ head.T + markov @ w2.T)) is, in every slot, from the target's
    softmax(sharpness (states @ head.T)), over `vocabulary`.

    Shapes: hidden [blocks, slots, hidden]; markov [blocks, slots, rank]. `dtype`: of the products.
    """
    return Losses(
        *_Block.apply(torch.cat([hidden, markov], -1), vocabulary.w2, vocabulary, aim, dtype)  # type: ignore[no-untyped-call]
    )
