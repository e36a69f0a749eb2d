"""A sequence's bits do not depend on its neighbours, on the cuts at multiples of 64, or on the number of threads."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.backend import load_backend
from model.batch import Backend, Segment
from tests.golden import golden_dir, golden_tensors
from tests.model.runs import BLOCK_TOKENS, KINDS, Pools, backend, run

NAME = "k3_tiny_mxfp4"
PROMPTS = tuple(tuple(golden_tensors(NAME)[f"len{n}.ids"].tolist()) for n in (1, 33, 65, 130, 200))
STEPS = 3  # tokens taken one by one after each prompt

pytestmark = pytest.mark.usefixtures("keep_threads")


@cache
def alone(kind: str, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the prompt in one pass, then of its own first tokens step by step; and the state at the end."""
    engine, ids = backend(NAME, kind), PROMPTS[index]
    pools = Pools(engine.layout(BLOCK_TOKENS), 1, 5)
    blocks = pools.take(len(ids) + STEPS)
    outs = []
    for start, piece in [(0, ids), *((len(ids) + i, PROMPTS[3][i : i + 1]) for i in range(STEPS))]:
        segment = Segment(ids=piece, start=start, slot=0, blocks=blocks, logits="all")
        outs.append(engine.forward([segment], pools.rows, pools.state))
    return torch.cat(outs), pools.state[0]


def schedule(ids: tuple[int, ...], rng: random.Random) -> list[tuple[int, tuple[int, ...]]]:
    """(start, ids) of each pass: the prompt cut at some multiples of 64, then the steps."""
    cuts = [cut for cut in range(64, len(ids), 64) if rng.random() < 0.6]
    edges = [0, *cuts, len(ids)]
    passes = [(a, ids[a:b]) for a, b in itertools.pairwise(edges)]
    return passes + [(len(ids) + i, PROMPTS[3][i : i + 1]) for i in range(STEPS)]


def run_mixed(engine: Backend, kind: str, rng: random.Random) -> None:
    """Prompts in random company: each pass takes the next piece of a random few."""
    pools = Pools(engine.layout(BLOCK_TOKENS), len(PROMPTS), 16, rng.randrange(1 << 30))
    chosen = rng.sample(range(len(PROMPTS)), rng.randint(1, len(PROMPTS)))
    blocks = {i: pools.take(len(PROMPTS[i]) + STEPS) for i in chosen}
    waiting = {i: schedule(PROMPTS[i], rng) for i in chosen}
    found: dict[int, list[torch.Tensor]] = {i: [] for i in chosen}
    while any(waiting.values()):
        ready = [i for i in chosen if waiting[i]]
        taking = rng.sample(ready, rng.randint(1, len(ready)))
        segments = [
            Segment(ids=piece, start=start, slot=i, blocks=blocks[i], logits="all")
            for i in taking
            for start, piece in [waiting[i].pop(0)]
        ]
        out = engine.forward(segments, pools.rows, pools.state)
        for i, logits in zip(taking, out.split([len(s.ids) for s in segments]), strict=True):
            found[i].append(logits)
    for i in chosen:
        logits, state = alone(kind, i)
        assert torch.equal(torch.cat(found[i]), logits), i
        assert torch.equal(pools.state[i], state), i


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_any_company_and_any_cut_at_64(kind: str, seed: int) -> None:
    torch.set_num_threads(1)
    for index in range(len(PROMPTS)):
        alone(kind, index)
    run_mixed(backend(NAME, kind), kind, random.Random(seed))


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_threads(kind: str, threads: int) -> None:
    """One pass over two prompts: torch's threads wait busily, so on a loaded machine more would take minutes."""
    torch.set_num_threads(1)
    wanted = [alone(kind, index)[0][: len(PROMPTS[index])] for index in (1, 2)]
    engine = load_backend(golden_dir(NAME), kind=kind, threads=threads, numerics="invariant")
    found = run(engine, PROMPTS[1:3], 1 << 20)
    assert all(map(torch.equal, found.logits, wanted))


def test_fast_numerics_stay_close() -> None:
    torch.set_num_threads(1)
    fast = load_backend(golden_dir(NAME), kind="torch", threads=1, numerics="fast")
    exact = run(backend(NAME, "torch"), PROMPTS[:3], 1 << 20)
    loose = run(fast, PROMPTS[:3], 1 << 20)
    for a, b in zip(exact.logits, loose.logits, strict=True):
        assert (a - b).norm() < 1e-4 * a.norm()
