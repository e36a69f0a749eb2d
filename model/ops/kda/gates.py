"""KDA's per-token gates, and the norms of its queries and keys."""

from __future__ import annotations

import torch

from model.ops.pointwise import sigmoid, softplus


def log_decay(z: torch.Tensor, a_log: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    """g <= 0 from the gate's projection. K3 bounds it below: the bound multiplies a sigmoid, it does not clamp.

    Shapes: z, result [..., H, K]; a_log [H]. Without `lower_bound` it is Kimi-Linear's unbounded form.
    """
    rate = torch.exp(a_log)[:, None]
    if lower_bound is None:
        return -rate * softplus(z)
    return lower_bound * sigmoid(rate * z)


def normalise(q: torch.Tensor, k: torch.Tensor, l2_eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k over their L2 norms (eps on the sum of squares), then q times K^-1/2."""
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + l2_eps)
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + l2_eps)
    return q * q.shape[-1] ** -0.5, k
