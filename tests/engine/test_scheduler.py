"""What goes into a step, by the steps that the toy model saw."""

from __future__ import annotations

import pytest
from toy import Client, ToyBackend, alone, finish, quiet_engine, start

from engine.api import Failed, Finished, Progress, SamplingParams, SequenceSpec, SnapshotTaken, TokenSampled
from engine.settings import EngineSettings
from moonrelay.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    InvariantError,
    Overloaded,
    RequestTooLarge,
    SettingsError,
)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(i * 17 + salt * 5 + i // 7) % 97 for i in range(length)]


def test_a_long_prompt_never_stalls_a_decoding_sequence():
    backend = ToyBackend()
    engine = quiet_engine(backend, prefill_share_tokens=64)
    short, _ = start(engine, prompt(5), SamplingParams(max_tokens=40), name="short")
    engine.turn()
    long, _ = start(engine, prompt(1000), SamplingParams(max_tokens=2), name="long")
    before = len(short.tokens)
    for turns in range(1, 16):
        engine.turn()
        assert len(short.tokens) == before + turns  # one token a step, whatever the prompt
        assert sum(n for _, n in backend.batches[-1]) <= 64 + 1
    assert not long.tokens
    finish(engine)
    assert long.tokens == alone(prompt(1000), SamplingParams(max_tokens=2))


def test_a_lone_prompt_uses_the_whole_step_and_is_cut_at_tiles():
    backend = ToyBackend()
    engine = quiet_engine(backend, max_batch_tokens=200)
    start(engine, prompt(500), SamplingParams())
    finish(engine)
    assert backend.batches == [[(0, 192)], [(192, 192)], [(384, 116)]]


def test_several_prompts_share_one_step():
    backend = ToyBackend()
    engine = quiet_engine(backend, max_batch_tokens=160)
    for i, length in enumerate((10, 70, 100)):
        start(engine, prompt(length), SamplingParams(), name=str(i))
    finish(engine)
    assert backend.batches == [[(0, 10), (0, 70), (0, 64)], [(64, 36)]]


def test_chunks_end_at_snapshots_and_an_unaligned_start_meets_the_next_tile():
    backend = ToyBackend()
    engine = quiet_engine(backend, max_batch_tokens=512)
    client, reservation = start(
        engine, prompt(100), SamplingParams(max_tokens=200), hold_after_first=True, snapshot_at=(64,)
    )
    finish(engine)
    assert backend.batches == [[(0, 64)], [(64, 36)]]
    assert [e.tokens for e in client.events if isinstance(e, SnapshotTaken)] == [64]
    more = Client()
    spec = SequenceSpec(
        request_id="more", ids=prompt(170), sampling=SamplingParams(), restored=100, snapshot_at=(192,)
    )
    engine.submit(spec, reservation, more)
    finish(engine)
    assert backend.batches[2:] == [[(100, 92)], [(192, 78)]]


def test_a_short_prompt_does_not_wait_for_the_whole_of_a_long_one_and_the_long_one_advances():
    backend = ToyBackend()
    engine = quiet_engine(backend, max_batch_tokens=68, num_blocks=80, num_slots=20)
    long, _ = start(engine, prompt(2000), SamplingParams(), name="long")
    short, _ = start(engine, prompt(64), SamplingParams(), name="short")
    engine.turn()
    engine.turn()
    assert isinstance(short.end, Finished)
    for i in range(14):  # a steady stream of short prompts takes at most every second step
        start(engine, prompt(64), SamplingParams(), name=f"short-{i}")
        engine.turn()
        engine.turn()
    assert max(e.tokens for e in long.events if isinstance(e, Progress)) >= 15 * 64


def test_waiting_is_first_come_first_served_and_bounded():
    engine = quiet_engine(max_batch_sequences=2, queue_len_max=2)
    clients = [start(engine, prompt(4, i), SamplingParams(max_tokens=3), name=str(i))[0] for i in range(4)]
    spare = engine.reserve(10)
    with pytest.raises(Overloaded):
        engine.submit(SequenceSpec(request_id="x", ids=[1], sampling=SamplingParams()), spare, Client())
    engine.turn()
    assert [len(c.tokens) for c in clients] == [1, 1, 0, 0]
    assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 2)
    finish(engine)
    assert all(c.tokens == alone(prompt(4, i), SamplingParams(max_tokens=3)) for i, c in enumerate(clients))


def test_both_budgets_refuse_and_give_back():
    engine = quiet_engine(num_blocks=4, num_slots=2, max_batch_sequences=2)
    first = engine.reserve(150)
    assert len(first.blocks) == 3
    with pytest.raises(Overloaded, match="blocks"):
        engine.reserve(65)
    second = engine.reserve(64)
    engine.release(first)
    engine.release(first)
    third = engine.reserve(1)
    with pytest.raises(Overloaded, match="slot"):
        engine.reserve(1)
    with pytest.raises(RequestTooLarge):
        engine.reserve(257)
    engine.release(second)
    engine.release(third)
    assert (engine.stats().free_blocks, engine.stats().free_slots) == (4, 2)
    engine.check()


def test_snapshots_count_in_the_slot_budget_and_are_skipped_without_one():
    engine = quiet_engine(num_slots=2, max_batch_sequences=2)
    client, _ = start(engine, prompt(200), SamplingParams(max_tokens=60), snapshot_at=(64, 128, 256))
    finish(engine)
    taken = [e for e in client.events if isinstance(e, SnapshotTaken)]
    assert [e.tokens for e in taken] == [64]
    assert engine.stats().snapshots_skipped == 2
    engine.release_snapshot(taken[0].slot)
    with pytest.raises(InvariantError):
        engine.release_snapshot(taken[0].slot)


def test_events_come_in_order_and_count_what_the_state_has_seen():
    engine = quiet_engine()
    client, _ = start(engine, prompt(130), SamplingParams(max_tokens=3), snapshot_at=(128,))
    finish(engine)
    kinds = [type(e) for e in client.events]
    assert kinds == [Progress, SnapshotTaken, Progress, TokenSampled, TokenSampled, TokenSampled, Finished]
    assert [e.position for e in client.events if isinstance(e, TokenSampled)] == [130, 131, 132]
    assert client.end == Finished(reason="length", tokens_in_state=132)


def test_the_reasons_to_end():
    engine = quiet_engine(ToyBackend(context_len=20))
    free = alone(prompt(9), SamplingParams(max_tokens=8))
    stop = SamplingParams(max_tokens=8, stop_token_ids=(free[2].id,))
    stopped, _ = start(engine, prompt(9), stop, name="stop")
    held, _ = start(engine, prompt(9), SamplingParams(max_tokens=8), name="held", hold_after_first=True)
    one, _ = start(engine, prompt(9), SamplingParams(max_tokens=1), name="one", hold_after_first=True)
    full, _ = start(engine, prompt(18), SamplingParams(max_tokens=8), name="full")
    finish(engine)
    first = next(i for i, token in enumerate(free) if token.id == free[2].id)
    assert stopped.tokens == free[: first + 1]
    assert [c.end.reason for c in (stopped, held, one, full)] == ["stop", "held", "length", "length"]
    assert held.end.tokens_in_state == 9
    assert len(full.tokens) == 2  # the context's end


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("prompt", {"ids": []}),
        ("prompt", {"ids": [97]}),
        ("prompt", {"ids": [-1]}),
        ("restored", {"restored": -1}),
        ("snapshot_at", {"snapshot_at": (65,)}),
        ("snapshot_at", {"snapshot_at": (64, 64)}),
        ("snapshot_at", {"snapshot_at": (64,), "restored": 64}),
        ("temperature", {"sampling": SamplingParams(temperature=float("nan"))}),
        ("temperature", {"sampling": SamplingParams(temperature=-0.1)}),
        ("top_p", {"sampling": SamplingParams(top_p=0.0)}),
        ("top_k", {"sampling": SamplingParams(top_k=-1)}),
        ("seed", {"sampling": SamplingParams(seed=2**64)}),
        ("max_tokens", {"sampling": SamplingParams(max_tokens=0)}),
        ("top_logprobs", {"sampling": SamplingParams(top_logprobs=65)}),
    ],
)
def test_bad_values_name_their_field_and_leave_the_reservation_usable(field, change):
    engine = quiet_engine()
    reservation = engine.reserve(200)
    good = {"request_id": "r", "ids": [1, 2], "sampling": SamplingParams()}
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(SequenceSpec(**{**good, **change}), reservation, Client())
    assert caught.value.param == field
    client = Client()
    engine.submit(SequenceSpec(**good), reservation, client)
    with pytest.raises(InvalidRequest, match="already running"):
        engine.submit(SequenceSpec(**good), engine.reserve(10), Client())
    finish(engine)
    assert client.tokens == alone([1, 2], SamplingParams())


def test_prompts_beyond_the_context_and_misused_reservations_are_refused():
    engine = quiet_engine(ToyBackend(context_len=100))
    reservation = engine.reserve(101)
    with pytest.raises(ContextLengthExceeded):
        engine.submit(SequenceSpec(request_id="r", ids=prompt(101), sampling=SamplingParams()), reservation, Client())
    small = engine.reserve(10)
    spec = SequenceSpec(request_id="r", ids=prompt(9), sampling=SamplingParams(max_tokens=3))
    with pytest.raises(InvariantError, match="11 tokens"):
        engine.submit(spec, small, Client())
    engine.release(small)
    with pytest.raises(InvariantError, match="released"):
        engine.submit(SequenceSpec(request_id="r", ids=[1], sampling=SamplingParams()), small, Client())
    client = Client()
    engine.submit(SequenceSpec(request_id="r", ids=[1], sampling=SamplingParams()), reservation, client)
    with pytest.raises(InvariantError, match="BUSY"):
        engine.submit(SequenceSpec(request_id="s", ids=[1], sampling=SamplingParams()), reservation, Client())
    finish(engine)
    spec = SequenceSpec(request_id="t", ids=[1], sampling=SamplingParams(), restored=50)
    with pytest.raises(InvariantError, match="holds 1 tokens"):
        engine.submit(spec, reservation, Client())


def test_a_failed_pass_ends_its_sequences_and_spoils_their_memory_only():
    backend = ToyBackend()
    engine = quiet_engine(backend, max_batch_sequences=2)
    failed, reservation = start(engine, prompt(70), SamplingParams(max_tokens=9), name="a", snapshot_at=(64,))
    waiting = [start(engine, prompt(70, i), SamplingParams(max_tokens=9), name=f"w{i}")[0] for i in (1, 2)]
    backend.raise_next = RuntimeError("out of memory in some kernel")
    engine.turn()
    assert isinstance(failed.end, Failed)
    assert failed.end.error.code == "model_failed"
    assert "kernel" not in str(failed.end.error)  # the client gets no internals
    assert isinstance(waiting[0].end, Failed)
    assert waiting[1].end is None
    finish(engine)
    assert waiting[1].tokens == alone(prompt(70, 2), SamplingParams(max_tokens=9))
    with pytest.raises(InvariantError, match="SPOILED"):
        engine.submit(SequenceSpec(request_id="b", ids=[1], sampling=SamplingParams()), reservation, Client())
    before = engine.stats().free_slots
    engine.release(reservation)
    assert engine.stats().free_slots == before + 1


def test_logits_that_are_not_finite_fail_that_sequence_alone():
    engine = quiet_engine(ToyBackend(nan_after=13))
    bad, _ = start(engine, [1, 2, 13], SamplingParams(max_tokens=4), name="bad")
    good, _ = start(engine, [1, 2, 14], SamplingParams(max_tokens=1), name="good")
    finish(engine)
    assert isinstance(bad.end, Failed)
    assert bad.end.error.code == "non_finite_logits"
    assert not bad.tokens
    assert good.tokens == alone([1, 2, 14], SamplingParams(max_tokens=1))


def test_a_snapshot_of_a_step_that_nobody_wants_is_given_back():
    backend = ToyBackend(nan_after=13)
    engine = quiet_engine(backend)
    bad, _ = start(engine, [*prompt(63), 13], SamplingParams(max_tokens=4), name="bad", snapshot_at=(64,))
    gone, _ = start(engine, [*prompt(63), 14], SamplingParams(max_tokens=4), name="gone", snapshot_at=(64,))
    backend.during_next = lambda: engine.cancel("gone")
    finish(engine)
    assert isinstance(bad.end, Failed)
    assert gone.end == Finished(reason="cancelled", tokens_in_state=64)
    assert not any(isinstance(e, SnapshotTaken) for e in bad.events + gone.events)
    assert engine.stats().free_slots == 6  # the two reservations keep theirs


def test_a_bug_in_the_model_is_not_swallowed():
    backend = ToyBackend()
    engine = quiet_engine(backend)
    start(engine, [1], SamplingParams())
    backend.raise_next = InvariantError("state of another sequence")
    with pytest.raises(InvariantError):
        engine.turn()


@pytest.mark.parametrize(
    "change",
    [{"block_tokens": 96}, {"num_blocks": 0}, {"prefill_share_tokens": 63}, {"max_batch_tokens": 95}],
)
def test_settings_that_would_starve_or_tear_are_refused(change):
    with pytest.raises(SettingsError):
        EngineSettings(**change)
