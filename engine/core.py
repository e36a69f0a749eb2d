"""The scheduler: which sequences take which tokens in the next step, and what a step's result means.

Pure: no torch, clock or threads. The engine calls it under its lock; the simulator calls it directly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.api import (
    EngineEvent,
    EngineStats,
    Failed,
    Finished,
    Progress,
    Reservation,
    SampledToken,
    SequenceSpec,
    SnapshotTaken,
    TokenSampled,
)
from engine.ledger import Hold, Ledger
from engine.sequence import Draft, Emit, EndReason, Happened, LiveSequence, Phase
from engine.settings import TILE_TOKENS, EngineSettings
from engine.settle import Copies, settle
from engine.step import Draw, Drawn, Step, Verification
from model.batch import Segment
from moonrelay.errors import InvalidRequest, InvariantError, Overloaded, ServeError

__all__ = ["Draw", "Drawn", "Events", "Scheduler", "Step"]
Events = list[tuple[LiveSequence, EngineEvent]]


class Scheduler:
    """Continuous batching over two budgets.

    Every step holds the one pending token of each sequence that has just one, so no prompt, however long, stops
    another's tokens; prompts share what is left of the step, in arrival order on even steps and by fewest pending
    tokens on odd ones: the oldest prompt gets at least every second step, and a short one never waits for the whole
    of a long one. Memory is reserved in full before a sequence is submitted, so nothing is ever preempted.
    """

    def __init__(self, settings: EngineSettings, *, context_len: int, has_drafter: bool = False) -> None:
        self.settings = settings
        self.context_len = context_len
        self.has_drafter = has_drafter
        self.ledger = Ledger(
            num_blocks=settings.num_blocks, num_slots=settings.num_slots, block_tokens=settings.block_tokens
        )
        self._waiting: deque[LiveSequence] = deque()
        self._running: list[LiveSequence] = []  # in arrival order
        self._live: dict[str, LiveSequence] = {}
        self._cancelled: list[LiveSequence] = []
        self._step: Step | None = None
        self._num_steps = 0
        self._copies = Copies(self.ledger, settings)

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

    @property
    def num_cancelled(self) -> int:
        """How many `reap` has to look at."""
        return len(self._cancelled)

    def reap(self, count: int | None = None) -> Events:
        """End what was cancelled, or the first `count` of it. Not while a step runs."""
        self._assert_no_step()
        events: Events = []
        cancelled = self._cancelled if count is None else self._cancelled[:count]
        for sequence in cancelled:
            if sequence.phase is not Phase.ENDED:
                events += self._finish(sequence, Happened.CANCELLED, "cancelled")
        del self._cancelled[: len(cancelled)]
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
        singles: list[LiveSequence] = []
        prompts: list[LiveSequence] = []
        for sequence in self._running:
            (singles if sequence.pending == 1 else prompts).append(sequence)
        budget = self.settings.max_batch_tokens - len(singles)
        share = min(budget, self.settings.prefill_share_tokens) if singles else budget
        spare = budget - share if prompts else budget  # for drafts: a prompt's share is never less for them
        for sequence in singles:
            spare -= self._add(step, sequence, 1, drafts_max=spare)
        budget = share
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

    def offer(self, sequence: LiveSequence, draft: Draft) -> None:
        """Tokens to verify behind its last one in the next step, as far as there is room. Not while a step runs."""
        self._assert_no_step()
        if sequence.phase is Phase.DECODE:
            sequence.draft = draft

    def draft_cold(self, sequence: LiveSequence, first: int) -> None:
        """The live sequence's drafter rows are valid from `first` on only."""
        sequence.draft_first = max(sequence.draft_first, first)
        self.ledger.draft_cold(sequence.reservation, sequence.draft_first)

    def settle(self, step: Step, drawn: Sequence[Drawn]) -> None:
        """What each verified segment's request keeps, by `drawn`: after the pass, before `complete`, if any is."""
        settle(step, drawn, self._copies)

    def complete(self, step: Step, drawn: Sequence[Drawn]) -> Events:
        """Account for a finished step; `drawn` answers `step.draws` in order."""
        self._end_step(step)
        events: Events = []
        answers = iter(drawn)
        for index, (sequence, segment) in enumerate(zip(step.sequences, step.segments, strict=True)):
            answer = next(answers) if segment.logits != "none" else None
            if isinstance(answer, tuple):
                self._complete_run(step, index, answer, events)
                continue
            self.ledger.advance(sequence.reservation, start=segment.start, tokens=len(segment.ids))
            sequence.consumed += len(segment.ids)
            if index in step.rolling:
                self.ledger.rolled(sequence.reservation, sequence.consumed)
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
            snapshots_skipped=self._copies.num_skipped,
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

    def _add(self, step: Step, sequence: LiveSequence, count: int, drafts_max: int = 0) -> int:
        """Have the step consume `count` tokens and verify at most `drafts_max`; returns how many it verifies."""
        start, end = sequence.consumed, sequence.consumed + count
        held = self.ledger.tokens_in_state(sequence.reservation)
        if held != start:
            raise InvariantError(f"state holds {held} tokens, the step starts at {start}")
        draft, sequence.draft = sequence.draft, None
        if draft is not None:
            # Everything that may be drawn has its place in the reservation, so the draws left bound the draft.
            draft = draft.cut(min(drafts_max, sequence.draws_left - 1))
        if draft is not None:
            self._add_draft(step, sequence, draft)
            return len(draft.tokens)
        ends_known_ids = count == sequence.pending
        segment = Segment(
            ids=sequence.ids(count),
            start=start,
            slot=sequence.reservation.slot,
            blocks=sequence.blocks,
            logits="last" if ends_known_ids else "none",
        )
        if ends_known_ids:
            step.draws.append(Draw(params=sequence.spec.sampling, position=end, shift=sequence.shift))
            if sequence.spec.hold_after_first:
                step.closing.append(sequence)
        copy = self._copies.target(step, sequence, len(step.segments), end, rolls=ends_known_ids)
        if copy is not None:
            step.copies.append((sequence.reservation.slot, copy))
        step.sequences.append(sequence)
        step.segments.append(segment)
        if sequence.last_id is None:
            step.num_prompt_tokens += count
        else:
            step.num_decode_tokens += count
        return 0

    def _add_draft(self, step: Step, sequence: LiveSequence, draft: Draft) -> None:
        """Have the step verify what follows the sequence's last token. Copies are for `settle` to choose."""
        verification = step.verification = step.verification or Verification()
        segment = Segment(
            ids=(*sequence.ids(1), *draft.tokens),
            start=sequence.consumed,
            slot=sequence.reservation.slot,
            blocks=sequence.blocks,
            logits="all",
            record=len(verification.draws),
        )
        verification.draws[len(step.segments)] = len(step.draws)
        params, position = sequence.spec.sampling, sequence.consumed + 1
        step.draws.append(
            Draw(params=params, position=position, drafted=draft.tokens, laws=draft.laws, shift=sequence.shift)
        )
        step.sequences.append(sequence)
        step.segments.append(segment)
        step.num_decode_tokens += len(segment.ids)

    def _complete_run(self, step: Step, index: int, run: Sequence[SampledToken | ServeError], events: Events) -> None:
        """A verified segment: its events, and their order, are those of as many steps.

        What was settled counts: a sequence cancelled since is ended by the next `reap`.
        """
        sequence, segment, verification = step.sequences[index], step.segments[index], step.verification
        assert verification is not None
        kept, cut, slot = verification.kept[index], verification.cuts.get(index), step.snapshots.get(index)
        self.ledger.advance(sequence.reservation, start=segment.start, tokens=kept)
        if index in step.rolling:
            self.ledger.rolled(sequence.reservation, cut)
        if index in verification.dropped:
            sequence.consumed += kept
            kept = 0
        tokens = [token for token in run[:kept] if isinstance(token, SampledToken)]
        before = len(tokens)
        if slot is not None and cut is not None and sequence.consumed < cut <= sequence.consumed + before:
            before = cut - sequence.consumed - 1
        self._say(sequence, tokens[:before], events)
        if before < len(tokens):
            assert slot is not None and cut is not None
            events.append((sequence, SnapshotTaken(tokens=cut, slot=slot)))
            self._say(sequence, tokens[before:], events)
        elif slot is not None:
            self.ledger.release_snapshot(slot)
        if len(tokens) < kept:
            sequence.consumed += 1
            error = run[kept - 1]
            assert isinstance(error, ServeError)
            events.append(self._fail(sequence, error))
        elif tokens:
            self._go_on(sequence, events)

    def _say(self, sequence: LiveSequence, tokens: Sequence[SampledToken], events: Events) -> None:
        """Tokens were drawn, each behind one that was consumed."""
        first = sequence.consumed + 1
        events += [(sequence, TokenSampled(token=token, position=at)) for at, token in enumerate(tokens, first)]
        sequence.consumed += len(tokens)
        sequence.drawn += [token.id for token in tokens]
        sequence.draws_left -= len(tokens)

    def _accept(self, sequence: LiveSequence, token: SampledToken, events: Events) -> None:
        """A token was drawn: emit it and decide whether the sequence goes on."""
        events.append((sequence, TokenSampled(token=token, position=sequence.consumed)))
        sequence.drawn.append(token.id)
        sequence.draws_left -= 1
        self._go_on(sequence, events)

    def _go_on(self, sequence: LiveSequence, events: Events) -> None:
        """Or not: what it drew last may be its end."""
        sequence.last_id = last = sequence.drawn[-1]
        if last in sequence.stop_ids:
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
        first = self.ledger.draft_first(sequence.reservation) if self.has_drafter else None
        self.ledger.detach(sequence.reservation)
        draft, consumed = sequence.draft_report, sequence.consumed
        events.append((sequence, Finished(reason=reason, tokens_in_state=consumed, draft_first=first, draft=draft)))
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
