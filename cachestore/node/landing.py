"""Bringing offered spans from a publisher into memory that the core gave; what did not come is given up safely."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachestore.checksum import checksum
from cachestore.entries import Key
from cachestore.node.allocator import Extent
from cachestore.node.books import Region
from cachestore.node.core import NodeCore
from cachestore.node.metrics import NodeMetrics
from cachestore.spans import ARENA_POOL
from cachestore.transports import Read, ReadHandle, Slice, TransportSet
from moonrelay.stubs.v1.common_pb2 import Peer, Span

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Spans of the publisher, and the room for them."""

    key: Key
    spans: Sequence[Span]
    extents: Sequence[Extent]


class Lander:
    """Reads into the arena. Loop thread only."""

    def __init__(self, core: NodeCore, transports: TransportSet, metrics: NodeMetrics) -> None:
        self._core, self._transports, self._metrics = core, transports, metrics

    async def bring(
        self, source: Peer, wanted: Sequence[Wanted], deadline_s: float,
        *, abort: Callable[[Sequence[Key]], None], quarantine: Callable[[Sequence[Key]], int],
    ) -> list[list[Region]]:  # fmt: skip
        """Each one's verified regions; all or none. Raises: ServeError; then all are aborted, or quarantined while
        our own read may still land."""
        keys = [each.key for each in wanted]
        handle: ReadHandle | None = None
        came = False
        try:
            reads = [_reads(each.spans, each.extents) for each in wanted]
            handle = self._transports.read(source, [read for each in reads for read in each], deadline_s)
            with self._metrics.pull_seconds.time():
                report = await handle
            self._metrics.pulled_bytes[report.transport].inc(report.bytes)
            regions = [self._regions(each) for each in reads]
            came = True
            return regions
        finally:
            if not came and (handle is None or handle.ended.done()):
                abort(keys)
            elif not came and handle is not None:
                handle.abort()
                number = quarantine(keys)
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


def _reads(spans: Sequence[Span], extents: Sequence[Extent]) -> list[Read]:
    """One read per span, into the room in order."""
    room = [Slice(ARENA_POOL, e.offset, e.length) for e in extents]
    reads = []
    for span in spans:
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
