"""What the index is told of a node's entries, and what it could not be told yet."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cachestore.entries import SNAPSHOT, Key, Offer
from cachestore.index import CacheIndex
from cachestore.lookup import Kind, Tier
from cachestore.node.core import NodeCore
from cachestore.node.metrics import NodeMetrics
from cachestore.node.naming import index_entries
from cachestore.node.states import ON_DISK, VISIBLE
from moonrelay.errors import Unavailable
from moonrelay.valkey import FAILURES, raise_if_cancelled

logger = logging.getLogger(__name__)

INDEX_TIMEOUT_S = 2.0
RENEW_S = 5.0  # keeping the index keys alive, and noticing that they vanished
BATCH = 512  # entries of one call: 1.4 ms in Redis, which every lookup waits for
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """This life of this node, as the index names it."""

    instance_id: str
    epoch: int


class IndexWriter:
    """Writing and withdrawing take turns: an entry on its way out must not be written after it was withdrawn.

    What could not be told, and what is not urgent (an entry changed its tier), is told by `run`.
    """

    def __init__(self, core: NodeCore, index: CacheIndex, identity: Identity, metrics: NodeMetrics) -> None:
        self._core, self._index, self._identity, self._metrics = core, index, identity, metrics
        self._turn = asyncio.Lock()
        self._untold: dict[bytes, set[Key]] = defaultdict(set)
        self._wake = asyncio.Event()
        self.reachable = True

    @property
    def num_untold(self) -> int:
        return sum(map(len, self._untold.values()))

    async def run(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """Tell what is left to tell; every few seconds make sure that the index still has everything, and say
        whether it can be reached."""
        renew_at_s = time.monotonic() + RENEW_S
        while True:
            raise_if_cancelled()
            try:
                async with asyncio.timeout(renew_at_s - time.monotonic()):
                    await self._wake.wait()
            except TimeoutError:
                renew_at_s = time.monotonic() + RENEW_S
                await self.renew()
            self._wake.clear()
            await self.flush()
            await tell(self.reachable)

    def note(self, keys: Iterable[Key]) -> None:
        """These changed; tell the index soon."""
        for key in keys:
            self._untold[key.root].add(key)
            self._wake.set()

    async def write(self, keys: Sequence[Key]) -> None:
        """Make the index name those of `keys` that are here, and no others. Raises: FAILURES; then it is told
        later."""
        by_root: dict[bytes, list[Key]] = defaultdict(list)
        for key in keys:
            by_root[key.root].append(key)
        try:
            for root in list(by_root):
                for start in range(0, len(by_root[root]), BATCH):
                    await self._tell(root, by_root[root][start : start + BATCH])
                del by_root[root]
        finally:
            for root, untold in by_root.items():
                self._untold[root].update(untold)

    async def flush(self) -> None:
        """Tell what is left to tell."""
        waiting, self._untold = self._untold, defaultdict(set)
        try:
            await self.write([key for keys in waiting.values() for key in keys])
        except FAILURES as error:
            logger.warning("index not told of changes", extra={"reason": str(error), "entries": self.num_untold})

    async def withdraw(self, victims: Sequence[Key]) -> None:
        """Take LEAVING entries out of the index, then out of the books. Raises: Unavailable; then the rest stays."""
        by_root: dict[bytes, list[Key]] = defaultdict(list)
        for key in victims:
            by_root[key.root].append(key)
        try:
            for root in list(by_root):
                while by_root[root]:  # the deep ends come first, so that runs stay unbroken
                    async with self._turn:
                        names = [(_kind(key), key.prefix_hash) for key in by_root[root][:BATCH]]
                        await self._limited(self._index.remove(root, self._identity, names))
                    self._core.reclaim(by_root[root][:BATCH])
                    del by_root[root][:BATCH]
        except FAILURES as error:
            raise Unavailable(f"nothing can be evicted while the index is away: {error}") from None
        finally:
            kept = [key for keys in by_root.values() for key in keys]
            self._core.restore(kept)
            self.note(kept)  # the index may have heard, although it did not answer

    async def renew(self) -> None:
        """Extend the keys' lives; a root whose keys have vanished (a flush, a lost Redis) is written again."""
        held: dict[bytes, list[Key]] = defaultdict(list)
        for key in self._core.visible():
            held[key.root].append(key)
        try:
            for root, keys in held.items():
                there = await self._limited(self._index.renew(root, self._identity))
                if {key.kind for key in keys} - there:
                    self._metrics.index_lost.inc()
                    logger.warning("index entries had vanished, writing them again", extra={"entries": len(keys)})
                    await self.write(keys)
        except FAILURES as error:
            logger.warning("index not renewed", extra={"reason": str(error)})

    async def forget(self) -> None:
        """Withdraw every entry: this node is leaving. What Redis does not hear expires by itself."""
        try:
            for root in {key.root for key in self._core.visible()}:
                await self._limited(self._index.forget(root, self._identity))
        except FAILURES as error:
            logger.warning("index not told of leaving", extra={"reason": str(error)})

    async def _tell(self, root: bytes, keys: Sequence[Key]) -> None:
        async with self._turn:
            entries = index_entries(keys, self._held)
            gone = [name for key in keys if (name := (_kind(key), key.prefix_hash)) not in entries]
            if gone:
                await self._limited(self._index.remove(root, self._identity, gone))
            if entries:
                await self._limited(self._index.write(root, self._identity, entries))

    def _held(self, key: Key) -> tuple[Offer, Tier] | None:
        entry = self._core.entry(key)
        if entry is None or entry.state not in VISIBLE:
            return None
        return entry.offer, "disk" if entry.state in ON_DISK else "host"

    async def _limited(self, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(INDEX_TIMEOUT_S):
                answer = await call
        except FAILURES:
            self._reached(False)
            raise
        raise_if_cancelled()  # or who waits for the end of a task that came through here would wait for ever
        self._reached(True)
        return answer

    def _reached(self, reachable: bool) -> None:
        if reachable != self.reachable:
            self.reachable = reachable
            logger.warning("the index answers again" if reachable else "the index is away: serving what leases name")
        self._metrics.index_up.set(reachable)
        self._metrics.index_untold.set(self.num_untold)


def _kind(key: Key) -> Kind:
    return "snapshot" if key.kind == SNAPSHOT else "block"
