"""Runs one planned step on the model: forward, snapshot copies, draws."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.api import SampledToken
from engine.core import Step
from engine.errors import NonFiniteLogits
from engine.pools import Pools
from engine.sampler import sample
from model.batch import Backend
from model.progress import LayerProgress
from moonrelay.errors import InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a step gave. Units: seconds."""

    drawn: list[SampledToken | NonFiniteLogits]
    forward_s: float
    sample_s: float


class Runner:
    """Owns nothing but the way from a step to its tokens; called on the engine's thread only."""

    def __init__(self, backend: Backend, pools: Pools) -> None:
        self.backend, self.pools = backend, pools

    def run(self, step: Step, progress: LayerProgress) -> Ran:
        """`progress` counts layers where a prompt ends whose state somebody may want early.

        Raises: whatever the backend raises; InvariantError if it answers in a wrong shape."""
        started = time.perf_counter()
        watched = progress if step.closing else None
        logits = self.backend.forward(step.segments, self.pools.rows, self.pools.state, progress=watched)
        if logits.shape[0] != len(step.draws):
            raise InvariantError(f"the backend gave {logits.shape[0]} rows of logits for {len(step.draws)} draws")
        for source, target in step.copies:
            self.pools.copy_state(source, target)
        forward_done = time.perf_counter()
        drawn = sample(logits.numpy(), step.draws) if step.draws else []
        done = time.perf_counter()
        return Ran(drawn=drawn, forward_s=forward_done - started, sample_s=done - forward_done)
