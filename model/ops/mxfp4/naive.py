"""MXFP4 to fp32, one element at a time, from the definition."""

from __future__ import annotations

import torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Shapes: packed uint8 [out, in/2]; scale uint8 [out, in/32]; result fp32 [out, in]."""
    rows, half = packed.shape
    out = torch.empty(rows, 2 * half, dtype=torch.float64)
    for i in range(rows):
        for j in range(2 * half):
            code = (int(packed[i, j // 2]) >> (4 * (j % 2))) & 0xF
            exponent = int(scale[i, j // 32])
            factor = float("nan") if exponent == 0xFF else 2.0 ** (exponent - 127)
            out[i, j] = (-1.0 if code & 8 else 1.0) * MAGNITUDES[code & 7] * factor
    return out.float()
