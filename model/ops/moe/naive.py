"""The experts' sum, one token and expert at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from model.ops.linear.padded import Matrix

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
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for expert, weight in zip(chosen[t].tolist(), weights[t], strict=True):
            gate, up = (gate_up[expert].data[: gate_up[expert].out] @ x[t]).chunk(2)
            out[t] += weight * (down[expert].data[: down[expert].out] @ glu(gate, up))
    return out
