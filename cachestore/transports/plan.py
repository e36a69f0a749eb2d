"""A read as the transports see it: segments in order, in groups, verified as they land."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

from cachestore.transports.base import ChecksumMismatch, Read, ReadHandle
from cachestore.transports.pools import Pools
from moonrelay.errors import InvariantError

# Bytes of a group are pulled by one call and then hashed out of the last-level cache. Measured on 16 MiB, serial, as
# parts of memcpy's speed: 256 KiB 0.61, 1 MiB 0.70, 4 MiB 0.70, 16 MiB 0.70. Larger means fewer waits for the GIL;
# smaller means a deadline or an abort is seen sooner.
GROUP_BYTES = 4 << 20
GROUP_SEGMENTS = 512


class Segment(NamedTuple):
    """A range that is contiguous on both sides, of one span or of several that follow each other."""

    remote_pool: int
    remote_offset: int
    pool: int
    offset: int
    length: int


def check(reads: Sequence[Read], pools: Pools) -> None:
    """Our own side must be right before anything starts. Raises: InvariantError."""
    for span, into in reads:
        length = 0
        for part in into:
            length += part.length
            if not pools.holds(*part):
                raise InvariantError(f"{part} is outside registered memory")
        if length != span.length:
            raise InvariantError(f"a span of {span.length} bytes does not fit its landing slices")


def groups(reads: Sequence[Read]) -> Iterator[list[Segment]]:
    """What moves, in order, in groups of at most GROUP_BYTES and GROUP_SEGMENTS."""
    group: list[Segment] = []
    room = GROUP_BYTES
    for remote_pool, theirs, pool, ours, left in _runs(reads):
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


def _runs(reads: Sequence[Read]) -> Iterator[Segment]:
    """The reads' pieces, however long; what goes on without a gap on both sides is one: each segment costs a
    descriptor, and a walk over it in the system call."""
    remote_pool: int | None = None
    pool = theirs = ours = length = 0
    for span, into in reads:
        at_pool, at = span.pool, span.offset
        for to_pool, to, part in into:
            if at == theirs + length and to == ours + length and at_pool == remote_pool and to_pool == pool:
                length += part
            else:
                if remote_pool is not None:
                    yield Segment(remote_pool, theirs, pool, ours, length)
                remote_pool, theirs, pool, ours, length = at_pool, at, to_pool, to, part
            at += part
    if remote_pool is not None:
        yield Segment(remote_pool, theirs, pool, ours, length)


class Verifier:
    """Checks a read's spans as their bytes land, in order, while these are still in the processor's cache.

    `handle` is told how many are right; a transport that begins anew makes a new verifier.
    """

    def __init__(self, reads: Sequence[Read], pools: Pools, handle: ReadHandle) -> None:
        handle.verified = 0
        self._handle = handle
        self._spans = [read.span for read in reads]
        self._number = 0  # of the span whose bytes come next
        self._left = self._spans[0].length if self._spans else 0
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
        at = 0
        while self._number < len(self._spans):
            span, left = self._spans[self._number], self._left
            piece = view[at : at + left]
            at += len(piece)
            if len(piece) < left:
                if left == span.length:
                    self._running.reset()
                self._running.update(piece)
                self._left -= len(piece)
                return
            if left == span.length:
                found = xxhash.xxh3_64_intdigest(piece)
            else:
                self._running.update(piece)
                found = self._running.intdigest()
            if found != span.xxh3:
                raise ChecksumMismatch(
                    f"span {self._number} of {len(self._spans)}: its bytes differ from the promised checksum"
                )
            self._number += 1
            self._handle.verified = self._number
            self._left = self._spans[self._number].length if self._number < len(self._spans) else 0
