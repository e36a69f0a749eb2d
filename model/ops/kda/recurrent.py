"""The gated delta rule step by step, many sequences at once: the decode path."""

from __future__ import annotations

import torch

from model.ops.kda.gates import normalise


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    state: torch.Tensor,
    l2_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the gated delta rule over T tokens; return (out, new state). q and k come raw.

    Shapes: q k g [B,T,H,K]; v out [B,T,H,V]; beta [B,T,H]; state [B,H,K,V]; all fp32.
    Units:  g is log-decay, <= 0; beta in [0, 1].
    Source: the Kimi Linear report, arXiv 2510.26692.
    """
    q, k = normalise(q, k, l2_eps)
    decay = torch.exp(g)
    state = state.clone()
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        # Sums over K, not matrix products: their order is the same for any number of sequences.
        state.mul_(decay[:, t, :, :, None])
        error = v[:, t] - (state * k[:, t, :, :, None]).sum(-2)
        state.add_(k[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None, :])
        out[:, t] = (state * q[:, t, :, :, None]).sum(-2)
    return out, state
