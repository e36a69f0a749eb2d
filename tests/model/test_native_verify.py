"""Verification leaves the slot alone; a fold of any length has the bits of stepping. Wrong records are refused."""

from __future__ import annotations

import random
import shutil
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.batch import Fold, Segment
from model.checkpoint import load_weights
from model.config import load_config
from model.native.backend import BatchError, NativeBackend
from tests.golden import golden_dir
from tests.model.runs import Pools

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="there is no C++ compiler"
)
MODELS = ("k3_tiny_mxfp4", "k3_tiny_smooth")
BLOCK_TOKENS, RECORD_TOKENS = 64, 9


@cache
def engine(name: str, threads: int = 1) -> NativeBackend:
    config = load_config(golden_dir(name))
    return NativeBackend(config, load_weights(golden_dir(name), config), threads)


class Run:
    """Some sequences, each with a stepped twin in other slots and blocks."""

    def __init__(self, name: str, starts: list[int], rng: random.Random, threads: int = 1) -> None:
        self.engine, self.starts = engine(name, threads), list(starts)
        vocab = self.engine.config.vocab_size
        layout = self.engine.layout(BLOCK_TOKENS)
        longest = max(starts) + 4 * RECORD_TOKENS
        self.pools = Pools(layout, 2 * len(starts), 2 * len(starts) * (longest // BLOCK_TOKENS + 1))
        self.blocks = [self.pools.take(longest) for _ in range(2 * len(starts))]
        self.records = torch.full((len(starts) + 1, layout.record_floats(RECORD_TOKENS)), float("nan"))
        for i, start in enumerate(starts):
            prompt = [rng.randrange(vocab) for _ in range(start)]
            for twin in (2 * i, 2 * i + 1):
                if prompt:
                    self.forward([Segment(ids=prompt, start=0, slot=twin, blocks=self.blocks[twin])])

    def forward(self, segments: list[Segment], taps: torch.Tensor | None = None, taps_at: int = 0) -> torch.Tensor:
        pools, records = self.pools, self.records
        return self.engine.forward(segments, pools.rows, pools.state, records=records, taps=taps, taps_at=taps_at)

    def verified(self, i: int, ids: list[int]) -> Segment:
        return Segment(
            ids=ids, start=self.starts[i], slot=2 * i, blocks=self.blocks[2 * i], logits="all", record=i + 1
        )

    def step(self, i: int, token: int, at: int) -> torch.Tensor:
        twin = 2 * i + 1
        return self.forward([Segment(ids=[token], start=at, slot=twin, blocks=self.blocks[twin])])[0]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
@given(
    seed=st.integers(0, 2**32 - 1), starts=st.lists(st.sampled_from([0, 1, 2, 5, 63, 64, 70]), min_size=1, max_size=3)
)
@settings(max_examples=6, deadline=None)
def test_folds_have_the_bits_of_stepping(name: str, threads: int, seed: int, starts: list[int]) -> None:
    """Ragged verification, each sequence keeping its own count, several rounds on."""
    rng = random.Random(seed)
    run = Run(name, starts, rng, threads)
    vocab = run.engine.config.vocab_size
    for _ in range(3):
        drafts = [[rng.randrange(vocab) for _ in range(rng.randint(1, RECORD_TOKENS))] for _ in starts]
        before = run.pools.state[::2].clone()
        logits = run.forward([run.verified(i, ids) for i, ids in enumerate(drafts)])
        assert torch.equal(run.pools.state[::2].nan_to_num(7.0), before.nan_to_num(7.0))
        folds, first = [], 0
        for i, ids in enumerate(drafts):
            kept = rng.randint(0, len(ids))
            folds.append(Fold(record=i + 1, slot=2 * i, tokens=kept, start=run.starts[i]))
            for j in range(kept):
                assert torch.equal(run.step(i, ids[j], run.starts[i] + j), logits[first + j])
            first += len(ids)
        run.engine.fold(folds, run.pools.state, run.records)
        for i, fold in enumerate(folds):
            run.starts[i] += fold.tokens
            if run.starts[i]:
                assert torch.equal(run.pools.state[2 * i], run.pools.state[2 * i + 1])


@pytest.mark.parametrize("name", MODELS)
def test_a_fold_in_two_parts_stops_at_a_boundary(name: str) -> None:
    """Where a snapshot boundary lies inside a fold, the state is the boundary's in between, to the bit."""
    rng = random.Random(3)
    run = Run(name, [61], rng)
    ids = [rng.randrange(run.engine.config.vocab_size) for _ in range(8)]
    run.forward([run.verified(0, ids)])
    for first, tokens in ((0, 3), (3, 5)):
        fold = Fold(record=1, slot=0, first=first, tokens=tokens, start=61 + first)
        run.engine.fold([fold], run.pools.state, run.records)
        for j in range(first, first + tokens):
            run.step(0, ids[j], 61 + j)
        assert torch.equal(run.pools.state[0], run.pools.state[1])


@pytest.mark.parametrize("name", MODELS)
def test_taps_are_the_same_bits_in_any_batch_and_the_last_layer_may_be_one(name: str) -> None:
    run = Run(name, [10, 64], random.Random(5))
    last = run.engine.config.num_layers - 1
    with pytest.raises(BatchError, match="ascending"):
        run.engine.tap([2, 1])
    run.engine.tap([0, last])
    hidden = run.engine.config.hidden_size
    taps = torch.empty(4 + 3, 2, hidden)
    segments = [run.verified(0, [1, 2, 3, 4]), run.verified(1, [5, 6, 7])]
    plain = run.forward(segments)
    assert torch.equal(run.forward(segments, taps=taps), plain)
    one = torch.empty(1, 2, hidden)
    for j, token in enumerate((1, 2, 3, 4)):
        segment = Segment(ids=[token], start=10 + j, slot=1, blocks=run.blocks[1], logits="none")
        run.forward([segment], taps=one)
        assert torch.equal(one[0], taps[j])
    spare = torch.full((10, 2, hidden), 7.0)
    run.forward(segments, taps=spare, taps_at=2)
    assert torch.equal(spare[2:9], taps) and (spare[:2] == 7.0).all() and (spare[9:] == 7.0).all()
    for wrong, at in ((torch.empty(6, 2, hidden), 0), (spare, 4), (spare, -1), (torch.empty(9, 1, hidden), 0)):
        with pytest.raises(BatchError, match="taps"):
            run.forward(segments, taps=wrong, taps_at=at)


def test_wrong_records_and_folds_touch_nothing() -> None:
    run = Run(MODELS[0], [10, 20], random.Random(7))
    before = run.pools.state.clone()
    too_long = run.verified(0, [1] * (RECORD_TOKENS + 1))
    absent = Segment(ids=[1], start=10, slot=0, blocks=run.blocks[0], record=3)
    twice = [run.verified(0, [1]), Segment(ids=[1], start=20, slot=2, blocks=run.blocks[2], record=1)]
    for segments, message in (
        ([too_long], "do not fit into a record"),
        ([absent], "outside"),
        (twice, "another segment"),
    ):
        with pytest.raises(BatchError, match=message):
            run.forward(segments)
    for bad in (
        Fold(record=3, slot=0, tokens=1, start=10),
        Fold(record=1, slot=4, tokens=1, start=10),
        Fold(record=1, slot=0, tokens=RECORD_TOKENS + 1, start=10),
    ):
        with pytest.raises(BatchError, match="fold 0"):
            run.engine.fold([bad], run.pools.state, run.records)
    with pytest.raises(BatchError, match="records"):
        run.engine.fold([], run.pools.state, torch.zeros(1, 5))
    assert torch.equal(run.pools.state, before)
