"""A read as the transports see it: segments in order, in groups, verified as they land."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from cachestore.transports.base import ChecksumMismatch, Read, ReadHandle
from cachestore.transports.pools import Pools
from moonrelay.errors import InvariantError

# Bytes of a group are pulled by one call and then hashed out of the last-level cache. Measured on 16 MiB, serial, as
# parts of memcpy's speed: 256 KiB 0.61, 1 MiB 0.70, 4 MiB 0.70, 16 MiB 0.70. Larger means fewer waits for the GIL;
# smaller means a deadline or an abort is seen sooner.
GROUP_BYTES = 4 << 20
GROUP_SEGMENTS = 512


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous range on both sides, at most GROUP_BYTES long. `first` and `last` are within its span."""

    remote_pool: int
    remote_offset: int
    pool: int
    offset: int
    length: int
    read_index: int
    first: bool
    last: bool


def check(reads: Sequence[Read], pools: Pools) -> None:
    """Our own side must be right before anything starts. Raises: InvariantError."""
    for read in reads:
        if sum(part.length for part in read.into) != read.span.length:
            raise InvariantError(f"a span of {read.span.length} bytes does not fit its landing slices")
        for part in read.into:
            if not pools.holds(part.pool, part.offset, part.length):
                raise InvariantError(f"{part} is outside registered memory")


def segments(reads: Sequence[Read]) -> Iterator[Segment]:
    """Cut every read where its landing slices end and where a group would grow too large."""
    for index, read in enumerate(reads):
        span, done = read.span, 0
        parts = [part for part in read.into if part.length] or list(read.into[:1])
        for part in parts:
            taken = 0
            while taken < part.length or part.length == 0:
                length = min(GROUP_BYTES, part.length - taken)
                yield Segment(
                    span.pool, span.offset + done, part.pool, part.offset + taken, length, index,
                    done == 0, done + length == span.length,
                )  # fmt: skip
                taken, done = taken + length, done + length
                if part.length == 0:
                    break


def groups(reads: Sequence[Read]) -> Iterator[list[Segment]]:
    """Segments in order, gathered up to GROUP_BYTES and GROUP_SEGMENTS."""
    group: list[Segment] = []
    group_bytes = 0
    for segment in segments(reads):
        if group and (group_bytes + segment.length > GROUP_BYTES or len(group) == GROUP_SEGMENTS):
            yield group
            group, group_bytes = [], 0
        group.append(segment)
        group_bytes += segment.length
    if group:
        yield group


class Verifier:
    """Checks a read's spans as their segments land, in order, while the bytes are still in the processor's cache.

    `handle` is told how many are right; a transport that begins anew makes a new verifier.
    """

    def __init__(self, reads: Sequence[Read], pools: Pools, handle: ReadHandle) -> None:
        handle.verified = 0
        self._handle = handle
        self._reads = reads
        self._pools = pools
        self._running = xxhash.xxh3_64()
        self.seconds = 0.0

    def landed(self, group: Sequence[Segment]) -> None:
        """Take the read's next segments. Raises: ChecksumMismatch at the end of a span whose bytes differ."""
        started = time.perf_counter()
        for segment in group:
            view = self._pools.view(segment.pool, segment.offset, segment.length)
            if segment.first and segment.last:
                found = xxhash.xxh3_64_intdigest(view)
            else:
                if segment.first:
                    self._running.reset()
                self._running.update(view)
                if not segment.last:
                    continue
                found = self._running.intdigest()
            if found != self._reads[segment.read_index].span.xxh3:
                raise ChecksumMismatch(
                    f"span {segment.read_index} of {len(self._reads)}: its bytes differ from the promised checksum"
                )
            self._handle.verified = segment.read_index + 1
        self.seconds += time.perf_counter() - started
