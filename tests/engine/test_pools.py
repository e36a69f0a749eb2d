"""The pools' memory, and the ledger's table."""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path

import pytest
import torch
from toy import ToyBackend

from engine.ledger import NEXT, Change, Hold, Ledger
from engine.pools import Pools, mapped_floats
from engine.settings import EngineSettings
from moonrelay.errors import InvariantError, SettingsError


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_untouched_memory_costs_nothing_and_is_aligned_and_zero():
    before = resident_bytes()
    floats = mapped_floats(1000, 500_000)
    assert floats.nbytes == 2_000_000_000
    assert floats.data_ptr() % mmap.PAGESIZE == 0
    assert resident_bytes() - before < 20_000_000
    assert floats[700, ::100_000].tolist() == [0.0] * 5
    floats[999, -1] = 7.0
    assert resident_bytes() - before < 20_000_000


def test_a_pool_beyond_the_address_space_is_a_settings_error():
    with pytest.raises(SettingsError, match="cannot be mapped"):
        mapped_floats(2**30, 2**30)


def test_a_snapshot_copies_the_whole_slot_and_nothing_else():
    pools = Pools(ToyBackend().layout(64), EngineSettings(num_blocks=2, num_slots=4, max_batch_sequences=1))
    pools.state.copy_(torch.arange(pools.state.numel(), dtype=torch.float32).view_as(pools.state))
    before = pools.state.clone()
    pools.copy_state(1, 3)
    assert torch.equal(pools.state[3], before[1])
    assert torch.equal(pools.state[:3], before[:3])


@pytest.mark.parametrize(("hold", "change"), list(itertools.product(Hold, Change)), ids=str)
def test_a_reservation_follows_the_table_and_nothing_else(hold, change):
    ledger = Ledger(num_blocks=3, num_slots=2, block_tokens=64)
    reservation = ledger.reserve(100)
    steps = {
        Change.ATTACHED: lambda: ledger.attach(reservation, restored=0),
        Change.DETACHED: lambda: ledger.detach(reservation),
        Change.FAULTED: lambda: ledger.detach(reservation, faulted=True),
        Change.RELEASED: lambda: ledger.release(reservation),
    }
    way = {
        Hold.IDLE: [],
        Hold.BUSY: [Change.ATTACHED],
        Hold.LEAVING: [Change.ATTACHED, Change.RELEASED],
        Hold.SPOILED: [Change.ATTACHED, Change.FAULTED],
        Hold.GONE: [Change.RELEASED],
    }[hold]
    for step in way:
        steps[step]()
    if hold is Hold.GONE and change is Change.RELEASED:
        steps[change]()  # idempotent
    elif (hold, change) in NEXT:
        steps[change]()
    else:
        with pytest.raises(InvariantError):
            steps[change]()
    gone = NEXT.get((hold, change), hold) is Hold.GONE
    assert (ledger.free_blocks, ledger.free_slots) == ((3, 2) if gone else (1, 1))
    ledger.check()


def test_what_was_used_last_is_used_next():
    ledger = Ledger(num_blocks=10, num_slots=3, block_tokens=64)
    first = ledger.reserve(200)
    assert (first.blocks, first.slot) == ((0, 1, 2, 3), 0)
    ledger.release(first)
    assert ledger.reserve(200).blocks == (0, 1, 2, 3)


def test_the_check_finds_a_lost_and_a_doubled_block():
    ledger = Ledger(num_blocks=4, num_slots=2, block_tokens=64)
    ledger.reserve(64)
    lost = ledger._free_blocks.pop()
    with pytest.raises(InvariantError, match="blocks"):
        ledger.check()
    ledger._free_blocks.append(lost)
    ledger.check()
    ledger._free_slots.append(0)
    with pytest.raises(InvariantError, match="slots"):
        ledger.check()
