"""What one node gives to an attempt of a fetch: the lease's records beside the memory that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cachestore.spans import DISK, unpack
from cachestore.transports import Read, ReadHandle, Slice, Source
from moonrelay.membership import Member
from moonrelay.stubs.v1 import cache_pb2

NodeKey = tuple[str, int]
Record = tuple[int, int, int, int, int, int]  # pool, tier, last, offset, length, xxh3


class UnreadableLease(Exception):
    """The lease's spans are not those of the entries that were asked for; never leaves the fetch."""


class OtherForm(Exception):
    """An entry has another size than belongs here; never leaves the fetch."""


@dataclass(frozen=True, slots=True)
class DraftRead:
    """A block's drafter rows: they are right once the first `reads` reads of their part are."""

    block: int
    reads: int
    nbytes: int
    xxh3: int | None  # None where they came in pieces


@dataclass(slots=True, kw_only=True)
class Part:
    """Block ranges, and perhaps the snapshot, at that depth; and then, as far as there are any, drafter rows."""

    member: Member
    ranges: list[tuple[int, int]]
    snapshot: int = 0
    lease: cache_pb2.LeaseReply | None = None
    valid_until_s: float = 0.0
    entry_of: list[int] = field(default_factory=list)  # per read of an entry: which of `entries()`
    sums: dict[int, int | None] = field(default_factory=dict)  # block to checksum
    on_disk: set[int] = field(default_factory=set)
    nbytes: int = 0  # of its entries
    offered: dict[int, list[Record]] = field(default_factory=dict)  # block to records of its drafter rows
    drafts: list[DraftRead] = field(default_factory=list)
    handle: ReadHandle | None = None

    @property
    def key(self) -> NodeKey:
        return (self.member.instance_id, self.member.epoch)

    @property
    def whole(self) -> bool:
        """The read has ended, and every entry has landed and agrees, whatever became of the drafter rows after it."""
        return self.handle is not None and self.handle.ended.done() and self.handle.verified >= len(self.entry_of)

    def blocks(self) -> list[int]:
        return [i for first, end in self.ranges for i in range(first, end)]

    def entries(self) -> list[int]:
        """In the order of the lease: blocks by index, then the snapshot as its depth below zero."""
        return self.blocks() + [-self.snapshot] * bool(self.snapshot)

    def landed_drafts(self) -> list[DraftRead]:
        """Drafter rows that are in their place and agree."""
        verified = self.handle.verified if self.handle is not None else 0
        return [draft for draft in self.drafts if draft.reads <= verified]

    def reads(self, rows: Sequence[Slice], state: Slice) -> list[Read]:
        """Every leased span of an entry beside the part of our memory it belongs to.

        Raises: UnreadableLease, OtherForm.
        """
        assert self.lease is not None
        blocks = self.blocks()
        places = [rows[i] for i in blocks] + [state] * bool(self.snapshot)
        try:
            records = unpack(self.lease.spans)
        except ValueError as error:
            raise UnreadableLease(f"an unreadable lease: {error}") from None
        if int(np.count_nonzero(records["last"])) != len(places):
            raise UnreadableLease("the lease covers other entries than were asked for")
        reads: list[Read] = []
        entry_of, number, done = self.entry_of, 0, 0
        sums: list[int | None] = []  # of entries
        for pool, tier, last, offset, length, xxh3 in records.tolist():
            place = places[number]
            whole = bool(last) and not done
            into = place if whole else Slice(place.pool, place.offset + done, length)
            reads.append(Read(Source(pool, offset, length, xxh3), (into,)))
            entry_of.append(number)
            done += length
            if done > place.length or (last and done != place.length):
                raise OtherForm(f"an entry has {done} bytes where {place.length} belong")
            if last:
                sums.append(xxh3 if whole else None)
                if tier == DISK and number < len(blocks):
                    self.on_disk.add(blocks[number])
                number, done = number + 1, 0
        self.sums = dict(zip(blocks, sums, strict=False))  # the snapshot's comes last
        self.nbytes = sum(place.length for place in places)
        return reads

    def read_offer(self, draft_into: Sequence[Slice]) -> None:
        """Note which blocks' drafter rows the lease names, from the deepest upwards. What does not fit is as good as
        not there, and so is what comes after it."""
        assert self.lease is not None
        try:
            records: list[Record] = unpack(self.lease.draft_spans).tolist()
        except ValueError:
            return
        deepest_first = reversed(self.blocks())
        group: list[Record] = []
        for record in records:
            group.append(record)
            if record[2]:
                block = next(deepest_first, None)
                if block is None or sum(each[4] for each in group) != draft_into[block].length:
                    return
                self.offered[block], group = group, []

    def draft_reads(self, first: int, draft_into: Sequence[Slice]) -> list[Read]:
        """The offered drafter rows of blocks from `first` on, deepest first: where one goes wrong, those that landed
        before it are a run up to the hit's end."""
        reads: list[Read] = []
        for block, records in self.offered.items():
            if block < first:
                break
            place, done = draft_into[block], 0
            for pool, _, _, offset, length, xxh3 in records:
                into = Slice(place.pool, place.offset + done, length)
                reads.append(Read(Source(pool, offset, length, xxh3), (into,)))
                done += length
            whole = records[0][5] if len(records) == 1 else None
            self.drafts.append(DraftRead(block, len(self.entry_of) + len(reads), done, whole))
        return reads


def run_of_drafts(blocks: set[int], end: int) -> int:
    """The first block of those that go on without a gap to `end`."""
    first = end
    while first - 1 in blocks:
        first -= 1
    return first
