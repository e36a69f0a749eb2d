"""What a worker keeps in its own memory, as the index says it: best effort, behind the worker's back.

The worker's own book is the truth; an entry here that is wrong costs a worse placement and nothing else. So nothing
waits: changes queue, and where they cannot be told (too many, or no Redis) everything of this worker is withdrawn
rather than anything claimed that is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from cachestore.index import CacheIndex
from cachestore.lookup import Entry, EntryName, Life
from moonrelay.valkey import FAILURES, raise_if_cancelled

logger = logging.getLogger(__name__)

QUEUE_MAX = 1_024
RENEW_S = 600.0  # a third of the time after which others take a silent life out
CALL_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class _Change:
    """Entries that came under a root; or, without their data, those that went."""

    root: bytes
    came: dict[EntryName, Entry]
    went: tuple[EntryName, ...] = ()


class DeviceEntries:
    """Loop thread only. `run` beside the worker; `announce` and `withdraw` return at once."""

    def __init__(self, index: CacheIndex, life: Life) -> None:
        self._index, self._life = index, life
        self._queue: deque[_Change] = deque()
        self._roots: set[bytes] = set()
        self._untold = False  # the index may claim what is gone
        self._changed = asyncio.Event()

    def announce(self, root: bytes, hashes: Sequence[bytes], first: int, end: int, snapshots: Sequence[int]) -> None:
        """Blocks [first, end) of a chain, all before them too, and the snapshots at these depths are kept here."""
        came: dict[EntryName, Entry] = {}
        for i in range(first, end):
            parent = hashes[i - 1] if i else None
            came["block", hashes[i]] = Entry(nbytes=0, tier="device", first=0, parent=parent)
        for depth in snapshots:
            came["snapshot", hashes[depth - 1]] = Entry(nbytes=0, tier="device")
        self._add(_Change(root, came))

    def withdraw(self, root: bytes, blocks: Sequence[bytes], snapshots: Sequence[bytes]) -> None:
        """They are kept no more."""
        went: list[EntryName] = [("snapshot", h) for h in snapshots]
        went += [("block", h) for h in blocks]
        self._add(_Change(root, {}, tuple(went)))

    async def run(self) -> None:
        """Tell the index, until cancelled."""
        renew_at_s = time.monotonic() + RENEW_S
        while True:
            raise_if_cancelled()
            try:
                async with asyncio.timeout(max(0.0, renew_at_s - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            try:
                await self._tell()
                if time.monotonic() >= renew_at_s:
                    renew_at_s = time.monotonic() + RENEW_S
                    for root in self._roots:
                        await self._limited(self._index.renew(root, self._life))
            except FAILURES as error:
                self._untold = True
                logger.info("device entries not told to the index", extra={"reason": str(error)})

    async def forget(self) -> None:
        """Withdraw everything: this worker is leaving. What Redis does not hear expires by itself."""
        try:
            await self._forget()
        except FAILURES as error:
            logger.info("index not told of leaving", extra={"reason": str(error)})

    def _add(self, change: _Change) -> None:
        if len(self._queue) >= QUEUE_MAX:
            self._queue.clear()
            self._untold = True
        self._queue.append(change)
        self._changed.set()

    async def _tell(self) -> None:
        if self._untold:
            await self._forget()
        while self._queue:
            change = self._queue.popleft()
            self._roots.add(change.root)
            if change.came:
                await self._limited(self._index.write(change.root, self._life, change.came))
            if change.went:
                await self._limited(self._index.remove(change.root, self._life, change.went))

    async def _forget(self) -> None:
        for root in list(self._roots):
            await self._limited(self._index.forget(root, self._life))
            self._roots.discard(root)
        self._untold = False

    async def _limited(self, call: Awaitable[object]) -> None:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await call
