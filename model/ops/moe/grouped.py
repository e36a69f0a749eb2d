"""The experts' sum, expert by expert: each multiplies all of its tokens at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from model.ops.linear.padded import Matrix, linear

Glu = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def combine(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Sequence[Matrix],
    down: Sequence[Matrix],
    glu: Glu,
) -> torch.Tensor:
    """Σ over a token's experts of weight · w2 glu(w1 x, w3 x), in ascending expert index.

    Shapes: x, result [T, size]; chosen, weights [T, count], chosen ascending; gate_up [2·inner, size] and
            down [size, inner] per expert.
    """
    made = x.new_empty(*chosen.shape, x.shape[1])
    for expert in sorted(set(chosen.flatten().tolist())):
        token, place = torch.where(chosen == expert)
        gate, up = linear(x[token], gate_up[expert]).chunk(2, -1)
        made[token, place] = linear(glu(gate, up), down[expert])
    total = weights[:, :1] * made[:, 0]  # summed after all are made, so the order is each token's own
    for i in range(1, chosen.shape[1]):
        total = total + weights[:, i : i + 1] * made[:, i]
    return total
