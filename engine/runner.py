"""Runs one planned step on the model: forward, snapshot copies, draws; then folds what was verified."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.judge import draw
from engine.pools import Pools
from engine.settings import DraftRule
from engine.step import Drawn, Step
from model.batch import Backend, Fold, Verifier
from model.progress import LayerProgress
from model.sampling import Sampler
from moonrelay.errors import InvariantError


@dataclass(slots=True, kw_only=True)
class Ran:
    """What a step gave. Units: seconds."""

    drawn: list[Drawn]
    forward_s: float
    sample_s: float
    fold_s: float = 0.0


class Runner:
    """Owns nothing but the way from a step to its tokens; called on the engine's thread only."""

    def __init__(self, backend: Backend, pools: Pools, rule: DraftRule) -> None:
        self.backend, self.pools, self.rule = backend, pools, rule
        self.sampler: Sampler | None = getattr(backend, "sampler", None)

    def run(self, step: Step, progress: LayerProgress) -> Ran:
        """`progress` counts layers where a prompt ends whose state somebody may want early.

        Raises: whatever the backend raises; InvariantError if it answers in a wrong shape."""
        started = time.perf_counter()
        watched = progress if step.closing else None
        logits = self.backend.forward(step.segments, self.pools.rows, self.pools.state, progress=watched)
        return self._drawn(step, logits, started)

    def run_drafted(
        self,
        backend: Verifier,
        step: Step,
        progress: LayerProgress,
        records: torch.Tensor | None,
        taps: torch.Tensor | None,
        taps_at: int,
    ) -> Ran:
        """`run` on the same backend with a drafter: verified segments leave records, and all tokens taps,
        from row `taps_at` on."""
        started = time.perf_counter()
        watched = progress if step.closing else None
        logits = backend.forward(
            step.segments, self.pools.rows, self.pools.state,
            progress=watched, records=records, taps=taps, taps_at=taps_at,
        )  # fmt: skip
        return self._drawn(step, logits, started)

    def fold(self, backend: Verifier, step: Step, records: torch.Tensor) -> float:
        """Bring the verified segments' states to what is kept, with copies at boundaries in between. In seconds."""
        verification = step.verification
        assert verification is not None
        started = time.perf_counter()
        self._fold(backend, verification.folds, records)
        for source, target in verification.copies:
            self.pools.copy_state(source, target)
        self._fold(backend, verification.late_folds, records)
        return time.perf_counter() - started

    def _fold(self, backend: Verifier, folds: Sequence[Fold], records: torch.Tensor) -> None:
        if folds:
            backend.fold(folds, self.pools.state, records)

    def _drawn(self, step: Step, logits: torch.Tensor, started: float) -> Ran:
        wanted = sum(1 + len(d.drafted) for d in step.draws) if step.verification is not None else len(step.draws)
        if logits.shape[0] != wanted:
            raise InvariantError(f"the backend gave {logits.shape[0]} rows of logits for {wanted} draws")
        for source, target in step.copies:
            self.pools.copy_state(source, target)
        forward_done = time.perf_counter()
        drawn = draw(logits.numpy(), step.draws, self.rule, self.sampler) if step.draws else []
        done = time.perf_counter()
        return Ran(drawn=drawn, forward_s=forward_done - started, sample_s=done - forward_done)
