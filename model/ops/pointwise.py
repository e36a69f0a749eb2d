"""Elementwise functions whose bits do not depend on where in a tensor an element lies.

torch's own sigmoid, silu and softplus use another formula for the last few elements of a tensor (or of a thread's
share) than for the rest. exp, log1p, tanh and division do not, so these are built from those.
"""

from __future__ import annotations

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.reciprocal(1.0 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1.0 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x), from the side that cannot overflow."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))


def silu_glu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return silu(gate) * up


def situ_glu(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """SiTU-GLU: both factors saturate smoothly, at beta and linear_beta.

    Source: the K3 technical report; checked against golden/.
    """
    return beta * torch.tanh(gate / beta) * sigmoid(gate) * (linear_beta * torch.tanh(up / linear_beta))
