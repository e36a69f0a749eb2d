"""What a cache node holds and whom it promised what. Decides; no I/O, no clock: `now_ms` is the node's own.

    offered ── admit ──▶ LANDING ── commit ──▶ VISIBLE ── victims ──▶ LEAVING ── reclaim ──▶ gone
                            │ abort                        ▲            │ restore (the index could not be told)
                            ▼                              └────────────┘
                     gone, or quarantine until the node's own read is over

An entry is VISIBLE only after its bytes were verified, LEAVING before its index entry is removed, and its memory is
free only when no lease covers it and the longest transfer since an expired lease has had time to end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from cachestore.node.allocator import Extent, PageAllocator
from moonrelay.errors import InvariantError

BLOCK, SNAPSHOT = "block", "snapshot"
LEASES_MAX = 4_096


@dataclass(frozen=True, slots=True)
class Key:
    """Names an entry: the root it belongs to, its kind, its prefix hash."""

    root: bytes
    kind: str
    prefix_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a publisher would give. `parent`: the entry that this one is of no use without."""

    key: Key
    parent: Key | None
    depth: int  # a block's index; a snapshot's tokens in blocks
    nbytes: int

    @property
    def rank(self) -> int:
        """Order along a chain: the block that ends at a boundary, then the snapshot there."""
        return 2 * self.depth + 1 if self.key.kind == SNAPSHOT else 2 * (self.depth + 1)


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
    leases: int = 0
    quiet_from_ms: int = 0  # reads under leases that expired may go on until here


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    id: str
    fence: int
    keys: tuple[Key, ...]
    ttl_ms: int
    expires_ms: int


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
        self._longest_transfer_ms = longest_transfer_ms
        self._entries: dict[Key, Stored] = {}
        self._recent: OrderedDict[Key, None] = OrderedDict()  # oldest first; VISIBLE entries only
        self._children: Counter[Key] = Counter()  # entries resting on a key, itself here or not; LEAVING ones not
        self._leases: dict[str, Lease] = {}
        self._quarantine: dict[int, tuple[Extent, ...]] = {}
        self._fence = 0
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
            self._entries[offer.key] = Stored(offer, extents)
            self._count(offer.parent, 1)
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
        self._show(entry)

    def abort(self, key: Key) -> None:
        """The bytes did not come, and nothing can land any more."""
        self._pages.free(self._drop(key, State.LANDING).extents)

    def quarantine(self, keys: Iterable[Key]) -> int:
        """The bytes did not come, but our own read may still write there; free with `release_quarantine`."""
        self._fence += 1
        self._quarantine[self._fence] = tuple(e for k in keys for e in self._drop(k, State.LANDING).extents)
        return self._fence

    def release_quarantine(self, number: int) -> None:
        self._pages.free(self._quarantine.pop(number))

    def touch(self, keys: Iterable[Key]) -> None:
        """Mark entries and everything they rest on as used now; the deeper, the sooner they go again."""
        chain: dict[Key, None] = {}
        for key in keys:
            at: Key | None = key
            while at is not None and at not in chain and at in self._entries:
                chain[at] = None
                at = self._entries[at].offer.parent
        for key in sorted(chain, key=lambda k: self._entries[k].offer.rank, reverse=True):
            if key in self._recent:
                self._recent.move_to_end(key)

    # Eviction.

    def victims(self, nbytes: int, now_ms: int, protect: Iterable[Key] = ()) -> list[Key]:
        """Least recently used entries that free `nbytes`, or as much as can be had; each is LEAVING from now on.

        Never one that a lease or a late read covers, that another entry rests on, or that `protect` rests on.
        """
        kept = self._ancestors(protect)
        found: list[Key] = []
        freed, again = 0, True
        while again and freed < nbytes:
            again = False
            for key in list(self._recent):
                entry = self._entries[key]
                if freed >= nbytes:
                    break
                if self._children[key] or entry.leases or entry.quiet_from_ms > now_ms or key in kept:
                    continue
                entry.state = State.LEAVING
                del self._recent[key]
                self._visible[key.kind] -= 1
                self._count(entry.offer.parent, -1)
                found.append(key)
                freed += sum(e.length for e in entry.extents)
                again = True  # its parent may be free to go now
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
            self._count(entry.offer.parent, 1)
            self._show(entry)
            self._recent.move_to_end(key, last=False)

    # Leases.

    def lease(self, keys: Sequence[Key], ttl_ms: int, now_ms: int) -> Lease | Key | None:
        """A timed right to read all of `keys`; the first key that is not there; or None when there are too many."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or entry.state is not State.VISIBLE:
                return key
        if len(self._leases) >= LEASES_MAX:
            return None
        self._fence += 1
        lease = Lease(
            id=f"lease-{self._fence}", fence=self._fence, keys=tuple(keys), ttl_ms=ttl_ms, expires_ms=now_ms + ttl_ms
        )
        self._leases[lease.id] = lease
        for key in keys:
            self._entries[key].leases += 1
        self.touch(keys)
        return lease

    def regions(self, key: Key) -> tuple[Region, ...]:
        """Where a visible entry's bytes are; nothing of one that is not."""
        return self._entries[key].regions if key in self._recent else ()

    def renew(self, lease_id: str, fence: int, now_ms: int) -> Lease | None:
        """The lease with its time begun anew; None where it has ended or the fence is another's."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.fence != fence or lease.expires_ms <= now_ms:
            return None
        renewed = Lease(
            id=lease.id, fence=fence, keys=lease.keys, ttl_ms=lease.ttl_ms, expires_ms=now_ms + lease.ttl_ms
        )
        self._leases[lease_id] = renewed
        return renewed

    def release(self, lease_id: str, fence: int) -> bool:
        """The reader has finished; False where there is no such lease. Idempotent."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.fence != fence:
            return False
        self._end(lease, quiet_from_ms=0)
        return True

    def expire(self, now_ms: int) -> int:
        """End leases whose time is over; how many. Their readers may be in the middle of a last transfer."""
        over = [lease for lease in self._leases.values() if lease.expires_ms <= now_ms]
        for lease in over:
            self._end(lease, quiet_from_ms=lease.expires_ms + self._longest_transfer_ms)
        return len(over)

    # Books.

    def visible(self) -> dict[Key, tuple[Region, ...]]:
        """Everything that the index should name."""
        return {key: self._entries[key].regions for key in self._recent}

    def stats(self) -> NodeStats:
        return NodeStats(
            capacity_bytes=self._pages.capacity_bytes,
            free_bytes=self._pages.free_bytes,
            quarantined_bytes=sum(e.length for extents in self._quarantine.values() for e in extents),
            num_blocks=self._visible[BLOCK],
            num_snapshots=self._visible[SNAPSHOT],
            num_hidden=len(self._entries) - len(self._recent),
            num_leases=len(self._leases),
            evicted_blocks=self._evicted[BLOCK],
            evicted_snapshots=self._evicted[SNAPSHOT],
        )

    def check(self) -> None:
        """Raises: InvariantError."""
        used = [e for entry in self._entries.values() for e in entry.extents]
        used += [e for extents in self._quarantine.values() for e in extents]
        self._pages.check(used)
        leases = Counter(key for lease in self._leases.values() for key in lease.keys)
        staying = [e for e in self._entries.values() if e.state is not State.LEAVING]
        if +self._children != Counter(e.offer.parent for e in staying if e.offer.parent is not None):
            raise InvariantError("children miscounted")
        if {kind: sum(key.kind == kind for key in self._recent) for kind in self._visible} != self._visible:
            raise InvariantError("visible entries miscounted")
        for key, entry in self._entries.items():
            if entry.leases != leases[key] or (entry.leases and entry.state is not State.VISIBLE):
                raise InvariantError(f"{key.kind}: {entry.leases} leases while {entry.state}")
            if (key in self._recent) != (entry.state is State.VISIBLE):
                raise InvariantError(f"{key.kind}: {entry.state} and recency disagree")

    def _show(self, entry: Stored) -> None:
        entry.state = State.VISIBLE
        self._recent[entry.offer.key] = None
        self._visible[entry.offer.key.kind] += 1

    def _count(self, parent: Key | None, by: int) -> None:
        if parent is not None:
            self._children[parent] += by
            if not self._children[parent]:
                del self._children[parent]

    def _drop(self, key: Key, state: State) -> Stored:
        entry = self._in_state(key, state)
        del self._entries[key]
        self._count(entry.offer.parent, -1)
        return entry

    def _in_state(self, key: Key, state: State) -> Stored:
        entry = self._entries.get(key)
        if entry is None or entry.state is not state:
            raise InvariantError(f"{key.kind}: {entry.state if entry else 'absent'}, not {state}")
        return entry

    def _end(self, lease: Lease, quiet_from_ms: int) -> None:
        del self._leases[lease.id]
        for key in lease.keys:
            entry = self._entries[key]
            entry.leases -= 1
            entry.quiet_from_ms = max(entry.quiet_from_ms, quiet_from_ms)

    def _ancestors(self, keys: Iterable[Key]) -> set[Key]:
        found: set[Key] = set()
        for key in keys:
            at: Key | None = key
            while at is not None and at not in found and at in self._entries:
                found.add(at)
                at = self._entries[at].offer.parent
        return found
