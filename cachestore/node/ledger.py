"""A node's books: what is held, where, and how much of everything; and the check that they balance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from cachestore.entries import BLOCK, SNAPSHOT, DraftOffer, Key, Offer
from cachestore.node.allocator import Extent, PageAllocator
from cachestore.node.books import DiskBooks, DraftRows, NodeStats, Region, Stored
from cachestore.node.leases import Leases
from cachestore.node.states import IN_MEMORY, ON_DISK, VISIBLE, Event, State, after
from cachestore.retention import Retention
from moonrelay.errors import InvariantError


class Ledger:
    """The state of `NodeCore`, and the steps that keep it whole."""

    def __init__(self, capacity_bytes: int, *, longest_transfer_ms: int = 2_000, disk_bytes: int = 0) -> None:
        self._pages = PageAllocator(capacity_bytes)
        self._entries: dict[Key, Stored] = {}
        self._retention = Retention()  # entries in memory, landing ones included
        self._disk = DiskBooks(disk_bytes)
        self._leases = Leases(longest_transfer_ms)
        self._held: Counter[Key] = Counter()  # in memory, beside leases: being written, or wanted by a promotion
        self._quarantine: dict[int, tuple[Extent, ...]] = {}
        self._drafts_landing: dict[Key, tuple[DraftOffer, tuple[Extent, ...]]] = {}
        self._retired: list[tuple[int, Key, tuple[Extent, ...]]] = []  # rows that were replaced, and a fence
        self._visible = {BLOCK: 0, SNAPSHOT: 0}
        self._evicted = {BLOCK: 0, SNAPSHOT: 0}
        self._on_disk = {BLOCK: 0, SNAPSHOT: 0}  # only there
        self.moves = 0  # how often something visible left or went elsewhere
        self._moved: set[Key] = set()  # between memory and disk, and nobody has asked yet
        self._resting: Counter[Key] = Counter()  # entries on a key, itself here or not; LEAVING ones not
        self._leaving: Counter[Key] = Counter()  # those: they may come back, so what they rest on goes after them

    def entry(self, key: Key) -> Stored | None:
        """The books' own; to look at only."""
        return self._entries.get(key)

    def resting_on(self, gone: Iterable[Key]) -> list[Key]:
        """What is visible and rests on entries that had to go before it, at any depth. Looks at everything."""
        reached, found = set(gone), []
        for key, entry in sorted(self._entries.items(), key=lambda item: item[1].offer.rank):
            if entry.offer.parent in reached and entry.state in VISIBLE:
                reached.add(key)
                found.append(key)
        return found

    def visible(self) -> dict[Key, tuple[Region, ...]]:
        """Everything that the index should name, and where in memory it is; on disk: nowhere."""
        return {key: entry.regions for key, entry in self._entries.items() if entry.state in VISIBLE}

    def stats(self) -> NodeStats:
        return NodeStats(
            capacity_bytes=self._pages.capacity_bytes,
            free_bytes=self._pages.free_bytes,
            quarantined_bytes=sum(e.length for extents in self._kept_back() for e in extents),
            num_blocks=self._visible[BLOCK],
            num_snapshots=self._visible[SNAPSHOT],
            num_hidden=len(self._entries) - sum(self._visible.values()),
            num_leases=len(self._leases),
            evicted_blocks=self._evicted[BLOCK],
            evicted_snapshots=self._evicted[SNAPSHOT],
            host_blocks=self._visible[BLOCK] - self._on_disk[BLOCK],
            host_snapshots=self._visible[SNAPSHOT] - self._on_disk[SNAPSHOT],
            disk=self._disk.stats(),
        )

    def check(self) -> None:
        """Raises: InvariantError."""
        entries = self._entries.items()
        self._pages.check(
            [extent for _, entry in entries for extent in entry.all_extents]
            + [extent for extents in self._kept_back() for extent in extents]
        )
        for _, entry in entries:
            entry.check()
        shown = [key for key, entry in entries if entry.state in VISIBLE]
        if {kind: sum(key.kind == kind for key in shown) for kind in self._visible} != self._visible:
            raise InvariantError("visible entries miscounted")
        staying = [entry.offer.parent for _, entry in entries if entry.state is not State.LEAVING]
        if self._resting != Counter(parent for parent in staying if parent is not None):
            raise InvariantError("what rests on what is miscounted")
        leaving = [entry.offer.parent for _, entry in entries if entry.state is State.LEAVING]
        if self._leaving != Counter(parent for parent in leaving if parent is not None):
            raise InvariantError("what is leaving is miscounted")
        only_there = Counter(key.kind for key, entry in entries if entry.state in ON_DISK)
        if any(only_there[kind] != count for kind, count in self._on_disk.items()):
            raise InvariantError("entries that are only on disk miscounted")
        self._retention.check(
            here={key: e.nbytes for key, e in entries if e.extents and e.state is not State.LEAVING},
            shown={key for key, entry in entries if entry.state in IN_MEMORY},
            pins=self._leases.covered() + self._held,
        )
        self._disk.check(self._entries)

    def _bring(self, entry: Stored, regions: Sequence[Region]) -> None:
        """Its bytes are in memory."""
        if sum(r.length for r in regions) != entry.offer.nbytes:
            raise InvariantError(f"{entry.offer.key.kind}: its regions do not add up to its bytes")
        self.moves += entry.state is State.PROMOTING
        entry.state, entry.regions = after(entry.state, Event.VERIFIED), tuple(regions)
        self._retention.show(entry.offer.key)

    def _empty(self, entry: Stored) -> None:
        """Its bytes leave memory; retention has let them go."""
        self.moves += 1
        entry.state = after(entry.state, Event.DROP_MEMORY)
        self._pages.free(entry.all_extents)
        entry.extents, entry.regions, entry.draft = (), (), None
        self._on_disk[entry.offer.key.kind] += 1
        self._disk.demoted += 1
        self._moved.add(entry.offer.key)

    def _rest(self, offer: Offer, by: int) -> None:
        _count(self._resting, offer, by)

    def _left(self, key: Key) -> Stored:
        """It is LEAVING no more."""
        entry = self._in_state(key, State.LEAVING)
        _count(self._leaving, entry.offer, -1)
        return entry

    def _withdraw(self, entry: Stored) -> Key:
        self.moves += 1
        entry.state = after(entry.state, Event.WITHDRAW)
        self._rest(entry.offer, -1)
        _count(self._leaving, entry.offer, 1)
        self._visible[entry.offer.key.kind] -= 1
        return entry.offer.key

    def _rests_on_disk(self, entry: Stored) -> bool:
        below = self._entries.get(entry.offer.parent) if entry.offer.parent is not None else None
        return below is not None and below.state in ON_DISK

    def _kept_back(self) -> list[tuple[Extent, ...]]:
        """Memory of no entry: reads may still land there, or look at it."""
        landing = [extents for _, extents in self._drafts_landing.values()]
        return [*self._quarantine.values(), *landing, *(extents for _, _, extents in self._retired)]

    def _set_draft(self, entry: Stored, draft: DraftRows | None) -> None:
        """The entry, in memory, has these drafter rows now. Those it had are free once nobody reads them."""
        key = entry.offer.key
        if entry.draft is not None:
            self._retired.append((self._leases.next_fence(), key, entry.draft.extents))
        entry.draft = draft
        self._retention.resize(key, entry.nbytes)
        self._file_anew(entry)
        self._free_retired()

    def _file_anew(self, entry: Stored) -> None:
        """Where the file has other drafter rows it goes, and is written again."""
        if entry.state is State.BOTH and entry.file_is_old:
            entry.state = after(entry.state, Event.DROP_FILE)
            self._disk.give(entry, kept=True, exists=True)
            self._disk.want(entry.offer.key, used=True)
        elif entry.state is State.HOST:
            self._disk.want(entry.offer.key, used=False)

    def _free_retired(self) -> None:
        """A lease that is younger than a replacement was told of the new rows; so was a write that began since."""
        if not self._retired:
            return
        oldest, retired, self._retired = self._leases.oldest_fence(), self._retired, []
        for fence, key, extents in retired:
            if (oldest is not None and oldest < fence) or key in self._held:
                self._retired.append((fence, key, extents))
            else:
                self._pages.free(extents)

    def _allocate(self, nbytes: int) -> tuple[Extent, ...]:
        """Pages that are known to be free."""
        extents = self._pages.allocate(nbytes)
        if extents is None:
            raise InvariantError("free pages that cannot be had")
        return extents

    def _missing(self, sizes: Iterable[int]) -> int:
        return max(0, sum(self._pages.rounded(nbytes) for nbytes in sizes) - self._pages.free_bytes)

    def _end_quiet(self, now_ms: int) -> None:
        """It is `now_ms`: last transfers have ended, entries have aged."""
        self._retention.advance(now_ms)
        self._disk.retention.advance(now_ms)
        for key in self._leases.take_quiet(now_ms):
            self._retention.unpin(key)
        self._free_retired()

    def _drop(self, key: Key, state: State) -> Stored:
        entry = self._in_state(key, state)
        self.moves += 1
        del self._entries[key]
        entry.state = State.LEAVING  # for whoever still looks at it
        self._rest(entry.offer, -1)
        self._retention.drop(key)
        return entry

    def _in_state(self, key: Key, state: State) -> Stored:
        entry = self._entries.get(key)
        if entry is None or entry.state is not state:
            raise InvariantError(f"{key.kind}: {entry.state if entry else 'absent'}, not {state}")
        return entry


def _count(entries: Counter[Key], offer: Offer, by: int) -> None:
    """As many more, or fewer, as are on what `offer` rests on."""
    if offer.parent is not None:
        entries[offer.parent] += by
        if not entries[offer.parent]:
            del entries[offer.parent]
