"""A simulated cache node: the real `NodeCore` behind publish, lease, renew and release, like `node/intake.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cachestore.entries import SNAPSHOT, Key, Offer
from cachestore.lookup import Tier
from cachestore.node.books import Region
from cachestore.node.core import NodeCore
from cachestore.node.naming import index_entries
from cachestore.node.states import ON_DISK, VISIBLE
from moonrelay.errors import DeadlineExceeded, Overloaded, RequestTooLarge, ServeError, Unavailable
from sim.adapters import LONGEST_TRANSFER_MS
from sim.memory import CELL_BYTES, Pool, Span, Transfer
from sim.network import LinkLost, expect_epoch
from sim.redis import Member
from sim.world import Future, Steps, Violation, World

TICK_MS, RENEW_MS, ROOM_TRIES = 100, 1_000, 3
PULL_TIMEOUT_MS = 1_000
AWAY = (LinkLost, DeadlineExceeded)


class NotHere(ServeError):
    """An entry that a lease names is not in this node."""

    code = "not_found"


@dataclass(frozen=True, slots=True)
class Publish:
    root: bytes
    source: str
    epoch: int
    entries: tuple[tuple[Offer, tuple[Span, ...]], ...]
    tenant: str  # for the checkers only


@dataclass(frozen=True, slots=True)
class AskLease:
    root: bytes
    epoch: int
    keys: tuple[Key, ...]
    ttl_ms: int
    tenant: str  # for the checkers only


@dataclass(frozen=True, slots=True)
class Leased:
    lease_id: str
    fence: int
    ttl_ms: int
    spans: tuple[tuple[Span, ...], ...]  # per key


class Lock:
    """First come, first served."""

    def __init__(self) -> None:
        self._held = False
        self._line: deque[Future] = deque()

    def acquire(self) -> Steps:
        if self._held:
            turn = Future()
            self._line.append(turn)
            try:
                yield turn
            except GeneratorExit:
                if turn.done:
                    self.release()
                else:
                    self._line.remove(turn)
                raise
        self._held = True

    def release(self) -> None:
        self._held = False
        if self._line:
            self._held = True
            self._line.popleft().set()


class CacheNode(Member):
    role = "cachestore"

    def __init__(self, world: World, name: str, cells: int) -> None:
        super().__init__(world, name)
        self.core = NodeCore(cells * CELL_BYTES, longest_transfer_ms=LONGEST_TRANSFER_MS)
        self.arena = Pool(world, f"{name}/arena", cells)
        self.pools = {"arena": self.arena}
        self.restored = 0  # entries that were to go and could not
        self._indexing = Lock()
        self._untold: dict[bytes, dict[Key, None]] = {}
        self._telling = False
        self._fences: dict[str, int] = {}  # the truth of what was granted, for the checker

    def boot(self) -> None:
        super().boot()
        self.spawn(self._run(), "node")

    # Publishing.

    def rpc_publish(self, request: Publish) -> Steps:
        """Admit, pull and verify, commit, index: all or nothing."""
        offers = [offer for offer, _ in request.entries]
        yield from self._make_room(offers)
        admission = self.core.admit(offers)
        new = {key: self._cells(key) for key in admission.new}
        for cells in new.values():
            self.arena.assign(cells, "an offer")
        if new:
            spans = {offer.key: spans for offer, spans in request.entries}
            yield from self._pull(request, new, spans)
        visible = [*admission.new, *admission.already_there]
        try:
            yield from self._write_index(request.root, visible)
        except AWAY as error:
            raise Unavailable(f"the index cannot be written: {error}") from None
        return len(admission.new), len(admission.refused)

    def _make_room(self, offers: Sequence[Offer]) -> Steps:
        protect = [key for offer in offers for key in (offer.key, offer.parent) if key is not None]
        yield from self._room(lambda: self.core.missing_bytes(offers), protect)

    def _room(self, missing: Callable[[], int], protect: Sequence[Key]) -> Steps:
        """Let go of what `missing()` says is lacking. Raises: RequestTooLarge, Unavailable."""
        for _ in range(ROOM_TRIES):
            wanted = missing()
            if not wanted:
                return
            stats = self.core.stats()
            if wanted > stats.capacity_bytes - stats.free_bytes:
                raise RequestTooLarge("more is needed than the node has")
            victims = self.victims(wanted, protect)
            if not victims:
                return
            self.world.checkers.evicted(self, victims, protect)
            yield from self._evict(victims)

    def victims(self, wanted: int, protect: Sequence[Key]) -> list[Key]:
        return self.core.victims(wanted, self.now_ms(), protect)

    def _evict(self, victims: Sequence[Key]) -> Steps:
        by_root: dict[bytes, list[Key]] = {}
        for key in victims:
            by_root.setdefault(key.root, []).append(key)
        self.world.phase("evicting", self)
        try:
            for root in list(by_root):
                names = [(key.kind, key.prefix_hash) for key in by_root[root]]
                yield from self._indexing.acquire()
                try:
                    yield from self.index("remove", root, self, names)
                finally:
                    self._indexing.release()
                going = by_root.pop(root)
                self.arena.thaw([cell for key in going for cell in self._cells(key)])
                self.core.reclaim(going)
                self.world.checkers.reclaimed(self, going)
                self.world.counts["evicted"] += len(names)
        except AWAY as error:
            raise Unavailable(f"nothing can be evicted while the index is away: {error}") from None
        finally:
            kept = [key for keys in by_root.values() for key in keys]
            self.restored += len(kept)
            self.core.restore(kept)

    def _pull(self, request: Publish, new: dict[Key, list[int]], spans: dict[Key, tuple[Span, ...]]) -> Steps:
        reads, transfer, committed = [], None, False
        try:
            for key, cells in new.items():
                at = 0
                for span in spans[key]:
                    reads.append((span, self.arena, cells[at : at + span.cells]))
                    at += span.cells
            transfer = Transfer(self.world, self, request.source, request.epoch, reads)
            self.world.phase("publish_pulling", self)
            yield (transfer.result, PULL_TIMEOUT_MS)
            for key, cells in new.items():
                self.core.commit(key, self._regions(key))
                self.arena.freeze(cells, "a stored entry")
            committed = True
            self.committed()
        finally:
            if not committed:
                self._give_up(list(new), transfer)
        for key, cells in new.items():
            self.world.checkers.committed(request.tenant, key, self.arena.read(cells), self._depth(key))

    def _give_up(self, keys: list[Key], transfer: Transfer | None) -> None:
        if transfer is not None:
            transfer.abort()
        if transfer is None or transfer.ended.done:
            for key in keys:
                self.core.abort(key)
            return
        number = self.core.quarantine(keys)
        self.world.counts["node_quarantines"] += 1
        transfer.ended.callbacks.append(lambda _: self.world.soon(self, self.core.release_quarantine, number))

    def _write_index(self, root: bytes, keys: Sequence[Key]) -> Steps:
        """Make the index name those of `keys` that are here, and no others."""
        yield from self._indexing.acquire()
        try:
            entries = index_entries(keys, self._visible)
            for key in keys:
                if (key.kind, key.prefix_hash) in entries and self.core.regions(key):
                    self.world.checkers.named(key, self.arena.read(self._cells(key)))
            gone = [name for key in keys if (name := (key.kind, key.prefix_hash)) not in entries]
            if gone:
                yield from self.index("remove", root, self, gone)
            if entries:
                yield from self.index("write", root, self, entries)
        finally:
            self._indexing.release()

    def note(self, keys: Iterable[Key]) -> None:
        """These changed: the index is told soon, or when it can be."""
        for key in keys:
            self._untold.setdefault(key.root, {})[key] = None
        if self._untold and not self._telling:
            self._telling = True
            self.spawn(self._tell_index(), "tell")

    def _tell_index(self) -> Steps:
        try:
            while self._untold:
                root = next(iter(self._untold))
                keys = self._untold[root]
                yield from self._write_index(root, list(keys))
                if self._untold.get(root) is keys:
                    del self._untold[root]
        except AWAY:
            self.world.counts["index_not_told"] += 1  # again when it is next renewed
        finally:
            self._telling = False

    def _visible(self, key: Key) -> tuple[Offer, Tier] | None:
        """What the index may say of an entry of ours."""
        entry = self.core.entry(key)
        tier: Tier = "disk" if entry is not None and entry.state in ON_DISK else "host"
        return (entry.offer, tier) if entry is not None and entry.state in VISIBLE else None

    @property
    def instance_id(self) -> str:
        return self.name

    # Leases.

    def rpc_lease(self, request: AskLease) -> Steps:
        """All or none. Raises: StaleEpoch, NotHere, Overloaded."""
        expect_epoch(request.epoch, self)
        yield from self.ensure(request.keys)
        for key in request.keys:
            if not self.core.regions(key):
                raise NotHere(f"a {key.kind} is not here")
        lease = self.core.lease(self._deepest(request.keys), request.ttl_ms, self.now_ms())
        if lease is None:
            raise Overloaded("too many leases")
        if isinstance(lease, Key):
            raise NotHere(f"a {lease.kind} is not here")
        self._fences[lease.id] = lease.fence
        self.world.checkers.leased(request.tenant, request.keys)
        cells = [cell for key in request.keys for cell in self._cells(key)]
        self._guard(lease.id, cells, lease.ttl_ms)
        self.world.phase("leased", self)
        spans = tuple(tuple(_span(region) for region in self.core.regions(key)) for key in request.keys)
        return Leased(lease.id, lease.fence, lease.ttl_ms, spans)

    def ensure(self, keys: Sequence[Key]) -> Steps:
        """What is not in memory comes there. A node without a disk has nothing elsewhere."""
        yield from ()

    def committed(self) -> None:
        """There are new entries."""

    def _deepest(self, keys: Sequence[Key]) -> list[Key]:
        """Each chain's last block, and the snapshot: what others rest on never goes."""
        entries: Any = self.core._entries
        parents = {entries[key].offer.parent for key in keys if key.kind != SNAPSHOT}
        return [key for key in keys if key.kind == SNAPSHOT or key not in parents]

    def rpc_renew(self, request: tuple[str, int]) -> int:
        lease = self.core.renew(*request, self.now_ms())
        if lease is None:
            raise NotHere("the lease has ended")
        self.world.checkers.fence(self, self._fences.get(request[0]), request[1])
        guarded = self.arena.guards.get(lease.id)
        self._guard(lease.id, sorted(guarded[0]) if guarded else [], lease.ttl_ms)
        return lease.ttl_ms

    def rpc_release(self, request: tuple[str, int]) -> None:
        if self.core.release(*request):
            self.world.checkers.fence(self, self._fences.get(request[0]), request[1])
            self.arena.unguard(request[0])

    def _guard(self, lease_id: str, cells: Sequence[int], ttl_ms: int) -> None:
        # One tick of the node's clock less: it counts whole ms.
        until = self.world.now + (ttl_ms + LONGEST_TRANSFER_MS - 2) / self.clock_rate
        self.arena.guard(lease_id, cells, "a lease or its last transfer covers them", until)

    # By itself.

    def _run(self) -> Steps:
        renew_at = self.now_ms() + RENEW_MS
        was_idle = False
        while True:
            yield TICK_MS
            self.core.expire(self.now_ms())
            stats = self.core.stats()
            idle = not (stats.num_hidden or stats.num_leases or stats.quarantined_bytes)
            if idle and not was_idle:
                self.check()
            was_idle = idle
            if self.now_ms() >= renew_at:
                renew_at = self.now_ms() + RENEW_MS
                yield from self._renew_index()

    def _renew_index(self) -> Steps:
        held: dict[bytes, list[Key]] = {}
        for key in self.core.visible():
            held.setdefault(key.root, []).append(key)
        try:
            for root, keys in held.items():
                there = yield from self.index("renew", root, self)
                if {key.kind for key in keys} - there:
                    self.world.counts["index_rewritten"] += 1
                    yield from self._write_index(root, keys)
        except AWAY:
            return
        self.note(())

    def check(self) -> None:
        self.world.counts["check:books"] += 1
        self.core.check()

    def settled(self) -> None:
        """Nothing goes on any more. Raises: Violation where something is still held."""
        self.check()
        stats = self.core.stats()
        held = stats.num_blocks + stats.num_snapshots + stats.num_hidden
        if stats.num_hidden or stats.num_leases or stats.quarantined_bytes:
            raise Violation("books", f"{self.name} is idle with {stats}")
        if self._untold and not self.stopped:
            raise Violation("books", f"{self.name} has not told the index of {len(self._untold)} roots")
        if not held and stats.free_bytes != stats.capacity_bytes:
            raise Violation("books", f"{self.name} is empty with {stats}")

    def _cells(self, key: Key) -> list[int]:
        return [
            cell
            for extent in self.core.extents(key)
            for cell in range(extent.offset // CELL_BYTES, (extent.offset + extent.length) // CELL_BYTES)
        ]

    def _regions(self, key: Key) -> list[Region]:
        found = []
        for extent in self.core.extents(key):
            span = self.arena.span(extent.offset // CELL_BYTES, extent.length // CELL_BYTES)
            found.append(Region(extent.offset, extent.length, span.xxh3))
        return found

    def _depth(self, key: Key) -> int:
        """In blocks, as the publisher said."""
        offer: Any = self.core._entries[key].offer
        depth: int = offer.depth
        return depth if key.kind == SNAPSHOT else depth + 1


def _span(region: Region) -> Span:
    return Span("arena", region.offset // CELL_BYTES, region.length // CELL_BYTES, region.xxh3)
