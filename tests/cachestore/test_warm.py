"""Connecting to members as they appear."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from tests_cachestore import MemoryPeer, Reader

from cachestore.transports import MemoryFabric
from cachestore.transports.warm import keep_warm
from moonrelay.membership import Member


class View:
    """A membership whose changes the test makes."""

    def __init__(self) -> None:
        self.all: list[Member] = []
        self.changed = asyncio.Event()
        self.waiting = asyncio.Event()  # keep_warm has seen everything and waits

    def members(self, role: str) -> tuple[Member, ...]:
        return tuple(m for m in self.all if m.role == role)

    async def wait_for(self, predicate, deadline_s: float) -> bool:
        assert deadline_s > time.monotonic()
        self.waiting.set()
        while not predicate(self):
            await self.changed.wait()
            self.changed.clear()
        return True


def test_each_life_of_a_member_is_connected_once_and_a_dead_one_is_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> list[tuple[str, str]]:
        fabric, view = MemoryFabric(), View()
        reader = Reader("memory", fabric)
        await reader.transports.start()
        task = asyncio.ensure_future(keep_warm(reader.transports, view, ("prefill",)))
        for name, epoch, role in (
            ("a", 1, "prefill"),
            ("b", 1, "decode"),
            ("a", 2, "prefill"),
            ("gone", 1, "prefill"),
        ):
            peer = MemoryPeer(fabric, name, epoch)
            await peer.start()
            if name == "gone":
                peer.kill()
            made = {"instance_id": name, "role": role, "epoch": epoch, "grpc_address": ""}
            view.all = [m for m in view.all if m.instance_id != name]
            view.all.append(Member(**made, peer=peer.peer.SerializeToString()))
            view.waiting.clear()
            view.changed.set()
            if role == "prefill":
                async with asyncio.timeout(5):
                    await view.waiting.wait()
        task.cancel()
        await asyncio.wait([task])
        return [(r.getMessage(), r.peer) for r in caplog.records if hasattr(r, "peer")]

    with caplog.at_level(logging.INFO, "cachestore.transports.warm"):
        seen = asyncio.run(run())
    assert seen == [("peer connected", "a"), ("peer connected", "a"), ("peer not connected", "gone")]
