"""What the engine tells whoever measures it. Torch-free; the metrics themselves are the worker's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.sequence import EndReason


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step. Units: seconds; token counts of what the pass consumed."""

    num_sequences: int
    num_prompt_tokens: int
    num_decode_tokens: int
    num_tokens_drawn: int
    forward_s: float
    sample_s: float
    total_s: float  # planning and bookkeeping included, events not yet handed out


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
