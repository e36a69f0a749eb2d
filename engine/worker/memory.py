"""The engine's pools as a worker lends them out: admission in order, shared holds, byte ranges for transports."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from engine.api import EngineStats, Reservation
from engine.engine import Engine
from engine.worker.bundles import Bundles, Evicted, Found
from model.batch import FLOAT_BYTES
from moonrelay.errors import InvariantError, Overloaded, Unavailable

ROWS_POOL = 0  # ids under which the pools are registered with the transports
STATE_POOL = 1


class Extent(NamedTuple):
    """A byte range of one registered pool."""

    pool: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What a sequence needs.

    `hashes` are those of its prompt's blocks that it need not compute: the reservation begins with the ones that are
    kept here, with `state` as deep as there is a snapshot, and at least `blocks_min` deep or not at all.
    `snapshots`: slots that its own snapshots would like to find free.
    """

    tokens: int
    write_back: bool = False
    hashes: Sequence[bytes] = ()
    state: bool = True
    blocks_min: int = 1
    snapshots: int = 0


class Announcer(Protocol):
    """The index, as far as it says what this worker keeps. Neither call waits: they queue, in order, best effort."""

    def announce(self, root: bytes, hashes: Sequence[bytes], first: int, end: int, snapshots: Sequence[int]) -> None:
        """Blocks [first, end) of a chain, and the snapshots at these depths in blocks, are kept here."""
        ...

    def withdraw(self, root: bytes, blocks: Sequence[bytes], snapshots: Sequence[bytes]) -> None: ...


class Holding:
    """A reservation with several users; the engine gets it back when the last one has dropped it.

    A prompt's memory is used by its sequence, then by the handoff that is read from it and by the cache node that
    copies from it, in any order of ending.
    """

    def __init__(self, memory: Memory, reservation: Reservation, found: Found | None = None) -> None:
        self._memory = memory
        self.reservation = reservation
        self.found = (
            found  # what it begins with; a snapshot's slot is the taker's to `drop_snapshot` once it is copied
        )
        self._users = 1

    def share(self) -> Holding:
        """One more user, who must `drop` it too."""
        if self._users < 1:
            raise InvariantError("memory shared after it was given back")
        self._users += 1
        return self

    def drop(self) -> None:
        if self._users < 1:
            raise InvariantError("memory given back twice")
        self._users -= 1
        if self._users == 0:
            self._memory.give_back(self)

    @property
    def nbytes(self) -> int:
        return self._memory.block_bytes * len(self.reservation.blocks) + self._memory.slot_bytes

    @property
    def draft_bytes(self) -> int:
        """Of each block, the drafter's part."""
        return self._memory.draft_bytes

    def rows(self, first: int, end: int) -> list[Extent]:
        """Blocks [first, end) of the sequence, in token order."""
        return [self._memory.block(block) for block in self.reservation.blocks[first:end]]

    def target_rows(self, first: int, end: int) -> list[Extent]:
        """The same blocks without the drafter's part."""
        size = self._memory.block_bytes - self._memory.draft_bytes
        return [Extent(pool, offset, size) for pool, offset, _ in self.rows(first, end)]

    def draft_rows(self, first: int, end: int) -> list[Extent]:
        """The drafter's part of the same blocks."""
        size = self._memory.draft_bytes
        return [Extent(pool, offset + length - size, size) for pool, offset, length in self.rows(first, end)]

    def state(self) -> Extent:
        """The whole slot: recurrent state, then conv history, without a gap."""
        return self._memory.slot(self.reservation.slot)

    def state_parts(self) -> list[Extent]:
        return self._memory.slot_parts(self.reservation.slot)


@dataclass(slots=True, eq=False)
class _Waiter:
    want: Want
    wake: asyncio.Future[None]
    holding: Holding | None = None


class Memory:
    """Reservations for the event loop's tasks, and the book of what is kept between them. On the loop's thread only.

    What is kept (`bundles`) never stands in a reservation's way: it is given up, oldest first, where room is short.
    Other processes only learn of it to place requests well: nobody reads it but this worker, which asks its own book.
    So an index entry may outlive its memory by a moment, and `withdraw` need not be waited for.
    """

    def __init__(self, engine: Engine, *, waiting_max: int, kept_share: float = 0.0) -> None:
        self._engine = engine
        layout, settings = engine.pools.layout, engine.settings
        self.block_bytes = layout.block_floats * FLOAT_BYTES
        self.draft_bytes = layout.draft_floats * FLOAT_BYTES  # of these, the drafter's, behind the target's
        self.slot_bytes = layout.slot_floats * FLOAT_BYTES
        self._recurrent_bytes = layout.recurrent_floats * FLOAT_BYTES
        self._block_tokens = settings.block_tokens
        self._second_slot = settings.writeback == "on"
        self._waiting_max = waiting_max
        self._waiting: deque[_Waiter] = deque()
        self._holdings: set[Holding] = set()
        self._snapshots: dict[int, int] = {}  # slot -> users: a publish, a copy, the book
        self._suspects = (0, 0)
        self.bundles = Bundles(
            blocks_max=int(kept_share * settings.num_blocks), slots_max=int(kept_share * settings.num_slots)
        )
        self.announcer: Announcer | None = None
        self._spare = (0, 0)

    def pools(self) -> dict[int, tuple[int, int]]:
        """What the transports register: address and length in bytes by pool id."""
        rows, state = self._engine.rows, self._engine.state
        return {ROWS_POOL: (rows.data_ptr(), rows.nbytes), STATE_POOL: (state.data_ptr(), state.nbytes)}

    def block(self, index: int) -> Extent:
        return Extent(ROWS_POOL, index * self.block_bytes, self.block_bytes)

    def slot(self, index: int) -> Extent:
        return Extent(STATE_POOL, index * self.slot_bytes, self.slot_bytes)

    def slot_parts(self, index: int) -> list[Extent]:
        """Recurrent state and conv history: what re-sharding would treat apart."""
        start, split = index * self.slot_bytes, self._recurrent_bytes
        return [Extent(STATE_POOL, start, split), Extent(STATE_POOL, start + split, self.slot_bytes - split)]

    def try_reserve(self, tokens: int, *, hashes: Sequence[bytes] = (), write_back: bool = False) -> Holding:
        """For a sequence whose state comes from elsewhere: rows of `hashes` that are kept here are shared.

        Never waits, and never overtakes who does. Raises: Overloaded, RequestTooLarge, Unavailable.
        """
        return self._try(Want(tokens=tokens, hashes=hashes, write_back=write_back, state=False))

    async def reserve(self, want: Want, deadline_s: float) -> Holding:
        """First come, first served; waits until `deadline_s` on the loop's clock.

        Raises: Overloaded when the queue is full or time is up, RequestTooLarge, Unavailable.
        """
        try:
            return self._try(want)
        except Overloaded:
            if len(self._waiting) >= self._waiting_max:
                raise
        waiter = _Waiter(want, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout_at(deadline_s):
                await waiter.wake
        except (TimeoutError, asyncio.CancelledError) as gave_up:
            if waiter.holding is not None:  # both happened at once
                self.untake(waiter.holding)
                waiter.holding.drop()
            if isinstance(gave_up, TimeoutError):
                raise Overloaded(f"no memory for {want.tokens} tokens in time") from None
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self.serve_waiting()  # who stood behind it may fit
        assert waiter.holding is not None
        return waiter.holding

    def serve_waiting(self) -> None:
        """Hand out what came back, in order of arrival; called whenever the engine's memory was freed."""
        while self._waiting:
            waiter = self._waiting[0]
            try:
                waiter.holding = self._hold(waiter.want)
            except Overloaded:
                return
            except Unavailable as stopping:
                waiter.wake.set_exception(stopping)
            else:
                waiter.wake.set_result(None)
            self._waiting.popleft()

    def own_snapshot(self, slot: int) -> None:
        self._snapshots[slot] = 1

    def share_snapshot(self, slot: int) -> None:
        """One more user, who must `drop_snapshot` it too."""
        self._snapshots[slot] += 1

    def drop_snapshot(self, slot: int) -> None:
        self._snapshots[slot] -= 1
        if not self._snapshots[slot]:
            del self._snapshots[slot]
            self._engine.release_snapshot(slot)

    def untake(self, holding: Holding) -> None:
        """The kept snapshot that `holding` found will not be copied, or has been."""
        if holding.found is not None and holding.found.slot is not None:
            self.drop_snapshot(holding.found.slot)

    def keep(
        self,
        holding: Holding,
        root: bytes,
        hashes: Sequence[bytes],
        xxh3: Sequence[int | None],
        snapshots: Sequence[tuple[int, int]],
        drafted_from: int = 0,
    ) -> None:
        """Keep the blocks that `hashes` name, full ones of `holding`, with their checksums where known; and snapshots
        (depth in blocks, slot), each of which the book uses beside its owner. Blocks from `drafted_from` on hold the
        drafter's rows."""
        if not self.bundles.blocks_max:
            return
        first, reservation = self.bundles.depth(hashes), holding.reservation
        new = list(zip(reservation.blocks[first : len(hashes)], xxh3[first:], strict=True))
        self._engine.retain(reservation, range(first, len(hashes)))
        self.bundles.keep(root, hashes, first, new, drafted_from)
        depths = []
        for depth, slot in snapshots:
            if self.bundles.slots_max and self.bundles.keep_snapshot(hashes[depth - 1], slot):
                self.share_snapshot(slot)
                depths.append(depth)
        if self.announcer is not None and (new or depths):
            self.announcer.announce(root, hashes, first, len(hashes), depths)
        self._give_up(self.bundles.trim())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_held(self) -> int:
        """What requests, publishes and transfers hold; what is merely kept does not count."""
        kept = set(self.bundles.slots)
        return len(self._holdings) + sum(users > (slot in kept) for slot, users in self._snapshots.items())

    def leaked(self) -> tuple[int, int]:
        """Blocks and slots that are taken but that nobody here holds or keeps; 0, 0 unless something was lost.

        Memory on its way between the engine and here looks lost for a moment, so only what two calls in a row see
        in an engine without work counts.
        """
        stats = self._engine.stats()
        now = (0, 0)
        if not (stats.num_running or stats.num_waiting):
            held = {block for holding in self._holdings for block in holding.reservation.blocks}
            held.update(self.bundles.blocks)
            slots = len(self._holdings) + len(self._snapshots) + stats.rolling_slots
            now = (stats.num_blocks - stats.free_blocks - len(held), stats.num_slots - stats.free_slots - slots)
        before, self._suspects = self._suspects, now
        return min(now[0], before[0]), min(now[1], before[1])

    def recount(self) -> None:
        """Count anew what could be given up at once, for `stats`."""
        blocks = sum(count == 1 for count in self._engine.holders_of(list(self.bundles.blocks)))
        self._spare = (blocks, sum(self._snapshots[slot] == 1 for slot in self.bundles.slots))

    def stats(self) -> EngineStats:
        """The engine's, with what could be given up (as of the last `recount`) counted as free. From any thread."""
        stats, (blocks, slots) = self._engine.stats(), self._spare
        return replace(
            stats,
            free_blocks=min(stats.free_blocks + blocks, stats.num_blocks),
            free_slots=min(stats.free_slots + slots, stats.num_slots),
        )

    def check(self) -> None:
        """Raises: InvariantError where the book does not hold, or names what is not held for it."""
        self.bundles.check()
        if not set(self.bundles.slots) <= self._snapshots.keys():
            raise InvariantError("a kept snapshot's slot was given back")
        if not all(self._engine.holders_of(list(self.bundles.blocks))):
            raise InvariantError("a kept block was given back")

    def clear(self) -> None:
        """Keep nothing any more."""
        self._give_up(
            self.bundles.evict(
                blocks=self.bundles.num_blocks, slots=0, free_block=lambda _: True, free_slot=lambda _: True
            )
        )

    def give_back(self, holding: Holding) -> None:
        """Called by the holding itself, once."""
        self._holdings.remove(holding)
        self._engine.release(holding.reservation)

    def _try(self, want: Want) -> Holding:
        if self._waiting:
            raise Overloaded(f"{len(self._waiting)} prompts are waiting for memory")
        return self._hold(want)

    def _hold(self, want: Want) -> Holding:
        found = self.bundles.find(want.hashes, state=want.state) if want.hashes else None
        if found is not None and len(found.blocks) < want.blocks_min:
            found = None
        try:
            reservation = self._reserve(want, found)
        except Overloaded:
            if found is None:
                raise
            found = None  # what it would have begun with is itself in the way: its snapshot takes a slot
            reservation = self._reserve(want, None)
        if found is not None and found.slot is not None:
            self.share_snapshot(found.slot)
        holding = Holding(self, reservation, found)
        self._holdings.add(holding)
        return holding

    def _reserve(self, want: Want, found: Found | None) -> Reservation:
        shared = found.blocks if found is not None else ()
        copies = want.snapshots + (want.write_back and not self._second_slot)
        if copies:  # the engine takes slots for them later and on its own thread, where nothing is given up
            self._make_room(want, found, copies)
        while True:
            try:
                return self._engine.reserve(want.tokens, shared=shared, write_back=want.write_back)
            except Overloaded:
                if not self._make_room(want, found, 0):
                    raise

    def _make_room(self, want: Want, found: Found | None, more_slots: int) -> bool:
        """Give up kept memory where the engine has too little; False where that is not so, or would not help."""
        stats, spared = self._engine.stats(), set(found.blocks if found is not None else ())
        blocks = -(-want.tokens // self._block_tokens) - len(spared) - stats.free_blocks
        slots = 1 + (want.write_back and self._second_slot) + more_slots - stats.free_slots
        slot = found.slot if found is not None else None
        evicted = self.bundles.evict(
            blocks=blocks,
            slots=slots,
            free_block=lambda block: block not in spared and self._engine.holders(block) == 1,
            free_slot=lambda at: at != slot and self._snapshots[at] == 1,
        )
        self._give_up(evicted)
        return bool(evicted)

    def _give_up(self, evicted: Evicted | None) -> None:
        if not evicted:
            return
        if self.announcer is not None:
            for root in evicted.block_hashes.keys() | evicted.snapshot_hashes.keys():
                self.announcer.withdraw(
                    root, evicted.block_hashes.get(root, ()), evicted.snapshot_hashes.get(root, ())
                )
        self._engine.drop(evicted.blocks)
        for slot in evicted.slots:
            self.drop_snapshot(slot)
