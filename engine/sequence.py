"""One live sequence and the table of its phases. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from engine.api import EngineEvent, FinishReason, Reservation, SequenceSpec
from moonrelay.errors import InvariantError

Emit = Callable[[EngineEvent], None]
EndReason = FinishReason | Literal["held"]


class Phase(Enum):
    WAITING = auto()  # first come, first served, for a place in the batch
    PREFILL = auto()  # ids of the spec remain to be consumed
    DECODE = auto()  # the last drawn token is consumed next
    ENDED = auto()


class Happened(Enum):
    ADMITTED = auto()
    CONSUMED = auto()  # a chunk that left ids to consume
    DRAWN = auto()  # a token, and more may follow
    COMPLETED = auto()  # the last token: stop, length or hold
    CANCELLED = auto()
    FAULTED = auto()


NEXT = {  # an absent pair raises InvariantError
    (Phase.WAITING, Happened.ADMITTED): Phase.PREFILL,
    (Phase.WAITING, Happened.CANCELLED): Phase.ENDED,
    (Phase.WAITING, Happened.FAULTED): Phase.ENDED,  # the engine stops
    (Phase.PREFILL, Happened.CONSUMED): Phase.PREFILL,
    (Phase.PREFILL, Happened.DRAWN): Phase.DECODE,
    (Phase.PREFILL, Happened.COMPLETED): Phase.ENDED,
    (Phase.PREFILL, Happened.CANCELLED): Phase.ENDED,
    (Phase.PREFILL, Happened.FAULTED): Phase.ENDED,
    (Phase.DECODE, Happened.DRAWN): Phase.DECODE,
    (Phase.DECODE, Happened.COMPLETED): Phase.ENDED,
    (Phase.DECODE, Happened.CANCELLED): Phase.ENDED,
    (Phase.DECODE, Happened.FAULTED): Phase.ENDED,
}


@dataclass(slots=True)
class Timeline:
    """When things happened to a sequence, for reports only. Units: seconds of the engine's clock; None: not yet."""

    submitted_s: float | None = None
    planned_s: float | None = None
    first_token_s: float | None = None


class LiveSequence:
    """A submitted sequence until its last event; only the scheduler changes it.

    Units: `consumed` counts tokens in rows and state, restored ones included; `prompt_end` is restored + len(ids).
    """

    __slots__ = (
        "blocks",
        "cancelled",
        "consumed",
        "draws",
        "draws_left",
        "emit",
        "last_id",
        "phase",
        "prompt_end",
        "reservation",
        "snapshots",
        "spec",
        "stop_ids",
        "timeline",
    )

    def __init__(self, spec: SequenceSpec, reservation: Reservation, emit: Emit, *, draws: int) -> None:
        self.spec, self.reservation, self.emit = spec, reservation, emit
        self.phase = Phase.WAITING
        self.consumed = spec.restored
        self.prompt_end = spec.restored + len(spec.ids)
        self.draws = self.draws_left = draws
        self.timeline = Timeline()
        self.last_id: int | None = None
        self.cancelled = False
        # A buffer of C ints: a backend reads a long sequence's blocks at every step without converting them.
        self.blocks: Sequence[int] = array("i", reservation.blocks)
        self.snapshots = list(reversed(spec.snapshot_at))  # the next one last
        self.stop_ids = frozenset(spec.sampling.stop_token_ids)

    @property
    def pending(self) -> int:
        """Ids that are known and not consumed: one while it decodes."""
        return max(self.prompt_end - self.consumed, 1)

    def ids(self, count: int) -> Sequence[int]:
        """The next `count` ids to consume."""
        if self.last_id is not None:
            return (self.last_id,)
        first = self.consumed - self.spec.restored
        return self.spec.ids[first : first + count]

    def move(self, happened: Happened) -> None:
        after = NEXT.get((self.phase, happened))
        if after is None:
            raise InvariantError(f"sequence {self.spec.request_id}: {happened.name} while {self.phase.name}")
        self.phase = after
