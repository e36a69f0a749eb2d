"""Registered memory as cells with owners, and one-sided reads that land in pieces, late, torn, or not at all."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from cachestore.node.allocator import PAGE_BYTES
from cachestore.transports.base import ChecksumMismatch
from moonrelay.errors import ServeError, StaleEpoch, TransferError
from sim.toy import Cells
from sim.world import Future, Process, Steps, Violation, World

CELL_BYTES = PAGE_BYTES
FOREVER = float("inf")


def checksum(values: Sequence[int]) -> int:
    return crc32(array("Q", values).tobytes(), 1)


@dataclass(frozen=True, slots=True)
class Span:
    """Cells of a pool of some process, with the checksum that they had. Units: cells."""

    pool: str
    first: int
    cells: int
    xxh3: int


class Pool:
    """One registered range. Who reads from cells or lands in them guards them; nobody else may get them then."""

    def __init__(self, world: World, name: str, cells: int) -> None:
        self.world, self.name = world, name
        self.values: Cells = [0] * cells
        self.owner: Cells = [0] * cells  # a new number at every giving away
        self.frozen: dict[int, str] = {}  # cells that nobody may write any more, and why
        self.guards: dict[object, tuple[frozenset[int], float, str]] = {}
        self._num_owners = 0

    def assign(self, cells: Sequence[int], what: str) -> None:
        """The process gives `cells` to a new owner. Raises: Violation where somebody may still read or land there."""
        self.world.counts["check:reuse_under_reader"] += 1
        self.world.counts["check:immutable"] += 1
        now = self.world.now
        for reader, (guarded, until, why) in list(self.guards.items()):
            if until < now:
                del self.guards[reader]
            elif not guarded.isdisjoint(cells):
                raise Violation("reuse_under_reader", f"{self.name}: cells given to {what} while {why}")
        self._num_owners += 1
        for cell in cells:
            if cell in self.frozen:
                raise Violation("immutable", f"{self.name}: a cell of {self.frozen[cell]} is given to {what}")
            self.owner[cell] = self._num_owners

    def guard(self, reader: object, cells: Sequence[int], why: str, until: float = FOREVER) -> None:
        """Nobody else may get `cells` before true time `until`, or `unguard`."""
        self.guards[reader] = (frozenset(cells), until, why)

    def unguard(self, reader: object) -> None:
        self.guards.pop(reader, None)

    def freeze(self, cells: Sequence[int], why: str) -> None:
        for cell in cells:
            self.frozen[cell] = why

    def thaw(self, cells: Sequence[int]) -> None:
        """What was there is no longer kept."""
        for cell in cells:
            self.frozen.pop(cell, None)

    def write(self, cells: Sequence[int], values: Sequence[int]) -> None:
        """Raises: Violation where a cell is immutable."""
        for cell, value in zip(cells, values, strict=True):
            if cell in self.frozen:
                raise Violation("immutable", f"{self.name}: a cell of {self.frozen[cell]} is written to")
            self.values[cell] = value

    def read(self, cells: Sequence[int]) -> Cells:
        return [self.values[cell] for cell in cells]

    def span(self, first: int, cells: int) -> Span:
        return Span(self.name, first, cells, checksum(self.values[first : first + cells]))


Reads = Sequence[tuple[Span, Pool, Sequence[int]]]  # a span, and the cells of ours that it goes to


class Transfer:
    """One read in flight. `result` is done when every byte is verified or the read failed; `ended` when nothing of it
    can land any more. Whoever gives up before `ended` must keep the landing memory from everybody."""

    def __init__(self, world: World, reader: Process, source: str, epoch: int, reads: Reads) -> None:
        self.world, self.reader, self.source, self.epoch = world, reader, source, epoch
        self.result, self.ended = Future(), Future()
        self.aborted = False
        self._pieces: list[tuple[str, int, Pool, int, int]] = []  # from pool, cell; into pool, cell, its owner
        self._reads = reads
        for span, pool, cells in reads:
            if len(cells) != span.cells:
                self._fail(TransferError("a span and its room differ in length"))
                return
            for step, cell in enumerate(cells):
                self._pieces.append((span.pool, span.first + step, pool, cell, pool.owner[cell]))
        for number, (_, pool, cells) in enumerate(reads):
            pool.guard((self, number), cells, "a read of ours may land there")
        peer = world.processes.get(source)
        if peer is not None:
            peer.readers[self] = None
        world.counts["transfers"] += 1
        self._at = 0
        self._schedule()

    def abort(self) -> None:
        """Nobody waits any more. A stream's read ends at once; a one-sided one ends when it ends."""
        self.aborted = True
        if self.world.transport == "tcp" and not self.ended.done:
            self._fail(TransferError("aborted"))

    def source_died(self) -> None:
        if not self.ended.done:
            self.world.at(self.world.now + 1, None, self._fail, TransferError(f"{self.source} is gone"))

    def _schedule(self) -> None:
        world, rng = self.world, self.world.rng
        delay = 0.05 + 0.01 * len(self._pieces) + rng.random()
        if world.network.chance(world.stuck):
            world.counts["fault:stuck_read"] += 1
            delay += rng.uniform(200, 4_000)
        # Who must run for bytes to move: the reader where the kernel copies for it, both sides of a stream.
        context = None if world.transport == "rdma" else self.reader
        world.at(world.now + delay, context, self._move)

    def _move(self) -> None:
        """Land the next part of what is missing."""
        if self.ended.done or not self.reader.alive:
            return
        peer = self.world.processes.get(self.source)
        if peer is None or not peer.alive:
            self._fail(TransferError(f"{self.source} is gone"))
            return
        if peer.epoch != self.epoch:
            self._fail(StaleEpoch(f"{self.source} is at epoch {peer.epoch}, not {self.epoch}"))
            return
        if self.world.transport == "tcp" and (peer.stopped or not self.world.network.reachable(self.reader, peer)):
            self.world.at(self.world.now + 20, self.reader, self._move)
            return
        left = len(self._pieces) - self._at
        count = left if self._at else self.world.rng.randint((left + 1) // 2, left)
        for name, cell, pool, target, owner in self._pieces[self._at : self._at + count]:
            self._land(peer.pools[name], cell, pool, target, owner)
        self._at += count
        if self._at < len(self._pieces):
            self._schedule()
            return
        for span, pool, cells in self._reads:
            if checksum(pool.read(cells)) != span.xxh3:
                self._fail(ChecksumMismatch("bytes differ from what was promised"))
                return
        self._end()
        self.result.set(True)

    def _land(self, source: Pool, cell: int, pool: Pool, target: int, owner: int) -> None:
        value = source.values[cell]
        if self.world.network.chance(self.world.flip):
            self.world.counts["fault:flipped"] += 1
            value ^= 1 << self.world.rng.randrange(32)
        self.world.counts["check:late_landing"] += 1
        if pool.owner[target] != owner:
            raise Violation("reuse_under_reader", f"{self.reader.name}: a late read lands in a foreign {pool.name}")
        pool.write((target,), (value,))

    def _fail(self, error: ServeError) -> None:
        self._end()
        self.result.set(None, error)

    def _end(self) -> None:
        for number, (_, pool, _) in enumerate(self._reads):
            pool.unguard((self, number))
        peer = self.world.processes.get(self.source)
        if peer is not None:
            peer.readers.pop(self, None)
        self.ended.set()


class Landing:
    """The reads that may still write into one piece of our memory."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []

    def add(self, transfer: Transfer) -> Transfer:
        self.transfers.append(transfer)
        return transfer

    @property
    def pending(self) -> bool:
        return any(not t.ended.done for t in self.transfers)

    def wait_ended(self) -> Steps:
        for transfer in self.transfers:
            yield transfer.ended
