"""State between tensor-parallel sizes, byte for byte against slicing done with named axes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.batch import PoolLayout
from model.reshard import (
    Copy,
    ReshardError,
    check_plan,
    heads_of,
    rows_source,
    shard_layout,
    slot_bytes,
    state_plan,
)

HEADS = {"k3": 96, "k3-nano": 4}


def layout_of(num_heads: int, *, layers: int = 3, key: int = 2, value: int = 3, history: int = 3) -> PoolLayout:
    return PoolLayout(
        block_tokens=64, num_mla_layers=1, row_width=4, num_kda_layers=layers, num_heads=num_heads, key_dim=key,
        value_dim=value, conv_history=history,
    )  # fmt: skip


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def axes(layout: PoolLayout, slot: np.ndarray) -> list[np.ndarray]:
    """A slot's parts as [layer][head][K][V] and three times [layer][row][head][dim]."""
    layers, heads, rows = layout.num_kda_layers, layout.num_heads, layout.conv_history
    split = layout.recurrent_floats
    recurrent = slot[:split].reshape(layers, heads, layout.key_dim, layout.value_dim)
    conv = slot[split:].reshape(layers, -1)
    parts, at = [recurrent], 0
    for dim in (layout.key_dim, layout.key_dim, layout.value_dim):
        width = rows * heads * dim
        parts.append(conv[:, at : at + width].reshape(layers, rows, heads, dim))
        at += width
    return parts


def sliced(whole: PoolLayout, slot: np.ndarray, heads: range) -> np.ndarray:
    """A rank's slot, from the whole one, by indexing heads."""
    recurrent, *conv = axes(whole, slot)
    keep = slice(heads.start, heads.stop)
    convs = [part[:, :, keep].reshape(whole.num_kda_layers, -1) for part in conv]
    return np.concatenate([recurrent[:, keep].reshape(-1), np.concatenate(convs, axis=1).reshape(-1)])


def shards(whole: PoolLayout, slot: np.ndarray, tp_size: int) -> list[np.ndarray]:
    return [sliced(whole, slot, heads_of(whole.num_heads, tp_size, rank)) for rank in range(tp_size)]


def filled(plan: tuple[Copy, ...], sources: list[np.ndarray], target_bytes: int) -> bytes:
    target = bytearray(b"\xee" * target_bytes)
    for copy in plan:
        data = sources[copy.source_rank].tobytes()[copy.source_offset : copy.source_offset + copy.length]
        target[copy.target_offset : copy.target_offset + copy.length] = data
    return bytes(target)


@st.composite
def reshards(draw):
    heads = draw(st.sampled_from([4, 6, 8, 12, 96]))
    whole = layout_of(
        heads, layers=draw(st.integers(1, 3)), key=draw(st.integers(1, 4)), value=draw(st.integers(1, 4)),
        history=draw(st.integers(0, 3)),
    )  # fmt: skip
    return whole, draw(st.sampled_from(divisors(heads))), draw(st.sampled_from(divisors(heads)))


@settings(max_examples=60, deadline=None)
@given(reshards())
def test_split_with_p_then_resharded_to_d_is_split_with_d_and_joins_to_the_original(case):
    whole, p, d = case
    slot = np.arange(whole.slot_floats, dtype=np.float32)
    sources, expected = shards(whole, slot, p), shards(whole, slot, d)
    size, source_size = slot_bytes(shard_layout(whole, d)), slot_bytes(shard_layout(whole, p))
    resharded = []
    for rank in range(d):
        plan = state_plan(whole, source_tp=p, target_tp=d, target_rank=rank)
        check_plan(plan, source_bytes=[source_size] * p, target_bytes=size)
        resharded.append(np.frombuffer(filled(plan, sources, size), np.float32))
        assert np.array_equal(resharded[-1], expected[rank])
    joined = state_plan(whole, source_tp=d, target_tp=1, target_rank=0)
    assert filled(joined, resharded, slot_bytes(whole)) == slot.tobytes()


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_every_pair_of_divisors_of_the_real_head_counts(heads):
    whole = layout_of(heads, layers=2)
    slot = np.random.default_rng(heads).standard_normal(whole.slot_floats).astype(np.float32)
    split = {tp: shards(whole, slot, tp) for tp in divisors(heads)}
    for p in divisors(heads):
        for d in divisors(heads):
            size, rank = slot_bytes(shard_layout(whole, d)), (7 * p) % d
            plan = state_plan(whole, source_tp=p, target_tp=d, target_rank=rank)
            check_plan(plan, source_bytes=[slot_bytes(shard_layout(whole, p))] * p, target_bytes=size)
            assert filled(plan, split[p], size) == split[d][rank].tobytes()


def test_equal_sizes_are_one_range_and_k3_moves_exactly_its_share():
    k3 = layout_of(96, layers=69, key=128, value=128)
    assert state_plan(k3, source_tp=8, target_tp=8, target_rank=5) == (
        Copy(source_rank=5, source_offset=0, target_offset=0, length=slot_bytes(k3) // 8),
    )
    plan = state_plan(k3, source_tp=8, target_tp=4, target_rank=3)
    assert sum(copy.length for copy in plan) == slot_bytes(k3) // 4 and {c.source_rank for c in plan} == {6, 7}
    assert len(plan) == 69 * 2 * (1 + 9)  # per layer and source: the states, and nine history rows


def test_conv_history_is_three_segments_not_one_range():
    whole = layout_of(4, layers=1)
    plan = state_plan(whole, source_tp=1, target_tp=2, target_rank=1)
    conv = [copy for copy in plan if copy.source_offset >= whole.recurrent_floats * 4]
    assert len(conv) == 9
    half = sum(copy.length for copy in conv)
    assert conv[0].source_offset != whole.recurrent_floats * 4 + half  # the second half of one merged range


@pytest.mark.parametrize(("heads", "p", "d"), [(96, 5, 1), (96, 1, 7), (4, 8, 1), (4, 0, 1), (4, 1, 3)])
def test_an_uneven_split_is_refused(heads, p, d):
    with pytest.raises(ReshardError, match="cannot be split"):
        state_plan(layout_of(heads), source_tp=p, target_tp=d, target_rank=0)
    with pytest.raises(ReshardError, match="rank"):
        heads_of(4, 2, 2)


@pytest.mark.parametrize("field", ["source_rank", "source_offset", "target_offset", "length"])
@pytest.mark.parametrize("by", [-1000, -4, 4, 1000])
def test_a_plan_with_one_wrong_number_is_refused(field, by):
    whole = layout_of(8)
    plan = list(state_plan(whole, source_tp=4, target_tp=2, target_rank=1))
    how = {
        "source_bytes": [slot_bytes(shard_layout(whole, 4))] * 4,
        "target_bytes": slot_bytes(shard_layout(whole, 2)),
    }
    check_plan(plan, **how)
    index = len(plan) - 1 if by > 0 else 0  # where the slot ends, and where it begins
    plan[index] = replace(plan[index], **{field: getattr(plan[index], field) + by})
    with pytest.raises(ReshardError):
        check_plan(plan, **how)


def test_rows_are_whole_everywhere_and_read_from_every_rank_alike():
    assert [rows_source(2, rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [rows_source(4, rank) for rank in range(2)] == [0, 1]
