"""Taking in what publishers offer: room, pull, verify, commit, index; in that order, all or nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from cachestore.checksum import checksum
from cachestore.entries import BLOCK, SNAPSHOT, Key, Offer
from cachestore.index import CacheIndex
from cachestore.lookup import Kind
from cachestore.node.books import Admission, Region
from cachestore.node.core import NodeCore
from cachestore.node.index_writer import Identity, IndexWriter
from cachestore.node.metrics import NodeMetrics
from cachestore.node.room import Room
from cachestore.transports import Read, ReadHandle, Slice, TransportSet
from moonrelay.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from moonrelay.prefix import HASH_BYTES
from moonrelay.stubs.v1 import cache_pb2, common_pb2
from moonrelay.valkey import FAILURES

logger = logging.getLogger(__name__)

ARENA_POOL = 0
ENTRIES_MAX = 65_536  # of one publish or lease
PULLS_MAX = 4  # publishes pulling at once
PULLS_WAITING_MAX = 64
_KIND: dict[int, Kind] = {cache_pb2.ENTRY_KIND_BLOCK: "block", cache_pb2.ENTRY_KIND_SNAPSHOT: "snapshot"}


class Intake:
    """Publishing into the node's core."""

    def __init__(
        self, core: NodeCore, transports: TransportSet, index: CacheIndex, identity: Identity, metrics: NodeMetrics,
        *, pull_timeout_ms: int,
    ) -> None:  # fmt: skip
        self._core, self._transports, self._metrics = core, transports, metrics
        self.index = IndexWriter(core, index, identity, metrics)
        self.room = Room(core, self.index)
        self._pull_timeout_s = pull_timeout_ms / 1000
        self._pulls = asyncio.Semaphore(PULLS_MAX)
        self._num_waiting = 0

    async def publish(self, request: cache_pb2.PublishRequest, remaining_s: float | None) -> cache_pb2.PublishReply:
        """Admit, pull and verify, commit, index: in that order. Raises: ServeError; then nothing new is visible."""
        deadline_s = time.monotonic() + min(remaining_s or self._pull_timeout_s, self._pull_timeout_s)
        offers = read_offers(request)
        if self._num_waiting >= PULLS_WAITING_MAX:
            raise Overloaded(f"{PULLS_WAITING_MAX} publishes are waiting")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                await self._pulls.acquire()
        except TimeoutError:
            raise DeadlineExceeded("the publish's deadline passed while others were pulling") from None
        finally:
            self._num_waiting -= 1
        try:
            protect = [key for offer in offers for key in (offer.key, offer.parent) if key is not None]
            await self.room.make(lambda: self._core.missing_bytes(offers), protect)
            admission = self._core.admit(offers)
            if admission.new:
                entries = {offer.key: entry for offer, entry in zip(offers, request.entries, strict=True)}
                await self._pull(request.source, [(key, entries[key]) for key in admission.new], deadline_s)
        finally:
            self._pulls.release()
        visible = [*admission.new, *admission.already_there]
        try:
            # Known entries too: the index may have lost them.
            await self.index.write(visible)
        except FAILURES as error:
            raise Unavailable(f"the index cannot be written: {error}") from None
        return self._reply(admission)

    def _reply(self, admission: Admission) -> cache_pb2.PublishReply:
        counts = {
            "stored": len(admission.new),
            "already_there": len(admission.already_there),
            "in_progress": len(admission.in_progress),
            "refused": len(admission.refused),
        }
        for outcome, count in counts.items():
            self._metrics.published.labels(outcome).inc(count)
        return cache_pb2.PublishReply(**counts)

    async def _pull(
        self, source: common_pb2.Peer, new: Sequence[tuple[Key, cache_pb2.Entry]], deadline_s: float
    ) -> None:
        """Bring the bytes of admitted entries, verified, and commit them. All or none. Raises: ServeError."""
        reads: list[Read] = []
        handle: ReadHandle | None = None
        committed = False
        try:
            for key, entry in new:
                reads += _reads(entry, [Slice(ARENA_POOL, e.offset, e.length) for e in self._core.extents(key)])
            handle = self._transports.read(source, reads, deadline_s)
            with self._metrics.pull_seconds.time():
                report = await handle
            self._metrics.pulled_bytes[report.transport].inc(report.bytes)
            at = 0
            for key, entry in new:
                count = len(entry.spans)
                self._core.commit(key, self._regions(reads[at : at + count]))
                at += count
            committed = True
        finally:
            if not committed:
                self._give_up([key for key, _ in new], handle)

    def _give_up(self, keys: Sequence[Key], handle: ReadHandle | None) -> None:
        """The memory of entries that did not come is free, or quarantined while our own read may still land."""
        if handle is None or handle.ended.done():
            for key in keys:
                self._core.abort(key)
            return
        handle.abort()
        number = self._core.quarantine(keys)
        handle.ended.add_done_callback(lambda _: self._core.release_quarantine(number))
        logger.warning("landing memory quarantined", extra={"entries": len(keys)})

    def _regions(self, reads: Sequence[Read]) -> list[Region]:
        """What is served of a verified entry: a span in one piece keeps its checksum, pieces get their own."""
        regions = []
        for read in reads:
            for part in read.into:
                whole = len(read.into) == 1
                found = read.span.xxh3 if whole else checksum(
                    self._transports.view(ARENA_POOL, part.offset, part.length)
                )  # fmt: skip
                regions.append(Region(part.offset, part.length, found))
        return regions


def read_offers(request: cache_pb2.PublishRequest) -> list[Offer]:
    """The request's entries, checked. Raises: InvalidRequest."""
    if len(request.root) != HASH_BYTES:
        raise InvalidRequest(f"expected {HASH_BYTES} bytes", param="root")
    if not 0 < len(request.entries) <= ENTRIES_MAX:
        raise InvalidRequest("a publish offers 1 to 65,536 entries", param="entries")
    offers: dict[Key, Offer] = {}
    for entry in request.entries:
        kind = _KIND.get(entry.kind)
        if kind is None:
            raise InvalidRequest("expected BLOCK or SNAPSHOT", param="entries.kind")
        if len(entry.prefix_hash) != HASH_BYTES or (entry.HasField("parent") and len(entry.parent) != HASH_BYTES):
            raise InvalidRequest(f"expected {HASH_BYTES} bytes", param="entries.prefix_hash")
        nbytes = sum(span.length for span in entry.spans)
        if not nbytes or any(span.length == 0 for span in entry.spans):
            raise InvalidRequest("an entry's spans are not empty", param="entries.spans")
        key = Key(request.root, kind, entry.prefix_hash)
        rests_on = entry.prefix_hash if kind == SNAPSHOT else entry.parent if entry.HasField("parent") else None
        if (kind == BLOCK and (entry.depth > 0) != entry.HasField("parent")) or (
            kind == SNAPSHOT and not entry.depth
        ):
            raise InvalidRequest(
                "a block has a parent unless it is the first; a snapshot has tokens", param="entries"
            )
        if key in offers:
            raise InvalidRequest("an entry is offered twice", param="entries")
        parent = Key(request.root, BLOCK, rests_on) if rests_on is not None else None
        offers[key] = Offer(key=key, parent=parent, depth=entry.depth, nbytes=nbytes)
    return list(offers.values())


def _reads(entry: cache_pb2.Entry, room: list[Slice]) -> list[Read]:
    """One read per span, into the entry's room in order."""
    reads = []
    for span in entry.spans:
        into, left = [], span.length
        while left:
            part = room.pop(0)
            taken = min(left, part.length)
            into.append(Slice(part.pool, part.offset, taken))
            if taken < part.length:
                room.insert(0, Slice(part.pool, part.offset + taken, part.length - taken))
            left -= taken
        reads.append(Read(span, tuple(into)))
    return reads
