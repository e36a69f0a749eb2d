"""A node with a directory, in this process: written behind, read for leases, found again, refused when altered."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import threading
import time
from pathlib import Path

import pytest
from cache_world import BLOCK_BYTES, LocalWorld, Prompt, local_world, prompt
from test_node import BUNDLE_BYTES, fresh_root, until

from cachestore.node import tiers as tiers_module
from cachestore.node.file_form import Header
from cachestore.node.files import OWNER_FILE, EntryFiles
from cachestore.node.states import State
from moonrelay.errors import DeadlineExceeded
from moonrelay.valkey import LocalValkey, start_local_valkey

DISK_BYTES = 1 << 24


async def settled(world: LocalWorld) -> None:
    """Everything that wants to be written is written."""
    disk = world.node.disk
    await until(lambda: disk.state == "ready")
    disk.wake()
    await until(lambda: not world.node.core.stats().disk.num_waiting and not states(world, State.WRITING))
    world.node.core.check()


def states(world: LocalWorld, state: State) -> list:
    return [key for key in world.node.core.visible() if world.node.core.entry(key).state is state]


async def published(world: LocalWorld, *prompts: Prompt) -> None:
    for mine in prompts:
        await world.worker.publish(world.member, mine, range(4), (4,))
        await settled(world)


async def fetched(world: LocalWorld, mine: Prompt) -> int:
    match = await world.worker.match(mine)
    return (await world.worker.fetch(mine, match)).tokens if match.tokens else 0


def files_in(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.is_file() and p.name != OWNER_FILE)


def test_what_memory_lets_go_comes_back_from_disk_and_survives_the_node(
    valkey: LocalValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fresh_root()
    prompts = [prompt(root, (token, 4)) for token in range(6)]

    async def first_life() -> None:
        async with local_world(valkey.url, 2 * BUNDLE_BYTES, tmp_path, DISK_BYTES) as world:
            await published(world, *prompts)
            stats = world.node.core.stats()
            assert (stats.num_snapshots, stats.host_snapshots, stats.disk.num_snapshots) == (6, 2, 6)
            assert stats.evicted_snapshots == 0 and stats.disk.demoted == 4 * 5
            for mine in [*prompts, *prompts]:
                assert await fetched(world, mine) == 4 * 64
                await until(lambda: world.node.core.stats().num_leases == 0)
                world.node.core.check()
            await world.node.intake.index.flush()
            assert (await world.worker.match(prompts[0])).by_tier == {"disk": 4 * 64}
            assert (await world.worker.match(prompts[5])).by_tier == {"host": 4 * 64}

    async def second_life() -> None:
        async with local_world(valkey.url, 2 * BUNDLE_BYTES, tmp_path, DISK_BYTES) as world:
            await settled(world)
            assert world.node.core.stats().disk.num_snapshots == 6
            for mine in prompts:
                match = await world.worker.match(mine)
                assert [(run.first, run.end) for run in match.runs] == [(0, 4)]
                assert await fetched(world, mine) == 4 * 64
                await until(lambda: world.node.core.stats().num_leases == 0)
            again = await world.worker.publish(world.member, prompts[0], range(4), (4,))
            assert again.already_there == 5

    asyncio.run(first_life())
    assert len(files_in(tmp_path)) == 6 * 5
    for path in files_in(tmp_path):
        os.utime(path, (1, 1))  # as if all were written within one tick of the clock
    monkeypatch.setattr(tiers_module, "SCAN_BATCH", 3)
    asyncio.run(second_life())


def test_a_lease_waits_for_the_disk_once_however_many_ask(valkey: LocalValkey, tmp_path: Path) -> None:
    root = fresh_root()
    mine, other = prompt(root, (1, 4)), prompt(root, (2, 4))

    async def run() -> None:
        async with local_world(valkey.url, BUNDLE_BYTES, tmp_path, DISK_BYTES) as world:
            await published(world, mine, other)
            match = await world.worker.match(mine)
            reports = await asyncio.gather(*(world.worker.fetch(mine, match) for _ in range(4)))
            assert [r.tokens for r in reports] == [4 * 64] * 4
            assert world.node.core.stats().disk.promoted == 5
            # Memory that is leased cannot take another bundle: a miss, and nothing else.
            await until(lambda: world.node.core.stats().num_leases == 0)
            lease = world.node.core.lease(states(world, State.BOTH), 10_000, now_ms=0)
            missed = await world.worker.fetch(other, await world.worker.match(other))
            assert (missed.tokens, missed.miss_reason) == (0, "tier_error")
            world.node.core.release(lease.id, lease.fence)
            assert await fetched(world, other) == 4 * 64

    asyncio.run(run())


@pytest.mark.parametrize("which", ["block", "snapshot"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_an_altered_file_is_refused_and_costs_its_bundle_only(
    valkey: LocalValkey, tmp_path: Path, which: str, how: str
) -> None:
    root = fresh_root()
    mine, other, third = (prompt(root, (token, 4)) for token in range(3))

    async def run() -> None:
        async with local_world(valkey.url, BUNDLE_BYTES, tmp_path, DISK_BYTES) as world:
            await published(world, mine, other, third)
            names = {"block": mine.hashes[1], "snapshot": mine.hashes[3]}
            path = tmp_path / root.hex() / f"{names[which].hex()}.{which}"
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            if how == "gone":
                path.unlink()
            else:
                path.write_bytes(data[:-1] if how == "cut" else data)
            match = await world.worker.match(mine)
            assert match.tokens == 4 * 64
            missed = await world.worker.fetch(mine, match)
            assert missed.tokens == 0 and missed.miss_reason in ("stale_index", "tier_error")
            world.node.core.check()
            await world.node.intake.index.flush()
            left = await world.worker.match(mine)
            assert (left.tokens, left.matchable_tokens) == (0, 64 if which == "block" else 4 * 64)
            assert await fetched(world, other) == 4 * 64
            await until(lambda: not path.exists() and not world.node.core.stats().num_leases)
            # It is stored anew like anything else, and is whole again.
            assert (await world.worker.publish(world.member, mine, range(4), (4,))).stored == 1
            assert await fetched(world, mine) == 4 * 64

    asyncio.run(run())


def test_memory_that_went_bad_is_not_written_and_leaves(
    valkey: LocalValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with local_world(valkey.url, 2 * BUNDLE_BYTES, tmp_path, DISK_BYTES) as world:
            mine = prompt(fresh_root(), (5, 4))
            await until(lambda: world.node.disk.state == "ready")
            with monkeypatch.context() as patch:
                patch.setattr(world.node.disk, "wake", lambda: None)  # not yet
                await world.worker.publish(world.member, mine, range(4), (4,))
            [(bad, [region, _])] = [(k, r) for k, r in world.node.core.visible().items() if k.kind == "snapshot"]
            world.node.arena.view[region.offset] ^= 1
            await settled(world)
            await until(lambda: bad not in world.node.core.visible())
            assert len(files_in(tmp_path)) == 4 and (await world.worker.match(mine)).tokens == 0

    asyncio.run(run())


def test_a_full_tier_keeps_what_was_used(valkey: LocalValkey, tmp_path: Path) -> None:
    """Room on disk for two bundles: what nobody asked for is not written over what is there."""
    root = fresh_root()
    prompts = [prompt(root, (token, 4)) for token in range(5)]
    size = 2 * sum(-(-(BLOCK_BYTES + 4096) // 4096) * 4096 for _ in range(4)) + 2 * (45_056)

    async def run() -> None:
        async with local_world(valkey.url, 2 * BUNDLE_BYTES, tmp_path, size) as world:
            await published(world, *prompts[:4])
            assert world.node.core.stats().disk.used_bytes <= size
            kept = [p for p in prompts if (await world.worker.match(p)).tokens]
            assert prompts[0] in kept and prompts[3] in kept and len(kept) == 4  # two on disk, two in memory
            assert await fetched(world, prompts[3]) == 4 * 64  # it was asked for: now it is worth a file
            await until(lambda: world.node.core.stats().num_leases == 0)
            await settled(world)
            await published(world, prompts[4])
            assert await fetched(world, prompts[3]) == 4 * 64
            on_disk = {p.name.split(".")[0] for p in files_in(tmp_path)}
            assert {h.hex() for h in prompts[3].hashes} <= on_disk
            assert sum(-(-p.stat().st_size // 4096) * 4096 for p in files_in(tmp_path)) <= size
            world.node.core.check()

    asyncio.run(run())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_or_broken_disk_costs_hits_and_is_tried_again(
    valkey: LocalValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.writev

    def refuse(fd: int, pieces: list[memoryview]) -> int:
        raise OSError(number, os.strerror(number))

    async def run() -> None:
        async with local_world(valkey.url, 2 * BUNDLE_BYTES, tmp_path, DISK_BYTES) as world:
            mine = prompt(fresh_root(), (5, 4))
            await until(lambda: world.node.disk.state == "ready")
            monkeypatch.setattr(os, "writev", refuse)
            await world.worker.publish(world.member, mine, range(4), (4,))
            world.node.disk.wake()
            await until(lambda: metric(world, "disk_errors_total") > 0)
            assert files_in(tmp_path) == [] and await fetched(world, mine) == 4 * 64
            monkeypatch.setattr(os, "writev", real)
            await until(lambda: not world.node.core.stats().num_leases)
            assert await fetched(world, mine) == 4 * 64
            await settled(world)
            assert len(files_in(tmp_path)) == 5

    asyncio.run(run())


def metric(world: LocalWorld, name: str) -> float:
    wanted = f"moonrelay_cache_{name}"
    return sum(
        s.value for family in world.node.metrics.registry.collect() for s in family.samples if s.name == wanted
    )


def test_without_redis_what_is_on_disk_too_makes_room_and_the_index_hears_later(tmp_path: Path) -> None:
    server = start_local_valkey(tmp_path / "valkey")
    root = fresh_root()
    mine, other = prompt(root, (1, 4)), prompt(root, (2, 4))

    async def run() -> None:
        async with local_world(server.url, BUNDLE_BYTES, tmp_path / "disk", DISK_BYTES) as world:
            await published(world, mine, other)
            await world.node.intake.index.flush()
            matches = [await world.worker.match(p) for p in (mine, other)]
            world.node.core.check()
            server.stop()
            for p, match in zip((mine, other, mine), [*matches, matches[0]], strict=True):
                assert (await world.worker.fetch(p, match)).tokens == 4 * 64
                await until(lambda: world.node.core.stats().num_leases == 0)
            await world.node.intake.index.flush()
            assert not world.node.intake.index.reachable and world.node.intake.index.num_untold

    asyncio.run(run())


def test_two_tenants_never_meet(valkey: LocalValkey, tmp_path: Path) -> None:
    """The same hashes under two roots: other files, other entries; one's files moved to the other are refused."""
    mine = prompt(fresh_root(), (5, 4))
    theirs = Prompt(secrets.token_bytes(16), mine.tokens)

    async def run() -> None:
        async with local_world(valkey.url, 2 * BUNDLE_BYTES, tmp_path, DISK_BYTES) as world:
            await published(world, mine)
            assert (await world.worker.match(theirs)).tokens == 0
        folder = tmp_path / theirs.root.hex()
        folder.mkdir()
        for path, name in zip(sorted((tmp_path / mine.root.hex()).glob("*.block")), theirs.hashes, strict=True):
            (folder / f"{name.hex()}.block").write_bytes(path.read_bytes())
            (folder / path.name).write_bytes(path.read_bytes())
        async with local_world(valkey.url, 2 * BUNDLE_BYTES, tmp_path, DISK_BYTES) as world:
            await settled(world)
            assert {key.root for key in world.node.core.visible()} == {mine.root}
            assert metric(world, "disk_recovery_refused") == 8 and not files_in(folder)
            assert await fetched(world, mine) == 4 * 64 and await fetched(world, theirs) == 0

    asyncio.run(run())


def test_a_lease_that_the_disk_cannot_serve_in_time_is_told_at_once_and_the_next_one_is_served(
    valkey: LocalValkey, tmp_path: Path
) -> None:
    root = fresh_root()
    mine, other = prompt(root, (1, 4)), prompt(root, (2, 4))

    async def run() -> None:
        async with local_world(valkey.url, BUNDLE_BYTES, tmp_path, DISK_BYTES) as world:
            await published(world, mine, other)
            disk, core = world.node.disk, world.node.core
            disk._bytes_per_s = 1_000.0  # a disk that was very slow so far
            keys = core.on_disk(core.visible())
            with pytest.raises(DeadlineExceeded, match="will take longer"):
                await disk.ensure(keys, time.monotonic() + 5)
            await until(lambda: not core.on_disk(keys))  # what was begun goes on
            assert await fetched(world, mine) == 4 * 64
            await until(lambda: not core.stats().num_leases)
            disk._bytes_per_s = 0.0
            with pytest.raises(DeadlineExceeded, match="took longer"):
                await disk.ensure(core.on_disk(core.visible()), time.monotonic())
            await until(lambda: not disk._promoting)
            core.check()

    asyncio.run(run())


def test_an_entry_that_left_and_came_back_while_room_was_made_is_not_written_from_its_old_place(
    valkey: LocalValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with local_world(valkey.url, 2 * BUNDLE_BYTES, tmp_path, DISK_BYTES) as world:
            core, disk = world.node.core, world.node.disk
            await until(lambda: disk.state == "ready")
            mine, filler = (prompt(fresh_root(), (token, 4)) for token in (1, 2))
            moved = []

            async def leave_and_return(nbytes: int) -> None:
                if not moved:
                    moved.append(nbytes)
                    await world.node.intake.index.withdraw(core.victims(1 << 40, now_ms=0))
                    for each in (filler, mine):  # the filler takes the old place
                        await world.worker.publish(world.member, each, range(4), (4,))

            monkeypatch.setattr(disk, "_make_room", leave_and_return)
            await world.worker.publish(world.member, mine, range(4), (4,))
            await until(lambda: bool(moved) and core.stats().num_snapshots == 2)  # both came after it had left
            await settled(world)
            assert moved and metric(world, "disk_refused_entries_total") == 0
            assert await fetched(world, mine) == await fetched(world, filler) == 4 * 64
            await until(lambda: not core.stats().num_leases)
            await settled(world)
            assert len(files_in(tmp_path)) == 10

    asyncio.run(run())


def test_a_disk_that_hangs_costs_the_leases_that_want_it_and_nothing_else(
    valkey: LocalValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fresh_root()
    prompts = [prompt(root, (token, 4)) for token in range(8)]
    go_on = threading.Event()
    real = EntryFiles.read

    def hang(files: EntryFiles, header: Header, into: list, draft: list) -> bool:
        assert go_on.wait(30)
        return real(files, header, into, draft)

    async def run() -> None:
        async with local_world(valkey.url, 6 * BUNDLE_BYTES, tmp_path, DISK_BYTES) as world:
            core, disk = world.node.core, world.node.disk
            await published(world, *prompts)
            await world.node.intake.index.withdraw(core.victims(1 << 40, now_ms=0))
            monkeypatch.setattr(EntryFiles, "read", hang)
            for mine in prompts:
                keys = [k for k in core.visible() if k.prefix_hash in mine.hashes]
                with pytest.raises(DeadlineExceeded):
                    await disk.ensure(keys, time.monotonic() + 0.01)
            assert core.stats().free_bytes >= 2 * BUNDLE_BYTES  # so many may hang and no more
            new = prompt(root, (99, 4))
            await world.worker.publish(world.member, new, range(4), (4,))
            assert await fetched(world, new) == 4 * 64
            go_on.set()
            await until(lambda: not disk._promoting)
            core.check()
            assert await fetched(world, prompts[7]) == 4 * 64

    try:
        asyncio.run(run())
    finally:
        go_on.set()
