"""The aggregated engine: one thread owns the model; any thread may reserve, submit, cancel and release.

reserve -> (the caller may fill rows and state) -> submit -> events ... -> Finished or Failed -> release
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from engine.api import EngineStats, Failed, Finished, LastPass, Reservation, SequenceSpec, TokenSampled
from engine.core import Events, Scheduler, Step
from engine.errors import ModelFailed
from engine.observer import NullObserver, Observer, SequenceReport, StepReport
from engine.pools import Pools
from engine.runner import Ran, Runner
from engine.sequence import Emit, EndReason, LiveSequence
from engine.settings import EngineSettings
from engine.spec import validate
from engine.warm import warm
from model.batch import Backend
from model.drafting import DraftModel
from model.progress import LayerProgress
from moonrelay.errors import Unavailable

log = logging.getLogger(__name__)
EXIT_SOFTWARE = 70  # sysexits.h: an internal error


def exit_process(error: BaseException) -> None:
    """A broken promise of our own: nothing this process says can be trusted, so its supervisor starts it anew."""
    log.critical("engine invariant broken", exc_info=error)
    logging.shutdown()
    os._exit(EXIT_SOFTWARE)


class Engine:
    """See `engine.api` for the contract and `engine/DESIGN.md` for states, invariants and failures."""

    def __init__(
        self,
        backend: Backend,
        settings: EngineSettings,
        *,
        drafter: DraftModel | None = None,
        observer: Observer | None = None,
        on_fatal: Callable[[BaseException], None] = exit_process,
    ) -> None:
        self.backend, self.settings, self.drafter = backend, settings, drafter
        backend.draft_width = drafter.draft_width if drafter is not None else 0
        self.progress = LayerProgress()
        self.pools = Pools(backend.layout(settings.block_tokens), settings)
        self._observer: Observer = observer or NullObserver()
        self._on_fatal = on_fatal
        self._runner = Runner(backend, self.pools)
        self._core = Scheduler(settings, context_len=backend.config.context_len)
        self._wake = threading.Condition(
            threading.Lock()
        )  # guards the core and `_stopping`; sleeps while no sequence lives
        self._stopping = False
        self._checked = True  # the engine's thread only
        self._thread: threading.Thread | None = None

    @property
    def rows(self) -> torch.Tensor:
        """[num_blocks, block_floats] fp32."""
        return self.pools.rows

    @property
    def state(self) -> torch.Tensor:
        """[num_slots, slot_floats] fp32."""
        return self.pools.state

    # -- from any thread ----------------------------------------------------------------------------------------

    def start(self) -> None:
        assert self._thread is None, "an engine starts once"
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    def warm(self) -> None:
        """Run small shapes end to end and wait for them, so that no request meets anything cold. After `start`."""
        warm(self)

    def stop(self) -> None:
        """Fail what still lives with Unavailable and join the thread. Not from `emit`. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def reserve(self, tokens: int, *, shared: Sequence[int] = (), write_back: bool = False) -> Reservation:
        """Blocks for `tokens` and one slot, the caller's until `release`; never waits. It begins with the blocks
        `shared`, which the caller retains and nobody writes to.

        Raises: Overloaded when there is no room now, RequestTooLarge when there never could be, Unavailable.
        """
        with self._wake:
            self._refuse_if_stopping()
            rolling = write_back and self.settings.writeback == "on"
            return self._core.ledger.reserve(tokens, shared=shared, rolling=rolling)

    def retain(self, reservation: Reservation, indices: Iterable[int]) -> None:
        """Keep some of its blocks, full ones, beyond its life. Raises: InvariantError where one is not full."""
        with self._wake:
            self._core.ledger.retain(reservation, indices)

    def drop(self, blocks: Iterable[int]) -> None:
        """The end of a `retain` of each of the blocks."""
        with self._wake:
            self._core.ledger.drop(blocks)
            freed = self._core.ledger.take_freed()
        if freed:
            self._observer.memory_freed()

    def holders(self, block: int) -> int:
        """How many hold it: reservations that contain it, and retains."""
        return self.holders_of((block,))[0]

    def holders_of(self, blocks: Iterable[int]) -> list[int]:
        with self._wake:
            return [self._core.ledger.holders(block) for block in blocks]

    def submit(self, spec: SequenceSpec, reservation: Reservation, emit: Emit) -> None:
        """Queue a sequence; its events reach `emit` on the engine's thread, one of Finished and Failed last.

        Raises: InvalidRequest, ContextLengthExceeded, Overloaded past queue_len_max, Unavailable; InvariantError for
        a reservation that is released, in use, spoiled or too small.
        """
        config = self.backend.config
        validate(spec, vocab_size=config.vocab_size, context_len=config.context_len)
        now_s = time.perf_counter()
        with self._wake:
            self._refuse_if_stopping()
            sequence = self._core.submit(spec, reservation, emit)
            sequence.timeline.submitted_s = now_s
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """End it with Finished(cancelled) after the running step; unknown ids are ignored."""
        with self._wake:
            self._core.cancel(request_id)

    def release(self, reservation: Reservation) -> None:
        """Give memory back, after the running step if that uses it; cancels a live sequence on it. Idempotent."""
        with self._wake:
            self._core.release(reservation)
            freed = self._core.ledger.take_freed()
        if freed:
            self._observer.memory_freed()

    def release_snapshot(self, slot: int) -> None:
        """Raises: InvariantError if `slot` holds no snapshot: call it exactly once per SnapshotTaken."""
        with self._wake:
            self._core.ledger.release_snapshot(slot)
            freed = self._core.ledger.take_freed()
        if freed:
            self._observer.memory_freed()

    def draft_first(self, reservation: Reservation) -> int | None:
        """The first token whose drafter rows are valid, as all after it; None without a drafter."""
        if self.drafter is None:
            return None
        with self._wake:
            return self._core.ledger.draft_first(reservation)

    def stats(self) -> EngineStats:
        with self._wake:
            return self._core.stats()

    def check(self) -> None:
        """Raises: InvariantError if the budgets do not balance."""
        with self._wake:
            self._core.check()

    # -- the engine's thread ------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """One turn of the loop: end what was cancelled, then run one step. False if there was nothing to do.

        The engine's thread calls it; tests and simulations that start no thread may call it instead.
        """
        started_s = time.perf_counter()
        self._checked = False
        with self._wake:
            events = self._core.reap()
            step = self._core.plan()
            freed = self._core.ledger.take_freed()
        self._deliver(events, freed=freed)
        if step is None:
            return bool(events)
        for sequence in step.admitted:
            sequence.timeline.planned_s = started_s
        if step.closing:
            self.progress.begin(step.number)
            self._deliver([(sequence, LastPass(number=step.number)) for sequence in step.closing], freed=False)
        ran = self._run(step)
        with self._wake:
            if isinstance(ran, ModelFailed):
                events = self._core.fault(step, ran)
            else:
                events = self._core.complete(step, ran.drawn)
            freed = self._core.ledger.take_freed()
        if isinstance(ran, Ran):
            self._observer.step_done(
                StepReport(
                    num_sequences=len(step.sequences),
                    num_prompt_tokens=step.num_prompt_tokens,
                    num_decode_tokens=step.num_decode_tokens,
                    num_tokens_drawn=len(ran.drawn),
                    forward_s=ran.forward_s,
                    sample_s=ran.sample_s,
                    total_s=time.perf_counter() - started_s,
                )
            )
        self._deliver(events, freed=freed)
        return True

    def _main(self) -> None:
        try:
            while self._wait():
                self.turn()
            with self._wake:
                events = self._core.abort(Unavailable("the worker is stopping"))
                freed = self._core.ledger.take_freed()
            self._deliver(events, freed=freed)
        except BaseException as error:  # the thread's edge: whatever arrives here is a bug
            with self._wake:
                self._stopping = True
            self._on_fatal(error)

    def _wait(self) -> bool:
        """Sleep until there is work; false when stopping. An engine that falls idle checks its books first."""
        with self._wake:
            while not self._stopping and not self._core.has_work:
                if not self._checked:
                    self._core.check()
                    self._checked = True
                self._wake.wait()
            return not self._stopping

    def _run(self, step: Step) -> Ran | ModelFailed:
        try:
            return self._runner.run(step, self.progress)
        except AssertionError:  # InvariantError is one: a bug ends the process
            raise
        except Exception as error:  # the model's edge: an operating fault ends the sequences of this step
            log.error("model failed", exc_info=error, extra={"num_sequences": len(step.sequences)})
            failure = ModelFailed("the model failed while computing this request")
            failure.__cause__ = error
            return failure

    def _deliver(self, events: Events, *, freed: bool) -> None:
        if freed:
            self._observer.memory_freed()
        if not events:
            return
        now_s = time.perf_counter()
        for sequence, event in events:
            timeline = sequence.timeline
            if timeline.first_token_s is None and isinstance(event, TokenSampled):
                timeline.first_token_s = now_s
            sequence.emit(event)
            if isinstance(event, Finished | Failed):
                reason = event.reason if isinstance(event, Finished) else None
                self._observer.sequence_done(report(sequence, reason, now_s))

    def _refuse_if_stopping(self) -> None:
        if self._stopping:
            raise Unavailable("the worker is stopping")


def report(sequence: LiveSequence, reason: EndReason | None, now_s: float) -> SequenceReport:
    """What the observer hears of a sequence that ended at `now_s`."""
    times = sequence.timeline
    return SequenceReport(
        reason=reason,
        num_prompt_tokens=min(sequence.consumed, sequence.prompt_end) - sequence.spec.restored,
        num_tokens_drawn=sequence.draws - sequence.draws_left,
        queue_s=_elapsed(times.submitted_s, times.planned_s),
        prefill_s=_elapsed(times.planned_s, times.first_token_s),
        decode_s=_elapsed(times.first_token_s, now_s),
    )


def _elapsed(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s
