"""Absorbed attention in tiles of rows with a running softmax; the same for prompts and single tokens."""

from __future__ import annotations

import torch

from model.ops.linear.padded import matmul

KEY_TILE = 256  # rows per step, on absolute positions


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
    flat = q.reshape(tokens * heads, width)
    position = torch.arange(start, start + tokens).repeat_interleave(heads)[:, None]
    highest = flat.new_full((tokens * heads, 1), float("-inf"))
    total = flat.new_zeros(tokens * heads, 1)
    mixed = flat.new_zeros(tokens * heads, rank)
    for first in range(0, start + tokens, KEY_TILE):
        rows, row_position = _gather(pool, blocks, first, start + tokens)
        scores = matmul(flat, rows.t(), row_multiple) * scale
        if first + KEY_TILE > start + 1:
            scores = scores.masked_fill(row_position > position, float("-inf"))
        raised = torch.maximum(highest, scores.max(-1, keepdim=True).values)
        shares = torch.exp(scores - raised)
        kept = torch.exp(highest - raised)
        total = total * kept + shares.sum(-1, keepdim=True)
        mixed = mixed * kept + matmul(shares, rows[:, :rank], row_multiple)
        highest = raised
    return (mixed / total).view(tokens, heads, rank)


def _gather(pool: torch.Tensor, blocks: torch.Tensor, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One tile's rows [256, width] and their positions; rows from `end` on are zeros, whatever is in the pool."""
    position = torch.arange(first, first + KEY_TILE)
    inside = position.clamp(max=end - 1)
    rows = pool[blocks[inside // pool.shape[1]], inside % pool.shape[1]]
    if end < first + KEY_TILE:
        rows[end - first :] = 0.0
    return rows, position
