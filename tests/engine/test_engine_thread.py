"""The engine's thread: many callers at once, a step in flight, stopping, bugs, idleness."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest
from toy import VOCAB, Client, ToyBackend, alone

from engine.api import Failed, Finished, SamplingParams, SequenceSpec, TokenSampled
from engine.engine import Engine
from engine.observer import SequenceReport, StepReport
from engine.settings import EngineSettings
from moonrelay.errors import InvariantError, Overloaded, Unavailable

DEADLINE_S = 20.0
SETTINGS = EngineSettings(num_blocks=64, num_slots=12, max_batch_tokens=192, max_batch_sequences=6, queue_len_max=12)


class WaitingClient(Client):
    """A client another thread can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.ended, self.first_token = threading.Event(), threading.Event()

    def __call__(self, event) -> None:
        super().__call__(event)
        if isinstance(event, TokenSampled):
            self.first_token.set()
        if isinstance(event, Finished | Failed):
            self.ended.set()

    def wait(self) -> None:
        assert self.ended.wait(DEADLINE_S)


class Watching:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.sequences: queue.SimpleQueue[SequenceReport] = queue.SimpleQueue()
        self.freed = threading.Semaphore(0)

    def step_done(self, report: StepReport) -> None:
        self.steps.append(report)

    def sequence_done(self, report: SequenceReport) -> None:
        self.sequences.put(report)

    def memory_freed(self) -> None:
        self.freed.release()


class GatedBackend(ToyBackend):
    """Every pass reports that it began and waits until it may end."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    def forward(self, segments, rows, state, *, progress=None):
        self.inside.release()
        assert self.go_on.acquire(timeout=DEADLINE_S)
        return super().forward(segments, rows, state, progress=progress)

    def enter(self) -> None:
        assert self.inside.acquire(timeout=DEADLINE_S)


def refuse(error: BaseException) -> None:
    raise error


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(ToyBackend(), SETTINGS, on_fatal=refuse)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def gated() -> Iterator[tuple[Engine, GatedBackend, Watching]]:
    backend, watching = GatedBackend(), Watching()
    engine = Engine(backend, SETTINGS, on_fatal=refuse, observer=watching)
    engine.start()
    yield engine, backend, watching
    backend.go_on.release(1000)
    engine.stop()


def begin(engine: Engine, ids: list[int], max_tokens: int, name: str = "r"):
    client, reservation = WaitingClient(), engine.reserve(len(ids) + max_tokens)
    spec = SequenceSpec(request_id=name, ids=ids, sampling=SamplingParams(max_tokens=max_tokens))
    engine.submit(spec, reservation, client)
    return client, reservation


def test_many_threads_at_once_get_the_tokens_they_would_get_alone(engine):
    failures: list[BaseException] = []
    overloaded = threading.Semaphore(0)

    def one_thread(number: int) -> None:
        try:
            for turn in range(6):
                one_request(
                    f"{number}-{turn}", [(number * 31 + turn * 7 + i) % VOCAB for i in range(5 + number * 20)]
                )
        except BaseException as error:
            failures.append(error)

    def one_request(name: str, ids: list[int]) -> None:
        sampling = SamplingParams(max_tokens=6, temperature=0.8, seed=len(ids))
        client = WaitingClient()
        try:
            reservation = engine.reserve(len(ids) + 6)
        except Overloaded:
            overloaded.release()
            return
        try:
            engine.submit(SequenceSpec(request_id=name, ids=ids, sampling=sampling), reservation, client)
            if len(name) % 4 == 0:
                engine.cancel(name)
            client.wait()
            want = alone(ids, sampling)
            assert client.tokens == want[: len(client.tokens)]
            assert client.end.reason == "cancelled" or client.tokens == want
        finally:
            engine.release(reservation)

    threads = [threading.Thread(target=one_thread, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not failures
    engine.check()
    stats = engine.stats()
    assert (stats.free_blocks, stats.free_slots, stats.num_running) == (64, 12, 0)


def test_release_in_the_middle_of_a_step_waits_for_its_end_and_cancels(gated):
    engine, backend, watching = gated
    client, reservation = begin(engine, [1, 2, 3], 5)
    backend.enter()
    engine.release(reservation)
    engine.release(reservation)
    assert engine.stats().free_slots == 11  # the running step still writes there
    other = engine.reserve(10)  # never waits for a step
    assert other.slot != reservation.slot
    assert not set(other.blocks) & set(reservation.blocks)
    backend.go_on.release()
    client.wait()
    assert client.end == Finished(reason="cancelled", tokens_in_state=3)
    assert not client.tokens
    assert watching.freed.acquire(timeout=DEADLINE_S)
    assert engine.stats().free_slots == 11
    engine.release(other)
    engine.check()


def test_memory_given_back_by_a_failed_step_is_told_at_once():
    backend, watching = ToyBackend(), Watching()
    engine = Engine(backend, SETTINGS, on_fatal=refuse, observer=watching)
    client, reservation = begin(engine, [1, 2, 3], 5)
    backend.during_next = lambda: engine.release(reservation)
    backend.raise_next = RuntimeError("injected")
    engine.turn()
    assert isinstance(client.end, Failed)
    assert watching.freed.acquire(blocking=False)
    assert engine.stats().free_slots == 12


def test_cancel_in_the_middle_of_a_step_gives_no_further_token_and_keeps_the_memory(gated):
    engine, backend, _ = gated
    client, reservation = begin(engine, [1, 2, 3], 5)
    backend.enter()
    backend.go_on.release()
    backend.enter()  # the second step
    engine.cancel("r")
    engine.cancel("r")
    engine.cancel("unknown")
    backend.go_on.release()
    client.wait()
    assert client.end == Finished(reason="cancelled", tokens_in_state=4)
    assert client.tokens == alone([1, 2, 3], SamplingParams())
    engine.cancel("r")
    assert engine.stats().free_slots == 11
    engine.release(reservation)
    assert engine.stats().free_slots == 12


def test_stopping_ends_everything_and_refuses_the_rest(gated):
    engine, backend, _ = gated
    clients = [begin(engine, [1, 2], 50, str(i))[0] for i in range(9)]  # more than the batch takes
    backend.enter()
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    backend.go_on.release(1000)
    stopper.join(DEADLINE_S)
    assert not stopper.is_alive()
    for client in clients:
        assert isinstance(client.end, Failed)
        assert isinstance(client.end.error, Unavailable)
    with pytest.raises(Unavailable):
        engine.reserve(1)
    engine.stop()


@pytest.mark.parametrize("bug", [InvariantError("broken"), AssertionError("broken")])
def test_a_bug_reaches_the_process(bug):
    backend, died = ToyBackend(), queue.SimpleQueue()
    engine = Engine(backend, SETTINGS, on_fatal=died.put)
    backend.raise_next = bug
    engine.start()
    begin(engine, [1], 1)
    assert died.get(timeout=DEADLINE_S) is bug
    with pytest.raises(Unavailable):
        engine.reserve(1)
    engine.stop()


def test_an_emit_that_raises_reaches_the_process():
    died = queue.SimpleQueue()
    engine = Engine(ToyBackend(), SETTINGS, on_fatal=died.put)
    engine.start()

    def emit(event):
        raise RuntimeError("the loop is closed")

    engine.submit(SequenceSpec(request_id="r", ids=[1], sampling=SamplingParams()), engine.reserve(1), emit)
    assert isinstance(died.get(timeout=DEADLINE_S), RuntimeError)


def test_an_idle_engine_uses_no_cpu(engine):
    client, reservation = begin(engine, [1, 2, 3], 3)
    client.wait()
    engine.release(reservation)
    engine.warm()
    clock = time.pthread_getcpuclockid(engine._thread.ident)
    engine.stats()
    before = time.clock_gettime(clock)
    threading.Event().wait(0.3)
    assert time.clock_gettime(clock) - before < 0.003  # one per cent: the last turn's own end


def test_warming_runs_prompts_batches_and_the_sampler_and_leaves_nothing(engine):
    engine.warm()
    lengths = {tuple(n for _, n in batch) for batch in engine.backend.batches}
    assert (65,) in lengths
    assert any(len(batch) > 1 and set(batch) == {1} for batch in lengths)
    stats = engine.stats()
    assert (stats.free_blocks, stats.free_slots) == (64, 12)


def test_warming_fails_loudly_on_a_broken_model(engine):
    engine.backend.raise_next = RuntimeError("illegal instruction")
    with pytest.raises(Exception, match="the model failed"):
        engine.warm()


def test_the_observer_hears_of_every_step_and_sequence():
    watching = Watching()
    engine = Engine(ToyBackend(), SETTINGS, on_fatal=refuse, observer=watching)
    engine.start()
    client, reservation = begin(engine, list(range(70)), 4)
    client.wait()
    engine.release(reservation)
    report = watching.sequences.get(timeout=DEADLINE_S)
    assert (report.reason, report.num_prompt_tokens, report.num_tokens_drawn) == ("length", 70, 4)
    assert min(report.queue_s, report.prefill_s, report.decode_s) >= 0
    assert sum(step.num_prompt_tokens for step in watching.steps) == 70
    assert sum(step.num_decode_tokens for step in watching.steps) == 3
    assert all(step.total_s >= step.forward_s + step.sample_s > 0 for step in watching.steps)
    engine.stop()
    assert watching.freed.acquire(blocking=False)


def test_a_handoff_to_another_engine_gives_the_tokens_of_one(engine):
    """Prefill holds, its rows and state are copied elsewhere, decode goes on with the token no state has seen."""
    decode = Engine(ToyBackend(), SETTINGS, on_fatal=refuse)
    decode.start()
    ids, sampling = [(i * 13) % VOCAB for i in range(150)], SamplingParams(max_tokens=9, temperature=1.0, seed=5)
    held, source = WaitingClient(), engine.reserve(150)
    engine.submit(SequenceSpec(request_id="r", ids=ids, sampling=sampling, hold_after_first=True), source, held)
    held.wait()
    assert held.end == Finished(reason="held", tokens_in_state=150)
    decode.reserve(70)  # so that blocks and slots differ
    target = decode.reserve(159)
    for theirs, ours in zip(source.blocks, target.blocks, strict=True):
        decode.rows[ours] = engine.rows[theirs]
    decode.state[target.slot] = engine.state[source.slot]
    engine.release(source)
    client = WaitingClient()
    rest = SamplingParams(max_tokens=8, temperature=1.0, seed=5)
    spec = SequenceSpec(request_id="r", ids=[held.tokens[0].id], sampling=rest, restored=150)
    decode.submit(spec, target, client)
    client.wait()
    decode.stop()
    assert held.tokens + client.tokens == alone(ids, sampling)
