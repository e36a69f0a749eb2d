"""A simulated worker's memory: reservations in order of arrival, and what is kept between them, over real books.

`engine.ledger` counts, `engine.worker.bundles` knows what is kept; the order of things is as in
`engine/worker/memory.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.api import Reservation
from engine.core import Scheduler
from engine.worker.bundles import Bundles, Evicted, Found
from moonrelay.errors import DeadlineExceeded, InvariantError, Overloaded
from sim.memory import CELL_BYTES, Pool
from sim.toy import BLOCK_TOKENS, ROW_CELLS, STATE_CELLS
from sim.world import Future, Steps, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What a sequence needs; `hashes`: blocks that it would begin with if they are kept here."""

    tokens: int
    write_back: bool = False
    hashes: Sequence[bytes] = ()
    state: bool = True
    blocks_min: int = 1
    snapshots: int = 0


class Holding:
    """A reservation with several users; the engine gets it back when the last one has dropped it."""

    def __init__(self, memory: WorkerMemory, reservation: Reservation, found: Found | None) -> None:
        self.memory, self.reservation, self.found, self._users = memory, reservation, found, 1

    def share(self) -> Holding:
        if self._users < 1:
            raise InvariantError("memory shared after it was given back")
        self._users += 1
        return self

    def drop(self) -> None:
        if self._users < 1:
            raise InvariantError("memory given back twice")
        self._users -= 1
        if self._users == 0:
            self.memory.give_back(self)

    @property
    def nbytes(self) -> int:
        return CELL_BYTES * (ROW_CELLS * len(self.reservation.blocks) + STATE_CELLS)

    @property
    def num_blocks(self) -> int:
        return len(self.reservation.blocks)

    def row_cells(self, block: int) -> range:
        return block_cells(self.reservation.blocks[block])

    def state_cells(self) -> range:
        return slot_cells(self.reservation.slot)


class WorkerMemory:
    """`on_change`: memory came back, or may soon; not called where it can be given out at once.

    `announce`, `withdraw`: the index, best effort.
    """

    def __init__(
        self, world: World, name: str, scheduler: Scheduler, *, kept_share: float, on_change: Callable[[], None]
    ) -> None:
        self._world, self._scheduler, self._on_change = world, scheduler, on_change
        num_blocks, num_slots = scheduler.settings.num_blocks, scheduler.settings.num_slots
        self.rows = Pool(world, f"{name}/rows", ROW_CELLS * num_blocks)
        self.state = Pool(world, f"{name}/state", STATE_CELLS * num_slots)
        self.bundles = Bundles(blocks_max=int(kept_share * num_blocks), slots_max=int(kept_share * num_slots))
        self.holdings: dict[Holding, None] = {}
        self.snapshots: dict[int, int] = {}  # slot -> users
        self.announce: Callable[[bytes, Sequence[bytes], int, Sequence[int]], None] = lambda *_: None
        self.withdraw: Callable[[bytes, Sequence[bytes], Sequence[bytes]], None] = lambda *_: None
        self.waiting: deque[tuple[Want, Future]] = deque()

    # Reservations.

    def try_reserve(self, want: Want) -> Holding:
        """Raises: Overloaded, RequestTooLarge."""
        if self.waiting:
            raise Overloaded("others wait for memory")
        return self._hold(want)

    def reserve(self, want: Want, wait_ms: float) -> Steps:
        """First come, first served. Raises: Overloaded when no memory came in time."""
        try:
            return self.try_reserve(want)
        except Overloaded:
            turn = Future()
            entry = (want, turn)
            self.waiting.append(entry)
        try:
            return (yield (turn, wait_ms))
        except (DeadlineExceeded, GeneratorExit) as left:
            if turn.done:  # it was given what it no longer waits for
                self.untake(turn.value)
                turn.value.drop()
            if isinstance(left, GeneratorExit):
                raise
            raise Overloaded("no memory came in time") from None
        finally:
            if entry in self.waiting:
                self.waiting.remove(entry)
                self._on_change()

    def serve_waiting(self) -> None:
        while self.waiting:
            want, turn = self.waiting[0]
            try:
                holding = self._hold(want)
            except Overloaded:
                return
            self.waiting.popleft()
            turn.set(holding)

    def give_back(self, holding: Holding) -> None:
        del self.holdings[holding]
        self._scheduler.release(holding.reservation)
        self._on_change()

    def _hold(self, want: Want) -> Holding:
        found = self.bundles.find(want.hashes, state=want.state) if want.hashes else None
        if found is not None and len(found.blocks) < want.blocks_min:
            found = None
        try:
            reservation = self._reserve(want, found)
        except Overloaded:
            if found is None:
                raise
            found = None
            reservation = self._reserve(want, None)
        if found is not None and found.slot is not None:
            self.snapshots[found.slot] += 1
        holding = Holding(self, reservation, found)
        own = reservation.blocks[reservation.shared :]
        self.rows.assign([cell for block in own for cell in block_cells(block)], "a reservation")
        self.state.assign(slot_cells(reservation.slot), "a reservation")
        self.holdings[holding] = None
        return holding

    def _reserve(self, want: Want, found: Found | None) -> Reservation:
        ledger, shared = self._scheduler.ledger, found.blocks if found is not None else ()
        if want.snapshots:
            self._make_room(want, found, want.snapshots)
        while True:
            try:
                return ledger.reserve(want.tokens, shared=shared, rolling=want.write_back and self._second_slot)
            except Overloaded:
                if not self._make_room(want, found, 0):
                    raise

    @property
    def _second_slot(self) -> bool:
        return self._scheduler.settings.writeback == "on"

    def _make_room(self, want: Want, found: Found | None, more_slots: int) -> bool:
        """Give up kept memory where the engine has too little; False where that is not so, or would not help."""
        ledger, spared = self._scheduler.ledger, found.blocks if found is not None else ()
        slot = found.slot if found is not None else None
        evicted = self.bundles.evict(
            blocks=-(-want.tokens // BLOCK_TOKENS) - len(spared) - ledger.free_blocks,
            slots=1 + (want.write_back and self._second_slot) + more_slots - ledger.free_slots,
            free_block=lambda block: block not in spared and ledger.holders(block) == 1,
            free_slot=lambda at: at != slot and self.snapshots[at] == 1,
        )
        self._give_up(evicted)
        return bool(evicted)

    # Snapshots and what is kept.

    def own_snapshot(self, slot: int) -> None:
        self.snapshots[slot] = 1

    def drop_snapshot(self, slot: int) -> None:
        self.snapshots[slot] -= 1
        if not self.snapshots[slot]:
            del self.snapshots[slot]
            self.state.thaw(slot_cells(slot))
            self._scheduler.ledger.release_snapshot(slot)
            self._on_change()

    def untake(self, holding: Holding) -> None:
        """The kept snapshot that `holding` found will not be copied, or has been."""
        if holding.found is not None and holding.found.slot is not None:
            self.drop_snapshot(holding.found.slot)

    def take(self, holding: Holding) -> int:
        """Copy the kept snapshot that `holding` found to its own slot; the tokens that it now has."""
        assert holding.found is not None and holding.found.slot is not None
        self.state.write(holding.state_cells(), self.state.read(slot_cells(holding.found.slot)))
        self.untake(holding)
        return len(holding.found.blocks) * BLOCK_TOKENS

    def keep(
        self, holding: Holding, root: bytes, hashes: Sequence[bytes], snapshots: Sequence[tuple[int, int]]
    ) -> None:
        """Keep full blocks that `hashes` name, and snapshots (depth in blocks, slot)."""
        if not self.bundles.blocks_max:
            return
        first, reservation = self.bundles.depth(hashes), holding.reservation
        blocks = reservation.blocks[first : len(hashes)]
        self._scheduler.ledger.retain(reservation, range(first, len(hashes)))
        self.bundles.keep(root, hashes, first, [(block, None) for block in blocks])
        for block, name in zip(blocks, hashes[first:], strict=True):
            self.rows.freeze(block_cells(block), "a kept block")
            self._world.checkers.kept(name, self.rows.read(block_cells(block)), state=False)
        depths = []
        for depth, slot in snapshots:
            if self.bundles.slots_max and self.bundles.keep_snapshot(hashes[depth - 1], slot):
                self._world.checkers.kept(hashes[depth - 1], self.state.read(slot_cells(slot)), state=True)
                self.snapshots[slot] += 1
                depths.append(depth)
        if blocks or depths:
            self._world.counts["kept_blocks"] += len(blocks)
            self.announce(root, hashes, first, depths)
        self._give_up(self.bundles.trim())

    def clear(self) -> None:
        """Keep nothing any more."""
        every = len(list(self.bundles.blocks))
        evicted = self.bundles.evict(blocks=every, slots=0, free_block=lambda _: True, free_slot=lambda _: True)
        self._give_up(evicted)

    def _give_up(self, evicted: Evicted | None) -> None:
        if not evicted:
            return
        for root in dict.fromkeys([*evicted.block_hashes, *evicted.snapshot_hashes]):
            self.withdraw(root, evicted.block_hashes.get(root, ()), evicted.snapshot_hashes.get(root, ()))
        self.rows.thaw([cell for block in evicted.blocks for cell in block_cells(block)])
        self._scheduler.ledger.drop(evicted.blocks)
        for slot in evicted.slots:
            self.drop_snapshot(slot)


def block_cells(block: int) -> range:
    return range(ROW_CELLS * block, ROW_CELLS * (block + 1))


def slot_cells(slot: int) -> range:
    return range(STATE_CELLS * slot, STATE_CELLS * (slot + 1))
