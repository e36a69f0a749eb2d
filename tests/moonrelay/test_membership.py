"""Membership against a real Valkey: joining, dying, restarting, losing the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from moonrelay.errors import SettingsError, Unavailable
from moonrelay.membership import TTL_MS, Load, Member, Membership
from moonrelay.prefix import Fingerprint
from moonrelay.valkey import LocalValkey, check_policy, connect, raise_if_cancelled, start_local_valkey

FINGERPRINT = Fingerprint(
    model="m", weights_revision="w", tokenizer_revision="t", row_dtype="f32", snapshot_dtype="f32",
    layout_version="1", numerics_version="n", block_tokens=64,
)  # fmt: skip


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def member(instance_id: str, epoch: int, role="decode", **more) -> Member:
    return Member(instance_id=instance_id, role=role, epoch=epoch, grpc_address="127.0.0.1:1", **more)


@contextlib.asynccontextmanager
async def running(url: str, cluster: str, **options) -> AsyncIterator[Membership]:
    redis = connect(url)
    membership = Membership(redis, cluster, **options)
    task = asyncio.ensure_future(membership.run())
    try:
        yield membership
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await redis.aclose()


def test_members_see_each_other_and_their_changes(valkey: LocalValkey) -> None:
    async def run() -> None:
        async with running(valkey.url, "see") as one, running(valkey.url, "see") as two:
            epochs = [await one.next_epoch(), await two.next_epoch()]
            assert epochs[0] < epochs[1]
            peer, layout = b"\x00peer\xff", {"num_heads": 4}
            mine = member("decode-0", epochs[0], fingerprint=FINGERPRINT, layout=layout, peer=peer, max_context=9)
            await one.join(mine)
            await two.join(member("prefill-0", epochs[1], role="prefill"))
            assert await two.wait_for(lambda m: bool(m.members("decode")), soon())
            assert await one.wait_for(lambda m: bool(m.members("prefill")), soon())
            assert two.members("decode") == (mine,)
            assert two.find("decode-0", epochs[0]) == mine and two.find("decode-0", epochs[0] - 1) is None

            one.update(load=Load(free_blocks=3, num_blocks=9), state="draining")
            assert await two.wait_for(lambda m: m.members("decode")[0].state == "draining", soon())
            assert two.members("decode")[0].load.free_blocks == 3

            await one.leave()
            assert await two.wait_for(lambda m: not m.members("decode"), soon(1.0))  # told, not timed out
            assert two.stale_since is None

    asyncio.run(run())


def test_a_silent_member_disappears_and_a_member_that_beats_stays(valkey: LocalValkey) -> None:
    async def run() -> None:
        redis = connect(valkey.url)
        silent = Membership(redis, "silent")
        async with running(valkey.url, "silent") as other:
            await other.join(member("prefill-0", await other.next_epoch(), role="prefill"))
            await silent.join(member("decode-0", await silent.next_epoch()))
            assert await other.wait_for(lambda m: bool(m.members("decode")), soon())
            assert await other.wait_for(lambda m: not m.members("decode"), soon(TTL_MS / 1000 + 1))
            assert other.members("prefill")
        await redis.aclose()

    asyncio.run(run())


def test_a_restarted_process_replaces_the_old_one_which_must_end(valkey: LocalValkey) -> None:
    async def run() -> None:
        redis = connect(valkey.url)
        old = Membership(redis, "restart")
        await old.join(member("decode-0", await old.next_epoch()))
        task = asyncio.ensure_future(old.run())
        async with running(valkey.url, "restart") as new:
            mine = member("decode-0", await new.next_epoch())
            await new.join(mine)
            with pytest.raises(ExceptionGroup) as caught:
                await asyncio.wait_for(task, 5)
            assert caught.group_contains(Unavailable)
            await old.leave()  # must not remove its successor
            assert new.members("decode") == (mine,)
        await redis.aclose()

    asyncio.run(run())


def test_losing_redis_keeps_the_view_for_a_while_and_a_flush_heals(tmp_path) -> None:
    server = start_local_valkey(tmp_path)

    async def run() -> None:
        async with running(server.url, "lost", keep_view_s=1.0) as mine, running(server.url, "lost") as other:
            before = await mine.next_epoch()
            await mine.join(member("decode-0", before))
            await other.join(member("prefill-0", await other.next_epoch(), role="prefill"))
            assert await mine.wait_for(lambda m: bool(m.members("prefill")), soon())

            os.kill(server.process.pid, signal.SIGSTOP)  # it does not even refuse: every call must time out
            assert await mine.wait_for(lambda m: m.stale_since is not None, soon())
            assert mine.members("prefill")
            assert await mine.wait_for(lambda m: not m.members("prefill"), soon())
            os.kill(server.process.pid, signal.SIGCONT)
            assert await mine.wait_for(lambda m: m.stale_since is None and bool(m.members("prefill")), soon())

            async with asyncio.timeout(5):
                redis = Redis.from_url(server.url)
                await redis.flushall()
                await redis.aclose()
            assert await mine.next_epoch() > before  # never an epoch twice, even after a flush
            assert await mine.wait_for(lambda m: len(m.members("prefill") + m.members("decode")) == 2, soon())

    try:
        asyncio.run(run())
    finally:
        server.stop()


def test_a_server_that_may_evict_is_refused(tmp_path) -> None:
    server = start_local_valkey(tmp_path)

    async def run() -> None:
        redis = connect(server.url)
        await check_policy(redis)
        await redis.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(SettingsError, match="allkeys-lru"):
            await check_policy(redis)
        server.stop()
        with pytest.raises(Unavailable):
            await check_policy(redis)
        with pytest.raises(Unavailable):
            await Membership(redis, "none").next_epoch()
        await redis.aclose()

    asyncio.run(run())


def test_an_unreadable_url_is_a_settings_error() -> None:
    with pytest.raises(SettingsError):
        connect("http://somewhere")


def test_a_swallowed_cancellation_is_raised_again() -> None:
    async def swallower() -> None:
        with contextlib.suppress(asyncio.CancelledError):  # as asyncio.wait_for does when its work ends just then
            await asyncio.Event().wait()
        raise_if_cancelled()
        raise AssertionError("went on after its cancellation")

    async def run() -> None:
        raise_if_cancelled()
        task = asyncio.ensure_future(swallower())
        await asyncio.wait([task], timeout=0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
