"""Causal depthwise convolution and SiLU as a sum of shifted copies: all tokens at once, one token or many."""

from __future__ import annotations

import torch

from model.ops.pointwise import silu


def short_conv(x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve x with the last `kernel` inputs of its own channel, then SiLU; return (out, new history).

    Shapes: x, out [B, T, C]; weight [C, kernel], the last tap on the current token; history [B, kernel-1, C],
            oldest first, raw inputs.
    """
    tokens = x.shape[1]
    taps = torch.cat([history, x], 1)
    total = taps[:, :tokens] * weight[:, 0]
    for i in range(1, weight.shape[1]):  # oldest tap first, for every token alike
        total = total + taps[:, i : i + tokens] * weight[:, i]
    return silu(total), taps[:, tokens:]
