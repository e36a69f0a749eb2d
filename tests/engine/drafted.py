"""The toy model with verification, taps and drafter rows, and a drafter that knows what is right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from toy import PRIME, VOCAB, ToyBackend

from engine.engine import Engine
from engine.settings import EngineSettings
from model.batch import Fold, PoolLayout, Segment
from model.drafting import NOTHING, DraftRequest, Proposal
from model.text import Text

MLA_FLOATS = 6  # of one token of the toy
LEN_MAX = 5


class VerifyingToy(ToyBackend):
    """Records are [hash after each token]; a tap is the hash after its token, and so is the drafter's row."""

    draft_width = 0
    taps_asked = 0

    def layout(self, block_tokens: int) -> PoolLayout:
        return replace(super().layout(block_tokens), draft_width=self.draft_width)

    def tap(self, layers: Sequence[int]) -> None:
        self.config.hidden_size = 1
        assert list(layers) == [0]

    def forward(self, segments, rows, state, *, progress=None, records=None, taps=None, taps_at=0) -> torch.Tensor:
        self.batches.append([(s.start, len(s.ids)) for s in segments])
        assert len({s.slot for s in segments}) == len(segments)
        logits: list[np.ndarray] = []
        at = 0
        for segment in segments:
            slot = state[segment.slot] if segment.record is None else state[segment.slot].clone()
            for index, token in enumerate(segment.ids):
                row = self._token(segment, slot, rows, segment.start + index, token)
                if segment.record is not None:
                    records[segment.record][index] = slot[0]
                if taps is not None:
                    taps[taps_at + at] = slot[0]
                last = index + 1 == len(segment.ids)
                if segment.logits == "all" or (segment.logits == "last" and last):
                    logits.append(row())
                at += 1
        if self.during_next is not None:
            act, self.during_next = self.during_next, None
            act()
        if self.raise_next is not None:
            error, self.raise_next = self.raise_next, None
            raise error
        return torch.from_numpy(np.stack(logits)) if logits else torch.empty(0, VOCAB)

    def _token(
        self, segment: Segment, slot: torch.Tensor, rows: torch.Tensor, position: int, token: int
    ) -> Callable[[], np.ndarray]:
        block_tokens = rows.shape[1] // (MLA_FLOATS + self.draft_width)
        if position:
            assert slot[-1] == position, f"the state holds {slot[-1]} tokens, not {position}"
        running = ((int(slot[0]) if position else 0) * 31 + token + 1) % PRIME
        block = rows[segment.blocks[position // block_tokens]][: MLA_FLOATS * block_tokens]
        block.view(2, block_tokens, 3)[:, position % block_tokens] = torch.tensor([running, token, position])
        slot[:] = running
        slot[-1] = position + 1

        def logits() -> np.ndarray:
            end = position + 1
            covered = list(segment.blocks[: -(-end // block_tokens)])
            pool = rows[covered][:, MLA_FLOATS // 2 * block_tokens : MLA_FLOATS * block_tokens]
            seen = pool.reshape(-1, 3)[:end].numpy().astype(np.int64)
            assert (seen[:, 2] == np.arange(end)).all(), "rows of other positions"
            mixed = int((seen[:, 0] * (np.arange(end) % 251 + 1) % PRIME).sum() % PRIME)
            values = (np.arange(VOCAB) * 7919 + 1) * (running + 1) % PRIME + np.arange(VOCAB) * mixed % PRIME
            found = (values % PRIME / PRIME * 6).astype(np.float32)
            if token == self.nan_after:
                found[3] = np.nan
            return found

        return logits

    def fold(self, folds: Sequence[Fold], state: torch.Tensor, records: torch.Tensor) -> None:
        assert len({f.slot for f in folds}) == len({f.record for f in folds}) == len(folds)
        for fold in folds:
            if fold.tokens:
                slot = state[fold.slot]
                assert fold.start == 0 or slot[-1] == fold.start
                slot[:] = records[fold.record][fold.first + fold.tokens - 1]
                slot[-1] = fold.start + fold.tokens


class KnowingDrafter:
    """`truth(blocks, position)` are the tokens to come after `position`; `skill` the chance to say each right."""

    drafter_id = "knowing"
    target_layers = (0,)
    block_len = LEN_MAX
    draft_width = 1

    def __init__(self, truth: Callable[[Sequence[int], int], Sequence[int]], *, skill: float = 0.7) -> None:
        self.truth, self.skill, self.rng = truth, skill, random.Random(11)
        self.fails: Callable[[DraftRequest], Proposal | None] = lambda request: None
        self.fail_rows: Exception | None = None
        self.drafted = 0

    def write_rows(self, segments, taps, rows) -> None:
        if self.fail_rows is not None:
            raise self.fail_rows
        block_tokens, at = rows.shape[1] // (MLA_FLOATS + 1), 0
        for segment in segments:
            for position in range(segment.start, segment.start + len(segment.ids)):
                row = rows[segment.blocks[position // block_tokens]]
                row[MLA_FLOATS * block_tokens + position % block_tokens] = taps[at, 0, 0]
                at += 1

    def draft(self, requests, rows) -> list[Proposal]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Proposal:
        failure = self.fails(request)
        if failure is not None:
            return failure
        right = list(self.truth(request.blocks, request.position))[: request.length]
        tokens = [t if self.rng.random() < self.skill else (t + 1) % VOCAB for t in right]
        self.drafted += len(tokens)
        return Proposal(tokens=tokens, confidence=[0.9] * len(tokens)) if tokens else NOTHING


class ReadingDrafter(KnowingDrafter):
    """Reads on in `stories`, the whole sequences of which every text is a beginning."""

    read_len_max = 40

    def __init__(self, stories: Sequence[Sequence[int]], *, skill: float) -> None:
        super().__init__(lambda blocks, position: (), skill=skill)
        self.stories = stories
        self.lengths: list[int] = []  # asked for

    def read(self, text: Text, length: int, *, drawn: bool, sure: bool = False) -> Proposal | None:
        assert 1 <= length <= self.read_len_max
        self.lengths.append(length)
        known = list(text)
        right = next(list(s[len(known) :]) for s in self.stories if list(s[: len(known)]) == known)[:length]
        tokens = [t if self.rng.random() < self.skill else (t + 1) % VOCAB for t in right]
        return Proposal(tokens=tokens, confidence=[0.9] * len(tokens)) if tokens else None

    def with_rows(self, requests, rows) -> list[Proposal]:
        return self.draft(requests, rows)


def drafted_engine(drafter: KnowingDrafter, backend: VerifyingToy | None = None, **changes: object) -> Engine:
    """An engine without a thread: the test calls `turn`. Every draft is as long as it may be."""

    def fatal(error: BaseException) -> None:
        raise error

    small = {
        "num_blocks": 40, "num_slots": 8, "max_batch_tokens": 192, "max_batch_sequences": 4, "queue_len_max": 4,
        "draft_len_max": LEN_MAX, "draft_adaptive": False,
    }  # fmt: skip
    return Engine(backend or VerifyingToy(), EngineSettings(**{**small, **changes}), drafter=drafter, on_fatal=fatal)
