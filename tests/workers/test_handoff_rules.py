"""What is worth a part, how long a read may take, how far a pass is: the handoff's small pure rules."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decode.bandwidth import GRACE_MS, PEERS_MAX, SLACK, Bandwidth
from engine.pools import Pools
from engine.settings import EngineSettings
from engine.worker.layers import layer_extents
from engine.worker.memory import Extent
from engine.worker.timing import Timing
from model.backend import load_backend
from model.batch import Segment
from model.progress import LayerProgress
from prefill.parts import Announcer, HandoffShape
from tests.golden import golden_dir

TIMING = Timing(transfer_floor_ms=2_000, transfer_min_bytes_per_s=50_000_000, lease_floor_ms=6_000)
PEER = ("prefill-0", 7)
SHAPE = HandoffShape(block_tokens=64, prompt_tokens=1000, block_bytes=100, num_layers=9, layer_bytes=50)


def announcer(part_bytes: int) -> Announcer:
    return Announcer(shape=SHAPE, part_bytes=part_bytes)


def test_only_full_blocks_and_left_layers_are_announced_each_once_and_in_order():
    one = announcer(1)
    assert (one.rows(63), one.rows(64), one.rows(64), one.rows(200)) == (range(0), range(1), range(0), range(1, 3))
    assert (one.layers(0), one.layers(2), one.layers(2), one.layers(8)) == (range(0), range(2), range(0), range(2, 8))
    assert one.layers(9) == range(0) and one.next_layer == 8  # the last layers go with the manifest
    assert one.rows(1000) == range(3, 15)  # the sixteenth block is not full


def test_small_parts_wait_until_they_are_worth_a_message():
    some = announcer(300)
    assert some.rows(128) == range(0) and some.rows(192) == range(3)
    assert some.layers(5) == range(0) and some.layers(6) == range(6)
    some.hold(5)
    assert some.rows(64 * 7) == range(0) and some.rows(64 * 8) == range(5, 8)
    some.hold(2)  # holding less than was announced changes nothing
    assert some.next_block == 8


@given(st.integers(1, 900), st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 9)), max_size=30))
def test_parts_never_overlap_and_never_name_what_is_not_done(part_bytes, steps):
    one, rows, layers = announcer(part_bytes), [], []
    tokens = done = 0
    for more_tokens, more_layers in steps:
        tokens, done = max(tokens, more_tokens), max(done, more_layers)
        named = one.rows(tokens)
        rows += named
        layers += one.layers(done)
        assert not named or len(named) * 100 >= part_bytes
        assert len(rows) * 64 <= tokens and len(layers) <= done
    assert rows == list(range(len(rows))) and layers == list(range(len(layers)))


def test_a_deadline_follows_what_was_measured_and_is_never_longer_than_the_owner_expects():
    bandwidth, nbytes = Bandwidth(TIMING), 400_000_000
    assert bandwidth.read_ms(PEER, nbytes) == TIMING.transfer_ms(nbytes) == 10_000
    bandwidth.observe(PEER, 4_000_000_000, 1.0)
    assert bandwidth.read_ms(PEER, nbytes) == GRACE_MS + SLACK * 100
    assert bandwidth.read_ms(("prefill-0", 8), nbytes) == 10_000  # a restarted peer is another one
    bandwidth.observe(PEER, 100, 1.0)  # a message's time, not the link's
    assert bandwidth.read_ms(PEER, nbytes) == GRACE_MS + SLACK * 100
    bandwidth.observe(PEER, 2_000_000_000, 1.0)
    assert bandwidth.bytes_per_s(PEER) == pytest.approx(3.5e9)
    bandwidth.slow(PEER)
    assert bandwidth.read_ms(PEER, nbytes) == 10_000


@given(st.lists(st.tuples(st.integers(1 << 20, 1 << 34), st.floats(1e-4, 1e4)), max_size=8), st.integers(0, 1 << 36))
def test_deadlines_stay_between_their_limits(samples, nbytes):
    bandwidth = Bandwidth(TIMING)
    for size, seconds in samples:
        bandwidth.observe(PEER, size, seconds)
    known = bandwidth.bytes_per_s(PEER)
    assert known is None or known >= TIMING.transfer_min_bytes_per_s
    assert min(GRACE_MS, TIMING.transfer_floor_ms) <= bandwidth.read_ms(PEER, nbytes) <= TIMING.transfer_ms(nbytes)


def test_peers_that_are_long_gone_are_forgotten():
    bandwidth = Bandwidth(TIMING)
    for epoch in range(PEERS_MAX + 10):
        bandwidth.observe(("p", epoch), 1 << 30, 1.0)
    assert bandwidth.bytes_per_s(("p", 9)) is None and bandwidth.bytes_per_s(("p", 10)) is not None


def test_layers_of_a_slot_are_one_range_of_each_part():
    parts = [Extent(1, 1000, 90), Extent(1, 1090, 45)]
    assert layer_extents(parts, 9, 0, 9) == tuple(parts)
    assert layer_extents(parts, 9, 2, 5) == (Extent(1, 1020, 30), Extent(1, 1100, 15))


@pytest.fixture
def progress():
    made = LayerProgress()
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_a_pass_counts_its_layers_and_wakes_who_watches(kind, progress):
    """Two segments in one pass, the longer in several tiles of the C++ backend; all states are final at the count."""
    backend = load_backend(golden_dir("k3_tiny_smooth"), kind=kind, threads=1, numerics="invariant")
    layers = backend.config.pool_layout(64).num_kda_layers
    pools = Pools(backend.layout(64), EngineSettings(num_blocks=16, num_slots=2))
    segments = [
        Segment(ids=[i % 200 + 1 for i in range(600)], start=0, slot=0, blocks=list(range(10))),
        Segment(ids=[5, 6, 7], start=0, slot=1, blocks=[10]),
    ]
    assert progress.layers(3) == 0
    progress.begin(3)
    progress.watch(1)
    backend.forward(segments, pools.rows, pools.state, progress=progress)
    assert progress.layers(3) == layers and progress.layers(2) is None and progress.layers(4) == 0
    woken: list[int] = []

    async def wait() -> None:
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(progress.fd, lambda: (progress.clear(), woken.append(progress.layers(4) or 0), came.set()))
        threading.Thread(target=lambda: (progress.begin(4), progress.layer_done())).start()
        async with asyncio.timeout(10):
            while not woken or not woken[-1]:
                came.clear()
                await came.wait()
        loop.remove_reader(progress.fd)

    asyncio.run(wait())
    assert woken[-1] == 1
    again = Pools(backend.layout(64), EngineSettings(num_blocks=16, num_slots=2))
    backend.forward(segments, again.rows, again.state)
    assert torch.equal(again.state, pools.state)  # counting changes nothing
