"""Snapshot forms, one element at a time, from the definitions of the formats."""

from __future__ import annotations

import struct

import torch

from model.batch import PoolLayout
from model.ops.snapshot import E4M3_MAX, SnapshotDtype


def encode(slot: torch.Tensor, layout: PoolLayout, dtype: SnapshotDtype) -> bytes:
    """Shapes: slot [slot_floats] fp32."""
    values = slot.tolist()
    state, conv = values[: layout.recurrent_floats], values[layout.recurrent_floats :]
    match dtype:
        case "fp32":
            return struct.pack(f"<{len(values)}f", *values)
        case "bf16":
            return b"".join(bf16_code(x) for x in values)
        case "fp8":
            size = layout.key_dim * layout.value_dim
            heads = [state[i : i + size] for i in range(0, len(state), size)]
            scales = [rounded(rounded(max(abs(x) for x in head)) / E4M3_MAX) for head in heads]
            codes = [
                e4m3_code(rounded(x / s)) if s else 0 for head, s in zip(heads, scales, strict=True) for x in head
            ]
            return bytes(codes) + struct.pack(f"<{len(scales)}f", *scales) + b"".join(bf16_code(x) for x in conv)


def decode(stored: bytes, layout: PoolLayout, dtype: SnapshotDtype) -> torch.Tensor:
    """Shapes: result [slot_floats] fp32."""
    num_state, num_conv = layout.recurrent_floats, layout.conv_floats
    match dtype:
        case "fp32":
            values = list(struct.unpack(f"<{num_state + num_conv}f", stored))
        case "bf16":
            values = [bf16_value(stored[i : i + 2]) for i in range(0, len(stored), 2)]
        case "fp8":
            size = layout.key_dim * layout.value_dim
            num_heads = num_state // size
            scales = struct.unpack(f"<{num_heads}f", stored[num_state : num_state + 4 * num_heads])
            values = [e4m3_value(stored[i]) * scales[i // size] for i in range(num_state)]
            rest = stored[num_state + 4 * num_heads :]
            values += [bf16_value(rest[i : i + 2]) for i in range(0, len(rest), 2)]
    return torch.tensor(values, dtype=torch.float32)


def rounded(value: float) -> float:
    """To the nearest fp32."""
    (nearest,) = struct.unpack("<f", struct.pack("<f", value))
    return float(nearest)


def bf16_code(value: float) -> bytes:
    """The upper half of an fp32, rounded to nearest even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + (bits >> 16 & 1)
    return struct.pack("<H", bits >> 16 & 0xFFFF)


def bf16_value(code: bytes) -> float:
    (value,) = struct.unpack("<f", b"\0\0" + code)
    return float(value)


def e4m3_value(code: int) -> float:
    """Sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7F and 0xFF are NaN, there is no infinity."""
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    if code & 0x7F == 0x7F:
        magnitude = float("nan")
    return -magnitude if code & 0x80 else magnitude


MAGNITUDES = [e4m3_value(code) for code in range(0x7F)]


def e4m3_code(value: float) -> int:
    """The nearest, of two equally near the one with the even code; beyond 448 is 448."""
    magnitude = min(abs(value), E4M3_MAX)
    code = min(range(0x7F), key=lambda c: (abs(MAGNITUDES[c] - magnitude), c & 1))
    return code | (0x80 if struct.pack("<d", value)[7] & 0x80 else 0)
