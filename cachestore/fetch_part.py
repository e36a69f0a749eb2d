"""What one node gives to an attempt of a fetch: the lease's records beside the memory that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cachestore import spans
from cachestore.spans import DISK, Record
from cachestore.transports import Batch, ReadHandle, Slice
from cachestore.transports.base import columns
from moonrelay.membership import Member
from moonrelay.stubs.v1 import cache_pb2

NodeKey = tuple[str, int]


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
    places: list[Slice] = field(default_factory=list)  # of `entries()`
    columns: tuple[Sequence[int], Sequence[int], Sequence[int]] = ((), (), ())  # the same, field by field
    ends: Sequence[int] = ()  # per span of an entry: 1 where it is the last of it
    sums: Sequence[int | None] = ()  # of `blocks()`; None where it came in pieces
    on_disk: Sequence[bool] = ()  # of `blocks()`
    nbytes: int = 0  # of its entries
    offered: dict[int, list[Record]] = field(default_factory=dict)  # block to records of its drafter rows
    drafts: list[DraftRead] = field(default_factory=list)
    handle: ReadHandle | None = None

    @property
    def key(self) -> NodeKey:
        return (self.member.instance_id, self.member.epoch)

    @property
    def landed(self) -> bool:
        """Every entry has landed and agrees; drafter rows may still come."""
        return self.handle is not None and self.handle.verified >= len(self.ends)

    @property
    def whole(self) -> bool:
        """The read has ended, and every entry has landed and agrees, whatever became of the drafter rows after it."""
        return self.landed and self.handle is not None and self.handle.ended.done()

    @property
    def whole_entries(self) -> int:
        """So many of `entries()`, from the first on, are in their place and agree."""
        return sum(self.ends[: self.handle.verified]) if self.handle is not None else 0

    def blocks(self) -> list[int]:
        return [i for first, end in self.ranges for i in range(first, end)]

    def entries(self) -> list[int]:
        """In the order of the lease: blocks by index, then the snapshot as its depth below zero."""
        return self.blocks() + [-self.snapshot] * bool(self.snapshot)

    def landed_drafts(self) -> list[DraftRead]:
        """Drafter rows that are in their place and agree."""
        verified = self.handle.verified if self.handle is not None else 0
        return [draft for draft in self.drafts if draft.reads <= verified]

    def prepare(self, rows: Sequence[Slice], state: Slice) -> None:
        """What needs no lease: where each entry goes."""
        self.places = [place for first, end in self.ranges for place in rows[first:end]]
        if self.snapshot:
            self.places.append(state)
        into, at, sizes = zip(*self.places, strict=True)
        self.columns = into, at, list(sizes)

    def reads(self) -> Batch:
        """Every leased span of an entry, to the part of our memory it belongs to.

        Raises: UnreadableLease, OtherForm.
        """
        assert self.lease is not None
        places, num_blocks = self.places, len(self.places) - bool(self.snapshot)
        try:
            found = spans.columns(self.lease.spans)
        except ValueError as error:
            raise UnreadableLease(f"an unreadable lease: {error}") from None
        pools, tiers, self.ends, offsets, lengths, self.sums = found
        if sum(self.ends) != len(places) or max(self.ends) > 1:
            raise UnreadableLease("the lease covers other entries than were asked for")
        into, at, sizes = self.columns
        batch = Batch()
        if lengths == sizes:  # each in one piece
            batch.add((pools, offsets, into, at, lengths), lengths, self.sums)
        else:
            batch.add(columns(_pieces(found.records(), places)), lengths, self.sums)
            starts = (1, *self.ends)
            ends = [i for i, last in enumerate(self.ends) if last]
            self.sums = [self.sums[i] if starts[i] else None for i in ends]
            tiers = [tiers[i] for i in ends]
        self.sums = self.sums[:num_blocks]
        self.on_disk = [tier == DISK for tier in tiers[:num_blocks]]
        self.nbytes = sum(lengths)
        return batch

    def read_offer(self, draft_into: Sequence[Slice]) -> None:
        """Note which blocks' drafter rows the lease names, from the deepest upwards. What does not fit is as good as
        not there, and so is what comes after it."""
        assert self.lease is not None
        try:
            records = spans.unpack(self.lease.draft_spans)
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

    def add_drafts(self, batch: Batch, first: int, draft_into: Sequence[Slice]) -> None:
        """Also read the offered drafter rows of blocks from `first` on, deepest first: where one goes wrong, those
        that landed before it are a run up to the hit's end."""
        for block, records in self.offered.items():
            if block < first:
                break
            (into, at, _), done = draft_into[block], 0
            for pool, _, _, offset, length, xxh3 in records:
                batch.add(((pool,), (offset,), (into,), (at + done,), (length,)), (length,), (xxh3,))
                done += length
            whole = records[0][5] if len(records) == 1 else None
            self.drafts.append(DraftRead(block, len(batch.lengths), done, whole))


def _pieces(records: Sequence[Record], places: Sequence[Slice]) -> list[tuple[int, int, int, int, int]]:
    """The spans of entries that came in several, one after the other in their places. Raises: OtherForm."""
    pieces: list[tuple[int, int, int, int, int]] = []
    number = done = 0
    for pool, _, last, offset, length, _ in records:
        into, at, size = places[number]
        pieces.append((pool, offset, into, at + done, length))
        done += length
        if last:
            if done != size:
                raise OtherForm(f"an entry has {done} bytes where {size} belong")
            number, done = number + 1, 0
    return pieces


def run_of_drafts(blocks: set[int], end: int) -> int:
    """The first block of those that go on without a gap to `end`."""
    first = end
    while first - 1 in blocks:
        first -= 1
    return first
