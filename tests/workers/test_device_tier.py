"""What a worker keeps in its own pools: a hit that moves nothing, and memory that is never in anybody's way."""

from __future__ import annotations

import asyncio

import pytest

from decode.held import DeviceTier
from engine.api import SamplingParams, SequenceSpec
from engine.worker.memory import ROWS_POOL, Memory, Want
from engine.worker.timing import Timing
from moonrelay.errors import InvariantError, Overloaded
from moonrelay.prefix import prefix_hashes
from moonrelay.stubs.v1 import common_pb2, worker_pb2
from tests.workers.cached import cached_world, continued, prompt_of, roots
from tests.workers.world import ROOT, World, prefill_request, tokens_of, until

SHORT = Timing(transfer_floor_ms=400, transfer_min_bytes_per_s=1_000_000_000, lease_floor_ms=800)
HALF = {"kept_share": 0.5, "num_blocks": 64, "num_slots": 16}


async def settled(world: World) -> None:
    await until(lambda: not (world.prefill.prompts.num_background or world.decode.prompts.num_background))


async def release(world: World, manifest: worker_pb2.Manifest) -> None:
    await world.prefill_stub.ReleaseHandoff(
        worker_pb2.ReleaseHandoffRequest(handoff_id=manifest.handoff_id, fence=manifest.fence)
    )


@pytest.mark.parametrize("length", [65, 128, 129, 200])
def test_a_prompt_seen_before_needs_no_transfer_and_gives_the_same_bits(valkey, make_engine, backend, length):
    async def scenario():
        async with cached_world(valkey, make_engine, backend, **HALF) as (world, node):
            prompt, root, cut = prompt_of(length), next(roots), (length - 1) // 64 * 64
            request = prefill_request(prompt, root=root, snapshot_at=(cut,), store=True)
            cold, cold_tokens = await continued(world, request)
            await settled(world)
            node.arena.view[:] = b"\xff" * len(node.arena.view)  # nothing that is fetched could be right
            warm, tokens = await continued(world, prefill_request(prompt, root=root, store=True))
            assert (warm.cache.cached_tokens, warm.cache.cached_device) == (cut, cut)
            assert [s.xxh3 for s in warm.manifest.rows[: cut // 64]] == [
                s.xxh3 for s in cold.manifest.rows[: cut // 64]
            ]
            assert [(s.recurrent.xxh3, s.conv.xxh3) for s in warm.manifest.state] == [
                (s.recurrent.xxh3, s.conv.xxh3) for s in cold.manifest.state
            ]
            assert tokens == cold_tokens == await world.aggregated(prompt)

    asyncio.run(scenario())


def test_the_deeper_of_the_workers_own_and_the_nodes_is_taken(valkey, make_engine, backend):
    async def scenario():
        async with cached_world(valkey, make_engine, backend, **HALF) as (world, node):
            prompt, root = prompt_of(200), next(roots)
            whole = prefill_request(prompt, root=root, snapshot_at=(64, 192), store=True)
            await tokens_of(world.decode_stub.Generate(whole))  # by the other worker: to the node
            await settled(world)
            hit = (await node.match(prompt, root)).hit()
            assert hit.tokens == 192
            short = prefill_request(prompt[:100], root=root, snapshot_at=(64,), store=True)
            await release(world, (await world.prefilled(short)).manifest)
            deeper, tokens = await continued(world, prefill_request(prompt, root=root, hit=hit))
            assert (deeper.cache.cached_host, deeper.cache.cached_device) == (192, 0)
            hit.tokens = 64  # no deeper than what is here
            for run in (hit.runs[0], hit.snapshot):
                run.end_block = 1
            hit.snapshot.first_block = 1
            equal, same = await continued(world, prefill_request(prompt, root=root, hit=hit))
            assert (equal.cache.cached_host, equal.cache.cached_device) == (0, 64)
            assert tokens == same == await world.aggregated(prompt)

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["gone", "stalled"])
def test_a_hit_that_cannot_be_fetched_falls_back_to_what_is_kept_here(valkey, make_engine, backend, fault):
    async def scenario():
        async with cached_world(valkey, make_engine, backend, timing=SHORT, **HALF) as (world, node):
            prompt, root = prompt_of(200), next(roots)
            whole = prefill_request(prompt, root=root, snapshot_at=(192,), store=True)
            cold = await tokens_of(world.decode_stub.Generate(whole))
            short = prefill_request(prompt[:100], root=root, snapshot_at=(64,), store=True)
            await release(world, (await world.prefilled(short)).manifest)
            await settled(world)
            hit = (await node.match(prompt, root)).hit()
            assert hit.tokens == 192
            (world.fabric.kill if fault == "gone" else world.fabric.stop)("cachestore-0")
            ready, tokens = await continued(world, prefill_request(prompt, root=root, hit=hit))
            assert (ready.cache.cached_tokens, ready.cache.cached_device) == (64, 64)
            assert ready.cache.miss_reason == common_pb2.MISS_REASON_TIER_ERROR
            assert tokens == cold
            world.fabric.resume("cachestore-0")

    asyncio.run(scenario())


def test_another_tenant_never_gets_at_what_is_kept(valkey, make_engine, backend):
    async def scenario():
        async with cached_world(valkey, make_engine, backend, **HALF) as (world, _):
            prompt = prompt_of(130)
            await continued(world, prefill_request(prompt, root=next(roots), snapshot_at=(128,), store=True))
            await settled(world)
            other, _ = await continued(world, prefill_request(prompt, root=next(roots)))
            assert other.cache.cached_tokens == 0

    asyncio.run(scenario())


def test_a_conversation_in_one_worker_goes_on_from_its_own_memory(valkey, make_engine, backend):
    async def scenario():
        async with cached_world(valkey, make_engine, backend, **HALF) as (world, _):
            ids, root, consumed = prompt_of(70), next(roots), 0
            for turn in range(3):
                cuts = ((len(ids) - 1) // 64 * 64,)
                request = prefill_request(
                    ids, root=root, max_tokens=40, store=True, write_back=True, snapshot_at=cuts
                )
                usage, tokens = await generated(world, request)
                assert usage.cached_device == usage.cached_tokens == consumed // 64 * 64
                assert tokens == await world.aggregated(ids, max_tokens=40)
                await settled(world)
                consumed = len(ids) + len(tokens) - 1
                ids = ids + tokens + prompt_of(10, turn)

    asyncio.run(scenario())


async def generated(world: World, request: worker_pb2.PrefillRequest):
    usage, tokens = None, []
    async for event in world.decode_stub.Generate(request):
        usage = event.cache if event.HasField("cache") else usage
        tokens += [token.id for token in event.tokens.tokens]
    return usage, tokens


def test_decode_keeps_the_rows_of_its_turns_and_a_handoff_moves_only_what_is_new(valkey, make_engine, backend):
    async def scenario():
        async with cached_world(valkey, make_engine, backend, **HALF) as (world, _):
            prompt, root = prompt_of(130), next(roots)
            _, tokens = await continued(world, prefill_request(prompt, root=root, max_tokens=70, write_back=True))
            await settled(world)
            ids = prompt + tokens + [1, 2, 3]
            held = DeviceTier(world.decode.memory)
            holding, blocks = held.reserve(len(ids) + 5, root, prefix_hashes(root, ids, 64))
            assert blocks == holding.reservation.shared == 199 // 64 and holding.found.slot is None
            holding.drop()

    asyncio.run(scenario())


# -- without workers: the engine's memory and the book ------------------------------------------------------------


def small(make_engine, **settings) -> tuple[object, Memory]:
    engine = make_engine(start=False, **{"num_blocks": 8, "num_slots": 4, **settings})
    return engine, Memory(engine, waiting_max=4, kept_share=1.0)


def finished(engine, memory: Memory, prompt: list[int], cuts: tuple[int, ...] = ()) -> list[bytes]:
    """Run a prompt and keep it; returns its hashes. Its own memory is given back."""
    holding, slots = memory.try_reserve(len(prompt)), []

    def hear(event) -> None:
        if hasattr(event, "slot"):
            slots.append((event.tokens // 64, event.slot))

    engine.submit(
        SequenceSpec(request_id="r", ids=prompt, sampling=SamplingParams(), snapshot_at=cuts),
        holding.reservation, hear,
    )  # fmt: skip
    while engine.turn():
        pass
    hashes = prefix_hashes(ROOT, prompt, 64)
    for _, slot in slots:
        memory.own_snapshot(slot)
    memory.keep(holding, ROOT, hashes, [None] * len(hashes), slots)
    for _, slot in slots:
        memory.drop_snapshot(slot)
    holding.drop()
    memory.check()
    engine.check()
    return hashes


def test_kept_memory_makes_room_oldest_first_and_never_refuses_anybody(make_engine):
    engine, memory = small(make_engine)
    first = finished(engine, memory, prompt_of(128, 1), (128,))
    second = finished(engine, memory, prompt_of(192, 2), (64, 192))
    assert engine.stats().free_blocks == 3 and engine.stats().free_slots == 1
    memory.recount()
    assert (memory.stats().free_blocks, memory.stats().free_slots) == (8, 4)
    assert memory.num_held == 0 and memory.leaked() == memory.leaked() == (0, 0)
    big = memory.try_reserve(4 * 64)
    assert memory.bundles.depth(first) == 1 and memory.bundles.depth(second) == 3
    more = memory.try_reserve(4 * 64)  # all eight are taken now
    assert memory.bundles.depth(first) == memory.bundles.depth(second) == 0
    with pytest.raises(Overloaded):
        memory.try_reserve(1)
    big.drop()
    more.drop()
    memory.check()
    assert engine.stats().free_blocks == 8 and engine.stats().free_slots == 4


def test_what_a_reservation_begins_with_is_not_given_up_for_it_unless_it_is_in_the_way(make_engine):
    async def scenario():
        engine, memory = small(make_engine, num_slots=2)
        hashes = finished(engine, memory, prompt_of(192, 1), (192,))
        soon = asyncio.get_running_loop().time() + 5
        holding = await memory.reserve(Want(tokens=8 * 64, hashes=hashes), soon)
        assert holding.reservation.shared == 3 and holding.found.slot is not None
        with pytest.raises(InvariantError, match="shared"):
            engine.submit(
                SequenceSpec(request_id="s", ids=[1], sampling=SamplingParams(), restored=128),
                holding.reservation, lambda _: None,
            )  # fmt: skip
        memory.untake(holding)
        holding.drop()
        other = memory.try_reserve(64)  # one slot is left, and the snapshot has it
        alone = await memory.reserve(Want(tokens=8 * 64 - 64, hashes=hashes), soon)
        assert alone.found is None and alone.reservation.shared == 0
        for held in (other, alone):
            held.drop()
        memory.check()

    asyncio.run(scenario())


def test_a_snapshot_in_use_outlives_its_eviction(make_engine):
    async def scenario():
        engine, memory = small(make_engine)
        hashes = finished(engine, memory, prompt_of(128, 1), (128,))
        soon = asyncio.get_running_loop().time() + 5
        holding = await memory.reserve(Want(tokens=200, hashes=hashes), soon)
        memory.clear()
        assert engine.stats().free_slots == 2 and memory.num_held == 2
        memory.untake(holding)
        assert engine.stats().free_slots == 3
        assert engine.stats().free_blocks == 4  # the shared blocks are the reservation's own now
        holding.drop()
        assert (engine.stats().free_blocks, engine.stats().free_slots) == (8, 4)

    asyncio.run(scenario())


def test_limits_bound_what_is_kept_and_the_index_is_told(make_engine):
    engine = make_engine(start=False, num_blocks=16, num_slots=8)
    memory, told = Memory(engine, waiting_max=4, kept_share=0.25), []

    class Index:
        def announce(self, root, hashes, first, end, snapshots) -> None:
            told.append(("announce", first, end, tuple(snapshots)))

        def withdraw(self, root, blocks, snapshots) -> None:
            told.append(("withdraw", len(blocks), len(snapshots)))

    memory.announcer = Index()
    finished(engine, memory, prompt_of(192, 1), (64, 128))
    finished(engine, memory, prompt_of(192, 2), (192,))
    assert len(list(memory.bundles.blocks)) == 4 and len(list(memory.bundles.slots)) <= 2
    assert told == [("announce", 0, 3, (1, 2)), ("announce", 0, 3, (3,)), ("withdraw", 2, 1)]
    nothing = Memory(engine, waiting_max=4)
    finished(engine, nothing, prompt_of(128, 3), (64,))
    assert not list(nothing.bundles.blocks)
    memory.clear()
    assert engine.stats().free_blocks == 16


@pytest.mark.parametrize("tier", ["host", "device"])
def test_what_a_transfer_or_an_owner_has_hashed_is_not_hashed_again(valkey, make_engine, backend, tier):
    async def scenario():
        async with cached_world(valkey, make_engine, backend, **HALF) as (world, node):
            prompt, root = prompt_of(200), next(roots)
            whole = prefill_request(prompt, root=root, snapshot_at=(192,), store=True)
            ready, _ = await continued(world, whole)
            await settled(world)
            hit = (await node.match(prompt, root)).hit()
            if tier == "host":
                world.prefill.memory.clear()
            prompts, hashed = world.prefill.prompts, []
            make_span = prompts._make_span
            prompts._make_span = lambda *extent: hashed.append(extent) or make_span(*extent)
            again, _ = await continued(world, prefill_request(prompt, root=root, hit=hit, store=True))
            assert getattr(again.cache, f"cached_{tier}") == 192
            rows = [extent for extent in hashed if extent[0] == ROWS_POOL]
            assert len(rows) == 1  # the last, partly filled block
            assert [s.xxh3 for s in again.manifest.rows] == [s.xxh3 for s in ready.manifest.rows]

    asyncio.run(scenario())
