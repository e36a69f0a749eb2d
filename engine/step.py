"""One planned forward pass, as the scheduler hands it to the engine. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from engine.api import SampledToken, SamplingParams
from engine.sequence import LiveSequence
from model.batch import Fold, Segment
from moonrelay.errors import ServeError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engine.shift import Shift


class Draw(msgspec.Struct, frozen=True, kw_only=True):
    """One token to draw: `params`' law over a row of logits, for the token at `position` of the sequence.

    With `drafted` tokens to judge first, the first of them at `position`, there is one row more for each, and `laws`
    [len(drafted), vocab] are what each was drawn from (None: it was certain). `shift` changes the rows first.
    """

    params: SamplingParams
    position: int
    drafted: Sequence[int] = ()
    laws: npt.NDArray[np.float32] | None = None
    shift: Shift | None = None


Drawn = SampledToken | ServeError | tuple[SampledToken | ServeError, ...]  # a tuple: of a draft, errors only last


@dataclass(slots=True, kw_only=True)
class Verification:
    """The segments of a step that have a draft, and once `Scheduler.settle` has decided, what becomes of them.

    Keys are indices of segments. `folds`, then `copies`, then `late_folds` bring their states to where they belong.
    """

    draws: dict[int, int] = field(default_factory=dict)  # which of the step's draws is the segment's
    kept: dict[int, int] = field(default_factory=dict)  # tokens that are folded
    dropped: set[int] = field(default_factory=set)  # cancelled before anything was kept
    cuts: dict[int, int] = field(default_factory=dict)  # after how many tokens its state is copied
    folds: list[Fold] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (slot, snapshot slot)
    late_folds: list[Fold] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Step:
    """One forward pass; the lists run in parallel, `draws` and `copies` hold only the segments that have one."""

    sequences: list[LiveSequence] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (slot, snapshot slot), after the pass
    snapshots: dict[int, int] = field(default_factory=dict)  # index of a segment -> snapshot slot
    rolling: set[int] = field(default_factory=set)  # indices of segments whose rolling copy is renewed
    admitted: list[LiveSequence] = field(default_factory=list)
    verification: Verification | None = None
    number: int = 0  # counts steps; only rises
    closing: list[LiveSequence] = field(default_factory=list)  # held ones whose prompt ends here
    num_prompt_tokens: int = 0
    num_decode_tokens: int = 0
