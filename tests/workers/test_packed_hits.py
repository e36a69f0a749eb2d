"""Several prompts in one step, each going on from a hit of another depth: what cold runs give, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from engine.api import Finished, SamplingParams, SequenceSpec, SnapshotTaken, TokenSampled
from engine.engine import Engine

DRAWS = SamplingParams(max_tokens=4)


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, 250), k=length)


def run(engine: Engine, jobs: list[tuple[SequenceSpec, object]]) -> list[list[object]]:
    """Submit all, then turn until idle: what each was told."""
    heard: list[list[object]] = [[] for _ in jobs]
    for (spec, reservation), events in zip(jobs, heard, strict=True):
        engine.submit(spec, reservation, events.append)
    while engine.turn():
        pass
    return heard


def tokens(events: list[object]) -> list[int]:
    assert isinstance(events[-1], Finished) and events[-1].reason == "length"
    return [event.token.id for event in events if isinstance(event, TokenSampled)]


@pytest.mark.parametrize("lengths", [(65, 130, 193, 70), (129, 128, 127, 66, 257)])
def test_hits_of_different_depths_in_one_step(make_engine, backend, lengths):
    engine = make_engine(
        start=False,
        num_blocks=64,
        num_slots=24,
        max_batch_tokens=1024,
        max_batch_sequences=8,
        prefill_share_tokens=512,
    )
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    depths = [(length - 1) // 64 * 64 // (1 + seed % 2) // 64 * 64 for seed, length in enumerate(lengths)]
    cold, bundles = [], []
    for number, (ids, depth) in enumerate(zip(prompts, depths, strict=True)):
        reservation = engine.reserve(len(ids) + DRAWS.max_tokens)
        cuts = (depth,) if depth else ()
        spec = SequenceSpec(request_id=f"cold-{number}", ids=ids, sampling=DRAWS, snapshot_at=cuts)
        (events,) = run(engine, [(spec, reservation)])
        slot = next((e.slot for e in events if isinstance(e, SnapshotTaken)), None)
        cold.append((tokens(events), engine.state[reservation.slot].clone()))
        bundles.append((reservation, slot))
    jobs = []
    for number, (ids, depth, (source, slot)) in enumerate(zip(prompts, depths, bundles, strict=True)):
        kept = range(depth // 64)
        engine.retain(source, kept)
        target = engine.reserve(len(ids) + DRAWS.max_tokens, shared=source.blocks[: len(kept)])
        engine.drop(source.blocks[: len(kept)])
        engine.release(source)
        engine.state[target.slot] = engine.state[slot] if slot is not None else float("nan")
        spec = SequenceSpec(request_id=f"warm-{number}", ids=ids[depth:], sampling=DRAWS, restored=depth)
        jobs.append((spec, target))
    starts = []
    forward = backend.forward

    def watched(segments, rows, state, **more):
        starts.append([segment.start for segment in segments])
        return forward(segments, rows, state, **more)

    engine._runner.backend = type("Watched", (), {"forward": staticmethod(watched)})()
    heard = run(engine, jobs)
    assert sorted(starts[0]) == sorted(depths)  # all in one pass
    for (_, target), events, (want, state) in zip(jobs, heard, cold, strict=True):
        assert tokens(events) == want
        assert torch.equal(engine.state[target.slot], state)
    engine.check()
