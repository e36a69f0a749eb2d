"""What the engine tells whoever measures it. Torch-free; the metrics themselves are the worker's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine.api import DraftReport
from engine.sequence import EndReason


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Units: seconds; token counts of what the pass ran over, drafted ones included.

    Of drafting: num_verified sequences had a draft, of num_drafted tokens in all, of which num_accepted were kept;
    draft_s and rows_s went into drafts and drafter rows since the last report; verify_s is the whole step, drafting
    aside, where it verified anything, fold_s a part of that; ignored counts drafts by what was wrong with them.
    """

    num_sequences: int
    num_prompt_tokens: int
    num_decode_tokens: int
    num_tokens_drawn: int
    forward_s: float
    sample_s: float
    total_s: float  # planning and bookkeeping included, events not yet handed out
    num_verified: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    draft_s: float = 0.0
    rows_s: float = 0.0
    verify_s: float = 0.0
    fold_s: float = 0.0
    ignored: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceReport:
    """One sequence, at its end. Units: seconds; a part that was never reached is None.

    queue: submitted to first planned; prefill: to the first token; decode: first token to the end.
    """

    reason: EndReason | None  # None: failed
    num_prompt_tokens: int  # computed here; restored ones not counted
    num_tokens_drawn: int
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    draft: DraftReport | None = None  # None: nobody drafted for it


class Observer(Protocol):
    """Called on the engine's thread with no lock held (`memory_freed` also on a releasing thread). Must not raise."""

    def step_done(self, report: StepReport) -> None: ...

    def sequence_done(self, report: SequenceReport) -> None: ...

    def memory_freed(self) -> None:
        """Blocks or slots came back: a reservation refused before may now succeed."""
        ...


class NullObserver:
    """The do-nothing twin."""

    def step_done(self, report: StepReport) -> None:
        pass

    def sequence_done(self, report: SequenceReport) -> None:
        pass

    def memory_freed(self) -> None:
        pass
