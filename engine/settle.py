"""What a step's requests keep of what was verified, and where their states are copied. Pure, like `engine.core`."""

from __future__ import annotations

from collections.abc import Sequence

from engine.api import SampledToken
from engine.ledger import Ledger
from engine.sequence import LiveSequence
from engine.settings import TILE_TOKENS, EngineSettings
from engine.step import Drawn, Step, Verification
from model.batch import Fold
from moonrelay.errors import ServeError


class Copies:
    """Finds slots for copies of states: snapshots of prompts, and turns' rolling copies."""

    def __init__(self, ledger: Ledger, settings: EngineSettings) -> None:
        self.ledger, self.settings = ledger, settings
        self.num_skipped = 0  # snapshots that found no slot

    def target(self, step: Step, sequence: LiveSequence, index: int, at: int, *, rolls: bool) -> int | None:
        """The slot for a copy of its state after `at` tokens, if one is wanted and there is room for it.

        A snapshot of the prompt, or with `rolls` the turn's rolling copy on a block boundary.
        """
        if sequence.snapshots and sequence.snapshots[-1] == at:
            sequence.snapshots.pop()
            slot = self.ledger.take_snapshot()
            if slot is None:
                self.num_skipped += 1
            else:
                step.snapshots[index] = slot
            return slot
        if not rolls or not sequence.spec.write_back or at % self.settings.block_tokens:
            return None
        slot = None if self.settings.writeback == "off" else self.ledger.roll(sequence.reservation)
        if slot is not None:
            step.rolling.add(index)
        return slot

    def cut(self, step: Step, verification: Verification, index: int, end: int) -> int:
        """How many of a verified segment's kept tokens, which end at `end`, are folded before its state is copied."""
        segment, at = step.segments[index], end // TILE_TOKENS * TILE_TOKENS
        if at > segment.start:
            slot = self.target(step, step.sequences[index], index, at, rolls=True)
            if slot is not None:
                verification.cuts[index] = at
                verification.copies.append((segment.slot, slot))
                return at - segment.start
        return end - segment.start


def settle(step: Step, drawn: Sequence[Drawn], copies: Copies) -> None:
    """Decide what each verified segment's request keeps of its run, and how its state gets there."""
    verification = step.verification
    assert verification is not None
    for index, draw in verification.draws.items():
        sequence, segment, run = step.sequences[index], step.segments[index], drawn[draw]
        assert isinstance(run, tuple) and 1 <= len(run) <= len(segment.ids) and segment.record is not None
        if sequence.cancelled:
            kept = 1  # as without a draft: the token that was pending is consumed, no other is drawn
            verification.dropped.add(index)
        else:
            kept = taken(sequence, run)
        verification.kept[index] = kept
        first = copies.cut(step, verification, index, segment.start + kept)
        fold = Fold(record=segment.record, slot=segment.slot, tokens=first, start=segment.start)
        verification.folds.append(fold)
        if first < kept:
            start = segment.start + first
            late = Fold(record=segment.record, slot=segment.slot, tokens=kept - first, start=start, first=first)
            verification.late_folds.append(late)


def taken(sequence: LiveSequence, run: Sequence[SampledToken | ServeError]) -> int:
    """How many of the tokens of a run the sequence takes: up to its first stop token or error, that included."""
    for count, token in enumerate(run, 1):
        if not isinstance(token, SampledToken) or token.id in sequence.stop_ids:
            return count
    return len(run)


def some_end(step: Step, drawn: Sequence[Drawn]) -> bool:
    """Whether `Scheduler.complete` will end a sequence of the step."""
    if step.verification is None and not step.num_prompt_tokens:
        for sequence, answer in zip(step.sequences, drawn, strict=True):
            if sequence.draws_left == 1 or not isinstance(answer, SampledToken) or answer.id in sequence.stop_ids:
                return True
        return False
    answers = iter(drawn)
    settled = step.verification.kept if step.verification is not None else {}
    for index, (sequence, segment) in enumerate(zip(step.sequences, step.segments, strict=True)):
        if segment.logits == "none":
            continue
        answer = next(answers)
        if isinstance(answer, SampledToken):
            if sequence.draws_left == 1 or answer.id in sequence.stop_ids or sequence.spec.hold_after_first:
                return True
            continue
        run = answer if isinstance(answer, tuple) else (answer,)
        kept = settled.get(index, 1)
        last = run[kept - 1]
        if kept == sequence.draws_left or sequence.spec.hold_after_first:
            return True
        if not isinstance(last, SampledToken) or last.id in sequence.stop_ids:
            return True
    return False
