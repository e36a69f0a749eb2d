"""What a node's books are made of."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from cachestore.entries import BLOCK, SNAPSHOT, Key, Offer
from cachestore.node.allocator import Extent
from cachestore.node.states import IN_MEMORY, ON_DISK, WITH_FILE, State
from cachestore.retention import Retention
from moonrelay.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Region:
    """A checked range of the arena; an entry is its regions in order."""

    offset: int
    length: int
    xxh3: int


@dataclass(frozen=True, slots=True)
class DraftForm:
    """Drafter rows as a file has them: length and xxh3 of each part."""

    drafter: str
    sums: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(length for length, _ in self.sums)


@dataclass(frozen=True, slots=True)
class DraftRows:
    """A drafter's rows of a block, in memory. Without regions they are being brought from disk."""

    drafter: str
    extents: tuple[Extent, ...]
    regions: tuple[Region, ...] = ()
    packed: bytes = b""  # the regions as a lease's reply names them

    @property
    def nbytes(self) -> int:
        return sum(r.length for r in self.regions)

    @property
    def form(self) -> DraftForm:
        return DraftForm(self.drafter, tuple((r.length, r.xxh3) for r in self.regions))


@dataclass(slots=True, eq=False)
class Stored:
    """An entry. `extents`, `regions`: in memory. `sums` (length and xxh3 of each part), `file_bytes`: on disk.

    `draft`, `filed_draft`: drafter rows in memory, and in the file; a block may have none, and is as good without.
    """

    offer: Offer
    extents: tuple[Extent, ...] = ()
    state: State = State.LANDING
    regions: tuple[Region, ...] = ()
    sums: tuple[tuple[int, int], ...] = ()
    file_bytes: int = 0
    draft: DraftRows | None = None
    filed_draft: DraftForm | None = None

    @property
    def all_extents(self) -> tuple[Extent, ...]:
        return self.extents if self.draft is None else (*self.extents, *self.draft.extents)

    @property
    def nbytes(self) -> int:
        """What it takes of the arena."""
        return sum(e.length for e in self.all_extents)

    @property
    def file_is_old(self) -> bool:
        """Memory has other drafter rows than the file."""
        here, filed = self.draft, self.filed_draft
        return (here and (here.drafter, here.nbytes)) != (filed and (filed.drafter, filed.nbytes))

    def check(self) -> None:
        """It is where its state says. Raises: InvariantError."""
        in_memory, on_disk = bool(self.extents), bool(self.file_bytes)
        if self.state is State.LEAVING:
            right, readable = in_memory != on_disk, in_memory
        else:
            right = (in_memory, on_disk) == (self.state is not State.DISK, self.state in WITH_FILE)
            readable = self.state in IN_MEMORY
        if not right or sum(r.length for r in self.regions) != (self.offer.nbytes if readable else 0):
            raise InvariantError(f"{self.offer.key.kind}: {self.state.name} with {self.extents}, {self.file_bytes}")
        if self.draft is not None and (
            not in_memory
            or self.offer.key.kind != BLOCK
            or (readable and not self.draft.regions)
            or sum(e.length for e in self.draft.extents) < self.draft.nbytes
        ):
            raise InvariantError(f"{self.offer.key.kind}: {self.state.name} with drafter rows that it cannot have")
        if (self.filed_draft is not None and not on_disk) or (self.state is State.BOTH and self.file_is_old):
            raise InvariantError("the file and its entry disagree about drafter rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What became of each offer. `new` have memory and are LANDING; the rest need nothing from the publisher."""

    new: tuple[Key, ...]
    already_there: tuple[Key, ...]
    in_progress: tuple[Key, ...]
    refused: tuple[Key, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """`used_bytes`: of entries' files, one being written included. `deleting_bytes`: files on their way out."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    deleting_bytes: int = 0
    num_blocks: int = 0  # on disk, in memory or not; being written too
    num_snapshots: int = 0
    num_waiting: int = 0  # to be written
    num_writing: int = 0
    promoted: int = 0
    demoted: int = 0  # left memory, stayed on disk
    evicted: int = 0  # files
    unwritten: int = 0  # entries that left memory before their turn to be written came


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStats:
    capacity_bytes: int
    free_bytes: int
    quarantined_bytes: int
    num_blocks: int  # that can be leased, from memory or from disk
    num_snapshots: int
    num_hidden: int  # landing or leaving
    num_leases: int
    evicted_blocks: int
    evicted_snapshots: int
    host_blocks: int = 0  # in memory
    host_snapshots: int = 0
    disk: DiskStats = DiskStats()


class DiskBooks:
    """The files' half: room, order of leaving, and what waits to be written. No capacity: no disk."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.retention = Retention()  # entries with a file, or with one being written
        self.used_bytes = 0
        self.deleting_bytes = 0
        self.to_delete: list[tuple[Key, int]] = []
        self.waiting: OrderedDict[Key, bool] = OrderedDict()  # whether it, or what rests on it, was ever leased
        self._count = {BLOCK: 0, SNAPSHOT: 0}
        self.num_writing = 0
        self.promoted = self.demoted = self.evicted = self.unwritten = 0

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes - self.deleting_bytes

    def want(self, key: Key, *, used: bool) -> None:
        """It should be written, after what is waiting already."""
        if self.capacity_bytes:
            self.waiting[key] = used or self.waiting.get(key, False)

    def take(self, entry: Stored, nbytes: int) -> None:
        """Room for an entry's file."""
        if nbytes > self.free_bytes:
            raise InvariantError("a file without room for it")
        entry.file_bytes = nbytes
        self.used_bytes += nbytes
        self._count[entry.offer.key.kind] += 1
        self.retention.add(entry.offer, nbytes)

    def give(self, entry: Stored, *, kept: bool, exists: bool) -> None:
        """The entry has no file any more; one that `exists` is to be deleted. `kept`: retention still has it."""
        if kept:
            self.retention.drop(entry.offer.key)
        self.used_bytes -= entry.file_bytes
        self._count[entry.offer.key.kind] -= 1
        if exists:
            self.deleting_bytes += entry.file_bytes
            self.to_delete.append((entry.offer.key, entry.file_bytes))
            self.evicted += 1
        entry.file_bytes, entry.sums, entry.filed_draft = 0, (), None

    def stats(self) -> DiskStats:
        return DiskStats(
            capacity_bytes=self.capacity_bytes,
            used_bytes=self.used_bytes,
            deleting_bytes=self.deleting_bytes,
            num_blocks=self._count[BLOCK],
            num_snapshots=self._count[SNAPSHOT],
            num_waiting=len(self.waiting),
            num_writing=self.num_writing,
            promoted=self.promoted,
            demoted=self.demoted,
            evicted=self.evicted,
            unwritten=self.unwritten,
        )

    def check(self, entries: Mapping[Key, Stored]) -> None:
        """Raises: InvariantError."""
        with_file = {key: entry for key, entry in entries.items() if entry.file_bytes}
        if self.used_bytes != sum(e.file_bytes for e in with_file.values()) or min(
            self.deleting_bytes, self.free_bytes
        ) < 0:  # fmt: skip
            raise InvariantError("the disk's books do not balance")
        if self._count != {kind: sum(key.kind == kind for key in with_file) for kind in self._count}:
            raise InvariantError("files miscounted")
        self.retention.check(
            here={key: entry.file_bytes for key, entry in with_file.items() if entry.state is not State.LEAVING},
            shown={key for key, entry in with_file.items() if entry.state in (State.BOTH, *ON_DISK)},
            pins=Counter(key for key, entry in with_file.items() if entry.state is State.PROMOTING),
        )
