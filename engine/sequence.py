"""One live sequence and the table of its phases. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Literal

from engine.api import DraftReport, EngineEvent, FinishReason, Reservation, SequenceSpec
from engine.draft_policy import Acceptance, Draws
from engine.shift import Shift
from moonrelay.errors import InvariantError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from model.text import Text

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Tokens to verify behind the last one, at least one; laws [len(tokens), vocab]: see `core.Draw`."""

    tokens: Sequence[int]
    laws: npt.NDArray[np.float32] | None = None

    def cut(self, length: int) -> Draft | None:
        if length < 1:
            return None
        if length >= len(self.tokens):
            return self
        return Draft(tokens=self.tokens[:length], laws=None if self.laws is None else self.laws[:length])


@dataclass(slots=True, kw_only=True)
class Drafting:
    """What drafting did for a sequence so far, as `api.DraftReport` says it, and what is expected of its drafts.

    `claimed`: the drafter's confidence in each token of its last draft. `text`: the ids that were known at the last
    draft, `heard` drawn ones among them. `readings` and `read`: of drafts read from the text, whether
    the last was one; `quiet`: steps in which the text was looked into since one gave a draft.
    """

    draws: Draws
    acceptance: Acceptance
    readings: Acceptance
    read: bool = False
    text: Text | None = None
    heard: int = 0
    quiet: int = 0
    claimed: Sequence[float] = ()
    drafted: int = 0
    accepted: int = 0
    verify_steps: int = 0
    kept: int = 0  # tokens that verified steps gave, their own among them
    draft_s: float = 0.0
    verify_s: float = 0.0
    saved_s: float = 0.0

    def report(self, drawn: int) -> DraftReport:
        """Of a sequence that drew so many tokens: the first by its prompt's own pass, the others one a plain step."""
        return DraftReport(
            drafted=self.drafted,
            accepted=self.accepted,
            verify_steps=self.verify_steps,
            plain_steps=max(0, drawn - 1 - self.kept),
            draft_s=self.draft_s,
            verify_s=self.verify_s,
            saved_s=self.saved_s,
        )


class LiveSequence:
    """A submitted sequence until its last event; only the scheduler changes it.

    Units: `consumed` counts tokens in rows and state, restored ones included; `prompt_end` is restored + len(ids).
    """

    __slots__ = (
        "blocks",
        "cancelled",
        "consumed",
        "draft",
        "draft_first",
        "drafting",
        "drawn",
        "draws",
        "draws_left",
        "emit",
        "last_id",
        "phase",
        "prompt_end",
        "reservation",
        "shift",
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
        self.drawn: list[int] = []
        self.shift = Shift(spec.sampling, self.drawn) if spec.sampling.shifts else None
        self.draft: Draft | None = None  # for the next step
        self.draft_first = spec.draft_first  # the first token with valid drafter rows
        self.drafting: Drafting | None = None  # None: nobody drafts for it
        self.cancelled = False
        # A buffer of C ints: a backend reads a long sequence's blocks at every step without converting them.
        self.blocks: Sequence[int] = array("i", reservation.blocks)
        self.snapshots = list(reversed(spec.snapshot_at))  # the next one last
        self.stop_ids = frozenset(spec.sampling.stop_token_ids)

    @property
    def pending(self) -> int:
        """Ids that are known and not consumed: one while it decodes."""
        return max(self.prompt_end - self.consumed, 1)

    @property
    def draft_report(self) -> DraftReport | None:
        """What drafting did so far; None: nobody drafts for it."""
        return self.drafting.report(self.draws - self.draws_left) if self.drafting is not None else None

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
