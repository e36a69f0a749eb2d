"""The same law through the whole engine: drafting, cutting drafts short, verifying, folding and drawing.

A backend whose logits are the toy language's, over all tokens so far, and drafters of every kind. The engine chooses
the random numbers here, so a number used twice would show.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from laws import DRAFTERS, TOKENS, TWINS, VOCAB, History, joint_law, p_value, raw_logits, sampler_of, unchanged

from engine.api import Failed, Finished, SamplingParams, SequenceSpec, TokenSampled
from engine.engine import Engine
from engine.settings import EngineSettings
from model.batch import Fold, PoolLayout, Segment
from model.drafting import DraftRequest, Proposal
from model.sampling import Sampler

STREAMS, AT_ONCE, DRAFTED = 600, 8, 3
AHEAD = TOKENS + DRAFTED  # of which TOKENS are looked at: the last ones cannot be drafted in full
P_MIN = 1e-4
PROMPT = 2  # every stream follows this token; its law does not know it


class Clock:
    """Time passes by what is computed, so what the policy learns is always the same."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


class Language:
    """A `Verifier` of the toy language. The history is a number in the state, its digits in base VOCAB + 1."""

    name = "language"
    draft_width = 0

    def __init__(self, clock: Clock, sampler: Sampler | None) -> None:
        self.sampler = sampler
        self.config = SimpleNamespace(vocab_size=VOCAB, context_len=4096)
        self._clock = clock

    def layout(self, block_tokens: int) -> PoolLayout:
        return PoolLayout(
            block_tokens=block_tokens, num_mla_layers=1, row_width=1, num_kda_layers=1, num_heads=1, key_dim=1,
            value_dim=1, conv_history=1,
        )  # fmt: skip

    def tap(self, layers) -> None:
        assert not layers

    def forward(self, segments, rows, state, *, progress=None, records=None, taps=None, taps_at=0) -> torch.Tensor:
        logits: list[np.ndarray] = []
        for segment in segments:
            logits += self._segment(segment, state, records)
        self._clock.now += 1e-4 * (4 + sum(len(segment.ids) for segment in segments))
        return torch.from_numpy(np.stack(logits)) if logits else torch.empty(0, VOCAB)

    def _segment(self, segment: Segment, state: torch.Tensor, records: torch.Tensor | None) -> list[np.ndarray]:
        slot = state[segment.slot]
        number = int(slot[0]) if segment.start else 0
        found = []
        for index, token in enumerate(segment.ids):
            number = number * (VOCAB + 1) + token + 1
            found.append(raw_logits(history(number)[1:]))
            if segment.record is not None:
                assert records is not None
                records[segment.record][index] = number
        if segment.record is None:
            slot[0] = number
        return {"none": [], "last": found[-1:], "all": found}[segment.logits]

    def fold(self, folds: list[Fold], state: torch.Tensor, records: torch.Tensor) -> None:
        for fold in folds:
            if fold.tokens:
                state[fold.slot][0] = records[fold.record][fold.first + fold.tokens - 1]


def history(number: int) -> History:
    digits: list[int] = []
    while number:
        number, digit = divmod(number, VOCAB + 1)
        digits.insert(0, digit - 1)
    return tuple(digits)


class LanguageDrafter:
    """Draws from one of the toy drafters' laws, with a confidence that depends on the tokens before each slot."""

    target_layers = ()
    block_len = DRAFTED
    draft_width = 0

    def __init__(self, name: str) -> None:
        self.drafter_id, self._law = name, DRAFTERS[name]
        self.drafted = 0

    def write_rows(self, segments, taps, rows) -> None:
        pass

    def draft(self, requests: list[DraftRequest], rows: torch.Tensor) -> list[Proposal]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Proposal:
        assert request.context is not None and len(request.uniforms) == request.length
        known = tuple(request.context())[1:]
        tokens: list[int] = []
        laws, confidence = [], []
        for number in request.uniforms:
            law = self._law((*known, *tokens))
            confidence.append(0.02 if tokens and tokens[-1] in (1, 3) else 0.9)
            tokens.append(min(int(np.searchsorted(law.cumsum(), number, side="right")), VOCAB - 1))
            laws.append(law)
        self.drafted += len(tokens)
        certain = self.drafter_id == "certain"
        return Proposal(
            tokens=tokens, confidence=confidence, laws=None if certain else np.array(laws, dtype=np.float32)
        )


def streams(
    clock: Clock, drafter: LanguageDrafter, params: dict[str, Any], twin: str, **settings: Any
) -> tuple[Counter[History], Counter[str]]:
    """STREAMS streams, AT_ONCE in every step; and drafted tokens that were verified and kept."""
    engine = Engine(
        Language(clock, sampler_of(twin)),
        EngineSettings(num_blocks=64, num_slots=16, max_batch_sequences=AT_ONCE, draft_len_max=DRAFTED, **settings),
        drafter=drafter,
        on_fatal=lambda error: pytest.fail(repr(error)),
    )
    found: Counter[History] = Counter()
    drafts: Counter[str] = Counter()
    live = 0

    def submit(seed: int) -> None:
        reservation, ids = engine.reserve(1 + AHEAD), []

        def emit(event) -> None:
            nonlocal live
            assert not isinstance(event, Failed), event
            if isinstance(event, TokenSampled):
                ids.append(event.token.id)
            elif isinstance(event, Finished):
                live -= 1
                drafts.update(verified=event.draft.drafted, kept=event.draft.accepted)
                found[tuple(ids[:TOKENS])] += 1
                engine.release(reservation)

        sampling = SamplingParams(seed=seed, max_tokens=AHEAD, **params)
        engine.submit(SequenceSpec(request_id=str(seed), ids=[PROMPT], sampling=sampling), reservation, emit)

    for seed in range(STREAMS):
        submit(seed)
        live += 1
        while live == AT_ONCE or (seed == STREAMS - 1 and live):
            assert engine.turn()
    engine.check()
    return found, drafts


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    steady = Clock()
    monkeypatch.setattr(time, "perf_counter", steady)
    yield steady
    monkeypatch.undo()


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("name", ["certain", "sharp", "wrong"])
@pytest.mark.parametrize("twin", TWINS)
def test_streams_follow_the_requests_law(clock, twin, name, adaptive, rule):
    params = {"temperature": 1.1, "top_k": 4, "top_p": 0.92}
    drafter = LanguageDrafter(name)
    found, drafts = streams(clock, drafter, params, twin, draft_adaptive=adaptive, draft_rule=rule)
    assert (drafts["kept"] > 0 or (adaptive and name == "wrong")) and drafts["kept"] < drafts["verified"]
    assert drafts["verified"] <= drafter.drafted
    # What is not worth verifying is cut away; of drafts that never pay only a few are made at all.
    assert adaptive == (drafts["verified"] < drafter.drafted) or (adaptive and name != "sharp")
    assert p_value(found, joint_law(SamplingParams(**params), unchanged)) > P_MIN
