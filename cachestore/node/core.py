"""What a cache node holds and whom it promised what. Decides; no I/O, no clock: `now_ms` is the node's own.

    offered ── admit ──▶ LANDING ── commit ──▶ VISIBLE ── victims ──▶ LEAVING ── reclaim ──▶ gone
                            │ abort                        ▲            │ restore (the index could not be told)
                            ▼                              └────────────┘
                     gone, or quarantine until the node's own read is over

An entry is VISIBLE only after its bytes were verified, LEAVING before its index entry is removed, and its memory is
free only when no lease covers it and the longest transfer since an expired lease has had time to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from cachestore.entries import BLOCK, SNAPSHOT, Key, Offer
from cachestore.node.allocator import Extent, PageAllocator
from cachestore.node.leases import Lease, Leases
from cachestore.retention import Retention
from moonrelay.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Region:
    """A checked range of the arena; an entry is its regions in order."""

    offset: int
    length: int
    xxh3: int


class State(Enum):
    LANDING = auto()
    VISIBLE = auto()
    LEAVING = auto()


@dataclass(slots=True, eq=False)
class Stored:
    offer: Offer
    extents: tuple[Extent, ...]
    state: State = State.LANDING
    regions: tuple[Region, ...] = ()

    @property
    def nbytes(self) -> int:
        """What it takes of the arena."""
        return sum(e.length for e in self.extents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What became of each offer. `new` have memory and are LANDING; the rest need nothing from the publisher."""

    new: tuple[Key, ...]
    already_there: tuple[Key, ...]
    in_progress: tuple[Key, ...]
    refused: tuple[Key, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStats:
    capacity_bytes: int
    free_bytes: int
    quarantined_bytes: int
    num_blocks: int
    num_snapshots: int
    num_hidden: int  # landing or leaving
    num_leases: int
    evicted_blocks: int
    evicted_snapshots: int


class NodeCore:
    def __init__(self, capacity_bytes: int, *, longest_transfer_ms: int = 2_000) -> None:
        self._pages = PageAllocator(capacity_bytes)
        self._entries: dict[Key, Stored] = {}
        self._retention = Retention()  # LANDING and VISIBLE entries
        self._leases = Leases(longest_transfer_ms)
        self._quarantine: dict[int, tuple[Extent, ...]] = {}
        self._visible = {BLOCK: 0, SNAPSHOT: 0}
        self._evicted = {BLOCK: 0, SNAPSHOT: 0}

    # Publishing.

    def missing_bytes(self, offers: Sequence[Offer]) -> int:
        """How much more must be free for every new offer to be admitted."""
        new = [o for o in offers if o.key not in self._entries]
        return max(0, sum(self._pages.rounded(o.nbytes) for o in new) - self._pages.free_bytes)

    def admit(self, offers: Sequence[Offer]) -> Admission:
        """Give memory to offers in order, until one does not fit: what follows it would be of no use."""
        new: list[Key] = []
        already: list[Key] = []
        landing: list[Key] = []
        refused: list[Key] = []
        for offer in offers:
            held = self._entries.get(offer.key)
            if held is not None:
                (already if held.state is State.VISIBLE else landing).append(offer.key)
                continue
            extents = None if refused else self._pages.allocate(offer.nbytes)
            if extents is None:
                refused.append(offer.key)
                continue
            stored = self._entries[offer.key] = Stored(offer, extents)
            self._retention.add(offer, stored.nbytes)
            new.append(offer.key)
        return Admission(
            new=tuple(new), already_there=tuple(already), in_progress=tuple(landing), refused=tuple(refused)
        )

    def extents(self, key: Key) -> tuple[Extent, ...]:
        return self._entries[key].extents

    def commit(self, key: Key, regions: Sequence[Region]) -> None:
        """The bytes are there and verified: the entry may be leased from now on."""
        entry = self._in_state(key, State.LANDING)
        if sum(r.length for r in regions) != entry.offer.nbytes:
            raise InvariantError(f"{key.kind}: its regions do not add up to its bytes")
        entry.regions = tuple(regions)
        entry.state = State.VISIBLE
        self._visible[key.kind] += 1
        self._retention.show(key)

    def abort(self, key: Key) -> None:
        """The bytes did not come, and nothing can land any more."""
        self._pages.free(self._drop(key, State.LANDING).extents)

    def quarantine(self, keys: Iterable[Key]) -> int:
        """The bytes did not come, but our own read may still write there; free with `release_quarantine`."""
        number = self._leases.next_fence()
        self._quarantine[number] = tuple(e for k in keys for e in self._drop(k, State.LANDING).extents)
        return number

    def release_quarantine(self, number: int) -> None:
        self._pages.free(self._quarantine.pop(number))

    def touch(self, keys: Iterable[Key]) -> None:
        """Mark entries and everything they rest on as used now; the deeper, the sooner they go again."""
        self._retention.touch(keys)

    # Eviction.

    def victims(self, nbytes: int, now_ms: int, protect: Iterable[Key] = ()) -> list[Key]:
        """What `Retention` gives up for `nbytes`, or as much as can be had; each is LEAVING from now on.

        Never one that a lease or a late read covers, that another entry rests on, or that `protect` rests on.
        """
        self._end_quiet(now_ms)
        found = self._retention.victims(nbytes, protect)
        for key in found:
            self._in_state(key, State.VISIBLE).state = State.LEAVING
            self._visible[key.kind] -= 1
        return found

    def reclaim(self, keys: Iterable[Key]) -> None:
        """The index does not name them any more: their memory is free."""
        for key in keys:
            entry = self._entries.pop(self._in_state(key, State.LEAVING).offer.key)
            self._evicted[key.kind] += 1
            self._pages.free(entry.extents)

    def restore(self, keys: Iterable[Key]) -> None:
        """The index could not be told: the entries stay."""
        for key in keys:
            entry = self._in_state(key, State.LEAVING)
            entry.state = State.VISIBLE
            self._visible[key.kind] += 1
            self._retention.restore(entry.offer, entry.nbytes)

    # Leases.

    def lease(self, keys: Sequence[Key], ttl_ms: int, now_ms: int) -> Lease | Key | None:
        """A timed right to read all of `keys`; the first key that is not there; or None when there are too many."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or entry.state is not State.VISIBLE:
                return key
        lease = self._leases.grant(keys, ttl_ms, now_ms)
        if lease is not None:
            for key in keys:
                self._retention.pin(key)
            self.touch(keys)
        return lease

    def regions(self, key: Key) -> tuple[Region, ...]:
        """Where a visible entry's bytes are; nothing of one that is not."""
        entry = self._entries.get(key)
        return entry.regions if entry is not None and entry.state is State.VISIBLE else ()

    def renew(self, lease_id: str, fence: int, now_ms: int) -> Lease | None:
        """The lease with its time begun anew; None where it has ended or the fence is another's."""
        return self._leases.renew(lease_id, fence, now_ms)

    def release(self, lease_id: str, fence: int) -> bool:
        """The reader has finished; False where there is no such lease. Idempotent."""
        lease = self._leases.release(lease_id, fence)
        for key in lease.keys if lease is not None else ():
            self._retention.unpin(key)
        return lease is not None

    def expire(self, now_ms: int) -> int:
        """End leases whose time is over; how many. Their readers may be in the middle of a last transfer."""
        self._end_quiet(now_ms)
        return self._leases.expire(now_ms)

    # Books.

    def visible(self) -> dict[Key, tuple[Region, ...]]:
        """Everything that the index should name."""
        return {key: e.regions for key, e in self._entries.items() if e.state is State.VISIBLE}

    def stats(self) -> NodeStats:
        return NodeStats(
            capacity_bytes=self._pages.capacity_bytes,
            free_bytes=self._pages.free_bytes,
            quarantined_bytes=sum(e.length for extents in self._quarantine.values() for e in extents),
            num_blocks=self._visible[BLOCK],
            num_snapshots=self._visible[SNAPSHOT],
            num_hidden=len(self._entries) - sum(self._visible.values()),
            num_leases=len(self._leases),
            evicted_blocks=self._evicted[BLOCK],
            evicted_snapshots=self._evicted[SNAPSHOT],
        )

    def check(self) -> None:
        """Raises: InvariantError."""
        used = [e for entry in self._entries.values() for e in entry.extents]
        used += [e for extents in self._quarantine.values() for e in extents]
        self._pages.check(used)
        shown = [key for key, entry in self._entries.items() if entry.state is State.VISIBLE]
        if {kind: sum(key.kind == kind for key in shown) for kind in self._visible} != self._visible:
            raise InvariantError("visible entries miscounted")
        self._retention.check(
            here={k for k, e in self._entries.items() if e.state is not State.LEAVING},
            shown=set(shown),
            pins=self._leases.covered(),
        )

    def _end_quiet(self, now_ms: int) -> None:
        for key in self._leases.take_quiet(now_ms):
            self._retention.unpin(key)

    def _drop(self, key: Key, state: State) -> Stored:
        entry = self._in_state(key, state)
        del self._entries[key]
        self._retention.drop(key)
        return entry

    def _in_state(self, key: Key, state: State) -> Stored:
        entry = self._entries.get(key)
        if entry is None or entry.state is not state:
            raise InvariantError(f"{key.kind}: {entry.state if entry else 'absent'}, not {state}")
        return entry
