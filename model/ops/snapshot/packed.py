"""Snapshot forms, in place in a slot: `encode` leaves the stored form in its first bytes, `decode` undoes it.

Layers go upwards when they shrink and downwards when they grow, so that no layer is written over before it was read.
"""

from __future__ import annotations

import torch

from model.batch import FLOAT_BYTES, PoolLayout
from model.ops.snapshot import E4M3_MAX, SnapshotDtype


def region_bytes(layout: PoolLayout, dtype: SnapshotDtype) -> tuple[int, ...]:
    """Lengths of the stored form's regions, in order: recurrent state, scales where there are any, conv history."""
    state, conv = layout.recurrent_floats, layout.conv_floats
    match dtype:
        case "fp32":
            return FLOAT_BYTES * state, FLOAT_BYTES * conv
        case "bf16":
            return 2 * state, 2 * conv
        case "fp8":
            return state, FLOAT_BYTES * layout.num_kda_layers * layout.num_heads, 2 * conv


def encode(slot: torch.Tensor, layout: PoolLayout, dtype: SnapshotDtype) -> None:
    """Shapes: slot [slot_floats] fp32, contiguous; afterwards its first sum(region_bytes) bytes are all."""
    if dtype == "fp32":
        return
    state = slot[: layout.recurrent_floats].view(layout.num_kda_layers, layout.num_heads, -1)
    regions = torch.split(_bytes(slot, layout, dtype), list(region_bytes(layout, dtype)))
    conv = slot[layout.recurrent_floats :].to(torch.bfloat16)
    if dtype == "bf16":
        for layer, stored in zip(state, regions[0].chunk(layout.num_kda_layers), strict=True):
            stored.copy_(layer.to(torch.bfloat16).view(torch.uint8).flatten())
    else:
        scales = torch.empty(layout.num_kda_layers, layout.num_heads)
        for index, stored in enumerate(regions[0].chunk(layout.num_kda_layers)):
            layer = state[index]
            scales[index] = layer.abs().amax(dim=1) / E4M3_MAX
            scale = scales[index, :, None]
            codes = torch.where(scale > 0, layer / scale, torch.zeros(())).clamp(-E4M3_MAX, E4M3_MAX)
            stored.copy_(codes.to(torch.float8_e4m3fn).view(torch.uint8).flatten())
        regions[1].copy_(scales.view(torch.uint8).flatten())
    regions[-1].copy_(conv.view(torch.uint8))


def decode(slot: torch.Tensor, layout: PoolLayout, dtype: SnapshotDtype) -> None:
    """Shapes: slot [slot_floats] fp32, contiguous, its first bytes the stored form."""
    if dtype == "fp32":
        return
    state = slot[: layout.recurrent_floats].view(layout.num_kda_layers, layout.num_heads, -1)
    regions = torch.split(_bytes(slot, layout, dtype), list(region_bytes(layout, dtype)))
    conv = regions[-1].clone().view(torch.bfloat16)
    scales = (
        regions[1].clone().view(torch.float32).view(state.shape[0], state.shape[1], 1) if dtype == "fp8" else None
    )
    layers = regions[0].chunk(layout.num_kda_layers)
    for index in reversed(range(layout.num_kda_layers)):
        stored = layers[index].clone()
        if scales is None:
            state[index] = stored.view(torch.bfloat16).view(state[index].shape)
        else:
            state[index] = stored.view(torch.float8_e4m3fn).float().view(state[index].shape) * scales[index]
    slot[layout.recurrent_floats :] = conv


def _bytes(slot: torch.Tensor, layout: PoolLayout, dtype: SnapshotDtype) -> torch.Tensor:
    return slot.view(torch.uint8)[: sum(region_bytes(layout, dtype))]
