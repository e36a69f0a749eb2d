"""What a cache node holds and whom it promised what. Decides; no I/O, no clock: `now_ms` is the node's own.

An entry's states are in `states.py`. It can be leased only after its bytes were verified, and only from memory; it is
LEAVING before its index entry is removed; memory is free only when no lease covers it and the longest transfer since
an expired lease has had time to end; a file is deleted only when nobody reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cachestore.entries import Key, Offer
from cachestore.node.allocator import Extent
from cachestore.node.books import Admission, DraftForm, DraftRows, Region, Stored
from cachestore.node.drafts import DraftLedger
from cachestore.node.leases import Lease
from cachestore.node.states import IN_MEMORY, ON_DISK, VISIBLE, Event, State, after


class NodeCore(DraftLedger):
    """Publishing, eviction, files and leases."""

    # Publishing.

    def missing_bytes(self, offers: Sequence[Offer]) -> int:
        """How much more must be free for every new offer to be admitted."""
        return self._missing(offer.nbytes for offer in offers if offer.key not in self._entries)

    def admit(self, offers: Sequence[Offer]) -> Admission:
        """Give memory to offers in order, until one does not fit: what follows it would be of no use. Nor is there
        room for what is LEAVING, or would rest on that: it would be left behind."""
        new: list[Key] = []
        already: list[Key] = []
        landing: list[Key] = []
        refused: list[Key] = []
        self._retention.passed(offers)
        self._disk.retention.passed(offers)
        for offer in offers:
            held = self._entries.get(offer.key)
            if held is not None and held.state is not State.LEAVING:
                (already if held.state in VISIBLE else landing).append(offer.key)
                continue
            below = self._entries.get(offer.parent) if offer.parent is not None else None
            going = held is not None or (below is not None and below.state is State.LEAVING)
            extents = None if refused or going else self._pages.allocate(offer.nbytes)
            if extents is None:
                refused.append(offer.key)
                continue
            stored = self._entries[offer.key] = Stored(offer, extents)
            self._rest(offer, 1)
            self._retention.add(offer, stored.nbytes)
            new.append(offer.key)
        return Admission(
            new=tuple(new), already_there=tuple(already), in_progress=tuple(landing), refused=tuple(refused)
        )

    def extents(self, key: Key) -> tuple[Extent, ...]:
        return self._entries[key].extents

    def commit(self, key: Key, regions: Sequence[Region]) -> None:
        """The bytes are there and verified: the entry may be leased from now on."""
        self._bring(self._in_state(key, State.LANDING), regions)
        self._visible[key.kind] += 1
        self._disk.want(key, used=False)

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

    # Eviction.

    def victims(self, nbytes: int, now_ms: int, protect: Iterable[Key] = ()) -> list[Key]:
        """What `Retention` gives up for `nbytes` of memory, or as much as can be had: what is on disk too is out of
        memory at once, the rest, which is returned, is LEAVING.

        Never one that a lease or a late read covers, that another entry in memory rests on, or that `protect` does;
        nor what an entry rested on that is LEAVING since an earlier call: it may come back.
        """
        self._end_quiet(now_ms)
        earlier = frozenset(self._leaving)
        leaving: list[Key] = []
        anchored: list[Stored] = []  # what rests on it is on disk only: it must be there too before it goes
        spared: list[Stored] = []  # what it rests on is on disk only, and so of no use to memory's `Retention`
        wanted = nbytes
        while wanted > 0 and (found := self._retention.victims(wanted, protect)):
            for entry in map(self._entries.__getitem__, found):
                if entry.state is State.BOTH:
                    wanted -= entry.nbytes
                    self._empty(entry)
                elif self._resting[entry.offer.key] or entry.offer.key in earlier:
                    anchored.append(entry)
                elif self._rests_on_disk(entry):
                    spared.append(entry)
                else:
                    wanted -= entry.nbytes
                    leaving.append(self._withdraw(entry))
        while wanted > 0 and spared:
            wanted -= spared[0].nbytes
            leaving.append(self._withdraw(spared.pop(0)))
        for entry in (*anchored, *spared):
            self._retention.restore(entry.offer, entry.nbytes)
            self._disk.want(entry.offer.key, used=True)
        return leaving

    def reclaim(self, keys: Iterable[Key]) -> None:
        """The index does not name them any more: their memory is free, their files are to be deleted."""
        for key in keys:
            entry = self._entries.pop(self._left(key).offer.key)
            self._evicted[key.kind] += 1
            self._pages.free(entry.all_extents)
            if self._disk.waiting.pop(key, None) is not None:
                self._disk.unwritten += 1
            if entry.file_bytes:
                self._disk.give(entry, kept=False, exists=True)

    def restore(self, keys: Iterable[Key]) -> None:
        """The index could not be told: the entries stay."""
        for key in keys:
            entry = self._left(key)
            self._rest(entry.offer, 1)
            self._visible[key.kind] += 1
            if entry.extents:
                entry.state = after(entry.state, Event.KEPT_IN_MEMORY)
                self._retention.restore(entry.offer, entry.nbytes)
            else:
                entry.state = after(entry.state, Event.KEPT_ON_DISK)
                self._on_disk[key.kind] += 1
                self._disk.retention.restore(entry.offer, entry.file_bytes)

    def retire(self, key: Key) -> bool:
        """Begin to withdraw an entry whose memory went bad; False where it is held or rested on, or not here."""
        entry = self._entries.get(key)
        if entry is None or entry.state is not State.HOST or self._resting[key] or self._leaving[key]:
            return False
        if self._held[key] or self._leases.covered()[key]:
            return False
        self._retention.drop(key)
        self._withdraw(entry)
        return True

    # Files.

    def next_writes(self) -> tuple[list[Key], bool] | None:
        """What should be written next: an entry behind those that it rests on and that are not written yet; and
        whether it was ever used. Asked once, it is forgotten."""
        while self._disk.waiting:
            key, used = self._disk.waiting.popitem(last=False)
            chain: list[Key] = []
            at: Key | None = key
            while at is not None and (entry := self._entries.get(at)) is not None and entry.state is State.HOST:
                chain.append(at)
                at = entry.offer.parent
            if chain:
                return chain[::-1], used
        return None

    @property
    def disk_free_bytes(self) -> int:
        return self._disk.free_bytes

    def disk_victims(self, nbytes: int) -> list[Key]:
        """What `Retention` gives up so that `nbytes` are free on disk, or as much as can be had: files of what is in
        memory too are to be deleted at once, entries that are nowhere else, which are returned, are LEAVING."""
        leaving: list[Key] = []
        anchored: list[Stored] = []
        earlier = frozenset(self._leaving)
        wanted = nbytes - self._disk.free_bytes - self._disk.deleting_bytes  # what is being deleted is free soon
        while wanted > 0 and (found := self._disk.retention.victims(wanted)):
            for key in found:
                entry = self._entries[key]
                if entry.state is State.DISK and (self._resting[key] or key in earlier):
                    anchored.append(entry)  # what rests on it is in memory only, or may come back
                    continue
                wanted -= entry.file_bytes
                if entry.state is State.BOTH:
                    entry.state = after(entry.state, Event.DROP_FILE)
                    self._disk.give(entry, kept=False, exists=True)
                else:
                    self._on_disk[key.kind] -= 1
                    leaving.append(self._withdraw(entry))
        for entry in anchored:
            self._disk.retention.restore(entry.offer, entry.file_bytes)
        return leaving

    def begin_write(self, key: Key, file_bytes: int) -> bool:
        """Hold the entry's memory while its file is written; False where it left meanwhile or there is no room."""
        entry = self._entries.get(key)
        if entry is None or entry.state is not State.HOST or file_bytes > self._disk.free_bytes:
            return False
        entry.state = after(entry.state, Event.WRITE)
        self._disk.take(entry, file_bytes)
        entry.filed_draft = entry.draft.form if entry.draft is not None else None
        self._disk.waiting.pop(key, None)
        self._disk.num_writing += 1
        self.hold([key])
        return True

    def written(self, key: Key) -> None:
        entry = self._in_state(key, State.WRITING)
        entry.state = after(entry.state, Event.WRITTEN)
        entry.sums = tuple((r.length, r.xxh3) for r in entry.regions)
        self._disk.retention.show(key)
        self._disk.num_writing -= 1
        self.let_go([key])
        self._file_anew(entry)

    def unwritten(self, key: Key, *, again: bool, used: bool = False) -> None:
        """There is no file. `again`: try once more, after what is waiting."""
        entry = self._in_state(key, State.WRITING)
        entry.state = after(entry.state, Event.UNWRITTEN)
        self._disk.give(entry, kept=True, exists=False)
        self._disk.num_writing -= 1
        self.let_go([key])
        if again:
            self._disk.want(key, used=used)

    def take_deletions(self) -> list[tuple[Key, int]]:
        """Files to delete now, before anything else is written, and their bytes; `deleted` when that is done."""
        taken, self._disk.to_delete = self._disk.to_delete, []
        return taken

    def deleted(self, file_bytes: int) -> None:
        self._disk.deleting_bytes -= file_bytes

    def found(
        self, offer: Offer, sums: Sequence[tuple[int, int]], file_bytes: int, draft: DraftForm | None = None
    ) -> bool:
        """A file from an earlier life; False where its entry is here already or the disk's room is used up."""
        if offer.key in self._entries or file_bytes > self._disk.free_bytes:
            return False
        entry = self._entries[offer.key] = Stored(offer, state=State.DISK, sums=tuple(sums), filed_draft=draft)
        self._rest(offer, 1)
        self._disk.take(entry, file_bytes)
        self._disk.retention.show(offer.key)
        self._visible[offer.key.kind] += 1
        self._on_disk[offer.key.kind] += 1
        return True

    def on_disk(self, keys: Iterable[Key]) -> list[Key]:
        """Those that must be promoted before they can be leased."""
        if not any(self._on_disk.values()):
            return []
        return [k for k in keys if (entry := self._entries.get(k)) is not None and entry.state in ON_DISK]

    def promotion_bytes(self, keys: Iterable[Key]) -> int:
        """How much more must be free for all of them to be promoted."""
        entries = [self._entries[key] for key in keys]
        drafts = [entry.filed_draft.nbytes for entry in entries if entry.filed_draft is not None]
        return self._missing([*(entry.offer.nbytes for entry in entries), *drafts])

    def begin_promote(self, keys: Sequence[Key]) -> bool:
        """Memory for all of `keys`, which are on disk only, or for none: False."""
        if self.promotion_bytes(keys):
            return False
        for key in keys:
            entry = self._in_state(key, State.DISK)
            entry.state, entry.extents = after(entry.state, Event.PROMOTE), self._allocate(entry.offer.nbytes)
            if entry.filed_draft is not None:
                entry.draft = DraftRows(entry.filed_draft.drafter, self._allocate(entry.filed_draft.nbytes))
            self._retention.add(entry.offer, entry.nbytes)
            self._disk.retention.pin(key)
        return True

    def promoted(self, key: Key, regions: Sequence[Region], draft: Sequence[Region] = ()) -> bool:
        """Its bytes are in memory and verified, and so are the regions of its `draft` rows; False where the file has
        rows and these did not come."""
        entry = self._in_state(key, State.PROMOTING)
        self._bring(entry, regions)
        self._disk.retention.unpin(key)
        complete = self._bring_draft(entry, draft)
        self._on_disk[key.kind] -= 1
        self._disk.promoted += 1
        self._moved.add(key)
        return complete

    def refuse(self, key: Key) -> None:
        """Its file must not be served: the entry is gone, its file to be deleted. The index is told afterwards; what
        it names meanwhile cannot be leased."""
        self._disk.retention.unpin(key)
        entry = self._drop(key, State.PROMOTING)
        self._pages.free(entry.all_extents)
        self._visible[key.kind] -= 1
        self._on_disk[key.kind] -= 1
        self._disk.give(entry, kept=True, exists=True)

    def take_moved(self) -> set[Key]:
        """What moved between memory and disk since this was last asked: the index names another tier."""
        taken, self._moved = self._moved, set()
        return taken

    def hold(self, keys: Iterable[Key]) -> list[Key]:
        """Keep in memory those of `keys` that are there, until `let_go` is given what this returns."""
        held = [k for k in keys if (entry := self._entries.get(k)) is not None and entry.state in IN_MEMORY]
        for key in held:
            self._held[key] += 1
            self._retention.pin(key)
        return held

    def let_go(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
            self._retention.unpin(key)
        self._free_retired()

    # Leases.

    def lease(self, keys: Sequence[Key], ttl_ms: int, now_ms: int) -> Lease | Key | None:
        """A timed right to read all of `keys`, which are used now; the first key that is not in memory; None: there
        are too many."""
        lease = self.grant(keys, ttl_ms, now_ms)
        if isinstance(lease, Lease):
            self.used(keys, now_ms)
        return lease

    def grant(self, keys: Sequence[Key], ttl_ms: int, now_ms: int) -> Lease | Key | None:
        """As `lease`, without what need not be done before the reader has its answer: `used` is to follow."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or entry.state not in IN_MEMORY:
                return key
        lease = self._leases.grant(keys, ttl_ms, now_ms)
        if lease is not None:
            for key in keys:
                self._retention.pin(key)
        return lease

    def used(self, keys: Sequence[Key], now_ms: int) -> None:
        """These were leased; those that are still here are worth more than before."""
        self._end_quiet(now_ms)
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.state is State.HOST:
                self._disk.want(key, used=True)
        self._retention.hit(keys)
        self._disk.retention.hit(keys)

    def regions(self, key: Key) -> tuple[Region, ...]:
        """Where the bytes of an entry that can be leased now are; nothing of another."""
        entry = self._entries.get(key)
        return entry.regions if entry is not None and entry.state in IN_MEMORY else ()

    def renew(self, lease_id: str, fence: int, now_ms: int) -> Lease | None:
        """The lease with its time begun anew; None where it has ended or the fence is another's."""
        return self._leases.renew(lease_id, fence, now_ms)

    def release(self, lease_id: str, fence: int) -> bool:
        """The reader has finished; False where there is no such lease. Idempotent."""
        lease = self._leases.release(lease_id, fence)
        for key in lease.keys if lease is not None else ():
            self._retention.unpin(key)
        self._free_retired()
        return lease is not None

    def expire(self, now_ms: int) -> int:
        """End leases whose time is over; how many. Their readers may be in the middle of a last transfer."""
        self._end_quiet(now_ms)
        return self._leases.expire(now_ms)
