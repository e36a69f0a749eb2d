"""The gated delta rule, one sequence, token and head at a time."""

from __future__ import annotations

import torch


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
    batch, tokens, heads, width = q.shape
    out = torch.empty_like(v)
    state = state.clone()
    for b in range(batch):
        for t in range(tokens):
            for h in range(heads):
                query, key = q[b, t, h], k[b, t, h]
                query = query * torch.rsqrt((query * query).sum() + l2_eps) * width**-0.5
                key = key * torch.rsqrt((key * key).sum() + l2_eps)
                decayed = torch.exp(g[b, t, h])[:, None] * state[b, h]
                error = v[b, t, h] - decayed.t() @ key
                state[b, h] = decayed + torch.outer(key, beta[b, t, h] * error)
                out[b, t, h] = state[b, h].t() @ query
    return out, state
