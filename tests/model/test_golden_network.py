"""Every backend equals the independent references, however the prompt is fed."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

from model.batch import Segment
from model.network import Taps, TorchBackend
from moonrelay.errors import InvariantError
from tests.golden import golden_tensors, relative_error
from tests.model.runs import BLOCK_TOKENS, KINDS, Pools, Result, backend, run

# The limits suggested beside the data.
TOLERANCE = {"k3_tiny": 1e-4, "k3_tiny_mxfp4": 1e-4, "k3_tiny_smooth": 2e-5, "kimi_linear_tiny": 2e-5}
LENGTHS = (1, 5, 33, 64, 65, 130, 200)
WAYS = {"whole": 1 << 20, "chunks": 64, "steps": 1}  # tokens of a prompt per pass
each_model = pytest.mark.parametrize("name", TOLERANCE)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_way = pytest.mark.parametrize("way", WAYS)


def prompt(name: str, length: int) -> list[int]:
    return golden_tensors(name)[f"len{length}.ids"].tolist()


@cache
def result(name: str, kind: str, way: str) -> Result:
    """All prompts side by side, in one ragged batch per pass."""
    return run(backend(name, kind), [prompt(name, length) for length in LENGTHS], WAYS[way])


@each_way
@each_kind
@each_model
def test_logits(name: str, kind: str, way: str) -> None:
    golden = golden_tensors(name)
    for length, logits in zip(LENGTHS, result(name, kind, way).logits, strict=True):
        expected = golden[f"len{length}.logits"]
        assert relative_error(logits, expected) < TOLERANCE[name], length
        assert torch.equal(logits.argmax(-1), expected.argmax(-1)), length


@each_kind
@each_model
def test_chunks_of_64_give_the_bits_of_the_whole(name: str, kind: str) -> None:
    whole, chunks = result(name, kind, "whole"), result(name, kind, "chunks")
    for a, b in zip(whole.logits, chunks.logits, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(whole.pools.state[1:], chunks.pools.state[1:])
    for length, a_blocks, b_blocks in zip(LENGTHS, whole.blocks, chunks.blocks, strict=True):
        assert torch.equal(whole.pools.rows_of(a_blocks, length), chunks.pools.rows_of(b_blocks, length))


@each_kind
@each_model
def test_a_prompt_alone_gives_the_bits_of_the_batch(name: str, kind: str) -> None:
    for length, logits in zip(LENGTHS, result(name, kind, "whole").logits, strict=True):
        assert torch.equal(run(backend(name, kind), [prompt(name, length)], 1 << 20).logits[0], logits), length
    for length in (1, 5):
        steps = result(name, kind, "steps").logits[LENGTHS.index(length)]
        assert torch.equal(run(backend(name, kind), [prompt(name, length)], 1).logits[0], steps), length


@each_way
@each_kind
@pytest.mark.parametrize("name", [name for name in TOLERANCE if name != "k3_tiny_smooth"])  # which has no such data
def test_what_is_kept_for_later_tokens(name: str, kind: str, way: str) -> None:
    """KDA state, convolution history and MLA rows after the prompt of 130."""
    golden, length = golden_tensors(name), 130
    done = result(name, kind, way)
    place = LENGTHS.index(length)
    rows = done.pools.rows_of(done.blocks[place], length)
    state = done.pools.recurrent_of(len(LENGTHS) - place)
    conv = done.pools.conv_of(len(LENGTHS) - place)
    if name == "kimi_linear_tiny":
        expected_rows = torch.cat([golden["cache130.mla_keys"], golden["cache130.mla_values"]], -1)
        expected_state = golden["cache130.kda_state"]
        last = golden["cache130.conv_state"][..., 1:]  # that reference keeps one input more
        expected_conv = last.unflatten(1, (3, -1)).transpose(2, 3)
    else:
        assert golden["taps.ids"].tolist() == prompt(name, length)
        expected_rows, expected_conv = golden["own.mla_cache_rows"], golden["own.kda_conv_history"]
        expected_state = golden["taps.kda_final_state"]
    assert relative_error(rows, expected_rows) < TOLERANCE[name]
    assert relative_error(conv, expected_conv) < TOLERANCE[name]
    for layer in range(state.shape[0]):
        assert relative_error(state[layer], expected_state[layer]) < TOLERANCE[name], layer


@each_model
def test_residual_stream_of_every_layer(name: str) -> None:
    golden = golden_tensors(name)
    engine, taps = backend(name, "torch"), Taps()
    assert isinstance(engine, TorchBackend)
    run(engine, [golden["taps.ids"].tolist()], 1 << 20, taps=taps)
    expected = golden["taps.residual_after_layer"]
    assert len(taps.after_layer) == len(expected)
    for layer, (found, wanted) in enumerate(zip(taps.after_layer, expected, strict=True)):
        assert relative_error(found, wanted) < TOLERANCE[name], layer
    if "taps.attnres_blocks" in golden:
        assert relative_error(torch.stack(taps.blocks), golden["taps.attnres_blocks"]) < TOLERANCE[name]
        assert taps.before_norm is not None and taps.normed is not None
        assert relative_error(taps.before_norm, golden["taps.final_mix_prenorm"]) < TOLERANCE[name]
        assert relative_error(taps.normed, golden["taps.final_normed"]) < TOLERANCE[name]


@each_kind
def test_reused_slots_and_blocks_need_no_clearing(kind: str) -> None:
    """What an earlier sequence left in a slot or a block never reaches a later one."""
    engine = backend("k3_tiny_smooth", kind)
    ids = prompt("k3_tiny_smooth", 65)
    fresh = run(engine, [ids], 1 << 20)
    used = Pools(engine.layout(BLOCK_TOKENS), 2, 3)
    used.rows.fill_(7.0)
    used.state.fill_(-3.0)
    again = engine.forward([Segment(ids=ids, start=0, slot=1, blocks=[2, 0], logits="last")], used.rows, used.state)
    assert torch.equal(again, fresh.logits[0][-1:])
    assert (used.state[0] == -3.0).all()
    assert (used.rows[1] == 7.0).all()


@each_kind
def test_only_the_asked_logits_come_back(kind: str) -> None:
    engine = backend("k3_tiny_smooth", kind)
    name, lengths = "k3_tiny_smooth", (5, 33, 64)
    pools = Pools(engine.layout(BLOCK_TOKENS), 3, 3)
    wanted = ("all", "none", "last")
    segments = [
        Segment(ids=prompt(name, n), start=0, slot=i, blocks=[i], logits=wanted[i]) for i, n in enumerate(lengths)
    ]
    out = engine.forward(segments, pools.rows, pools.state)
    assert out.shape == (6, engine.config.vocab_size)
    whole = result(name, kind, "whole").logits
    assert torch.equal(out[:5], whole[LENGTHS.index(5)])
    assert torch.equal(out[5:], whole[LENGTHS.index(64)][-1:])


@each_kind
def test_cuts_between_multiples_of_64_stay_within_tolerance(kind: str) -> None:
    """Tiles lie on absolute positions: after an odd cut, cuts at multiples of 64 are exact again."""
    name, ids = "k3_tiny_mxfp4", prompt("k3_tiny_mxfp4", 200)
    engine, outs = backend(name, kind), []
    for edges in ((0, 70, 200), (0, 70, 128, 200), (0, 70, 128, 192, 200)):
        pools = Pools(engine.layout(BLOCK_TOKENS), 1, 4)
        blocks = pools.take(200)
        segments = [
            Segment(ids=ids[a:b], start=a, slot=0, blocks=blocks, logits="all") for a, b in itertools.pairwise(edges)
        ]
        outs.append(torch.cat([engine.forward([segment], pools.rows, pools.state) for segment in segments]))
        assert relative_error(outs[-1], golden_tensors(name)["len200.logits"]) < TOLERANCE[name]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_nothing_is_read_before_it_is_written() -> None:
    """With every fresh tensor filled with NaN the bits stay the same."""
    name = "k3_tiny_mxfp4"
    torch.use_deterministic_algorithms(True)  # which fills
    try:
        poisoned = run(backend(name, "torch"), [prompt(name, 65), prompt(name, 5)], 64)
    finally:
        torch.use_deterministic_algorithms(False)
    whole = result(name, "torch", "whole").logits
    assert torch.equal(poisoned.logits[0], whole[LENGTHS.index(65)])
    assert torch.equal(poisoned.logits[1], whole[LENGTHS.index(5)])


BAD_BATCHES = {
    "no ids": [{"ids": []}],
    "an id past the vocabulary": [{"ids": [288]}],
    "a negative id": [{"ids": [-1]}],
    "past its blocks": [{"start": 64}],
    "a negative start": [{"start": -1}],
    "a slot that is not there": [{"slot": 2}],
    "a block that is not there": [{"blocks": [3]}],
    "a slot twice": [{}, {"blocks": [1]}],
}


@each_kind
@pytest.mark.parametrize("changes", BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_a_batch_that_would_leave_the_pools_is_refused_untouched(kind: str, changes: list[dict[str, Any]]) -> None:
    engine = backend("k3_tiny_smooth", kind)
    pools = Pools(engine.layout(BLOCK_TOKENS), 2, 3)
    pools.rows.fill_(7.0)
    pools.state.fill_(-3.0)
    good = {"ids": [1], "start": 0, "slot": 0, "blocks": [0]}
    with pytest.raises(InvariantError):
        engine.forward([Segment(**(good | change)) for change in changes], pools.rows, pools.state)
    assert (pools.rows == 7.0).all()
    assert (pools.state == -3.0).all()


def test_backends_agree_on_a_prompt_longer_than_the_goldens() -> None:
    """Several attention tiles; the model whose experts are fixed, so that rounding cannot flip one."""
    ids = torch.randint(0, 288, (700,), generator=torch.Generator().manual_seed(2)).tolist()
    torch_logits, native_logits = (run(backend("k3_tiny_smooth", kind), [ids], 256).logits[0] for kind in KINDS)
    assert relative_error(native_logits, torch_logits) < TOLERANCE["k3_tiny_smooth"]
