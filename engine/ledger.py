"""Who holds which row blocks and state slots. Torch-free; memory itself is in `engine.pools`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from engine.api import Reservation
from moonrelay.errors import InvariantError, Overloaded, RequestTooLarge


class Hold(Enum):
    """A reservation's state; one that is released is simply gone."""

    IDLE = auto()  # the caller may write to the memory
    BUSY = auto()  # a live sequence may be in a step
    LEAVING = auto()  # released by its caller, waiting for the sequence's end
    SPOILED = auto()  # a failed step may have half written it
    GONE = auto()


class Change(Enum):
    ATTACHED = auto()  # a sequence was submitted on it
    DETACHED = auto()  # that sequence ended
    FAULTED = auto()  # that sequence ended by a failed step
    RELEASED = auto()  # the caller gave it back


NEXT = {  # an absent pair raises InvariantError
    (Hold.IDLE, Change.ATTACHED): Hold.BUSY,
    (Hold.IDLE, Change.RELEASED): Hold.GONE,
    (Hold.BUSY, Change.DETACHED): Hold.IDLE,
    (Hold.BUSY, Change.FAULTED): Hold.SPOILED,
    (Hold.BUSY, Change.RELEASED): Hold.LEAVING,
    (Hold.LEAVING, Change.DETACHED): Hold.GONE,
    (Hold.LEAVING, Change.FAULTED): Hold.GONE,
    (Hold.LEAVING, Change.RELEASED): Hold.LEAVING,  # moot
    (Hold.SPOILED, Change.RELEASED): Hold.GONE,
}


@dataclass(slots=True)
class _Rolling:
    """The slot that keeps a decoding sequence's state at its last block boundary."""

    slot: int
    firm: bool  # set aside with the reservation: nobody else may have it
    tokens: int | None = None  # what it holds; None: nothing yet
    copying: bool = False  # a running step writes to it


@dataclass(slots=True)
class _Entry:
    reservation: Reservation
    hold: Hold = Hold.IDLE
    tokens_in_state: int | None = None  # None: never run here, so only the caller knows
    draft_first: int = 0  # the first token with valid drafter rows
    rolling: _Rolling | None = None


class Ledger:
    """Two budgets: row blocks, which may have several holders, and state slots, which never have.

    A block's holders are reservations that contain it and the worker's `retain`s; who holds a block together with
    others only reads it. Slots are shared out among sequences, snapshots and rolling copies.
    """

    def __init__(self, *, num_blocks: int, num_slots: int, block_tokens: int) -> None:
        self.num_blocks, self.num_slots, self.block_tokens = num_blocks, num_slots, block_tokens
        # Stacks: what was used last is used next, so that untouched pages stay untouched.
        self._free_blocks = list(range(num_blocks - 1, -1, -1))
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._retained: dict[int, int] = {}  # block -> how often
        self._entries: dict[int, _Entry] = {}
        self._snapshots: set[int] = set()
        self._num_issued = 0
        self._freed = False

    @property
    def free_blocks(self) -> int:
        return len(self._free_blocks)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def rolling_slots(self) -> int:
        return sum(entry.rolling is not None for entry in self._entries.values())

    def reserve(self, tokens: int, *, shared: Sequence[int] = (), rolling: bool = False) -> Reservation:
        """Set aside blocks for `tokens` and one slot, and with `rolling` a second one for its rolling copy.

        The reservation begins with the blocks `shared`, which somebody holds and which it may only read.
        Raises: RequestTooLarge if the whole pool could not hold them; Overloaded if it cannot now.
        """
        num_blocks, num_slots = -(-tokens // self.block_tokens), 1 + rolling
        if tokens < 1 or num_blocks > self.num_blocks or num_slots > self.num_slots:
            raise RequestTooLarge(f"{tokens} tokens need {num_blocks} blocks; this worker has {self.num_blocks}")
        if len(shared) > num_blocks or not all(self._holders[block] for block in shared):
            raise InvariantError("a reservation shares blocks that nobody holds")
        own = num_blocks - len(shared)
        if own > len(self._free_blocks):
            raise Overloaded(f"{own} blocks needed, {len(self._free_blocks)} free")
        while len(self._free_slots) < num_slots:
            if not self._give_up_rolling():
                raise Overloaded("no free state slot")
        split = len(self._free_blocks) - own
        blocks = (*shared, *reversed(self._free_blocks[split:]))
        del self._free_blocks[split:]
        for block in blocks:
            self._holders[block] += 1
        reservation = Reservation(
            id=self._num_issued, blocks=blocks, slot=self._free_slots.pop(), tokens=tokens, shared=len(shared)
        )
        self._num_issued += 1
        copy = _Rolling(slot=self._free_slots.pop(), firm=True) if rolling else None
        self._entries[reservation.id] = _Entry(reservation, rolling=copy)
        return reservation

    def retain(self, reservation: Reservation, indices: Iterable[int]) -> None:
        """One more holder for some of its blocks, by their index; they stay as they are until `drop`.

        Raises: InvariantError unless each is full: only then does its own sequence write to it no more.
        """
        entry = self._entry(reservation.id)
        full = (entry.tokens_in_state or 0) // self.block_tokens
        for index in indices:
            if not 0 <= index < full:
                raise InvariantError(f"block {index} retained where {full} are full")
            block = reservation.blocks[index]
            self._holders[block] += 1
            self._retained[block] = self._retained.get(block, 0) + 1

    def drop(self, blocks: Iterable[int]) -> None:
        """End a `retain` of each. Raises: InvariantError for one that is not retained."""
        for block in blocks:
            count = self._retained.get(block, 0)
            if count < 1:
                raise InvariantError(f"block {block} is not retained")
            if count == 1:
                del self._retained[block]
            else:
                self._retained[block] = count - 1
            self._unhold(block)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def attach(self, reservation: Reservation, *, restored: int, draft_first: int = 0) -> None:
        """A sequence starts on it after `restored` tokens, of which those from `draft_first` on have drafter rows.

        Raises: InvariantError if it is released, spoiled, in use, known to hold another number of tokens, or would
        write to a block that somebody else holds too.
        """
        entry = self._entry(reservation.id)
        if restored and entry.tokens_in_state not in (None, restored):
            raise InvariantError(f"state holds {entry.tokens_in_state} tokens, the sequence says {restored}")
        if any(self._holders[block] > 1 for block in reservation.blocks[restored // self.block_tokens :]):
            raise InvariantError(f"a sequence that starts after {restored} tokens would write to a shared block")
        self._move(entry, Change.ATTACHED)
        entry.tokens_in_state, entry.draft_first = restored, draft_first

    def tokens_in_state(self, reservation: Reservation) -> int | None:
        """How many tokens its rows and state have consumed; None before its first sequence."""
        return self._entry(reservation.id).tokens_in_state

    def draft_first(self, reservation: Reservation) -> int:
        """The first token with valid drafter rows."""
        return self._entry(reservation.id).draft_first

    def draft_cold(self, reservation: Reservation, first: int) -> None:
        """Drafter rows are valid from `first` on only."""
        entry = self._entry(reservation.id)
        entry.draft_first = max(entry.draft_first, first)

    def advance(self, reservation: Reservation, *, start: int, tokens: int) -> None:
        """A step consumed `tokens` after `start`. Raises: InvariantError if the state was not at `start`."""
        entry = self._entry(reservation.id)
        if entry.tokens_in_state != start or start + tokens > reservation.tokens:
            raise InvariantError(f"a step moved [{start}, {start + tokens}), the state held {entry.tokens_in_state}")
        entry.tokens_in_state = start + tokens

    def detach(self, reservation: Reservation, *, faulted: bool = False) -> None:
        """Its sequence ended; memory that was released meanwhile comes back."""
        self._move(self._entry(reservation.id), Change.FAULTED if faulted else Change.DETACHED)

    def release(self, reservation: Reservation) -> Hold:
        """The caller gives it back; LEAVING means that a live sequence still has to end. Idempotent."""
        entry = self._entries.get(reservation.id)
        if entry is None:
            return Hold.GONE
        self._move(entry, Change.RELEASED)
        return entry.hold

    def take_snapshot(self) -> int | None:
        """A slot for a copy of a state, or None when all are taken."""
        if not self._free_slots and not self._give_up_rolling():
            return None
        slot = self._free_slots.pop()
        self._snapshots.add(slot)
        return slot

    def roll(self, reservation: Reservation) -> int | None:
        """Where a step may copy the sequence's state, until `rolled`; None when there is no slot for it."""
        entry = self._entry(reservation.id)
        if entry.rolling is None:
            if not self._free_slots:
                return None
            entry.rolling = _Rolling(slot=self._free_slots.pop(), firm=False)
        entry.rolling.copying = True
        return entry.rolling.slot

    def rolled(self, reservation: Reservation, tokens: int | None) -> None:
        """The step is over: the copy is of the state after `tokens`; None: of nothing."""
        rolling = self._entry(reservation.id).rolling
        if rolling is None or not rolling.copying:
            raise InvariantError("a state was copied that nobody asked for")
        rolling.copying, rolling.tokens = False, tokens

    def keep_rolling(self, reservation: Reservation) -> tuple[int, int] | None:
        """The rolling copy becomes a snapshot: (tokens, slot); None where there is none."""
        entry = self._entry(reservation.id)
        rolling = entry.rolling
        if rolling is None or rolling.tokens is None:
            return None
        entry.rolling = None
        self._snapshots.add(rolling.slot)
        return rolling.tokens, rolling.slot

    def release_snapshot(self, slot: int) -> None:
        """Raises: InvariantError if `slot` is no snapshot: a second release could free someone else's."""
        if slot not in self._snapshots:
            raise InvariantError(f"slot {slot} holds no snapshot")
        self._snapshots.remove(slot)
        self._free_slots.append(slot)
        self._freed = True

    def take_freed(self) -> bool:
        """Whether any memory came back since the last call."""
        freed, self._freed = self._freed, False
        return freed

    def check(self) -> None:
        """Every block is free or has the holders it counts, every slot is in exactly one place.

        Raises: InvariantError.
        """
        entries = list(self._entries.values())
        counts = [self._retained.get(block, 0) for block in range(self.num_blocks)]
        for entry in entries:
            for block in entry.reservation.blocks:
                counts[block] += 1
        if counts != self._holders:
            raise InvariantError("row blocks have other holders than they count")
        if sorted(self._free_blocks) != [block for block, count in enumerate(counts) if not count]:
            raise InvariantError(f"row blocks do not balance: {len(self._free_blocks)} of {self.num_blocks} free")
        rolling = [entry.rolling.slot for entry in entries if entry.rolling is not None]
        slots = [*self._free_slots, *self._snapshots, *rolling, *(entry.reservation.slot for entry in entries)]
        if sorted(slots) != list(range(self.num_slots)):
            raise InvariantError(f"state slots do not balance: {len(slots)} of {self.num_slots}")

    def _entry(self, reservation_id: int) -> _Entry:
        entry = self._entries.get(reservation_id)
        if entry is None:
            raise InvariantError(f"reservation {reservation_id} was released")
        return entry

    def _move(self, entry: _Entry, change: Change) -> None:
        """Follow the table; memory comes back where that ends in GONE."""
        after = NEXT.get((entry.hold, change))
        if after is None:
            raise InvariantError(f"reservation {entry.reservation.id}: {change.name} while {entry.hold.name}")
        entry.hold = after
        if after is not Hold.GONE:
            return
        reservation = entry.reservation
        del self._entries[reservation.id]
        for block in reversed(reservation.blocks):
            self._unhold(block)
        self._free_slots.append(reservation.slot)
        if entry.rolling is not None:
            self._free_slots.append(entry.rolling.slot)
        self._freed = True

    def _unhold(self, block: int) -> None:
        self._holders[block] -= 1
        if not self._holders[block]:
            self._free_blocks.append(block)
            self._freed = True

    def _give_up_rolling(self) -> bool:
        """Free a rolling copy that was not set aside: the emptiest first. False where there is none to give up."""
        spare = [e for e in self._entries.values() if e.rolling and not (e.rolling.firm or e.rolling.copying)]
        if not spare:
            return False
        entry = min(spare, key=lambda e: (e.rolling.tokens or 0) if e.rolling else 0)
        assert entry.rolling is not None
        self._free_slots.append(entry.rolling.slot)
        entry.rolling = None
        return True
