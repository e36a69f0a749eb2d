"""Rotary positions, plain and YaRN. The drafter counts absolute positions although its target has none."""

from __future__ import annotations

import math

import torch

from model.drafter.config import Rope


def frequencies(rope: Rope) -> torch.Tensor:
    """[dim / 2] fp32 radians a position. Source: YaRN, arXiv 2309.00071, section 3."""
    exponent = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    plain = rope.theta**-exponent
    if rope.factor == 1.0:
        return plain

    def turns_end(turns: float) -> float:
        """The pair, counted in dims, that turns this often over the original length."""
        return rope.dim * math.log(rope.original_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(turns_end(rope.beta_fast)), 0)
    high = min(math.ceil(turns_end(rope.beta_slow)), rope.dim - 1)
    ramp = ((torch.arange(rope.dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def length_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def attention_scale(rope: Rope, width: int) -> float:
    """What scores are multiplied with. The rotation itself carries the rest: `amplitude`."""
    return float(width**-0.5 * length_scale(rope.factor, rope.mscale_all_dim) ** 2)


def amplitude(rope: Rope) -> float:
    return length_scale(rope.factor, rope.mscale) / length_scale(rope.factor, rope.mscale_all_dim)


def rotate(x: torch.Tensor, positions: torch.Tensor, rope: Rope, *, interleaved: bool) -> torch.Tensor:
    """Turn the pairs of x by their positions.

    Shapes: x [tokens, ..., dim]; positions [tokens]. `interleaved`: a pair is two neighbours (DeepSeek's latents),
    else one of each half (Qwen's heads).
    """
    angle = positions.to(torch.float32)[:, None] * frequencies(rope)
    angle = angle.view(angle.shape[0], *(1,) * (x.dim() - 2), angle.shape[1])
    cos, sin = angle.cos() * amplitude(rope), angle.sin() * amplitude(rope)
    if interleaved:
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
