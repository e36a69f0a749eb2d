"""Absorbed attention, one query and head at a time, with a plain softmax."""

from __future__ import annotations

import torch


def attend(
    q: torch.Tensor,
    pool: torch.Tensor,
    blocks: torch.Tensor,
    *,
    start: int,
    rank: int,
    scale: float,
    row_multiple: int,
) -> torch.Tensor:
    """Mix the latents that each query sees: those of its own position and before.

    Shapes: q [T, H, width], the query of position start + t; pool [num_blocks, block_tokens, width], one layer's
            rows, written up to start + T; blocks int64, the sequence's blocks in order; result [T, H, rank].
    """
    tokens, heads, width = q.shape
    rows = pool[blocks].reshape(-1, width)
    out = torch.empty(tokens, heads, rank)
    for t in range(tokens):
        seen = rows[: start + t + 1]
        for h in range(heads):
            shares = torch.softmax(seen @ q[t, h] * scale, 0)
            out[t, h] = shares @ seen[:, :rank]
    return out
