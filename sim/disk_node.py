"""A cache node with a disk: files written behind the requests, read for leases, found again by the next life.

The order of things is `cachestore/node/tiers.py`'s; `World.files` is what outlives a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cachestore.entries import Key, Offer
from cachestore.node.core import NodeCore
from cachestore.node.states import ON_DISK, State
from moonrelay.errors import Overloaded, ServeError
from sim.adapters import LONGEST_TRANSFER_MS
from sim.cache_node import CacheNode
from sim.memory import CELL_BYTES, checksum
from sim.toy import Cells
from sim.world import Future, Steps, Violation, World

PROMOTE_TRIES = 3
ENSURE_MS, PAUSE_MS = 200, 50


@dataclass(slots=True)
class File:
    """An entry at rest. A torn one is shorter than its sums say."""

    offer: Offer
    sums: tuple[tuple[int, int], ...]  # bytes and checksum of each part
    values: Cells


class DiskNode(CacheNode):
    def __init__(self, world: World, name: str, cells: int, disk_cells: int) -> None:
        super().__init__(world, name, cells)
        self.core = NodeCore(
            cells * CELL_BYTES, longest_transfer_ms=LONGEST_TRANSFER_MS, disk_bytes=disk_cells * CELL_BYTES
        )
        self.files: dict[Key, File] = world.files.setdefault(name, {})
        self._work = Future()
        self._promoting: dict[Key, Future] = {}
        self._writing: Key | None = None

    def boot(self) -> None:
        super().boot()
        self.spawn(self._disk(), "disk")

    def kill(self) -> None:
        """A file in the making may be left torn."""
        entry: Any = self.core.entry(self._writing) if self._writing is not None else None
        if entry is not None and self.world.rng.random() < 0.5:
            sums = tuple((r.length, r.xxh3) for r in entry.regions)
            values = self.arena.read(self._cells(entry.offer.key))
            self.files[entry.offer.key] = File(entry.offer, sums, values[: len(values) // 2])
            self.world.counts["torn_files"] += 1
        super().kill()

    # Reading.

    def ensure(self, keys: Sequence[Key]) -> Steps:
        """Those of `keys` that are on disk only come into memory, and stay until the next turn."""
        if not self.core.on_disk(keys):
            return
        held = self.core.hold(keys)
        try:
            for _ in range(PROMOTE_TRIES):
                missing = self.core.on_disk(keys)
                if not missing:
                    return
                yield from self._bring(missing, keys)
                held += self.core.hold(missing)
            if self.core.on_disk(keys):
                raise Overloaded("memory is too small for all that is wanted from disk")
        finally:
            if self.alive:
                self.core.let_go(held)

    def _bring(self, missing: Sequence[Key], keys: Sequence[Key]) -> Steps:
        fresh = [key for key in missing if key not in self._promoting]
        if fresh:
            task = self.spawn(self._promote(fresh, keys), "promote")
            for key in fresh:
                self._promoting[key] = task.outcome
            task.outcome.callbacks.append(lambda _: self._promoted(fresh))
        for key in missing:
            if key in self._promoting:
                yield (self._promoting[key], ENSURE_MS)

    def _promoted(self, keys: Sequence[Key]) -> None:
        for key in keys:
            del self._promoting[key]

    def _promote(self, wanted: Sequence[Key], protect: Sequence[Key]) -> Steps:
        """Raises: ServeError where there is no room."""

        def still() -> list[Key]:
            return [k for k in wanted if (e := self.core.entry(k)) is not None and e.state is State.DISK]

        yield from self._room(lambda: self.core.promotion_bytes(still()), protect)
        keys = still()
        if not self.core.begin_promote(keys):
            raise Overloaded("memory is leased or too small")
        for key in keys:
            self.arena.assign(self._cells(key), "a promotion")
        self.world.phase("promoting", self)
        yield self._disk_ms()
        refused = [key for key in keys if not self._read_file(key)]
        for key in refused:
            self.core.refuse(key)
        yield from self._delete()
        self.note([*refused, *self.core.resting_on(refused), *self.core.take_moved()])

    def _read_file(self, key: Key) -> bool:
        """Into memory, verified part by part; False where the file must not be served."""
        file, cells = self.files.get(key), self._cells(key)
        if file is None or not _whole(file):
            self.world.counts["refused_files"] += 1
            return False
        self.arena.write(cells, file.values)
        self.core.promoted(key, self._regions(key))
        self.arena.freeze(cells, "a stored entry")
        self.world.checkers.named(key, file.values)
        self.world.counts["promoted"] += 1
        return True

    # Writing.

    def committed(self) -> None:
        self._work.set()

    def _disk(self) -> Steps:
        yield from self._recover()
        while True:
            while (following := self.core.next_writes()) is not None:
                chain, used = following
                for key in chain:
                    if not (yield from self._write(key, used)):
                        break
            self._work = Future()
            yield self._work

    def _write(self, key: Key, used: bool) -> Steps:
        entry = self.core.entry(key)
        if entry is None or entry.state is not State.HOST:
            return False
        nbytes = entry.offer.nbytes
        if nbytes > self.core.disk_free_bytes and not used:
            return False
        yield from self._disk_room(nbytes)
        if not self.core.begin_write(key, nbytes):
            return False
        cells = self._cells(key)
        self.arena.guard(("file", key), cells, "a file is written from them")
        self._writing = key
        self.world.phase("writing_file", self)
        yield self._disk_ms()
        self._writing = None
        self.arena.unguard(("file", key))
        if self.world.network.chance(self.world.disk_faults):
            self.world.counts["fault:disk_full"] += 1
            self.core.unwritten(key, again=True)
            yield PAUSE_MS
            return False
        sums = tuple((r.length, r.xxh3) for r in self.core.regions(key))
        self.files[key] = File(entry.offer, sums, self.arena.read(cells))
        self.core.written(key)
        self.world.counts["files_written"] += 1
        return True

    def _disk_ms(self) -> float:
        """Now and then it hangs for a while."""
        return 0.5 + self.rng.random() * (80 if self.rng.random() < 0.1 else 3)

    def _disk_room(self, nbytes: int) -> Steps:
        if nbytes <= self.core.disk_free_bytes or nbytes > self.core.stats().disk.capacity_bytes:
            return
        leaving = self.core.disk_victims(nbytes)
        try:
            if leaving:
                yield from self._evict(leaving)
        except ServeError:
            self.world.counts["no_disk_room"] += 1
        yield from self._delete()

    def _delete(self) -> Steps:
        taken = self.core.take_deletions()
        if taken:
            yield self.rng.random()
            for key, nbytes in taken:
                self.files.pop(key, None)
                self.core.deleted(nbytes)

    def _recover(self) -> Steps:
        """Entries of the files that are there; torn ones go. The node serves meanwhile."""
        known = []
        for key, file in list(self.files.items()):
            if len(file.values) * CELL_BYTES != file.offer.nbytes:
                self.world.counts["torn_dropped"] += 1
            elif self.core.entry(key) is None and self.core.found(file.offer, file.sums, file.offer.nbytes):
                self.world.counts["files_found"] += 1
                known.append(key)
                continue
            entry = self.core.entry(key)
            if entry is None or entry.state not in (State.WRITING, State.BOTH, State.DISK):
                del self.files[key]
        yield 1
        self.note(known)

    def tier(self, key: Key) -> str:
        entry = self.core.entry(key)
        return "disk" if entry is not None and entry.state in ON_DISK else "host"

    def victims(self, wanted: int, protect: Sequence[Key]) -> list[Key]:
        """What is on disk too leaves memory at once."""
        both = {k: self._cells(k) for k, e in self.core._entries.items() if e.state is State.BOTH}
        found = super().victims(wanted, protect)
        for key, cells in both.items():
            if not self._cells(key):
                self.arena.thaw(cells)
        self.note(self.core.take_moved())
        return found

    def settled(self) -> None:
        super().settled()
        disk = self.core.stats().disk
        if disk.deleting_bytes or self._promoting or self._writing is not None:
            raise Violation("books", f"{self.name} is idle with {disk}")
        files = sum(file.offer.nbytes for file in self.files.values())
        if files != disk.used_bytes:
            raise Violation("books", f"{self.name}: {files} bytes in files, {disk.used_bytes} in the books")


def _whole(file: File) -> bool:
    at = 0
    for nbytes, xxh3 in file.sums:
        cells = nbytes // CELL_BYTES
        if checksum(file.values[at : at + cells]) != xxh3:
            return False
        at += cells
    return at == len(file.values)
