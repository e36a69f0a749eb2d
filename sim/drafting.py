"""Drafts on a simulated worker: guesses of the next tokens, verified in one pass, of which the request keeps some.

What is proposed, settled and folded when, and by whom, is as in `engine/engine.py`; the decisions are the real
scheduler's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from engine.api import SampledToken
from engine.core import Scheduler
from engine.sequence import Draft, LiveSequence, Phase
from engine.step import Drawn, Step
from model.batch import Fold, Segment
from sim.memory import Pool
from sim.toy import BLOCK_TOKENS, ROW_CELLS, STATE_CELLS, VOCAB, Cells, consume, next_token

ASKED, RIGHT = 0.8, 0.8  # how often a sequence gets a draft; how often its next token is the model's own
GARBAGE = 0x7FFFFFFF  # in rows that a refused token alone has written


class Ahead:
    """Copies of a sequence's cells, to run the model on while the pools stay as they are."""

    def __init__(self, rows: Pool, state: Pool, slot: int, blocks: Sequence[int], start: int) -> None:
        self.state = state.read(range(STATE_CELLS * slot, STATE_CELLS * (slot + 1)))
        # Blocks that begin with what is run ahead are written before they are read.
        self.rows: list[Cells] = [
            rows.read(range(ROW_CELLS * b, ROW_CELLS * (b + 1))) for b in blocks[: -(-start // BLOCK_TOKENS)]
        ]
        self.at = start

    def next(self, token: int) -> int:
        """What the model says after `token`."""
        if self.at % BLOCK_TOKENS == 0:
            self.rows.append([0] * ROW_CELLS)
        consume((token,), self.at, self.state, self.rows)
        self.at += 1
        return next_token(self.state, self.rows)


class Drafter:
    """Drafts for one worker, on its pools. `rng`: the worker's."""

    def __init__(self, scheduler: Scheduler, rows: Pool, state: Pool, rng: random.Random, length_max: int) -> None:
        self._scheduler, self._rows, self._state, self._rng = scheduler, rows, state, rng
        self._length_max = length_max

    def propose(self, sequences: Sequence[LiveSequence]) -> None:
        """Offer drafts for those that decode on: the model's own tokens, up to the first guess that is wrong."""
        for sequence in sequences:
            decodes = sequence.phase is Phase.DECODE and not sequence.cancelled and sequence.last_id is not None
            if not self._length_max or not decodes or self._rng.random() > ASKED:
                continue
            ahead = self._ahead(sequence.reservation.slot, sequence.blocks, sequence.consumed)
            tokens, token, right = [], sequence.last_id, True
            for _ in range(min(self._rng.randint(1, self._length_max), sequence.draws_left)):
                right = right and self._rng.random() < RIGHT
                token = ahead.next(token) if right else self._rng.randrange(VOCAB)  # type: ignore[arg-type]
                tokens.append(token)
            self._scheduler.offer(sequence, Draft(tokens=tokens))

    def verify(self, segment: Segment, draws: Any) -> Drawn:
        """The tokens that the model draws: behind the last one, and behind every drafted one that is its own."""
        ahead = self._ahead(segment.slot, segment.blocks, segment.start)
        run = []
        for token, drafted in zip(segment.ids, [*draws.drafted, None], strict=True):
            run.append(SampledToken(id=ahead.next(token)))
            if run[-1].id != drafted:
                break
        for index in range(-(-segment.start // BLOCK_TOKENS), -(-(segment.start + len(segment.ids)) // BLOCK_TOKENS)):
            self._write_rows(segment.blocks[index], [GARBAGE] * ROW_CELLS)
        return tuple(run)

    def fold(self, step: Step, drawn: Sequence[Drawn]) -> None:
        """Bring the states and rows of verified segments to what is kept, and copy states on the way."""
        if step.verification is None:
            return
        self._scheduler.settle(step, drawn)
        verification = step.verification
        segments = {step.segments[index].record: step.segments[index] for index in verification.draws}
        for fold in verification.folds:
            self._fold(segments[fold.record], fold)
        for source, target in verification.copies:
            self._state.assign(_cells(target), "a snapshot")
            self._state.write(_cells(target), self._state.read(_cells(source)))
        for fold in verification.late_folds:
            self._fold(segments[fold.record], fold)

    def _fold(self, segment: Segment, fold: Fold) -> None:
        ids, start = segment.ids[fold.first : fold.first + fold.tokens], segment.start + fold.first
        first, last = start // BLOCK_TOKENS, (start + len(ids) - 1) // BLOCK_TOKENS
        state = self._state.read(_cells(fold.slot))
        rows = {i: self._rows.read(range(ROW_CELLS * b, ROW_CELLS * (b + 1))) for i in range(first, last + 1)
                for b in [segment.blocks[i]]}  # fmt: skip
        consume(ids, start, state, rows)  # type: ignore[arg-type]
        self._state.write(_cells(fold.slot), state)
        for index, cells in rows.items():
            self._write_rows(segment.blocks[index], cells)

    def _write_rows(self, block: int, cells: Cells) -> None:
        self._rows.write(range(ROW_CELLS * block, ROW_CELLS * (block + 1)), cells)

    def _ahead(self, slot: int, blocks: Sequence[int], start: int) -> Ahead:
        return Ahead(self._rows, self._state, slot, blocks, start)


def _cells(slot: int) -> range:
    return range(STATE_CELLS * slot, STATE_CELLS * (slot + 1))
