"""A drafter's rows in the cache: stored beside a block, brought with a hit, and never the reason of a miss."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from cache_world import (
    BLOCK_BYTES,
    DRAFT_BYTES,
    DRAFTS,
    STATE_BYTES,
    LocalWorld,
    NodeProcess,
    Prompt,
    local_world,
    prompt,
    worker_in,
)
from test_node import BUNDLE_BYTES, fresh_root, until
from test_node_tiers import DISK_BYTES, files_in, settled
from test_replication import AFTER, pair
from tests_cachestore import soon

from cachestore.client import FetchReport, PublishReport
from cachestore.entries import BLOCK, Key
from cachestore.node.allocator import PAGE_BYTES, PageAllocator
from cachestore.node.leases import Lease
from cachestore.node.states import State
from cachestore.transports import Batch, Landing
from cachestore.transports.memory import MemoryTransport
from cachestore.transports.plan import Verifier
from moonrelay.errors import TransferError
from moonrelay.valkey import LocalValkey

BLOCKS = 4
BUNDLE = BLOCKS * BLOCK_BYTES + STATE_BYTES
ROWS_ROOM = BLOCKS * PageAllocator.rounded(DRAFT_BYTES)


async def publish(
    world: LocalWorld, mine: Prompt, drafter: str, blocks: Collection[int] = range(BLOCKS)
) -> PublishReport:
    offers = world.worker.write(mine, range(BLOCKS), (BLOCKS,))
    offers = world.worker.with_drafts(mine, offers, drafter, blocks)
    return await world.worker.client.publish(world.member, mine.root, offers, soon())


async def fetch(world: LocalWorld, mine: Prompt, drafter: str, landing: Landing | None = None) -> FetchReport:
    report = await world.worker.fetch(mine, await world.worker.match(mine), landing, drafter=drafter)
    await until(lambda: not world.node.core.stats().num_leases)
    return report


def first_block(report: FetchReport) -> int:
    assert report.tokens == BLOCKS * 64 and report.miss_reason is None
    return report.draft_first // 64


def counted(world: LocalWorld, outcome: str) -> float:
    return world.node.metrics.published_drafts.labels(outcome)._value.get()


def run(url: str, test: Callable[[LocalWorld, Prompt], object], **more) -> None:
    async def inside() -> None:
        async with local_world(url, **more) as world:
            await test(world, prompt(fresh_root(), (5, BLOCKS)))
            world.node.core.check()

    asyncio.run(inside())


def test_rows_come_with_the_hit_for_who_asks_for_that_drafters(valkey: LocalValkey) -> None:
    async def check(world: LocalWorld, mine: Prompt) -> None:
        report = await publish(world, mine, "one")
        assert (report.stored, report.drafts) == (BLOCKS + 1, BLOCKS)
        report = await fetch(world, mine, "one")
        assert first_block(report) == 0 and report.bytes == BUNDLE + BLOCKS * DRAFT_BYTES
        assert None not in report.draft_xxh3 and report.draft_refused == 0
        for other in ("two", ""):
            report = await fetch(world, mine, other)
            assert first_block(report) == BLOCKS and report.bytes == BUNDLE and report.draft_refused == 0
        report = await publish(world, mine, "one")
        assert (report.already_there, report.drafts) == (BLOCKS + 1, 0)

    run(valkey.url, check)


@pytest.mark.parametrize(("blocks", "first"), [((2, 3), 2), ((0, 1, 3), 3), ((0, 1, 2), BLOCKS), ((), BLOCKS)])
def test_only_the_run_that_ends_with_the_hit_counts(valkey: LocalValkey, blocks: tuple[int, ...], first: int) -> None:
    async def check(world: LocalWorld, mine: Prompt) -> None:
        assert (await publish(world, mine, "one", blocks)).drafts == len(blocks)
        report = await fetch(world, mine, "one")
        assert first_block(report) == first
        assert report.bytes == BUNDLE + (BLOCKS - first) * DRAFT_BYTES  # nothing is brought that would not be used

    run(valkey.url, check)


def test_the_newest_drafters_rows_replace_older_ones_but_not_under_a_reader(valkey: LocalValkey) -> None:
    async def check(world: LocalWorld, mine: Prompt) -> None:
        core = world.node.core
        await publish(world, mine, "one")
        free = core.stats().free_bytes
        key = Key(mine.root, BLOCK, mine.hashes[1])
        old = core.entry(key).draft
        reader = core.lease([Key(mine.root, BLOCK, mine.hashes[3])], 10_000, int(time.monotonic() * 1000))
        assert isinstance(reader, Lease)
        report = await publish(world, mine, "two")
        assert (report.stored, report.drafts) == (0, BLOCKS)
        assert core.stats().quarantined_bytes == ROWS_ROOM == free - core.stats().free_bytes
        match = await world.worker.match(mine)
        assert first_block(await world.worker.fetch(mine, match, drafter="two")) == 0
        assert first_block(await world.worker.fetch(mine, match, drafter="one")) == BLOCKS
        await until(lambda: core.stats().num_leases == 1)
        where = old.regions[0].offset
        assert bytes(world.node.arena.view[where : where + DRAFT_BYTES]) == mine.draft(1, "one")
        core.release(reader.id, reader.fence)
        assert core.stats().quarantined_bytes == 0 and core.stats().free_bytes == free

    run(valkey.url, check)


def test_a_bad_copy_costs_the_rows_above_it_and_nothing_else(valkey: LocalValkey) -> None:
    async def check(world: LocalWorld, mine: Prompt) -> None:
        await publish(world, mine, "one")
        rows = world.node.core.entry(Key(mine.root, BLOCK, mine.hashes[1])).draft
        world.node.arena.view[rows.regions[0].offset + 7] ^= 1
        landing = Landing()
        report = await fetch(world, mine, "one", landing)
        assert first_block(report) == 2 and report.draft_refused == 2 and not landing.pending
        assert report.transport == "memory" and report.bytes == BUNDLE + 2 * DRAFT_BYTES

    run(valkey.url, check)


def test_a_read_that_breaks_after_the_hit_has_landed_is_a_hit(
    valkey: LocalValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(world: LocalWorld, mine: Prompt) -> None:
        await publish(world, mine, "one")
        real = Verifier.landed

        def breaks(self: Verifier, group: list) -> None:
            entries = next(i for i, segment in enumerate(group) if segment.pool == DRAFTS)
            real(self, group[: entries + 1])
            raise TransferError("the node is gone")

        monkeypatch.setattr(Verifier, "landed", breaks)
        report = await fetch(world, mine, "one")
        assert first_block(report) == BLOCKS - 1 and report.draft_refused == BLOCKS - 1

    run(valkey.url, check)


@pytest.mark.parametrize("come", [0, 1, 3])
def test_a_hit_waits_a_moment_for_rows_whose_source_stands_still(
    valkey: LocalValkey, monkeypatch: pytest.MonkeyPatch, come: int
) -> None:
    async def check(world: LocalWorld, mine: Prompt) -> None:
        await publish(world, mine, "one")
        count = BLOCKS + 2 + come  # the blocks, the snapshot's two parts, and so many blocks' rows

        def stalls(self: MemoryTransport, handle, peer, batch, note=None) -> None:
            handle.transport, handle.on_abort = self.name, handle.end
            part = Batch()
            part.lengths, part.sums, left = batch.lengths[:count], batch.sums[:count], sum(batch.lengths[:count])
            for run in batch.runs:
                part.runs.append(run._replace(length=min(run.length, left)))
                left -= part.runs[-1].length
            self.copy(self._fabric.find(peer), part, handle)

        monkeypatch.setattr(MemoryTransport, "submit", stalls)
        landing, match, began = Landing(), await world.worker.match(mine), time.monotonic()
        report = await world.worker.fetch(mine, match, landing, soon(20), drafter="one")
        assert time.monotonic() - began < 5
        assert first_block(report) == BLOCKS - come and report.draft_refused == BLOCKS - come
        assert len(report.draft_xxh3) == come and not landing.pending

    run(valkey.url, check)


def test_rows_that_may_still_land_are_a_miss_since_the_memory_is_not_the_callers(
    valkey: LocalValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(world: LocalWorld, mine: Prompt) -> None:
        await publish(world, mine, "one")
        held = []

        def hangs(self, handle, peer, reads, note=None) -> None:
            handle.verified = BLOCKS + 2  # the blocks and the snapshot's two parts
            held.append(handle)

        monkeypatch.setattr(MemoryTransport, "submit", hangs)
        landing, match = Landing(), await world.worker.match(mine)
        report = await world.worker.fetch(mine, match, landing, soon(0.2), drafter="one")
        assert report.tokens == 0 and report.miss_reason == "tier_error" and landing.pending
        held[0].end()
        await landing.ended()

    run(valkey.url, check)


def test_a_publishers_bad_rows_are_not_taken_and_its_blocks_are(valkey: LocalValkey) -> None:
    async def check(world: LocalWorld, mine: Prompt) -> None:
        offers = world.worker.write(mine, range(BLOCKS), (BLOCKS,))
        offers = world.worker.with_drafts(mine, offers, "one", range(BLOCKS))
        world.worker.drafts.view[2 * DRAFT_BYTES] ^= 1  # after it was hashed
        report = await world.worker.client.publish(world.member, mine.root, offers, soon())
        assert (report.stored, report.drafts) == (BLOCKS + 1, 0) and counted(world, "failed") == BLOCKS
        assert first_block(await fetch(world, mine, "one")) == BLOCKS
        assert (await publish(world, mine, "one")).drafts == BLOCKS  # and may come later

    run(valkey.url, check)


def test_without_room_for_them_rows_are_refused_and_blocks_are_not(valkey: LocalValkey) -> None:
    async def check(world: LocalWorld, mine: Prompt) -> None:
        report = await publish(world, mine, "one")
        assert (report.stored, report.refused, report.drafts) == (BLOCKS + 1, 0, 1)
        assert counted(world, "refused") == BLOCKS - 1 and world.node.core.stats().free_bytes == 0
        assert first_block(await fetch(world, mine, "one")) == BLOCKS  # only the first block's found room

    run(valkey.url, check, dram_bytes=BUNDLE_BYTES + PAGE_BYTES)


def test_eviction_counts_and_frees_both_spans(valkey: LocalValkey) -> None:
    async def check(world: LocalWorld, mine: Prompt) -> None:
        core, root = world.node.core, mine.root
        await publish(world, mine, "one")
        assert core.stats().capacity_bytes - core.stats().free_bytes == BUNDLE_BYTES + ROWS_ROOM
        for token in (6, 7, 8):
            await publish(world, prompt(root, (token, BLOCKS)), "one")
            assert core.stats().capacity_bytes - core.stats().free_bytes <= 2 * (BUNDLE_BYTES + ROWS_ROOM)
            core.check()  # retention knows the bytes of both spans
        assert core.stats().num_snapshots == 2 and core.stats().free_bytes == 0
        assert first_block(await fetch(world, prompt(root, (8, BLOCKS)), "one")) == 0

    run(valkey.url, check, dram_bytes=2 * (BUNDLE_BYTES + ROWS_ROOM))


def test_rows_go_to_disk_and_come_back_and_outlive_the_node(valkey: LocalValkey, tmp_path: Path) -> None:
    mine = prompt(fresh_root(), (5, BLOCKS))
    # Memory for one bundle, and for new rows beside those that they replace.
    room = {"dram_bytes": BUNDLE_BYTES + 2 * ROWS_ROOM, "disk": tmp_path, "disk_bytes": DISK_BYTES}

    async def both() -> None:
        async with local_world(valkey.url, **room) as world:
            await publish(world, mine, "one")
            await settled(world)
            await publish(world, prompt(mine.root, (6, BLOCKS)), "one")  # the first one leaves memory
            await settled(world)
            assert world.node.core.entry(Key(mine.root, BLOCK, mine.hashes[3])).state is State.DISK
            report = await fetch(world, mine, "one")
            assert first_block(report) == 0 and any(place.on_disk for place in report.places)
            await publish(world, mine, "two")  # files of the older drafter are written again
            await settled(world)
        async with local_world(valkey.url, **room) as world:
            await settled(world)
            assert first_block(await fetch(world, mine, "two")) == 0
            assert first_block(await fetch(world, mine, "one")) == BLOCKS
            await settled(world)

    asyncio.run(both())


def test_rows_that_went_bad_on_disk_are_left_behind_and_the_file_is_written_again(
    valkey: LocalValkey, tmp_path: Path
) -> None:
    mine = prompt(fresh_root(), (5, BLOCKS))
    room = {"dram_bytes": 2 * (BUNDLE_BYTES + ROWS_ROOM), "disk": tmp_path, "disk_bytes": DISK_BYTES}

    async def both() -> None:
        async with local_world(valkey.url, **room) as world:
            await publish(world, mine, "one")
            await settled(world)
        path = next(p for p in files_in(tmp_path) if p.name == f"{mine.hashes[1].hex()}.block")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1  # the body ends with the rows
        path.write_bytes(data)
        async with local_world(valkey.url, **room) as world:
            await settled(world)
            report = await fetch(world, mine, "one")
            assert first_block(report) == 2 and report.draft_refused == 0  # the lease did not name the bad ones
            assert world.node.metrics.refused_files.labels("draft")._value.get() == 1
            await settled(world)
            assert path.stat().st_size == len(data) - DRAFT_BYTES
        async with local_world(valkey.url, **room) as world:
            await settled(world)
            assert first_block(await fetch(world, mine, "one")) == 2
            assert world.node.metrics.refused_files.labels("draft")._value.get() == 0

    asyncio.run(both())


def test_rows_whose_memory_went_bad_do_not_reach_a_file(
    valkey: LocalValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(world: LocalWorld, mine: Prompt) -> None:
        await until(lambda: world.node.disk.state == "ready")
        monkeypatch.setattr(world.node.disk, "wake", lambda: None)  # nothing is written yet
        await publish(world, mine, "one")
        rows = world.node.core.entry(Key(mine.root, BLOCK, mine.hashes[3])).draft
        world.node.arena.view[rows.regions[0].offset] ^= 1
        monkeypatch.undo()
        await settled(world)
        assert world.node.core.stats().disk.num_blocks == BLOCKS  # the block itself is as good as before
        assert world.node.core.entry(Key(mine.root, BLOCK, mine.hashes[3])).draft is None
        assert first_block(await fetch(world, mine, "one")) == BLOCKS

    run(valkey.url, check, disk=tmp_path, disk_bytes=DISK_BYTES)


def test_a_replica_has_the_rows_too(valkey: LocalValkey) -> None:
    async def both() -> None:
        async with pair(valkey.url) as world:
            mine, worker = prompt(fresh_root(), (5, BLOCKS)), world.worker
            offers = worker.write(mine, range(BLOCKS), (BLOCKS,))
            offers = worker.with_drafts(mine, offers, "one", range(BLOCKS))
            await worker.client.publish(world.members[0], mine.root, offers, soon())
            for _ in range(AFTER):
                await worker.fetch(mine, await worker.match(mine))
                await until(lambda: not world.nodes[0].core.stats().num_leases)
            await until(lambda: world.nodes[1].core.stats().num_snapshots == 1)
            await until(lambda: not world.nodes[0].core.stats().num_leases)
            world.listed.all = [world.members[1]]
            assert first_block(await worker.fetch(mine, await worker.match(mine), drafter="one")) == 0

    asyncio.run(both())


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_rows_move_between_processes(valkey: LocalValkey, tmp_path: Path, transport: str) -> None:
    async def both() -> None:
        cluster = secrets.token_hex(4)
        node = NodeProcess(valkey.url, cluster, tmp_path, "--transport", transport, "--dram-bytes", "16_000_000")
        async with worker_in(valkey.url, cluster, transport) as (worker, membership):
            try:
                member, mine = await node.ready(membership), prompt(fresh_root(), (5, BLOCKS))
                offers = worker.write(mine, range(BLOCKS), (BLOCKS,))
                offers = worker.with_drafts(mine, offers, "one", range(BLOCKS))
                published = await worker.client.publish(member, mine.root, offers, soon())
                assert (published.stored, published.drafts) == (BLOCKS + 1, BLOCKS)
                report = await worker.fetch(mine, await worker.match(mine), drafter="one")
                assert first_block(report) == 0
                assert report.transport == {"auto": "nixl", "tcp": "tcp"}[transport]
            finally:
                node.close()

    asyncio.run(both())
