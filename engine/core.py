"""The scheduler: which sequences take which tokens in the next step, and what a step's result means.

Pure: no torch, clock or threads. The engine calls it under its lock; the simulator calls it directly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.api import (
    EngineEvent,
    EngineStats,
    Failed,
    Finished,
    Progress,
    Reservation,
    SampledToken,
    SamplingParams,
    SequenceSpec,
    SnapshotTaken,
    TokenSampled,
)
from engine.ledger import Hold, Ledger
from engine.sequence import Emit, EndReason, Happened, LiveSequence, Phase
from engine.settings import TILE_TOKENS, EngineSettings
from model.batch import Segment
from moonrelay.errors import InvalidRequest, InvariantError, Overloaded, ServeError

Events = list[tuple[LiveSequence, EngineEvent]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One token to draw: `params`' law over a row of logits, for the token at `position` of the sequence."""

    params: SamplingParams
    position: int


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
    number: int = 0  # counts steps; only rises
    closing: list[LiveSequence] = field(default_factory=list)  # held ones whose prompt ends here
    num_prompt_tokens: int = 0
    num_decode_tokens: int = 0


class Scheduler:
    """Continuous batching over two budgets.

    Every step holds the one pending token of each sequence that has just one, so no prompt, however long, stops
    another's tokens; prompts share what is left of the step, in arrival order on even steps and by fewest pending
    tokens on odd ones: the oldest prompt gets at least every second step, and a short one never waits for the whole
    of a long one. Memory is reserved in full before a sequence is submitted, so nothing is ever preempted.
    """

    def __init__(self, settings: EngineSettings, *, context_len: int) -> None:
        self.settings = settings
        self.context_len = context_len
        self.ledger = Ledger(
            num_blocks=settings.num_blocks, num_slots=settings.num_slots, block_tokens=settings.block_tokens
        )
        self._waiting: deque[LiveSequence] = deque()
        self._running: list[LiveSequence] = []  # in arrival order
        self._live: dict[str, LiveSequence] = {}
        self._cancelled: list[LiveSequence] = []
        self._step: Step | None = None
        self._num_steps = 0
        self._snapshots_skipped = 0

    # -- commands, any order ------------------------------------------------------------------------------------

    def submit(self, spec: SequenceSpec, reservation: Reservation, emit: Emit) -> LiveSequence:
        """Queue a sequence whose spec has passed `engine.spec.validate`.

        Raises: InvalidRequest for a request id in use; Overloaded when the queue is full; InvariantError for a
        reservation that is too small or not the caller's to use.
        """
        if spec.request_id in self._live:
            raise InvalidRequest(f"request {spec.request_id} is already running", param="request_id")
        prompt_end = spec.restored + len(spec.ids)
        draws = max(1, min(spec.sampling.max_tokens, self.context_len - prompt_end))
        needed = prompt_end if spec.hold_after_first else prompt_end + draws - 1
        if needed > reservation.tokens:
            raise InvariantError(f"{needed} tokens submitted on a reservation of {reservation.tokens}")
        places = self.settings.max_batch_sequences - len(self._running)
        if len(self._waiting) >= places + self.settings.queue_len_max:
            raise Overloaded(f"{len(self._waiting)} sequences are waiting")
        self.ledger.attach(reservation, restored=spec.restored, draft_first=spec.draft_first)
        sequence = LiveSequence(spec, reservation, emit, draws=draws)
        self._waiting.append(sequence)
        self._live[spec.request_id] = sequence
        return sequence

    def cancel(self, request_id: str) -> None:
        """End it with Finished(cancelled) at the next `reap`; unknown ids are ignored."""
        sequence = self._live.get(request_id)
        if sequence is not None and not sequence.cancelled:
            sequence.cancelled = True
            self._cancelled.append(sequence)

    def release(self, reservation: Reservation) -> None:
        """Give memory back, now or when the sequence on it, cancelled hereby, has ended."""
        if self.ledger.release(reservation) is Hold.LEAVING:
            for sequence in self._live.values():
                if sequence.reservation.id == reservation.id:
                    self.cancel(sequence.spec.request_id)
                    break

    # -- the loop: reap, plan, (run), complete or fault ------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def reap(self) -> Events:
        """End what was cancelled. Not while a step runs."""
        self._assert_no_step()
        events: Events = []
        for sequence in self._cancelled:
            if sequence.phase is not Phase.ENDED:
                events += self._finish(sequence, Happened.CANCELLED, "cancelled")
        self._cancelled.clear()
        return events

    def plan(self) -> Step | None:
        """The next step, or None when nothing can run."""
        self._assert_no_step()
        step = Step(number=self._num_steps + 1)
        while self._waiting and len(self._running) < self.settings.max_batch_sequences:
            sequence = self._waiting.popleft()
            sequence.move(Happened.ADMITTED)
            self._running.append(sequence)
            step.admitted.append(sequence)
        if not self._running:
            return None
        prompts = []
        for sequence in self._running:
            if sequence.pending == 1:
                self._add(step, sequence, 1)
            else:
                prompts.append(sequence)
        budget = self.settings.max_batch_tokens - len(step.sequences)
        if step.sequences:
            budget = min(budget, self.settings.prefill_share_tokens)
        if self._num_steps % 2:
            prompts.sort(key=lambda s: s.pending)  # stable: equals keep their arrival order
        for sequence in prompts:
            count = chunk_end(sequence, budget) - sequence.consumed
            if count > 0:
                self._add(step, sequence, count)
                budget -= count
        self._step = step
        self._num_steps += 1
        return step

    def complete(self, step: Step, drawn: Sequence[SampledToken | ServeError]) -> Events:
        """Account for a finished step; `drawn` answers `step.draws` in order."""
        self._end_step(step)
        events: Events = []
        answers = iter(drawn)
        for index, (sequence, segment) in enumerate(zip(step.sequences, step.segments, strict=True)):
            self.ledger.advance(sequence.reservation, start=segment.start, tokens=len(segment.ids))
            sequence.consumed += len(segment.ids)
            if index in step.rolling:
                self.ledger.rolled(sequence.reservation, sequence.consumed)
            answer = next(answers) if segment.logits == "last" else None
            slot = step.snapshots.get(index)
            if sequence.cancelled or isinstance(answer, ServeError):
                if slot is not None:
                    self.ledger.release_snapshot(slot)
                if not sequence.cancelled:
                    assert isinstance(answer, ServeError)
                    events.append(self._fail(sequence, answer))
                continue
            if sequence.last_id is None:
                events.append((sequence, Progress(tokens=sequence.consumed)))
            if slot is not None:
                events.append((sequence, SnapshotTaken(tokens=sequence.consumed, slot=slot)))
            if answer is None:
                sequence.move(Happened.CONSUMED)
            else:
                self._accept(sequence, answer, events)
        return events

    def fault(self, step: Step, error: ServeError) -> Events:
        """The pass of `step` raised: its rows and states may be half written, so all its sequences end."""
        self._end_step(step)
        for slot in step.snapshots.values():
            self.ledger.release_snapshot(slot)
        for index in step.rolling:
            self.ledger.rolled(step.sequences[index].reservation, None)
        return [self._fail(sequence, error) for sequence in step.sequences]

    def abort(self, error: ServeError) -> Events:
        """End every live sequence: the engine stops. Not while a step runs."""
        self._assert_no_step()
        return [self._fail(sequence, error) for sequence in list(self._live.values())]

    def stats(self) -> EngineStats:
        return EngineStats(
            num_blocks=self.ledger.num_blocks,
            free_blocks=self.ledger.free_blocks,
            num_slots=self.ledger.num_slots,
            free_slots=self.ledger.free_slots,
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            snapshots_skipped=self._snapshots_skipped,
            rolling_slots=self.ledger.rolling_slots,
        )

    def check(self) -> None:
        """Budgets balance and every live sequence is in exactly one place. Raises: InvariantError."""
        self.ledger.check()
        placed = [*self._waiting, *self._running]
        if {id(s) for s in placed} != {id(s) for s in self._live.values()} or len(placed) != len(self._live):
            raise InvariantError("live sequences and queues disagree")
        for sequence in placed:
            held = self.ledger.tokens_in_state(sequence.reservation)
            if self._step is None and held != sequence.consumed:
                raise InvariantError(f"state holds {held} tokens, its sequence counts {sequence.consumed}")

    # -- details -------------------------------------------------------------------------------------------------

    def _add(self, step: Step, sequence: LiveSequence, count: int) -> None:
        start, end = sequence.consumed, sequence.consumed + count
        held = self.ledger.tokens_in_state(sequence.reservation)
        if held != start:
            raise InvariantError(f"state holds {held} tokens, the step starts at {start}")
        ends_known_ids = count == sequence.pending
        segment = Segment(
            ids=sequence.ids(count),
            start=start,
            slot=sequence.reservation.slot,
            blocks=sequence.blocks,
            logits="last" if ends_known_ids else "none",
        )
        if ends_known_ids:
            step.draws.append(Draw(params=sequence.spec.sampling, position=end))
            if sequence.spec.hold_after_first:
                step.closing.append(sequence)
        if sequence.snapshots and sequence.snapshots[-1] == end:
            sequence.snapshots.pop()
            slot = self.ledger.take_snapshot()
            if slot is None:
                self._snapshots_skipped += 1
            else:
                step.snapshots[len(step.segments)] = slot
                step.copies.append((sequence.reservation.slot, slot))
        elif sequence.spec.write_back and ends_known_ids and end % self.settings.block_tokens == 0:
            self._roll(step, sequence)
        step.sequences.append(sequence)
        step.segments.append(segment)
        if sequence.last_id is None:
            step.num_prompt_tokens += count
        else:
            step.num_decode_tokens += count

    def _roll(self, step: Step, sequence: LiveSequence) -> None:
        """Have the segment about to be added renew its sequence's rolling copy, if there is a slot for it."""
        slot = None if self.settings.writeback == "off" else self.ledger.roll(sequence.reservation)
        if slot is not None:
            step.rolling.add(len(step.segments))
            step.copies.append((sequence.reservation.slot, slot))

    def _accept(self, sequence: LiveSequence, token: SampledToken, events: Events) -> None:
        """A token was drawn: emit it and decide whether the sequence goes on."""
        events.append((sequence, TokenSampled(token=token, position=sequence.consumed)))
        sequence.last_id = token.id
        sequence.draws_left -= 1
        if token.id in sequence.stop_ids:
            events += self._finish(sequence, Happened.COMPLETED, "stop")
        elif sequence.draws_left == 0:
            events += self._finish(sequence, Happened.COMPLETED, "length")
        elif sequence.spec.hold_after_first:
            events += self._finish(sequence, Happened.COMPLETED, "held")
        else:
            sequence.move(Happened.DRAWN)

    def _finish(self, sequence: LiveSequence, how: Happened, reason: EndReason) -> Events:
        self._remove(sequence, how)
        events: Events = []
        if (kept := self.ledger.keep_rolling(sequence.reservation)) is not None:
            events.append((sequence, SnapshotTaken(tokens=kept[0], slot=kept[1])))
        self.ledger.detach(sequence.reservation)
        events.append((sequence, Finished(reason=reason, tokens_in_state=sequence.consumed)))
        return events

    def _fail(self, sequence: LiveSequence, error: ServeError) -> tuple[LiveSequence, EngineEvent]:
        self._remove(sequence, Happened.FAULTED)
        self.ledger.detach(sequence.reservation, faulted=True)
        return sequence, Failed(error=error)

    def _remove(self, sequence: LiveSequence, how: Happened) -> None:
        (self._waiting if sequence.phase is Phase.WAITING else self._running).remove(sequence)
        sequence.move(how)
        del self._live[sequence.spec.request_id]

    def _end_step(self, step: Step) -> None:
        if self._step is not step:
            raise InvariantError("a step ended that was not running")
        self._step = None

    def _assert_no_step(self) -> None:
        if self._step is not None:
            raise InvariantError("a step is still running")


def chunk_end(sequence: LiveSequence, budget: int) -> int:
    """Where a prompt's next chunk ends, given `budget` tokens; at or below `consumed` when it gets none.

    At the prompt's end, exactly at the next snapshot, or at a multiple of 64: only there is a cut without effect.
    """
    end = min(sequence.consumed + budget, sequence.prompt_end)
    if sequence.snapshots:
        end = min(end, sequence.snapshots[-1])
    return end if end == sequence.prompt_end else end // TILE_TOKENS * TILE_TOKENS
