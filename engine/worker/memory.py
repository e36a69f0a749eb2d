"""The engine's pools as a worker lends them out: admission in order, shared holds, byte ranges for transports."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from engine.api import Reservation
from engine.engine import Engine
from model.batch import FLOAT_BYTES
from moonrelay.errors import InvariantError, Overloaded, Unavailable

ROWS_POOL = 0  # ids under which the pools are registered with the transports
STATE_POOL = 1


class Extent(NamedTuple):
    """A byte range of one registered pool."""

    pool: int
    offset: int
    length: int


class Holding:
    """A reservation with several users; the engine gets it back when the last one has dropped it.

    A prompt's memory is used by its sequence, then by the handoff that is read from it and by the cache node that
    copies from it, in any order of ending.
    """

    def __init__(self, memory: Memory, reservation: Reservation) -> None:
        self._memory = memory
        self.reservation = reservation
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
    def block_bytes(self) -> int:
        return self._memory.block_bytes

    @property
    def nbytes(self) -> int:
        return self._memory.block_bytes * len(self.reservation.blocks) + self._memory.slot_bytes

    def rows(self, first: int, end: int) -> list[Extent]:
        """Blocks [first, end) of the sequence, in token order."""
        return [self._memory.block(block) for block in self.reservation.blocks[first:end]]

    def state(self) -> Extent:
        """The whole slot: recurrent state, then conv history, without a gap."""
        return self._memory.slot(self.reservation.slot)

    def state_parts(self) -> list[Extent]:
        return self._memory.slot_parts(self.reservation.slot)


@dataclass(slots=True, eq=False)
class _Waiter:
    tokens: int
    wake: asyncio.Future[None]
    holding: Holding | None = None


class Memory:
    """Reservations for the event loop's tasks. Everything but `freed` runs on the loop's thread."""

    def __init__(self, engine: Engine, *, waiting_max: int) -> None:
        self._engine = engine
        layout = engine.pools.layout
        self.block_bytes = layout.block_floats * FLOAT_BYTES
        self.slot_bytes = layout.slot_floats * FLOAT_BYTES
        self._recurrent_bytes = layout.recurrent_floats * FLOAT_BYTES
        self._waiting_max = waiting_max
        self._waiting: deque[_Waiter] = deque()
        self._holdings: set[Holding] = set()
        self._snapshots: set[int] = set()
        self._suspects = (0, 0)

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

    def try_reserve(self, tokens: int) -> Holding:
        """Never waits, and never overtakes who does. Raises: Overloaded, RequestTooLarge, Unavailable."""
        if self._waiting:
            raise Overloaded(f"{len(self._waiting)} prompts are waiting for memory")
        return self._hold(tokens)

    async def reserve(self, tokens: int, deadline_s: float) -> Holding:
        """First come, first served; waits until `deadline_s` on the loop's clock.

        Raises: Overloaded when the queue is full or time is up, RequestTooLarge, Unavailable.
        """
        try:
            return self.try_reserve(tokens)
        except Overloaded:
            if len(self._waiting) >= self._waiting_max:
                raise
        waiter = _Waiter(tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout_at(deadline_s):
                await waiter.wake
        except (TimeoutError, asyncio.CancelledError) as gave_up:
            if waiter.holding is not None:  # both happened at once
                waiter.holding.drop()
            if isinstance(gave_up, TimeoutError):
                raise Overloaded(f"no memory for {tokens} tokens in time") from None
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
                waiter.holding = self._hold(waiter.tokens)
            except Overloaded:
                return
            except Unavailable as stopping:
                waiter.wake.set_exception(stopping)
            else:
                waiter.wake.set_result(None)
            self._waiting.popleft()

    def own_snapshot(self, slot: int) -> None:
        self._snapshots.add(slot)

    def drop_snapshot(self, slot: int) -> None:
        self._snapshots.remove(slot)
        self._engine.release_snapshot(slot)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_held(self) -> int:
        return len(self._holdings) + len(self._snapshots)

    def leaked(self) -> tuple[int, int]:
        """Blocks and slots that are taken but that nobody here holds; 0, 0 unless something was lost.

        Memory on its way between the engine and here looks lost for a moment, so only what two calls in a row see
        in an engine without work counts.
        """
        stats = self._engine.stats()
        now = (0, 0)
        if not (stats.num_running or stats.num_waiting):
            held_blocks = sum(len(holding.reservation.blocks) for holding in self._holdings)
            now = (
                stats.num_blocks - stats.free_blocks - held_blocks,
                stats.num_slots - stats.free_slots - self.num_held,
            )
        before, self._suspects = self._suspects, now
        return min(now[0], before[0]), min(now[1], before[1])

    def give_back(self, holding: Holding) -> None:
        """Called by the holding itself, once."""
        self._holdings.remove(holding)
        self._engine.release(holding.reservation)

    def _hold(self, tokens: int) -> Holding:
        holding = Holding(self, self._engine.reserve(tokens))
        self._holdings.add(holding)
        return holding
