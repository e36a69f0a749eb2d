"""Who holds which row blocks and state slots. Torch-free; memory itself is in `engine.pools`."""

from __future__ import annotations

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
class _Entry:
    reservation: Reservation
    hold: Hold = Hold.IDLE
    tokens_in_state: int | None = None  # None: never run here, so only the caller knows


class Ledger:
    """Two budgets: row blocks, and state slots, which sequences and snapshots share."""

    def __init__(self, *, num_blocks: int, num_slots: int, block_tokens: int) -> None:
        self.num_blocks, self.num_slots, self.block_tokens = num_blocks, num_slots, block_tokens
        # Stacks: what was used last is used next, so that untouched pages stay untouched.
        self._free_blocks = list(range(num_blocks - 1, -1, -1))
        self._free_slots = list(range(num_slots - 1, -1, -1))
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

    def reserve(self, tokens: int) -> Reservation:
        """Set aside blocks for `tokens` and one slot.

        Raises: RequestTooLarge if the whole pool could not hold them; Overloaded if it cannot now.
        """
        num_blocks = -(-tokens // self.block_tokens)
        if tokens < 1 or num_blocks > self.num_blocks:
            raise RequestTooLarge(f"{tokens} tokens need {num_blocks} blocks; this worker has {self.num_blocks}")
        if num_blocks > len(self._free_blocks):
            raise Overloaded(f"{num_blocks} blocks needed, {len(self._free_blocks)} free")
        if not self._free_slots:
            raise Overloaded("no free state slot")
        split = len(self._free_blocks) - num_blocks
        blocks = tuple(reversed(self._free_blocks[split:]))
        del self._free_blocks[split:]
        reservation = Reservation(id=self._num_issued, blocks=blocks, slot=self._free_slots.pop(), tokens=tokens)
        self._num_issued += 1
        self._entries[reservation.id] = _Entry(reservation)
        return reservation

    def attach(self, reservation: Reservation, *, restored: int) -> None:
        """A sequence starts on it after `restored` tokens.

        Raises: InvariantError if it is released, spoiled, in use, or known to hold another number of tokens.
        """
        entry = self._entry(reservation.id)
        if restored and entry.tokens_in_state not in (None, restored):
            raise InvariantError(f"state holds {entry.tokens_in_state} tokens, the sequence says {restored}")
        self._move(entry, Change.ATTACHED)
        entry.tokens_in_state = restored

    def tokens_in_state(self, reservation: Reservation) -> int | None:
        """How many tokens its rows and state have consumed; None before its first sequence."""
        return self._entry(reservation.id).tokens_in_state

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
        if not self._free_slots:
            return None
        slot = self._free_slots.pop()
        self._snapshots.add(slot)
        return slot

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
        """Every block and slot is in exactly one place. Raises: InvariantError."""
        held = [entry.reservation for entry in self._entries.values()]
        blocks = [*self._free_blocks, *(block for r in held for block in r.blocks)]
        slots = [*self._free_slots, *self._snapshots, *(r.slot for r in held)]
        if sorted(blocks) != list(range(self.num_blocks)):
            raise InvariantError(f"row blocks do not balance: {len(blocks)} of {self.num_blocks}")
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
        self._free_blocks.extend(reversed(reservation.blocks))
        self._free_slots.append(reservation.slot)
        self._freed = True
