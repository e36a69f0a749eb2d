"""The engine on the golden checkpoint, both backends: same bits alone, batched, cut, restored and handed over."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy import Client, finish

from engine.api import Finished, Reservation, SampledToken, SamplingParams, SequenceSpec, SnapshotTaken
from engine.engine import Engine
from engine.settings import EngineSettings
from model.backend import load_backend
from model.batch import Backend
from model.errors import BackendUnavailable

CHECKPOINT = Path(__file__).resolve().parents[1] / "data" / "k3_tiny_mxfp4"
WIDE = EngineSettings(num_blocks=64, num_slots=16, max_batch_sequences=8)
LENGTHS = (1, 33, 64, 65, 130, 200)


@pytest.fixture(params=["torch", "native"])
def backend(request) -> Backend:
    return loaded(request.param)


@functools.cache
def loaded(kind: str) -> Backend:
    try:
        return load_backend(CHECKPOINT, kind=kind, threads=1, numerics="invariant")
    except BackendUnavailable as error:
        pytest.skip(str(error))


@functools.cache
def golden() -> dict[str, torch.Tensor]:
    return load_file(CHECKPOINT / "golden.safetensors")


@dataclass(frozen=True, kw_only=True)
class Request:
    ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True)
class Ran:
    tokens: tuple[SampledToken, ...]
    state: torch.Tensor
    rows: torch.Tensor


@functools.cache
def requests() -> tuple[Request, ...]:
    laws = [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 8}]
    return tuple(
        Request(
            ids=tuple(golden()[f"len{n}.ids"].tolist()),
            sampling=SamplingParams(max_tokens=6, top_logprobs=2, **laws[i % len(laws)]),
        )
        for i, n in enumerate(LENGTHS)
    )


def engine_on(backend: Backend, settings: EngineSettings = WIDE) -> Engine:
    def fatal(error: BaseException) -> None:
        raise error

    return Engine(backend, settings, on_fatal=fatal)


def submit(engine: Engine, request: Request, name: str, **spec: object) -> tuple[Client, Reservation]:
    client = Client()
    reservation = engine.reserve(len(request.ids) + request.sampling.max_tokens)
    ids = request.ids[int(spec.get("restored", 0)) :]
    engine.submit(SequenceSpec(request_id=name, ids=ids, sampling=request.sampling, **spec), reservation, client)
    return client, reservation


def outcome(engine: Engine, client: Client, reservation: Reservation) -> Ran:
    """Tokens, and the very bits that the sequence left in its memory."""
    assert isinstance(client.end, Finished), client.end
    held, layout = client.end.tokens_in_state, engine.pools.layout
    rows = engine.rows[list(reservation.blocks)].view(
        -1, layout.num_mla_layers, layout.block_tokens, layout.row_width
    )
    rows = rows.transpose(1, 2).reshape(-1, layout.num_mla_layers, layout.row_width)[:held]
    return Ran(tokens=tuple(client.tokens), state=engine.state[reservation.slot].clone(), rows=rows.clone())


def run(backend: Backend, wanted: tuple[Request, ...], settings: EngineSettings = WIDE) -> list[Ran]:
    engine = engine_on(backend, settings)
    running = [submit(engine, request, str(i)) for i, request in enumerate(wanted)]
    finish(engine)
    return [outcome(engine, *pair) for pair in running]


@functools.cache
def alone(kind: str) -> tuple[Ran, ...]:
    return tuple(run(loaded(kind), (request,))[0] for request in requests())


def assert_same(got: Ran, want: Ran) -> None:
    assert got.tokens == want.tokens
    assert torch.equal(got.state, want.state)
    assert torch.equal(got.rows, want.rows)


def test_first_tokens_are_the_golden_logits_own(backend):
    for request, ran in zip(requests(), alone(backend.name), strict=True):
        logits = golden()[f"len{len(request.ids)}.logits"][-1]
        if request.sampling.temperature == 0.0:
            assert ran.tokens[0].id == int(logits.argmax())
        assert ran.tokens[0].top[0][0] == int(logits.argmax())
        assert ran.tokens[0].top[0][1] == pytest.approx(float(logits.log_softmax(0).max()), abs=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        WIDE,
        EngineSettings(num_blocks=64, num_slots=16, max_batch_sequences=3, max_batch_tokens=67),
    ],
    ids=["wide", "cut-at-64"],
)
def test_batched_and_cut_sequences_are_those_run_alone_to_the_bit(backend, settings):
    for got, want in zip(run(backend, requests(), settings), alone(backend.name), strict=True):
        assert_same(got, want)


def test_snapshots_change_nothing_and_restore_to_the_bit(backend):
    engine = engine_on(backend)
    source, held = submit(engine, requests()[5], "source", snapshot_at=(64, 192))
    finish(engine)
    want = alone(backend.name)[5]
    assert_same(outcome(engine, source, held), want)
    taken = [e for e in source.events if isinstance(e, SnapshotTaken)]
    assert [e.tokens for e in taken] == [64, 192]
    for event in taken:
        client, reservation = Client(), engine.reserve(206)
        engine.rows[list(reservation.blocks)] = float("nan")
        for i in range(event.tokens // 64):
            engine.rows[reservation.blocks[i]] = engine.rows[held.blocks[i]]
        engine.state[reservation.slot] = engine.state[event.slot]
        request = requests()[5]
        spec = SequenceSpec(
            request_id="restored", ids=request.ids[event.tokens :], sampling=request.sampling, restored=event.tokens
        )
        engine.submit(spec, reservation, client)
        finish(engine)
        assert_same(outcome(engine, client, reservation), want)
        engine.release_snapshot(event.slot)


@pytest.mark.parametrize("index", range(len(LENGTHS)))
def test_a_prompt_handed_to_another_engine_goes_on_to_the_bit(backend, index):
    prefill, decode = engine_on(backend), engine_on(backend)
    request = requests()[index]
    first, source = submit(prefill, request, "r", hold_after_first=True)
    finish(prefill)
    assert first.end == Finished(reason="held", tokens_in_state=len(request.ids))
    decode.reserve(100)  # so that blocks and slots differ
    target = decode.reserve(len(request.ids) + 6)
    decode.rows[list(target.blocks)] = float("nan")
    for theirs, ours in zip(source.blocks, target.blocks, strict=True):
        decode.rows[ours] = prefill.rows[theirs]
    decode.state[target.slot] = prefill.state[source.slot]
    client = Client()
    spec = SequenceSpec(
        request_id="r",
        ids=[first.tokens[0].id],
        sampling=replace(request.sampling, max_tokens=5),
        restored=len(request.ids),
    )
    decode.submit(spec, target, client)
    finish(decode)
    got = outcome(decode, client, target)
    assert_same(replace(got, tokens=(*first.tokens, *got.tokens)), alone(backend.name)[index])
