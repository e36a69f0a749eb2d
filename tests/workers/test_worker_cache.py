"""Both workers against a cache node: a hit changes nothing but the work, and whatever fails is a miss."""

from __future__ import annotations

import asyncio

import pytest

from cachestore.prompt_cache import choose_node
from engine.worker.timing import Timing
from moonrelay.membership import Load, Member
from moonrelay.prefix import prefix_hashes
from moonrelay.stubs.v1 import common_pb2, worker_pb2
from tests.workers.cached import cached_world, continued, prompt_of, roots, stored
from tests.workers.world import prefill_request, tokens_of, until

SHORT = Timing(transfer_floor_ms=400, transfer_min_bytes_per_s=1_000_000_000, lease_floor_ms=800)


@pytest.mark.parametrize("length", [65, 128, 129, 200])
def test_a_hit_gives_the_state_rows_and_tokens_of_a_cold_run(valkey, make_engine, backend, length):
    async def scenario():
        async with cached_world(valkey, make_engine, backend) as (world, node):
            prompt, root = prompt_of(length), next(roots)
            cut = (length - 1) // 64 * 64
            cold = await stored(world, prompt, root, cut)
            assert cold.cache.cached_tokens == 0 and cold.cache.miss_reason == common_pb2.MISS_REASON_COLD
            match = await node.match(prompt, root)
            assert match.tokens == cut
            ready, tokens = await continued(world, prefill_request(prompt, root=root, hit=match.hit()))
            assert (ready.cache.cached_tokens, ready.cache.cached_host) == (cut, cut)
            assert ready.cache.miss_reason == common_pb2.MISS_REASON_REMAINDER
            full = length // 64
            assert [s.xxh3 for s in ready.manifest.rows[:full]] == [s.xxh3 for s in cold.manifest.rows[:full]]
            [mine], [other] = ready.manifest.state, cold.manifest.state
            assert (mine.recurrent.xxh3, mine.conv.xxh3) == (other.recurrent.xxh3, other.conv.xxh3)
            assert tokens == await world.aggregated(prompt)
            assert world.prefill.value("moonrelay_prefill_cache_tokens_total", tier="host") == cut
            assert world.prefill.value("vllm:prefix_cache_hits_total", model_name="tiny") == cut

    asyncio.run(scenario())


def test_the_aggregated_path_stores_and_restores_too_and_the_next_turn_extends(valkey, make_engine, backend):
    async def scenario():
        async with cached_world(valkey, make_engine, backend) as (world, node):
            first, root = prompt_of(150), next(roots)
            request = prefill_request(first, root=root, snapshot_at=(64, 128), store=True)
            tokens = await tokens_of(world.decode_stub.Generate(request))
            await until(lambda: world.decode.prompts.num_background == 0)
            second = first + tokens + prompt_of(40, seed=2)
            match = await node.match(second, root)
            assert match.tokens == 128
            cold = await world.aggregated(second)
            hit = prefill_request(second, root=root, hit=match.hit(), snapshot_at=(192,), store=True)
            assert await tokens_of(world.decode_stub.Generate(hit)) == cold
            await until(lambda: world.decode.prompts.num_background == 0)
            assert (await node.match([*second, 1], root)).tokens == 192
            _, disaggregated = await continued(world, prefill_request(second, root=root, hit=match.hit()))
            assert disaggregated == cold

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["gone", "altered", "evicted"])
def test_a_fetch_that_fails_is_a_miss_with_its_reason_and_the_same_tokens(valkey, make_engine, backend, fault):
    async def scenario():
        async with cached_world(valkey, make_engine, backend, timing=SHORT) as (world, node):
            prompt, root = prompt_of(140), next(roots)
            await stored(world, prompt, root, 128)
            hit = (await node.match(prompt, root)).hit()
            if fault == "gone":
                world.fabric.kill("cachestore-0")
            elif fault == "altered":
                node.arena.view[100] ^= 1
            else:
                hit.snapshot.node_epoch += 1
                hit.runs[0].node_epoch += 1
            ready, tokens = await continued(world, prefill_request(prompt, root=root, hit=hit))
            expected = common_pb2.MISS_REASON_STALE_INDEX if fault == "evicted" else common_pb2.MISS_REASON_TIER_ERROR
            assert (ready.cache.cached_tokens, ready.cache.miss_reason) == (0, expected)
            assert tokens == await world.aggregated(prompt)

    asyncio.run(scenario())


def test_a_hit_that_is_gone_is_computed_and_stored_anew_for_the_next_to_find(valkey, make_engine, backend):
    async def scenario():
        async with cached_world(valkey, make_engine, backend) as (world, node):
            prompt, root = prompt_of(140), next(roots)
            await stored(world, prompt, root, 128)
            hit = (await node.match(prompt, root)).hit()
            [gone] = node.core.victims(1, now_ms=0)
            assert gone.kind == "snapshot"
            node.core.reclaim([gone])  # as where its file was refused; whoever planned this prompt did not know
            cached = []
            for _ in range(2):
                ready, tokens = await continued(world, prefill_request(prompt, root=root, hit=hit, store=True))
                await until(lambda: world.prefill.prompts.num_background == 0)
                cached.append(ready.cache.cached_tokens)
                assert tokens == await world.aggregated(prompt)
            assert cached == [0, 128]

    asyncio.run(scenario())


def test_a_fetch_that_stalls_costs_its_deadline_and_its_memory_until_it_is_over(valkey, make_engine, backend):
    async def scenario():
        async with cached_world(valkey, make_engine, backend, timing=SHORT) as (world, node):
            prompt, root = prompt_of(140), next(roots)
            await stored(world, prompt, root, 128)
            hit = (await node.match(prompt, root)).hit()
            world.fabric.stop("cachestore-0")
            ready, tokens = await continued(world, prefill_request(prompt, root=root, hit=hit))
            assert ready.cache.miss_reason == common_pb2.MISS_REASON_TIER_ERROR
            assert world.prefill.value("moonrelay_prefill_quarantined_bytes") > 0
            await until(lambda: world.held() == (1, 0))  # the handoff is over, the landing memory is not free
            world.fabric.resume("cachestore-0")
            await until(lambda: world.held() == (0, 0))
            assert world.prefill.value("moonrelay_prefill_quarantined_bytes") == 0
            assert tokens == await world.aggregated(prompt)

    asyncio.run(scenario())


def test_a_client_that_leaves_while_its_fetch_stalls_leaves_the_memory_in_quarantine(valkey, make_engine, backend):
    async def scenario():
        async with cached_world(valkey, make_engine, backend) as (world, node):
            prompt, root = prompt_of(140), next(roots)
            await stored(world, prompt, root, 128)
            hit = (await node.match(prompt, root)).hit()
            world.fabric.stop("cachestore-0")
            gone = world.prefill_stub.Prefill(prefill_request(prompt, root=root, hit=hit))
            await until(lambda: node.core.stats().num_leases == 1)  # its read is under way
            gone.cancel()
            await until(lambda: world.prefill.prompts.num_background == 1)
            assert world.held() == (1, 0)
            world.fabric.resume("cachestore-0")
            await until(lambda: world.held() == (0, 0))

    asyncio.run(scenario())


def test_storing_is_bounded_and_never_in_the_way(valkey, make_engine, backend):
    async def scenario():
        async with cached_world(valkey, make_engine, backend, publish_inflight_max=0) as (world, node):
            prompt, root = prompt_of(130), next(roots)
            await stored(world, prompt, root, 128)
            assert world.prefill.value("moonrelay_prefill_publish_skipped_total", reason="busy") == 1
            assert (await node.match([*prompt, 1], root)).tokens == 0

    asyncio.run(scenario())


def test_blocks_stay_until_the_node_has_answered_whatever_the_handoff_does(valkey, make_engine, backend):
    async def scenario():
        async with cached_world(valkey, make_engine, backend) as (world, node):
            prompt, root = prompt_of(130), next(roots)
            world.fabric.stop("prefill-0")  # the node's pull hangs
            ready = await world.prefilled(prefill_request(prompt, root=root, snapshot_at=(128,), store=True))
            await world.prefill_stub.ReleaseHandoff(
                worker_pb2.ReleaseHandoffRequest(handoff_id=ready.opened.handoff_id, fence=ready.opened.fence)
            )
            await until(lambda: len(world.owner.table) == 0)
            assert world.prefill.memory.num_held == 2  # the reservation and the snapshot's slot
            world.fabric.resume("prefill-0")
            await until(lambda: world.prefill.memory.num_held == 0)
            assert (await node.match(prompt, root)).tokens == 128

    asyncio.run(scenario())


def test_where_prompts_are_stored():
    nodes = tuple(
        Member(instance_id=f"c{i}", role="cachestore", epoch=1, grpc_address="", load=Load()) for i in range(4)
    )
    root = bytes(16)

    def hashes(seed: int) -> list[bytes]:
        return prefix_hashes(root, [1] * 128 + prompt_of(256, seed), 64)

    def place(seed: int, first_new: int, hit=None, among=nodes) -> str:
        chosen = choose_node(among, root, hashes(seed), first_new, hit)
        return "" if chosen is None else chosen.instance_id

    assert len({place(seed, 0) for seed in range(50)}) == 1  # equal beginnings, first seen: one node computes for all
    shared = worker_pb2.CacheHit(tokens=128, snapshot=worker_pb2.CacheRun(node_id="c2", node_epoch=1))
    spread = [place(seed, 2, shared) for seed in range(50)]
    assert len(set(spread)) == 4  # conversations that share a beginning
    assert spread == [place(seed, 2, shared) for seed in range(50)]
    assert {place(seed, 4, shared) for seed in range(50)} == {"c2"}  # one that goes on
    stale = worker_pb2.CacheHit(tokens=256, snapshot=worker_pb2.CacheRun(node_id="c2", node_epoch=9))
    assert place(1, 4, stale) != ""
    assert place(1, 0, among=()) == ""
    fewer = {
        place(seed, 2, shared, nodes[:3]) == place(seed, 2, shared) for seed in range(50) if place(seed, 2) != "c3"
    }
    assert fewer == {True}  # a node that goes away moves nobody else's prompts
