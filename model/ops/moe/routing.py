"""Which experts take a token, and with what weight."""

from __future__ import annotations

import torch

from model.ops.pointwise import sigmoid


def route(
    logits: torch.Tensor, bias: torch.Tensor, *, count: int, renormalize: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by biased sigmoid scores, weigh by unbiased ones. Ties go to the lower expert index.

    Shapes: logits [T, E]; bias [E]; results [T, count]: expert indices ascending (int64), and their weights.
    Source: the K3 technical report; checked against golden/.
    """
    scores = sigmoid(logits)
    order = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices
    chosen = order[:, :count].sort(-1).values
    weights = scores.gather(1, chosen)
    if renormalize:
        total = weights[:, :1]
        for i in range(1, count):
            total = total + weights[:, i : i + 1]
        weights = weights / (total + 1e-20)
    return chosen, weights * scaling
