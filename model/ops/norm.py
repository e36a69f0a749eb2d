"""Root-mean-square norms in fp32."""

from __future__ import annotations

import torch


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Shapes: x [..., size]; result [..., 1]."""
    return torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight · (x / rms(x)).

    Shapes: x, result [..., size]; weight [size]; all fp32.
    """
    return weight * (x * inverse_rms(x, eps))
