"""The C++ network: one result per sequence, however it is cut, batched, tiled or threaded; wrong batches refused."""

from __future__ import annotations

import random
import select
import shutil
import threading
import time
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.batch import Segment
from model.checkpoint import load_weights
from model.config import load_config
from model.errors import BackendUnavailable
from model.native import backend as native
from model.native import selfcheck
from model.native.backend import BatchError, NativeBackend
from model.native.build import build
from model.native.ffi import Clock, load
from tests.golden import golden_dir
from tests.model.runs import Pools

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="there is no C++ compiler"
)

MODELS = ("k3_tiny_mxfp4", "k3_tiny_smooth")
BLOCK_TOKENS = 64
LENGTH = 150


@cache
def engine(name: str, threads: int = 1) -> NativeBackend:
    """What else differs: on two threads MXFP4 experts stay as stored; three share out weights, two rows."""
    config = load_config(golden_dir(name))
    widen_bytes = 0 if threads == 2 else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeBackend, "cached_bytes", 0 if threads == 3 else None)
        return NativeBackend(config, load_weights(golden_dir(name), config), threads, widen_bytes=widen_bytes)


def random_ids(backend: NativeBackend, length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(backend.config.vocab_size) for _ in range(length)]


class Sequence1:
    """One sequence in its own pools, fed piece by piece."""

    def __init__(self, backend: NativeBackend, ids: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> None:
        self.backend, self.ids, self.consumed = backend, ids, 0
        self.pools = Pools(backend.layout(block_tokens), 2, len(ids) // block_tokens + 3)
        self.blocks = self.pools.take(len(ids))

    def segment(self, tokens: int) -> Segment:
        piece = self.ids[self.consumed : self.consumed + tokens]
        return Segment(ids=piece, start=self.consumed, slot=1, blocks=self.blocks, logits="all")

    def feed(self, tokens: int) -> torch.Tensor:
        out = self.backend.forward([self.segment(tokens)], self.pools.rows, self.pools.state)
        self.consumed += tokens
        return out

    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pools.rows_of(self.blocks, self.consumed), self.pools.state[1]


@cache
def whole(name: str, seed: int) -> tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, logits, rows and state of a prompt in one pass."""
    backend = engine(name)
    sequence = Sequence1(backend, random_ids(backend, LENGTH, seed))
    logits = sequence.feed(LENGTH)
    assert logits.isfinite().all()
    return list(sequence.ids), logits, *sequence.kept()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
@given(cuts=st.sets(st.integers(1, LENGTH - 1), max_size=6))
@settings(max_examples=8, deadline=None)
def test_any_cut_gives_the_bits_of_the_whole(name: str, threads: int, cuts: set[int]) -> None:
    ids, logits, rows, state = whole(name, 0)
    sequence = Sequence1(engine(name, threads), ids)
    stops = [*sorted(cuts), LENGTH]
    found = torch.cat([sequence.feed(stop - sequence.consumed) for stop in stops])
    assert torch.equal(found, logits)
    assert torch.equal(sequence.kept()[0], rows)
    assert torch.equal(sequence.kept()[1], state)


@pytest.mark.parametrize("name", MODELS)
def test_token_by_token_gives_the_bits_of_the_whole(name: str) -> None:
    ids, logits, _, state = whole(name, 0)
    sequence = Sequence1(engine(name), ids)
    assert torch.equal(torch.cat([sequence.feed(1) for _ in ids]), logits)
    assert torch.equal(sequence.kept()[1], state)


@pytest.mark.parametrize("threads", [1, 2, 3])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=5, deadline=None)
def test_a_ragged_batch_gives_the_bits_of_each_sequence_alone(threads: int, seed: int) -> None:
    """Sequences advance by random amounts, in random company and order; some passes want no or one row's logits."""
    name, rng = MODELS[seed % 2], random.Random(seed)
    backend = engine(name, threads)
    prompts = [whole(name, i) for i in range(4)]
    pools = Pools(backend.layout(BLOCK_TOKENS), 6, 16, seed)
    tables = [pools.take(LENGTH) for _ in prompts]
    slots = rng.sample(range(6), 4)
    consumed = [0] * 4
    while min(consumed) < LENGTH:
        running = [i for i in range(4) if consumed[i] < LENGTH]
        chosen = rng.sample(running, rng.randint(1, len(running)))
        segments, expected = [], []
        for i in chosen:
            ids, logits, *_ = prompts[i]
            n = min(rng.choice([1, 1, 2, 7, 40]), LENGTH - consumed[i])
            wanted = rng.choice(["all", "last", "none"])
            end = consumed[i] + n
            piece = ids[consumed[i] : end]
            segments.append(Segment(ids=piece, start=consumed[i], slot=slots[i], blocks=tables[i], logits=wanted))
            expected.append(logits[{"all": consumed[i], "last": end - 1, "none": end}[wanted] : end])
            consumed[i] = end
        assert torch.equal(backend.forward(segments, pools.rows, pools.state), torch.cat(expected))
    for i, (_, _, rows, state) in enumerate(prompts):
        assert torch.equal(pools.rows_of(tables[i], LENGTH), rows)
        assert torch.equal(pools.state[slots[i]], state)


@pytest.mark.parametrize("block_tokens", [16, 48, 128])
def test_block_size_changes_no_bit(block_tokens: int) -> None:
    ids, logits, *_ = whole("k3_tiny_smooth", 0)
    assert torch.equal(Sequence1(engine("k3_tiny_smooth"), ids, block_tokens).feed(LENGTH), logits)


def test_passes_longer_than_a_tile_give_the_bits_of_short_ones() -> None:
    """The library runs at most 512 rows at once; here the cut falls inside segments of every logits mode."""
    backend = engine("k3_tiny_smooth")
    modes = ("all", "last", "none", "last")
    lengths = (300, 500, 250, 20)
    prompts = [random_ids(backend, n, seed) for seed, n in enumerate(lengths)]
    results = []
    for tokens_per_pass in (10_000, 37):
        pools = Pools(backend.layout(BLOCK_TOKENS), 4, 24)
        tables = [pools.take(n) for n in lengths]
        logits: list[list[torch.Tensor]] = [[] for _ in lengths]
        for start in range(0, max(lengths), tokens_per_pass):
            running = [i for i in range(4) if start < lengths[i]]
            segments = []
            for i in running:
                piece = prompts[i][start : start + tokens_per_pass]
                ends = start + len(piece) == lengths[i]
                mode = modes[i] if ends or modes[i] == "all" else "none"
                segments.append(Segment(ids=piece, start=start, slot=i, blocks=tables[i], logits=mode))
            out = backend.forward(segments, pools.rows, pools.state)
            for i, part in zip(running, out.split([s.num_logits() for s in segments]), strict=True):
                logits[i].append(part)
        results.append([torch.cat(parts) for parts in logits] + [pools.state])
    for at_once, in_pieces in zip(*results, strict=True):
        assert torch.equal(at_once, in_pieces)


def test_attention_over_a_long_prefix_needs_no_memory_of_its_length() -> None:
    backend, tokens = engine("k3_tiny_smooth"), 65536
    layout = backend.layout(512)
    rows, state = torch.zeros(tokens // 512 + 1, layout.block_floats), torch.zeros(1, layout.slot_floats)
    rows.uniform_(-1, 1, generator=torch.Generator().manual_seed(0))

    def resident_mib() -> float:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))

    def run(start: int) -> torch.Tensor:
        segment = Segment(ids=list(range(48)), start=start, slot=0, blocks=list(range(len(rows))))
        return backend.forward([segment], rows, state)

    run(64)
    before = resident_mib()
    assert run(tokens).isfinite().all()
    assert resident_mib() - before < 4


def two_sequences(backend: NativeBackend) -> tuple[list[Segment], torch.Tensor, torch.Tensor]:
    layout = backend.layout(BLOCK_TOKENS)
    segments = [
        Segment(ids=[1, 2, 3], start=0, slot=0, blocks=[0]),
        Segment(ids=[4], start=70, slot=1, blocks=[1, 2]),
    ]
    return segments, torch.zeros(4, layout.block_floats), torch.zeros(2, layout.slot_floats)


WRONG = {
    "no tokens": {"ids": []},
    "token id 9999999": {"ids": [9999999]},
    "token id -1": {"ids": [0, -1]},
    "32-bit": {"ids": [1 << 40]},
    "slot 2 is outside": {"slot": 2},
    "slot -1 is outside": {"slot": -1},
    "slot 0 is in another": {"slot": 0},
    "start -1": {"start": -1},
    "do not fit into 2": {"start": 128},
    "block 4 is outside": {"blocks": [1, 4]},
    "block -1 is outside": {"blocks": [-1, 1]},
    "block 0 is written twice": {"blocks": [1, 0]},
    "block 0 is written elsewhere": {"blocks": [0, 1]},
    "block 1 is written elsewhere": {"blocks": [1, 1]},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_batch_is_refused_before_anything_is_touched(message: str) -> None:
    backend = engine("k3_tiny_smooth")
    segments, rows, state = two_sequences(backend)
    fields = {"ids": [4], "start": 70, "slot": 1, "blocks": [1, 2], **WRONG[message]}
    with pytest.raises(BatchError, match=message):
        backend.forward([segments[0], Segment(**fields)], rows, state)
    assert not rows.any() and not state.any()
    assert backend.forward(segments, rows, state).isfinite().all()


def test_pools_of_a_wrong_form_are_refused() -> None:
    backend = engine("k3_tiny_smooth")
    segments, rows, state = two_sequences(backend)
    for wrong_rows, wrong_state in (
        (rows.double(), state),
        (rows, state[:, :-1].contiguous()),
        (rows, state.T.contiguous().T),
        (rows[:, :-1].contiguous(), state),
        (rows[0], state),
    ):
        with pytest.raises(BatchError):
            backend.forward(segments, wrong_rows, wrong_state)


def test_a_prefix_may_be_shared_by_readers() -> None:
    ids, logits, *_ = whole("k3_tiny_smooth", 0)
    backend = engine("k3_tiny_smooth")
    first = Sequence1(backend, ids)
    first.feed(128)
    state = first.pools.state
    state[0] = state[1]
    spare = first.pools.take(64)
    segments = [
        Segment(ids=ids[128:], start=128, slot=slot, blocks=[*first.blocks[:2], last], logits="all")
        for slot, last in ((1, first.blocks[2]), (0, *spare))
    ]
    assert torch.equal(backend.forward(segments, first.pools.rows, state), logits[128:].repeat(2, 1))


def test_threads_may_use_two_models_at_once() -> None:
    name = "k3_tiny_smooth"
    ids, logits, *_ = whole(name, 0)
    config = load_config(golden_dir(name))
    wrong: list[int] = []

    def work(threads: int) -> None:
        backend = NativeBackend(config, load_weights(golden_dir(name), config), threads)
        for _ in range(5):
            if not torch.equal(Sequence1(backend, ids).feed(LENGTH), logits):
                wrong.append(threads)

    workers = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.parametrize("roused", [False, True])
def test_idle_threads_rest(roused: bool) -> None:
    """A pool that waits for work may look around for a moment only, also where none comes that was announced."""
    backend = engine("k3_tiny_smooth", 2)
    Sequence1(backend, [1, 2, 3]).feed(3)
    if roused:
        time.sleep(0.01)  # asleep by now
        backend.rouse()
    cpu, wall = time.process_time(), time.monotonic()
    select.select([], [], [], 0.3)
    assert time.process_time() - cpu < 0.1 * (time.monotonic() - wall)


def test_the_profile_accounts_for_a_pass() -> None:
    backend = engine("k3_tiny_smooth")
    backend.profile(Clock.CPU)
    begin = time.thread_time()
    Sequence1(backend, random_ids(backend, 200, 0)).feed(200)
    whole_pass = time.thread_time() - begin
    parts = backend.profile(Clock.OFF)
    assert 0.3 * whole_pass < sum(parts.values()) <= whole_pass
    assert all(seconds > 0 for seconds in parts.values())
    assert not any(backend.profile(Clock.OFF).values())


def test_experts_kept_as_bf16_change_no_bit() -> None:
    narrow, wide = (
        NativeBackend(selfcheck.CONFIG, selfcheck.PatternWeights(), widen_bytes=bytes_) for bytes_ in (0, 2**30)
    )
    assert wide.weight_bytes > narrow.weight_bytes
    assert selfcheck.digest(narrow) == selfcheck.digest(wide) == selfcheck.DIGEST


def test_other_vectors_compute_the_same_bits() -> None:
    """Sixteen lanes in plain C++: the packing and loops of AVX-512 machines, on any machine. Draws too."""
    lib = load(build(["-DMR_GENERIC_LANES=16", "-O0"]))
    assert lib.mr_isa() == b"generic"
    backend = NativeBackend(selfcheck.CONFIG, selfcheck.PatternWeights(), 2, lib=lib, widen_bytes=0)
    assert selfcheck.digest(backend) == selfcheck.DIGEST
    assert selfcheck.draws_digest(lib) == selfcheck.DRAWS


@pytest.mark.parametrize("which", ["DIGEST", "DRAWS"])
def test_a_library_that_computes_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    monkeypatch.setattr(selfcheck, which, "0" * 32)
    native.library.cache_clear()
    try:
        with pytest.raises(BackendUnavailable, match="computes"):
            native.library()
    finally:
        native.library.cache_clear()
