"""A turn's rolling copy: what it holds, who owns it, who gets its slot under pressure."""

from __future__ import annotations

import pytest
from toy import Client, ToyBackend, alone, finish, quiet_engine, start

from engine.api import Failed, Finished, SamplingParams, SequenceSpec, SnapshotTaken
from moonrelay.errors import Overloaded


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(i * 17 + salt * 5 + i // 7) % 97 for i in range(length)]


def taken(client: Client) -> list[SnapshotTaken]:
    return [event for event in client.events if isinstance(event, SnapshotTaken)]


def go_on(engine, source, ids: list[int], snapshot: SnapshotTaken, draws: int) -> Client:
    """Another sequence from the snapshot, on its own slot, over the rows that `source` still holds."""
    blocks = range(snapshot.tokens // 64)
    engine.retain(source, blocks)
    target = engine.reserve(len(ids) + draws, shared=source.blocks[: len(blocks)])
    engine.drop(source.blocks[: len(blocks)])
    engine.state[target.slot] = engine.state[snapshot.slot]
    client = Client()
    spec = SequenceSpec(
        request_id="next", ids=ids[snapshot.tokens :], sampling=SamplingParams(max_tokens=draws),
        restored=snapshot.tokens,
    )  # fmt: skip
    engine.submit(spec, target, client)
    finish(engine)
    return client


@pytest.mark.parametrize(
    ("length", "draws", "boundary"),
    [(5, 59, None), (5, 60, 64), (5, 61, 64), (60, 133, 192), (64, 2, 64), (128, 200, 320), (127, 2, 128)],
)
def test_the_last_boundary_that_was_consumed_is_kept_and_the_next_turn_goes_on_from_it(length, draws, boundary):
    engine = quiet_engine()
    client, reservation = start(engine, prompt(length), SamplingParams(max_tokens=draws), write_back=True)
    finish(engine)
    snapshots = taken(client)
    assert [s.tokens for s in snapshots] == ([] if boundary is None else [boundary])
    assert isinstance(client.events[-1], Finished)
    if not snapshots:
        return
    assert client.events[-2] == snapshots[0]
    following = prompt(length) + [t.id for t in client.tokens] + prompt(9, 3)
    resumed = go_on(engine, reservation, following, snapshots[0], 5)
    assert resumed.tokens == alone(following, SamplingParams(max_tokens=5))
    engine.release_snapshot(snapshots[0].slot)
    engine.check()


def test_copies_are_made_at_boundaries_only_and_into_one_slot():
    engine = quiet_engine()
    start(engine, prompt(5), SamplingParams(max_tokens=300), write_back=True)
    copies = []
    copy = engine.pools.copy_state
    engine.pools.copy_state = lambda source, target: (copies.append(target), copy(source, target))
    while engine.turn():
        assert engine.stats().rolling_slots <= 1
    assert len(copies) == 304 // 64 and len(set(copies)) == 1


def test_a_cancelled_turn_leaves_its_last_boundary_and_a_failed_one_nothing():
    backend = ToyBackend()
    engine = quiet_engine(backend)
    gone, held = start(engine, prompt(5), SamplingParams(max_tokens=300), name="gone", write_back=True)
    for _ in range(140):
        engine.turn()
    engine.cancel("gone")
    finish(engine)
    assert [s.tokens for s in taken(gone)] == [128]
    ids = prompt(5) + [t.id for t in gone.tokens]
    assert go_on(engine, held, ids, taken(gone)[0], 3).tokens == alone(ids, SamplingParams(max_tokens=3))
    failed, reservation = start(engine, prompt(5), SamplingParams(max_tokens=300), name="failed", write_back=True)
    for _ in range(70):
        engine.turn()
    backend.raise_next = RuntimeError("injected")
    finish(engine)
    assert isinstance(failed.end, Failed) and not taken(failed)
    assert engine.stats().rolling_slots == 1  # it goes with the reservation
    engine.release(reservation)
    assert engine.stats().rolling_slots == 0
    engine.check()


def test_adaptive_copies_give_way_to_sequences_and_snapshots_and_firm_ones_do_not():
    engine = quiet_engine(num_slots=2)
    rolling, _ = start(engine, prompt(60), SamplingParams(max_tokens=100), name="a", write_back=True)
    for _ in range(20):
        engine.turn()
    assert (engine.stats().rolling_slots, engine.stats().free_slots) == (1, 0)
    other = engine.reserve(10)
    assert engine.stats().rolling_slots == 0
    finish(engine)
    assert not taken(rolling) and rolling.tokens == alone(prompt(60), SamplingParams(max_tokens=100))
    engine.release(other)
    engine = quiet_engine(num_slots=3, writeback="on")
    firm = engine.reserve(200, write_back=True)
    engine.reserve(10)
    with pytest.raises(Overloaded):
        engine.reserve(10)
    with pytest.raises(Overloaded):
        engine.reserve(10, write_back=True)
    engine.release(firm)
    assert engine.stats().free_slots == 2


def test_a_copy_that_a_running_step_writes_is_not_given_away():
    backend = ToyBackend()
    engine = quiet_engine(backend, num_slots=2)
    client, reservation = start(engine, prompt(60), SamplingParams(max_tokens=10), write_back=True)
    for _ in range(4):
        engine.turn()
    refused = []

    def meanwhile() -> None:
        with pytest.raises(Overloaded):
            engine.reserve(10)
        refused.append(True)

    backend.during_next = meanwhile
    engine.turn()  # consumes token 64
    assert refused
    finish(engine)
    assert [s.tokens for s in taken(client)] == [64]
    engine.release(reservation)
    engine.check()


def test_off_means_off():
    engine = quiet_engine(writeback="off")
    client, _ = start(engine, prompt(5), SamplingParams(max_tokens=100), write_back=True)
    finish(engine)
    assert not taken(client)
