"""The aggregated engine: one thread owns the model; any thread may reserve, submit, cancel and release.

reserve -> (the caller may fill rows and state) -> submit -> events ... -> Finished or Failed -> release
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

import torch

from engine.api import EngineStats, Failed, Finished, LastPass, Reservation, SequenceSpec, TokenSampled
from engine.core import Events, Scheduler, Step
from engine.errors import ModelFailed
from engine.observer import NullObserver, Observer, SequenceReport, StepReport
from engine.pools import Pools
from engine.runner import Ran, Runner
from engine.sequence import Emit, EndReason, LiveSequence, Phase
from engine.settings import EngineSettings
from engine.settle import some_end
from engine.spec import validate
from engine.speculate import NO_DRAFTS, DraftWork, Speculator
from engine.warm import warm
from model.batch import Backend, Verifier
from model.drafting import DraftModel
from model.progress import LayerProgress
from moonrelay.errors import Unavailable

log = logging.getLogger(__name__)
LAST = (Finished, Failed)
EXIT_SOFTWARE = 70  # sysexits.h: an internal error
T = TypeVar("T")


def exit_process(error: BaseException) -> None:
    """A broken promise of our own: nothing this process says can be trusted, so its supervisor starts it anew."""
    log.critical("engine invariant broken", exc_info=error)
    logging.shutdown()
    os._exit(EXIT_SOFTWARE)


def attempt(work: Callable[[], T]) -> T | Exception:
    """The edge to the models: what they raise is an answer."""
    try:
        return work()
    except Exception as error:
        return error


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
        self._runner = Runner(backend, self.pools, settings.draft_rule)
        self._core = Scheduler(settings, context_len=backend.config.context_len, has_drafter=drafter is not None)
        self._wake = threading.Condition(
            threading.Lock()
        )  # guards the core and `_stopping`; sleeps while no sequence lives
        self._stopping = False
        self._checked = True  # the engine's thread only
        self._thread: threading.Thread | None = None
        self._speculator: Speculator | None = None
        if drafter is not None:
            verifier = cast("Verifier", backend)
            self._speculator = Speculator(
                drafter, verifier, settings, self.pools, attempt=attempt, cold=self._draft_cold
            )

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
            if self._speculator is not None:
                self._speculator.begin(sequence)
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

    def forget_drafts(self, *, costs: bool) -> None:
        """What drafting came to so far says nothing of what follows; with `costs` neither does what it cost."""
        if self._speculator is not None:
            self._speculator.policy.forget(costs=costs)

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
        doomed = self._before_reap(self._speculator) if self._speculator is not None else None
        with self._wake:
            events = self._core.reap(doomed)
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
        work = NO_DRAFTS
        if self._speculator is not None:
            work = self._account(step, ran, self._speculator, started_s)
        with self._wake:
            if isinstance(ran, ModelFailed):
                events = self._core.fault(step, ran)
            else:
                events = self._core.complete(step, ran.drawn)
            freed = self._core.ledger.take_freed()
        if isinstance(ran, Ran):
            self._observer.step_done(step_report(step, ran, work, time.perf_counter() - started_s))
        self._deliver(events, freed=freed)
        if self._speculator is not None:
            self._after(step, isinstance(ran, Ran), self._speculator, started_s)
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
        ran = attempt(lambda: self._pass(step))
        if isinstance(ran, Ran):
            return ran
        if isinstance(ran, AssertionError):  # InvariantError is one: a bug ends the process
            raise ran
        log.error("model failed", exc_info=ran, extra={"num_sequences": len(step.sequences)})
        failure = ModelFailed("the model failed while computing this request")
        failure.__cause__ = ran
        return failure

    def _pass(self, step: Step) -> Ran:
        """Raises: whatever the backend does."""
        speculator = self._speculator
        if speculator is None:
            return self._runner.run(step, self.progress)
        verifier, records = speculator.backend, None if step.verification is None else speculator.records
        ran = self._runner.run_drafted(verifier, step, self.progress, records, *speculator.taps(step))
        if step.verification is not None:
            assert records is not None
            with self._wake:
                self._core.settle(step, ran.drawn)
            ran.fold_s = self._runner.fold(verifier, step, records)
        return ran

    # -- drafting -------------------------------------------------------------------------------------------------

    def _before_reap(self, speculator: Speculator) -> int:
        """How many of the cancelled to end now. Their blocks are not ours to write to any more then."""
        doomed = self._core.num_cancelled  # of a list that only grows meanwhile
        if doomed:
            speculator.write_rows()
        return doomed

    def _account(self, step: Step, ran: Ran | ModelFailed, speculator: Speculator, started_s: float) -> DraftWork:
        """Between a pass and its completion: rows that somebody may want now, and what its drafts came to."""
        if isinstance(ran, ModelFailed):
            speculator.rows.forget(step.sequences)
            return NO_DRAFTS
        speculator.rows.consumed(step)
        if step.snapshots or (step.num_prompt_tokens and self._fills_prompts(step)) or some_end(step, ran.drawn):
            speculator.write_rows()
        return speculator.judged(step, ran.drawn, started_s)

    def _fills_prompts(self, step: Step) -> bool:
        """Whether a prompt moved on whose rows are handed over as it does, or filled a block that may now be kept."""
        size = self.settings.block_tokens
        return any(
            sequence.spec.hold_after_first or (segment.start + len(segment.ids)) // size > segment.start // size
            for sequence, segment in zip(step.sequences, step.segments, strict=True)
            if sequence.last_id is None
        )

    def _after(self, step: Step, ran: bool, speculator: Speculator, started_s: float) -> None:
        """Drafts for those of the step that decode on: every sequence that decodes is in every step."""
        if ran:
            seconds = time.perf_counter() - started_s
            if speculator.coasts(step, seconds):
                return
            speculator.ran(step, seconds)
        going_on = [s for s in step.sequences if s.phase is Phase.DECODE and not s.cancelled]
        offers = speculator.propose(going_on)
        speculator.rest()
        if offers:
            with self._wake:
                for sequence, draft in offers:
                    self._core.offer(sequence, draft)

    def _draft_cold(self, sequence: LiveSequence, first: int) -> None:
        with self._wake:
            self._core.draft_cold(sequence, first)

    def _deliver(self, events: Events, *, freed: bool) -> None:
        if freed:
            self._observer.memory_freed()
        if not events:
            return
        now_s = time.perf_counter()
        for sequence, event in events:
            if sequence.timeline.first_token_s is None and isinstance(event, TokenSampled):
                sequence.timeline.first_token_s = now_s
            sequence.emit(event)
            if isinstance(event, LAST):
                reason = event.reason if isinstance(event, Finished) else None
                self._observer.sequence_done(report(sequence, reason, now_s))

    def _refuse_if_stopping(self) -> None:
        if self._stopping:
            raise Unavailable("the worker is stopping")


def step_report(step: Step, ran: Ran, work: DraftWork, total_s: float) -> StepReport:
    kept = step.verification.kept if step.verification is not None else {}
    return StepReport(
        num_sequences=len(step.sequences),
        num_prompt_tokens=step.num_prompt_tokens,
        num_decode_tokens=step.num_decode_tokens,
        num_tokens_drawn=len(ran.drawn) - len(kept) + sum(kept.values()),
        forward_s=ran.forward_s,
        sample_s=ran.sample_s,
        total_s=total_s,
        num_verified=len(kept),
        num_drafted=work.num_drafted,
        num_accepted=work.num_accepted,
        draft_s=work.draft_s,
        rows_s=work.rows_s,
        verify_s=ran.forward_s + ran.sample_s + ran.fold_s if kept else 0.0,
        fold_s=ran.fold_s,
        ignored=work.ignored,
    )


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
        draft=sequence.draft_report,
    )


def _elapsed(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s
