"""Hot bundles find their way to another node: pulled by it, under a lease, beside the readers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cache_world import Listed, LocalNode, NodeProcess, Worker, worker_in
from cache_world import prompt as prompt_of
from test_node import BUNDLE_BYTES, fresh_root, until
from tests_cachestore import soon

from cachestore.entries import SNAPSHOT, Key
from cachestore.node.replication import HALF_LIFE_MS, WATCHED_MAX, Heat
from cachestore.transports import MemoryFabric, TransportSet
from moonrelay.membership import Member
from moonrelay.valkey import LocalValkey, connect

AFTER = 3


@dataclass
class Pair:
    fabric: MemoryFabric
    nodes: list[LocalNode]
    members: list[Member]
    listed: Listed
    worker: Worker


@contextlib.asynccontextmanager
async def pair(url: str, dram_bytes: int = 4 << 20, disk: Path | None = None) -> AsyncIterator[Pair]:
    redis, fabric, listed = connect(url), MemoryFabric(), Listed()
    nodes = [
        LocalNode(
            name, time.monotonic_ns(), fabric, redis, dram_bytes, disk if name == "a" else None,
            64 << 20 if name == "a" and disk else 0, others=listed, replicate_after=AFTER,
        )
        for name in ("a", "b")
    ]  # fmt: skip
    listed.all = [await node.start() for node in nodes]
    worker = Worker(TransportSet.in_memory("worker", 1, fabric), listed, redis)
    await worker.transports.start()
    try:
        yield Pair(fabric, nodes, list(listed.all), listed, worker)
    finally:
        await worker.close()
        for node in nodes:
            await node.close()
        await redis.aclose()


async def read_often(world: Pair, mine, times: int = AFTER) -> None:
    for _ in range(times):
        assert (await world.worker.fetch(mine, await world.worker.match(mine))).tokens == 4 * 64
        await until(lambda: not world.nodes[0].core.stats().num_leases)


def test_what_is_leased_often_is_soon_on_two_nodes_and_outlives_the_first(valkey: LocalValkey) -> None:
    async def run() -> None:
        async with pair(valkey.url) as world:
            mine, quiet = prompt_of(fresh_root(), (5, 4)), prompt_of(fresh_root(), (6, 4))
            for each in (mine, quiet):
                await world.worker.publish(world.members[0], each, range(4), (4,))
            await read_often(world, mine, AFTER - 1)
            await read_often(world, quiet, 1)
            assert world.nodes[1].core.stats().num_snapshots == 0
            await read_often(world, mine, 1)
            await until(lambda: world.nodes[1].core.stats().num_snapshots == 1)
            await until(lambda: not world.nodes[0].core.stats().num_leases)
            world.listed.all = [world.members[1]]  # the first is gone: the replica is an ordinary entry
            assert (await world.worker.fetch(mine, await world.worker.match(mine))).tokens == 4 * 64
            assert (await world.worker.match(quiet)).tokens == 0

    asyncio.run(run())


def test_a_hot_bundle_on_disk_is_read_first(valkey: LocalValkey, tmp_path: Path) -> None:
    async def run() -> None:
        async with pair(valkey.url, BUNDLE_BYTES, tmp_path) as world:
            node = world.nodes[0]
            await until(lambda: node.disk.state == "ready")
            mine, other = prompt_of(fresh_root(), (5, 4)), prompt_of(fresh_root(), (6, 4))
            for each in (mine, other):  # the second puts the first out of memory
                await world.worker.publish(world.members[0], each, range(4), (4,))
                node.disk.wake()
                await until(lambda: not node.core.stats().disk.num_waiting + node.core.stats().disk.num_writing)
            hot = next(k for k in node.core.visible() if k.kind == SNAPSHOT and k.root == mine.root)
            assert node.core.on_disk([hot])
            for _ in range(AFTER):
                node.replication.leased(hot)
            await until(lambda: world.nodes[1].core.stats().num_snapshots == 1)
            assert {k.root for k in world.nodes[1].core.visible()} == {mine.root}

    asyncio.run(run())


def test_a_node_that_does_not_answer_costs_a_lease_for_a_while_and_nothing_else(valkey: LocalValkey) -> None:
    async def run() -> None:
        async with pair(valkey.url) as world:
            mine = prompt_of(fresh_root(), (5, 4))
            await world.worker.publish(world.members[0], mine, range(4), (4,))
            await world.nodes[1].server.stop(None)
            for _ in range(2 * AFTER):
                assert (await world.worker.fetch(mine, await world.worker.match(mine))).tokens == 4 * 64
            failed = world.nodes[0].metrics.replicated.labels("failed")
            await until(lambda: failed._value.get() >= 1)
            assert world.nodes[0].core.stats().num_leases >= 1  # the other might still be reading
            world.nodes[0].core.expire(1 << 60)
            world.nodes[0].core.check()
            assert (await world.worker.fetch(mine, await world.worker.match(mine))).tokens == 4 * 64

    asyncio.run(run())


def test_heat_is_counted_by_the_minute_and_bounded() -> None:
    heat, key = Heat(4), Key(b"r" * 16, SNAPSHOT, b"h" * 16)
    assert [heat.leased(key, 0) for _ in range(8)] == [False, False, False, True] * 2
    assert not any(heat.leased(key, n * HALF_LIFE_MS) for n in range(50))  # never more than two a minute
    for number in range(2 * WATCHED_MAX):
        heat.leased(Key(b"r" * 16, SNAPSHOT, number.to_bytes(16, "big")), 50 * HALF_LIFE_MS)
    assert len(heat._counts) == WATCHED_MAX


@pytest.mark.cluster
def test_a_hot_bundle_outlives_its_node_with_real_processes(valkey: LocalValkey, tmp_path: Path) -> None:
    cluster, mine = secrets.token_hex(4), prompt_of(fresh_root(), (5, 5))
    nodes: dict[str, NodeProcess] = {}

    async def run() -> None:
        async with worker_in(valkey.url, cluster, "auto") as (worker, membership):
            try:
                for name in ("cachestore-0", "cachestore-1"):
                    home = tmp_path / name
                    home.mkdir()
                    flags = ("--dram-bytes", "4_000_000", "--replicate-after", str(AFTER), "--instance-id", name)
                    nodes[name] = NodeProcess(valkey.url, cluster, home, *flags)
                wanted = set(nodes)
                assert await membership.wait_for(
                    lambda m: {each.instance_id for each in m.members("cachestore")} == wanted, soon(60)
                ), [node.output() for node in nodes.values()]
                first, second = membership.members("cachestore")
                assert (await worker.publish(first, mine, range(5), (5,))).stored == 6
                deadline_s = soon(30)
                while not (await worker.index.match(mine.root, mine.hashes, 321, [second])).tokens:
                    assert time.monotonic() < deadline_s, [node.output() for node in nodes.values()]
                    assert (await worker.fetch(mine, await worker.match(mine))).tokens == 320
                await asyncio.to_thread(nodes[first.instance_id].kill)
                assert await membership.wait_for(lambda m: len(m.members("cachestore")) == 1, soon(10))
                assert (await worker.fetch(mine, await worker.match(mine))).tokens == 320
            finally:
                for node in nodes.values():
                    node.close()

    asyncio.run(run())
