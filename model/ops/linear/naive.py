"""y = x Wᵀ, one dot product at a time."""

from __future__ import annotations

import torch

from model.ops.linear.padded import Matrix


def linear(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Multiply each row of x by the matrix.

    Shapes: x [..., in] fp32; result [..., out] fp32.
    """
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(flat.shape[0], matrix.out)
    for i in range(flat.shape[0]):
        for j in range(matrix.out):
            out[i, j] = torch.dot(flat[i], matrix.data[j])
    return out.view(*x.shape[:-1], matrix.out)
