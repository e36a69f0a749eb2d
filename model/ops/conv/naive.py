"""Causal depthwise convolution and SiLU, one token at a time."""

from __future__ import annotations

import torch

from model.ops.pointwise import silu


def short_conv(x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve x with the last `kernel` inputs of its own channel, then SiLU; return (out, new history).

    Shapes: x, out [B, T, C]; weight [C, kernel], the last tap on the current token; history [B, kernel-1, C],
            oldest first, raw inputs.
    """
    window = history.clone()
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        taps = torch.cat([window, x[:, t : t + 1]], 1)
        total = taps[:, 0] * weight[:, 0]
        for i in range(1, taps.shape[1]):
            total = total + taps[:, i] * weight[:, i]
        out[:, t] = silu(total)
        window = taps[:, 1:]
    return out, window
