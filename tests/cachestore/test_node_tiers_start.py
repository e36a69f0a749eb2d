"""A node takes its directory and counts what it finds there."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from cache_world import local_world, prompt
from test_node import BUNDLE_BYTES, fresh_root
from test_node_tiers import DISK_BYTES, files_in, published, settled

from cachestore.node import tiers as tiers_module
from moonrelay.errors import SettingsError
from moonrelay.valkey import LocalValkey


def test_a_directory_in_use_is_waited_for_and_then_refused(
    valkey: LocalValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with local_world(valkey.url, 2 * BUNDLE_BYTES, tmp_path, DISK_BYTES) as first:
            mine = prompt(fresh_root(), (5, 4))
            await published(first, mine)
            with pytest.raises(SettingsError, match=r"^disk_dir: expected .* in use by another process"):
                async with local_world(valkey.url, 2 * BUNDLE_BYTES, tmp_path, DISK_BYTES):
                    pass
            # One that lets go while the next one waits, as a killed predecessor does.
            monkeypatch.setattr(tiers_module, "OPEN_AGAIN_S", 0.01)
            closing = asyncio.ensure_future(first.node.disk.close())
            async with local_world(valkey.url, 2 * BUNDLE_BYTES, tmp_path, DISK_BYTES) as second:
                await closing
                await settled(second)
                assert second.node.core.stats().disk.num_snapshots == 1
                assert len(files_in(tmp_path)) == 5

    asyncio.run(run())


def test_files_that_were_cut_while_nobody_looked_are_counted_by_reason(valkey: LocalValkey, tmp_path: Path) -> None:
    mine = prompt(fresh_root(), (5, 4))

    async def run() -> None:
        async with local_world(valkey.url, 2 * BUNDLE_BYTES, tmp_path, DISK_BYTES) as world:
            await published(world, mine)
        [cut] = (path for path in files_in(tmp_path) if path.suffix == ".snapshot")
        os.truncate(cut, cut.stat().st_size - 1)
        async with local_world(valkey.url, 2 * BUNDLE_BYTES, tmp_path, DISK_BYTES) as world:
            await settled(world)
            counts = {
                s.labels["reason"]: s.value
                for family in world.node.metrics.registry.collect()
                for s in family.samples
                if s.name == "moonrelay_cache_disk_refused_entries_total"
            }
            assert counts == {"torn": 1, "altered": 0, "unreadable": 0, "memory": 0, "draft": 0} and not cut.exists()

    asyncio.run(run())
