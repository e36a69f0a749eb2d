"""A read as the transports see it: segments in order, in groups, verified as they land."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import xxhash

from cachestore.transports.base import Batch, ChecksumMismatch, ReadHandle, Segment
from cachestore.transports.pools import Pools
from moonrelay.errors import InvariantError

# Bytes of a group are pulled by one call and then hashed out of the last-level cache. Measured on 16 MiB, serial, as
# parts of memcpy's speed: 256 KiB 0.61, 1 MiB 0.70, 4 MiB 0.70, 16 MiB 0.70. Larger means fewer waits for the GIL;
# smaller means a deadline or an abort is seen sooner.
GROUP_BYTES = 4 << 20
GROUP_SEGMENTS = 512


def check(batch: Batch, pools: Pools) -> None:
    """Our own side must be right before anything starts. Raises: InvariantError."""
    for run in batch.runs:
        if not pools.holds(run.pool, run.offset, run.length):
            raise InvariantError(f"{run} is outside registered memory")


def groups(batch: Batch) -> Iterator[list[Segment]]:
    """What moves, in order, in groups of at most GROUP_BYTES and GROUP_SEGMENTS."""
    group: list[Segment] = []
    room = GROUP_BYTES
    for run in batch.runs:
        if run.length <= room and len(group) < GROUP_SEGMENTS:
            group.append(run)
            room -= run.length
            continue
        remote_pool, theirs, pool, ours, left = run
        while True:
            if not room or len(group) == GROUP_SEGMENTS:
                yield group
                group, room = [], GROUP_BYTES
            length = min(left, room)
            group.append(Segment(remote_pool, theirs, pool, ours, length))
            theirs, ours, left, room = theirs + length, ours + length, left - length, room - length
            if not left:
                break
    if group:
        yield group


class Verifier:
    """Checks a read's spans as their bytes land, in order, while these are still in the processor's cache.

    `handle` is told how many are right; a transport that begins anew makes a new verifier.
    """

    def __init__(self, batch: Batch, pools: Pools, handle: ReadHandle) -> None:
        handle.verified = 0
        self._handle = handle
        self._lengths, self._sums = batch.lengths, batch.sums
        self._number = 0  # of the span whose bytes come next
        self._left = self._lengths[0] if self._lengths else 0
        self._pools = pools
        self._running = xxhash.xxh3_64()
        self.seconds = 0.0

    def landed(self, group: Sequence[Segment]) -> None:
        """Take the read's next segments. Raises: ChecksumMismatch at the end of a span whose bytes differ."""
        started = time.perf_counter()
        for segment in group:
            self._take(self._pools.view(segment.pool, segment.offset, segment.length))
        self.seconds += time.perf_counter() - started

    def _take(self, view: memoryview) -> None:
        """The next bytes of the spans, which end anywhere in it."""
        at, lengths = 0, self._lengths
        while self._number < len(lengths):
            whole, left = lengths[self._number], self._left
            piece = view[at : at + left]
            at += len(piece)
            if len(piece) < left:
                if left == whole:
                    self._running.reset()
                self._running.update(piece)
                self._left -= len(piece)
                return
            if left == whole:
                found = xxhash.xxh3_64_intdigest(piece)
            else:
                self._running.update(piece)
                found = self._running.intdigest()
            if found != self._sums[self._number]:
                raise ChecksumMismatch(
                    f"span {self._number} of {len(lengths)}: its bytes differ from the promised checksum"
                )
            self._number += 1
            self._handle.verified = self._number
            self._left = lengths[self._number] if self._number < len(lengths) else 0
