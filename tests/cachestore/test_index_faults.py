"""A Redis that evicts, forgets or is away: hits are lost, answers never are."""

from __future__ import annotations

import asyncio
import random
import secrets

import pytest
from cache_world import local_world, prompt
from index_model import Life, chain
from redis.exceptions import ResponseError

from cachestore.device_entries import QUEUE_MAX, DeviceEntries
from cachestore.index import CacheIndex
from cachestore.lookup import Entry
from cachestore.main import main
from moonrelay.errors import SettingsError
from moonrelay.valkey import LocalValkey, connect, start_local_valkey

KEYS = ("nodes", "cuts", "block:node", "snap:node", "was:0")


@pytest.mark.parametrize("lost", KEYS)
def test_a_lost_key_costs_hits_and_the_node_writes_it_again(valkey: LocalValkey, lost: str) -> None:
    async def run() -> None:
        async with local_world(valkey.url) as world:
            mine, worker, redis = prompt(secrets.token_bytes(16), (5, 6)), world.worker, world.worker.index._redis
            await worker.publish(world.member, mine, range(6), (3, 6))
            prefix = f"mr:{{{mine.root.hex()}}}:{lost}"
            gone = [key async for key in redis.scan_iter(match=prefix.replace("{", "\\{") + "*")]
            assert gone or lost == "was:0"
            await redis.delete(*gone, "nothing")
            match = await worker.match(mine)
            assert match.tokens in (0, 384)
            if match.tokens:
                assert (await worker.fetch(mine, match)).tokens == 384
            await world.node.intake.index.renew()
            match = await worker.match(mine)
            assert match.tokens == 384 and [b.tokens for b in match.alternatives] == [192]
            assert (await worker.fetch(mine, match)).tokens == 384

    asyncio.run(run())


def test_single_fields_that_go_missing_never_give_a_wrong_answer(valkey: LocalValkey) -> None:
    """What is offered may be less than there is; what a fetch brings is the prompt's, every time."""

    async def run() -> None:
        rng = random.Random(5)
        async with local_world(valkey.url) as world:
            mine, worker, redis = prompt(secrets.token_bytes(16), (5, 8)), world.worker, world.worker.index._redis
            await worker.publish(world.member, mine, range(8), (4, 8))
            for _ in range(30):
                keys = [k async for k in redis.scan_iter(match=f"mr:\\{{{mine.root.hex()}}}:*") if b"nodes" not in k]
                key = rng.choice(sorted(keys)) if keys else None
                if key is None:
                    break
                await redis.hdel(key, rng.choice(sorted(await redis.hkeys(key))))
                match = await worker.match(mine)
                assert match.tokens in (0, 256, 512)
                if match.tokens:
                    assert (await worker.fetch(mine, match)).tokens == match.tokens
            await worker.publish(world.member, mine, range(8), (4, 8))
            assert (await worker.match(mine)).tokens == 512

    asyncio.run(run())


def test_a_cancellation_that_the_redis_client_swallows_still_ends_who_waited(valkey: LocalValkey) -> None:
    """As the client does before Python 3.12 where its send ends in the moment of the cancellation."""

    async def run() -> None:
        async with local_world(valkey.url) as world:
            mine, index = prompt(secrets.token_bytes(16), (5, 2)), world.node.intake.index
            await world.worker.publish(world.member, mine, range(2), (2,))
            asked, renew = asyncio.Event(), index._index.renew

            async def swallowing(*args):
                asked.set()
                try:
                    await asyncio.sleep(30)
                except asyncio.CancelledError:
                    return await renew(*args)

            index._index.renew = swallowing
            task = asyncio.ensure_future(index.renew())
            await asked.wait()
            task.cancel()
            await asyncio.wait([task], timeout=10)
            assert task.cancelled()

    asyncio.run(run())


def test_an_index_that_claims_too_much_is_corrected_by_the_node(valkey: LocalValkey) -> None:
    """An entry that says its run begins earlier than it does: the lease does not cover it, and the index hears so."""

    async def run() -> None:
        async with local_world(valkey.url) as world:
            mine, worker, node = prompt(secrets.token_bytes(16), (5, 8)), world.worker, world.node
            await worker.publish(world.member, mine, range(4, 8), (8,))
            claimed = {
                ("block", mine.hashes[i]): Entry(nbytes=1, first=0, parent=mine.hashes[i - 1]) for i in range(4, 8)
            }
            claimed["block", mine.hashes[0]] = Entry(nbytes=1, first=0)
            await worker.index.write(mine.root, node.identity, claimed)
            match = await worker.match(mine)
            assert match.tokens == 512
            assert (await worker.fetch(mine, match)).miss_reason == "stale_index"
            await node.intake.index.flush()
            assert (await worker.match(mine)).tokens == 0

    asyncio.run(run())


def test_an_entry_that_cannot_be_read_is_an_error_of_redis_and_not_a_hit(valkey: LocalValkey) -> None:
    async def run() -> None:
        redis, root = connect(valkey.url), secrets.token_bytes(16)
        index, node = CacheIndex(redis, 64), Life("n", 1)
        await redis.hset(f"mr:{{{root.hex()}}}:block:n:1", chain("a")[0], b"\xc1 of another version")
        with pytest.raises(ResponseError):
            await index.match(root, chain("a"), 640, [node])
        index.close()
        await redis.aclose()

    asyncio.run(run())


def test_a_redis_that_may_evict_is_refused_at_the_start(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    server = start_local_valkey(tmp_path)

    async def allow_eviction() -> None:
        redis = connect(server.url)
        await redis.config_set("maxmemory-policy", "allkeys-lru")
        await redis.aclose()

    try:
        asyncio.run(allow_eviction())
        with pytest.raises(SettingsError, match="noeviction, found allkeys-lru"):
            main(["--redis-url", server.url])
    finally:
        server.stop()


def test_what_a_worker_keeps_is_told_late_but_never_overclaimed(tmp_path) -> None:
    server = start_local_valkey(tmp_path)

    async def run() -> None:
        redis, root, hashes, worker = connect(server.url), secrets.token_bytes(16), chain("a"), Life("p", 1)
        index, told = CacheIndex(redis, 64), asyncio.Event()
        device = DeviceEntries(index, worker)

        async def own() -> list[int]:
            return [d.tokens for d in (await index.match(root, hashes, 640, [], workers=[worker])).devices]

        tell, calls = device._tell, []

        async def observed() -> None:
            try:
                await tell()
            finally:
                calls.append(1)
                told.set()

        device._tell = observed  # type: ignore[method-assign]
        running = asyncio.ensure_future(device.run())

        async def after(change) -> list[int]:
            told.clear()
            change()
            await told.wait()
            return await own()

        assert await after(lambda: device.announce(root, hashes, 0, 8, [4, 8])) == [512]
        assert await after(lambda: device.withdraw(root, hashes[4:8], [hashes[7]])) == [256]

        def too_many() -> None:  # the queue gives up, and so does the index
            for _ in range(QUEUE_MAX + 1):
                device.announce(root, hashes, 0, 2, [2])

        assert await after(too_many) == [128]
        await redis.config_set("maxmemory", "1")  # Redis refuses every write
        told.clear()
        device.announce(root, hashes, 2, 8, [8])
        await told.wait()
        await redis.config_set("maxmemory", "0")
        assert await own() == [128]
        assert await after(lambda: device.announce(root, hashes, 0, 3, [3])) == [
            192
        ]  # everything older was withdrawn
        await device.forget()
        assert await own() == []
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        index.close()
        await redis.aclose()

    try:
        asyncio.run(run())
    finally:
        server.stop()
