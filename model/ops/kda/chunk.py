"""The gated delta rule in tiles of 64 tokens: the prompt path. The maths is in README.md."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from model.ops.kda import recurrent
from model.ops.kda.gates import normalise
from model.ops.linear.padded import matmul

TILE = 64
SUBTILE = 16  # rows whose pairwise decays are exponentiated directly
LOG_DECAY_MIN = -1000.0  # e^-104 is already 0 in fp32


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
    out = torch.empty_like(v)
    for start in range(0, q.shape[1], TILE):
        cut = slice(start, start + TILE)
        tile = (q[:, cut], k[:, cut], v[:, cut], g[:, cut], beta[:, cut])
        form = recurrent.gated_delta if tile[0].shape[1] == 1 else _tile
        out[:, cut], state = form(*tile, state=state, l2_eps=l2_eps)
    return out, state


def _tile(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    state: torch.Tensor,
    l2_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = q.shape[1]
    q, k = normalise(q, k, l2_eps)
    q, k, v = _head_first(q), _head_first(k), _head_first(v)  # [B,H,64,K or V]
    beta = _head_first(beta[..., None])
    total = _head_first(g).double().clamp(min=LOG_DECAY_MIN).cumsum(-2)  # G of the README
    decay_in = torch.exp(total.float())
    decay_out = torch.exp((total[..., -1:, :] - total).float())
    pairs_kk, pairs_qk = _pair_products(q, k, total)
    error = beta * (v - matmul(k * decay_in, state, 1))
    value = torch.linalg.solve_triangular(beta * pairs_kk, error, upper=False, unitriangular=True)
    out = matmul(q * decay_in, state, 1) + matmul(pairs_qk, value, 1)
    state = decay_in[..., -1, :, None] * state + matmul((k * decay_out).transpose(-1, -2), value, 1)
    return out[..., :tokens, :].transpose(1, 2), state


def _head_first(x: torch.Tensor) -> torch.Tensor:
    """[B,T,H,D] to [B,H,64,D], filled with zeros: tokens that change nothing.

    Always contiguous: over another memory order torch's sums run in another order too.
    """
    return F.pad(x.transpose(1, 2), (0, 0, 0, TILE - x.shape[1])).contiguous()


def _pair_products(q: torch.Tensor, k: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ_c x_ic k_jc e^{G_ic − G_jc} for x = k where i > j, and for x = q where i >= j; elsewhere 0.

    Shapes: q, k [B,H,64,K] fp32; total [B,H,64,K] fp64; results [B,H,64,64].
    """
    kk = q.new_zeros(*q.shape[:2], TILE, TILE)
    qk = torch.zeros_like(kk)
    later = torch.ones(SUBTILE, SUBTILE, dtype=torch.bool).triu(1)[..., None]
    for start in range(0, TILE, SUBTILE):
        rows = slice(start, start + SUBTILE)
        own = total[..., rows, :]
        gap = (own[..., :, None, :] - own[..., None, :, :]).float().masked_fill(later, float("-inf"))
        weighted = torch.exp(gap) * k[..., None, rows, :]
        kk[..., rows, rows] = (k[..., rows, None, :] * weighted).sum(-1)
        qk[..., rows, rows] = (q[..., rows, None, :] * weighted).sum(-1)
        if start:
            before = total[..., start - 1 : start, :]  # R of the README
            into = torch.exp((own - before).float())
            earlier = (k[..., :start, :] * torch.exp((before - total[..., :start, :]).float())).transpose(-1, -2)
            kk[..., rows, :start] = matmul(k[..., rows, :] * into, earlier, 1)
            qk[..., rows, :start] = matmul(q[..., rows, :] * into, earlier, 1)
    return kk.tril(-1), qk
