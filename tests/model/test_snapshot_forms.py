"""Snapshot forms: the fast, in-place form against the element-wise one, and what each may cost in precision."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from model.batch import PoolLayout
from model.ops.snapshot import naive, packed

LAYOUTS = [
    PoolLayout(block_tokens=64, num_mla_layers=1, row_width=8, num_kda_layers=layers, num_heads=heads, key_dim=8,
               value_dim=4, conv_history=3)
    for layers, heads in ((1, 1), (3, 2), (2, 5))
]  # fmt: skip


def slots(layout: PoolLayout) -> list[torch.Tensor]:
    """Random at very different magnitudes per head; with zeros, a zero head and values halfway between two codes."""
    generator = torch.Generator().manual_seed(5)
    wide = torch.randn(layout.slot_floats, generator=generator)
    heads = wide[: layout.recurrent_floats].view(-1, layout.key_dim * layout.value_dim)
    heads *= 10.0 ** torch.linspace(-6, 4, len(heads))[:, None]
    sparse = wide.clone()
    sparse[::3] = 0
    sparse[: layout.key_dim * layout.value_dim] = 0
    ties = torch.tensor([448.0, -448.0, 17.0, 19.0, 1.0625, -1.1875, 2.0**-9, 2.0**-10, 1.0 + 2**-8, 1.0 + 3 * 2**-8])
    return [wide, sparse, ties.repeat(-(-layout.slot_floats // len(ties)))[: layout.slot_floats]]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_place_equals_element_by_element_bit_for_bit(layout, dtype):
    for slot in slots(layout):
        want = naive.encode(slot, layout, dtype)
        regions = packed.region_bytes(layout, dtype)
        assert len(want) == sum(regions) <= slot.nbytes
        pool = torch.full((3, layout.slot_floats), float("nan"))
        pool[1] = slot
        packed.encode(pool[1], layout, dtype)
        stored = pool[1].view(torch.uint8)[: sum(regions)]
        assert bytes(stored.tolist()) == want
        pool[1].view(torch.uint8)[sum(regions) :] = 0xFF  # whatever was there before
        packed.decode(pool[1], layout, dtype)
        assert torch.equal(pool[1], naive.decode(want, layout, dtype))
        assert pool[0].isnan().all() and pool[2].isnan().all()


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 2**-8), ("fp8", 2**-4)])
def test_relative_error_stays_within_half_a_step(dtype, bound):
    layout = LAYOUTS[1]
    slot = slots(layout)[0]
    got = slot.clone()
    packed.encode(got, layout, dtype)
    packed.decode(got, layout, dtype)
    size = layout.key_dim * layout.value_dim
    for at in range(0, layout.recurrent_floats, size):
        head, decoded = slot[at : at + size], got[at : at + size]
        floor = head.abs().max() / 448 * 2**-10 if dtype == "fp8" else 0.0  # half the smallest subnormal step
        assert ((decoded - head).abs() <= head.abs() * bound + floor * 1.01).all()
    conv, decoded = slot[layout.recurrent_floats :], got[layout.recurrent_floats :]
    assert ((decoded - conv).abs() <= conv.abs() * 2**-8).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_what_was_decoded_encodes_to_the_same_bytes(dtype):
    """So a snapshot that travels over several workers does not drift. An fp8 scale may move by its own rounding."""
    layout = LAYOUTS[1]
    first = slots(layout)[0]
    packed.encode(first, layout, dtype)
    codes = packed.region_bytes(layout, dtype)[0]
    stored = first.view(torch.uint8)[:codes].clone()
    packed.decode(first, layout, dtype)
    packed.encode(first, layout, dtype)
    assert torch.equal(first.view(torch.uint8)[:codes], stored)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_what_is_not_finite_stays_not_finite(dtype):
    layout = LAYOUTS[0]
    slot = torch.ones(layout.slot_floats)
    slot[3] = float("nan")
    packed.encode(slot, layout, dtype)
    packed.decode(slot, layout, dtype)
    assert not slot.isfinite().all()


def test_e4m3_codes_are_their_own_values():
    for code in (*range(0x7F), *range(0x80, 0xFF)):
        value = naive.e4m3_value(code)
        assert naive.e4m3_code(value) == code
        assert torch.tensor([value]).to(torch.float8_e4m3fn).view(torch.uint8).item() == code
    assert math.isnan(naive.e4m3_value(0x7F)) and naive.e4m3_value(0x7E) == 448.0
    assert struct.unpack("<f", b"\0\0" + naive.bf16_code(1.0))[0] == 1.0
