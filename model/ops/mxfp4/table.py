"""MXFP4 to fp32 by table look-up."""

from __future__ import annotations

import torch

from model.ops.mxfp4.naive import MAGNITUDES

_CODES = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
_SCALES = torch.tensor([2.0 ** (e - 127) for e in range(255)] + [float("nan")])  # 2^127 still fits fp32


def dequantize(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Shapes: packed uint8 [out, in/2]; scale uint8 [out, in/32]; result fp32 [out, in]."""
    rows, half = packed.shape
    codes = torch.stack((packed & 0xF, packed >> 4), -1).view(rows, 2 * half)
    groups = scale.shape[1]
    values = _CODES[codes.long()].view(rows, groups, 2 * half // groups)
    return (values * _SCALES[scale.long()][..., None]).view(rows, 2 * half)
