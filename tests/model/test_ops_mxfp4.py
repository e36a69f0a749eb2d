"""MXFP4 codes become exactly the values of the format's definition."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from model.ops.mxfp4 import naive, table
from tests.golden import golden_dir


def golden_table() -> dict[str, torch.Tensor]:
    return load_file(golden_dir("k3_tiny_mxfp4") / "table.safetensors")


def test_every_code_at_the_golden_exponents_is_bit_equal() -> None:
    golden = golden_table()
    for dequantize in (naive.dequantize, table.dequantize):
        found = dequantize(golden["packed"], golden["scale"])
        assert torch.equal(found, golden["value_f32"])  # the largest overflow to infinity, as there


def test_every_byte_low_nibble_first() -> None:
    golden = golden_table()
    names = {name.removeprefix("all_bytes_"): t for name, t in golden.items() if name.startswith("all_bytes_")}
    packed, scale = names["packed"], names["scale"]
    wanted = next(t for name, t in names.items() if name.startswith("value") and t.dtype == torch.float32)
    assert packed.numel() == 256
    assert torch.equal(table.dequantize(packed, scale), wanted)
    assert torch.equal(naive.dequantize(packed, scale), wanted)


def test_twins_agree_on_every_exponent_and_255_is_nan() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(1, 256).repeat(256, 1)[:, :16].contiguous()
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1)
    fast, slow = table.dequantize(packed, scale), naive.dequantize(packed, scale)
    assert torch.equal(fast[:255], slow[:255])
    assert fast[255].isnan().all()
    assert slow[255].isnan().all()
