"""A node in this process, over in-memory transports and a real Valkey: what is stored, found, refused and evicted."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import time
from collections.abc import Callable

import grpc
import pytest
from cache_world import BLOCK_BYTES, ROWS, STATE_BYTES, Prompt, local_world, prompt
from tests_cachestore import soon

from cachestore.node.allocator import PAGE_BYTES, PageAllocator
from cachestore.spans import unpack
from cachestore.transports import Landing
from moonrelay.errors import ServeError, TransferError, Unavailable
from moonrelay.stubs.v1 import cache_pb2, cache_pb2_grpc
from moonrelay.valkey import LocalValkey, start_local_valkey

BUNDLE_BYTES = 4 * PageAllocator.rounded(BLOCK_BYTES) + PageAllocator.rounded(STATE_BYTES)


def fresh_root() -> bytes:
    return secrets.token_bytes(16)


async def until(condition: Callable[[], bool]) -> None:
    """Give the loop turns until `condition` holds."""
    deadline_s = soon(5)
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0))])


def test_publish_match_fetch_and_publish_again(valkey: LocalValkey) -> None:
    async def run() -> None:
        async with local_world(valkey.url) as world:
            mine, worker = prompt(fresh_root(), (5, 6)), world.worker
            assert (await worker.match(mine)).miss_reason == "cold"
            report = await worker.publish(world.member, mine, range(6), (4, 6))
            assert (report.stored, report.already_there, report.refused) == (8, 0, 0)
            match = await worker.match(mine)
            assert match.tokens == 6 * 64
            fetched = await worker.fetch(mine, match)
            assert (fetched.tokens, fetched.transport) == (6 * 64, "memory")
            assert fetched.bytes == 6 * BLOCK_BYTES + STATE_BYTES
            await until(lambda: world.node.core.stats().num_leases == 0)  # given back in the background

            again = await worker.publish(world.member, mine, range(6), (6,))
            assert (again.stored, again.already_there) == (0, 7)
            # A second prompt shares four blocks; the deepest snapshot at or below them is the one it can use.
            other = prompt(mine.root, (5, 5), (9, 2))
            match = await worker.match(other)
            assert (match.tokens, match.matchable_tokens) == (4 * 64, 5 * 64)
            assert (await worker.fetch(other, match)).tokens == 4 * 64
            assert (await worker.match(prompt(fresh_root(), (5, 6)))).miss_reason == "cold"  # another tenant

    asyncio.run(run())


def test_bytes_that_changed_are_refused_on_the_way_in_and_on_the_way_out(valkey: LocalValkey) -> None:
    async def run() -> None:
        async with local_world(valkey.url) as world:
            mine, worker = prompt(fresh_root(), (5, 3)), world.worker
            offers = worker.write(mine, range(3), (3,))
            worker.rows.view[BLOCK_BYTES] ^= 1  # after its checksum was taken
            with pytest.raises(Unavailable, match="checksum"):
                await worker.client.publish(world.member, mine.root, offers, soon())
            assert (await worker.match(mine)).tokens == 0
            stats = world.node.core.stats()
            assert stats.free_bytes == stats.capacity_bytes

            await worker.publish(world.member, mine, range(3), (3,))
            match = await worker.match(mine)
            [region] = next(r for k, r in world.node.core.visible().items() if k.kind == "block")
            world.node.arena.view[region.offset] ^= 1
            landing = Landing()
            report = await worker.fetch(mine, match, landing)
            assert (report.tokens, report.miss_reason) == (0, "tier_error") and not landing.pending
            world.node.arena.view[region.offset] ^= 1
            assert (await worker.fetch(mine, match)).tokens == match.tokens

    asyncio.run(run())


def test_a_full_node_evicts_whole_bundles_and_the_index_never_names_what_is_gone(valkey: LocalValkey) -> None:
    async def run() -> None:
        async with local_world(valkey.url, dram_bytes=5 * BUNDLE_BYTES) as world:
            root, worker, rng = fresh_root(), world.worker, random.Random(7)
            prompts = [prompt(root, (token, 4)) for token in range(12)]
            for _ in range(60):
                mine = rng.choice(prompts)
                match = await worker.match(mine)
                if match.tokens:
                    assert (await worker.fetch(mine, match)).tokens == match.tokens
                else:
                    await worker.publish(world.member, mine, range(4), (4,))
                    assert (await worker.match(mine)).tokens == 4 * 64
                world.node.core.check()
            stats = world.node.core.stats()
            assert stats.evicted_snapshots > 10 and stats.num_snapshots == 5
            found = [p for p in prompts if (await worker.match(p)).tokens]
            assert len(found) == 5
            # A chain is never found with a hole: what is matchable is there from the start.
            depths = {(await worker.match(p)).matchable_tokens for p in prompts}
            assert depths <= {0, 64, 128, 192, 256}

    asyncio.run(run())


def test_a_leased_bundle_survives_pressure_and_an_offer_larger_than_the_node_evicts_nothing(
    valkey: LocalValkey,
) -> None:
    async def run() -> None:
        async with local_world(valkey.url, dram_bytes=2 * BUNDLE_BYTES) as world:
            root, worker = fresh_root(), world.worker
            kept, other, third = (prompt(root, (token, 4)) for token in range(3))
            await worker.publish(world.member, kept, range(4), (4,))
            async with grpc.aio.insecure_channel(world.member.grpc_address) as channel:
                stub = cache_pb2_grpc.CacheNodeStub(channel)
                lease = await stub.Lease(lease_request(world.member.epoch, kept))
                await worker.publish(world.member, other, range(4), (4,))
                report = await worker.publish(world.member, third, range(4), (4,))
                assert report.stored == 5  # the unleased one made room
                assert (await worker.match(kept)).tokens and not (await worker.match(other)).tokens
                await stub.Release(cache_pb2.ReleaseRequest(lease_id=lease.lease_id, fence=lease.fence))
            huge = prompt(root, (99, 20))
            with pytest.raises(ServeError):
                await worker.publish(world.member, huge, range(20), (20,))
            assert (await worker.match(kept)).tokens and (await worker.match(third)).tokens

    asyncio.run(run())


def chain(what: Prompt, first: int, count: int, last: bytes | None = None) -> dict:
    return {
        "last": last or what.hashes[min(first + count, len(what.hashes)) - 1],
        "first_block": first,
        "count": count,
    }


def lease_request(epoch: int, what: Prompt, **changes) -> cache_pb2.LeaseRequest:
    given = {
        "root": what.root,
        "node_epoch": epoch,
        "chains": [chain(what, 0, len(what.hashes))],
        "snapshot": what.hashes[-1],
    }
    return cache_pb2.LeaseRequest(**(given | {"ttl_ms": 1_000} | changes))


def test_a_lease_is_all_or_nothing_and_bad_ones_are_refused(valkey: LocalValkey) -> None:
    async def run() -> None:
        async with local_world(valkey.url) as world:
            mine, epoch = prompt(fresh_root(), (5, 3)), world.member.epoch
            await world.worker.publish(world.member, mine, range(3), (3,))
            cases = [
                (lease_request(epoch, mine, chains=[chain(mine, 0, 3, last=bytes(16))]), grpc.StatusCode.NOT_FOUND),
                (lease_request(epoch, mine, chains=[chain(mine, 1, 3)]), grpc.StatusCode.NOT_FOUND),  # not its depth
                (lease_request(epoch, mine, chains=[chain(mine, 0, 4)]), grpc.StatusCode.NOT_FOUND),
                (lease_request(epoch, mine, chains=[chain(mine, 0, 0)]), grpc.StatusCode.INVALID_ARGUMENT),
                (lease_request(epoch, mine, snapshot=mine.hashes[1]), grpc.StatusCode.NOT_FOUND),
                (lease_request(epoch, mine, root=bytes(16)), grpc.StatusCode.NOT_FOUND),
                (lease_request(epoch - 1, mine), grpc.StatusCode.FAILED_PRECONDITION),
                (lease_request(epoch, mine, ttl_ms=0), grpc.StatusCode.INVALID_ARGUMENT),
                (lease_request(epoch, mine, chains=[], snapshot=b""), grpc.StatusCode.INVALID_ARGUMENT),
            ]
            async with grpc.aio.insecure_channel(world.member.grpc_address) as channel:
                stub = cache_pb2_grpc.CacheNodeStub(channel)
                for request, status in cases:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await stub.Lease(request)
                    assert caught.value.code() is status
                assert world.node.core.stats().num_leases == 0
                lease = await stub.Lease(lease_request(epoch, mine))
                assert [record[2] for record in unpack(lease.spans)] == [1, 1, 1, 0, 1]  # a state has two regions
                assert (await stub.Renew(cache_pb2.RenewRequest(lease_id=lease.lease_id, fence=lease.fence))).ttl_ms
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.Renew(cache_pb2.RenewRequest(lease_id=lease.lease_id, fence=lease.fence + 1))
                ended = [{"lease_id": lease.lease_id, "fence": lease.fence}]
                await stub.Lease(lease_request(epoch, mine, chains=[chain(mine, 1, 1)], ended=ended))
                assert world.node.core.stats().num_leases == 1

    asyncio.run(run())


BAD_ENTRIES = {
    "kind": {"kind": 0},
    "hash": {"prefix_hash": b"short"},
    "no spans": {"spans": []},
    "empty span": {"spans": [{"pool": ROWS, "offset": 0, "length": 0}]},
    "no parent": {"depth": 1},
    "first with a parent": {"parent": bytes(16)},
    "outside the pool": {"spans": [{"pool": ROWS, "offset": 1 << 40, "length": 10}]},
    "unknown pool": {"spans": [{"pool": 77, "offset": 0, "length": 10}]},
}


def test_bad_offers_are_refused_and_leave_nothing(valkey: LocalValkey) -> None:
    async def run() -> None:
        async with local_world(valkey.url) as world:
            good = {"kind": 1, "prefix_hash": bytes(16), "spans": [{"pool": ROWS, "offset": 0, "length": 10}]}
            source = world.worker.transports.peer()
            requests = [{"root": bytes(16), "entries": [good | change]} for change in BAD_ENTRIES.values()]
            requests += [{"root": b"", "entries": [good]}, {"root": bytes(16), "entries": []}]
            requests += [{"root": bytes(16), "entries": [good, good]}]
            async with grpc.aio.insecure_channel(world.member.grpc_address) as channel:
                stub = cache_pb2_grpc.CacheNodeStub(channel)
                for request in requests:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await stub.Publish(cache_pb2.PublishRequest(source=source, **request))
                    assert caught.value.code() in (
                        grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE
                    ), request  # fmt: skip
            stats = world.node.core.stats()
            assert stats.free_bytes == stats.capacity_bytes

    asyncio.run(run())


def test_a_stopped_publisher_costs_a_quarantine_until_its_read_is_over(valkey: LocalValkey) -> None:
    async def run() -> None:
        async with local_world(valkey.url) as world:
            mine, worker = prompt(fresh_root(), (5, 3)), world.worker
            world.fabric.stop("worker")
            with pytest.raises(TransferError, match="DEADLINE"):
                await worker.publish(world.member, mine, range(3), (3,), deadline_s=soon(0.3))
            expected = 3 * PageAllocator.rounded(BLOCK_BYTES) + PageAllocator.rounded(STATE_BYTES)
            await until(lambda: world.node.core.stats().quarantined_bytes == expected)
            world.node.core.check()
            world.fabric.resume("worker")
            await until(lambda: world.node.core.stats().quarantined_bytes == 0)
            assert world.node.core.stats().free_bytes == world.node.core.stats().capacity_bytes
            await worker.publish(world.member, mine, range(3), (3,))
            assert (await worker.match(mine)).tokens == 3 * 64

    asyncio.run(run())


def test_without_redis_nothing_is_stored_evicted_or_lost_and_a_flush_heals(tmp_path) -> None:
    server = start_local_valkey(tmp_path)

    async def run() -> None:
        async with local_world(server.url, dram_bytes=BUNDLE_BYTES + PAGE_BYTES) as world:
            root, worker = fresh_root(), world.worker
            mine, other = prompt(root, (5, 4)), prompt(root, (6, 4))
            await worker.publish(world.member, mine, range(4), (4,))
            match = await worker.match(mine)
            os.kill(server.process.pid, signal.SIGSTOP)
            with pytest.raises(Unavailable):  # room would need an eviction, which the index cannot be told of
                await worker.publish(world.member, other, range(4), (4,))
            os.kill(server.process.pid, signal.SIGCONT)
            assert (await worker.fetch(mine, match)).tokens == 4 * 64
            world.node.core.check()

            await worker.index._redis.flushall()
            assert (await worker.match(mine)).lost == (("cold", 4 * 64), ("remainder", 1))
            await world.node.intake.index.renew()
            assert (await worker.match(mine)).tokens == 4 * 64
            await worker.index._redis.flushall()
            assert (await worker.publish(world.member, mine, range(4), (4,))).already_there == 5
            assert (await worker.match(mine)).tokens == 4 * 64
            await world.node.intake.index.forget()
            assert (await worker.match(mine)).tokens == 0

    try:
        asyncio.run(run())
    finally:
        server.stop()


def test_concurrent_publishes_store_everything_once(valkey: LocalValkey) -> None:
    async def run() -> None:
        async with local_world(valkey.url) as world:
            mine, worker = prompt(fresh_root(), (5, 8)), world.worker
            offers = worker.write(mine, range(8), (8,))
            reports = await asyncio.gather(
                *(worker.client.publish(world.member, mine.root, offers, soon()) for _ in range(6))
            )
            assert sum(r.stored for r in reports) == 9
            assert sum(r.stored + r.already_there + r.in_progress for r in reports) == 6 * 9
            assert (await worker.fetch(mine, await worker.match(mine))).tokens == 8 * 64

    asyncio.run(run())
