"""Drafts change no answer: events, states and books are those of stepping, whatever is drafted and whatever fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from drafted import LEN_MAX, MLA_FLOATS, KnowingDrafter, ReadingDrafter, VerifyingToy, drafted_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_engine_machine import LAWS, PLAYS, World
from test_engine_model import LENGTHS, Request, loaded, outcome, requests, submit
from test_engine_model import alone as alone_on
from toy import VOCAB, Client, alone, finish, quiet_engine, start

from engine.api import EngineEvent, Failed, Finished, SamplingParams, SnapshotTaken
from engine.engine import Engine
from engine.errors import NonFiniteLogits
from engine.observer import NullObserver, StepReport
from engine.settings import EngineSettings
from engine.speculate import FAULTS_MAX
from model.drafting import DraftRequest, Proposal

GREEDY = SamplingParams(max_tokens=60)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(i * 17 + salt * 5 + i // 7) % VOCAB for i in range(length)]


class Told:
    """What is right, of sequences known by their first block."""

    def __init__(self) -> None:
        self.streams: dict[int, tuple[int, list[int]]] = {}

    def tell(self, block: int, ids: Sequence[int], sampling: SamplingParams) -> None:
        self.streams[block] = len(ids), [token.id for token in alone(ids, sampling)]

    def __call__(self, blocks: Sequence[int], position: int) -> Sequence[int]:
        first, tokens = self.streams[blocks[0]]
        return tokens[position + 1 - first :]


class Steps(NullObserver):
    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def step_done(self, report: StepReport) -> None:
        self.reports.append(report)


def began(engine: Engine, told: Told, ids: list[int], sampling: SamplingParams, **spec: object):
    client, reservation = start(engine, ids, sampling, **spec)
    told.tell(reservation.blocks[0], ids, sampling)
    return client, reservation


def comparable(events: list[EngineEvent]) -> list[EngineEvent]:
    plain = [replace(e, draft=None, draft_first=None) if isinstance(e, Finished) else e for e in events]
    return [replace(e, slot=0) if isinstance(e, SnapshotTaken) else e for e in plain]


@pytest.mark.parametrize("law", range(len(LAWS)))
@pytest.mark.parametrize("skill", [1.0, 0.6, 0.0])
def test_events_and_states_are_those_of_stepping(law, skill):
    """Side by side: runs that end at a stop, at the last draw, on and across boundaries; prompts meanwhile."""
    told = Told()
    engine = drafted_engine(KnowingDrafter(told, skill=skill))
    plain = quiet_engine()
    ended = []
    for which, length in enumerate([3, 60, 130, 64]):
        sampling = SamplingParams(**{"max_tokens": 150 + which, **LAWS[law]})
        spec = {"name": str(which), "write_back": which != 1, "snapshot_at": (192,) if which == 2 else ()}
        ended.append((began(engine, told, prompt(length, which), sampling, **spec),
                      start(plain, prompt(length, which), sampling, **spec)))  # fmt: skip
    finish(engine)
    finish(plain)
    for (client, reservation), (other, theirs) in ended:
        assert comparable(client.events) == comparable(other.events)
        assert torch.equal(engine.state[reservation.slot], plain.state[theirs.slot])
        for ours, its in zip(client.events, other.events, strict=True):
            if isinstance(ours, SnapshotTaken):
                assert torch.equal(engine.state[ours.slot], plain.state[its.slot])
        assert client.end.draft.accepted <= client.end.draft.drafted
        if skill == 1.0 and len(client.tokens) > 20:
            steps = client.end.draft.verify_steps + client.end.draft.plain_steps
            assert len(client.tokens) > 4 * steps


@pytest.mark.parametrize(("read_len_max", "longest"), [(0, LEN_MAX), (15, 15), (63, ReadingDrafter.read_len_max)])
@pytest.mark.parametrize("skill", [1.0, 0.9])
def test_drafts_read_from_the_text_may_be_longer_than_the_block(read_len_max, longest, skill):
    samplings = [SamplingParams(max_tokens=150 + i, **LAWS[i % len(LAWS)]) for i in range(3)]
    prompts = [prompt(length, salt) for salt, length in enumerate([3, 60, 130])]
    stories = [[*ids, *(t.id for t in alone(ids, s))] for ids, s in zip(prompts, samplings, strict=True)]
    drafter, backend = ReadingDrafter(stories, skill=skill), VerifyingToy()
    engine = drafted_engine(drafter, backend, draft_read_len_max=read_len_max)
    plain = quiet_engine()
    ended = []
    for i, (ids, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        spec = {"name": str(i), "write_back": True, "snapshot_at": (192,) if i == 2 else ()}
        ended.append((start(engine, ids, sampling, **spec), start(plain, ids, sampling, **spec)))
    finish(engine)
    finish(plain)
    for (client, reservation), (other, theirs) in ended:
        assert comparable(client.events) == comparable(other.events)
        assert torch.equal(engine.state[reservation.slot], plain.state[theirs.slot])
        assert client.end.draft_first == 0
    assert max(drafter.lengths) == longest
    assert 1 + longest in {length for batch in backend.batches for _, length in batch}


def test_drafter_rows_lie_behind_every_kept_token():
    told = Told()
    engine = drafted_engine(KnowingDrafter(told, skill=0.8))
    client, reservation = began(engine, told, prompt(100), SamplingParams(max_tokens=80))
    finish(engine)
    ids, running, found = [*prompt(100), *(t.id for t in client.tokens)], 0, []
    for position in range(client.end.tokens_in_state):
        running = (running * 31 + ids[position] + 1) % 65_521
        block, offset = reservation.blocks[position // 64], position % 64
        found.append(float(engine.rows[block][MLA_FLOATS * 64 + offset]) == running)
    assert all(found) and client.end.draft_first == engine.draft_first(reservation) == 0


def test_each_sequence_of_a_step_keeps_its_own_count_and_the_reports_add_up():
    told, steps = Told(), Steps()
    drafter = KnowingDrafter(told, skill=0.6)
    engine = drafted_engine(drafter)
    engine._observer = steps
    clients = [began(engine, told, prompt(9 + i, i), GREEDY, name=str(i))[0] for i in range(4)]
    finish(engine)
    reports = [client.end.draft for client in clients]
    assert sum(r.num_tokens_drawn for r in steps.reports) == 4 * GREEDY.max_tokens
    for name in ("drafted", "accepted"):
        assert sum(getattr(r, f"num_{name}") for r in steps.reports) == sum(getattr(d, name) for d in reports)
    assert len({d.verify_steps for d in reports}) > 1
    assert sum(r.num_verified for r in steps.reports) == sum(d.verify_steps for d in reports)


def test_a_cancel_while_a_draft_is_verified_keeps_none_of_it():
    told, backend = Told(), VerifyingToy()
    engine = drafted_engine(KnowingDrafter(told, skill=1.0), backend)
    client, reservation = began(engine, told, prompt(7), GREEDY)
    for _ in range(3):
        engine.turn()
    heard, held = len(client.tokens), 7 + len(client.tokens) - 1
    assert backend.batches[-1][0][1] == 1 + LEN_MAX
    backend.during_next = lambda: engine.cancel("r")
    finish(engine)
    assert len(client.tokens) == heard
    assert client.end.tokens_in_state == held + 1 == int(engine.state[reservation.slot][-1])
    assert client.end.draft_first == 0
    engine.release(reservation)
    engine.check()


def test_a_row_that_is_not_finite_fails_its_sequence_after_the_tokens_before_it():
    want = [t.id for t in alone(prompt(7), GREEDY)]
    bad = next(i for i in range(2, 60) if want[i] not in want[:i] and want[i] not in prompt(7))
    told, backend = Told(), VerifyingToy(nan_after=want[bad])
    engine = drafted_engine(KnowingDrafter(told, skill=1.0), backend)
    client, reservation = began(engine, told, prompt(7), GREEDY)
    finish(engine)
    assert [t.id for t in client.tokens] == want[: bad + 1]
    assert isinstance(client.end, Failed) and isinstance(client.end.error, NonFiniteLogits)
    engine.release(reservation)
    engine.check()


WRONG = {
    "length": lambda r: Proposal(tokens=[1] * (r.length + 1), confidence=[0.5] * (r.length + 1)),
    "vocabulary": lambda r: Proposal(tokens=[VOCAB], confidence=[0.5]),
    "non_finite": lambda r: Proposal(tokens=[1], confidence=[float("nan")]),
    "law": lambda r: Proposal(tokens=[1], confidence=[0.5], laws=torch.zeros(1, VOCAB).numpy()),
}


def raises(request: DraftRequest) -> Proposal:
    raise RuntimeError("injected")


@pytest.mark.parametrize("reason", [*WRONG, "raised"])
def test_a_drafter_that_fails_is_counted_ignored_and_switched_off_once(reason, caplog):
    told, steps = Told(), Steps()
    drafter = KnowingDrafter(told)
    drafter.fails = WRONG.get(reason, raises)
    engine = drafted_engine(drafter)
    engine._observer = steps
    sampling = replace(GREEDY, temperature=1.0) if reason == "law" else GREEDY
    with caplog.at_level(logging.ERROR):
        client, reservation = began(engine, told, prompt(7), sampling)
        finish(engine)
    assert client.tokens == alone(prompt(7), sampling)
    assert sum(r.ignored.get(reason, 0) for r in steps.reports) == FAULTS_MAX
    assert [r.message for r in caplog.records] == ["drafter switched off"]
    assert engine.draft_first(reservation) == client.end.tokens_in_state  # rows are not written any more


def test_rows_that_could_not_be_written_are_cold_and_cost_no_answer():
    told = Told()
    drafter = KnowingDrafter(told, skill=1.0)
    engine = drafted_engine(drafter)
    client, reservation = began(engine, told, prompt(100), GREEDY)
    drafter.fail_rows = RuntimeError("injected")
    engine.turn()
    drafter.fail_rows = None
    assert engine.draft_first(reservation) == 100
    finish(engine)
    assert client.tokens == alone(prompt(100), GREEDY)
    assert client.end.draft_first == 100


def test_a_draft_after_rows_that_failed_is_asked_for_from_where_rows_are():
    told, asked = Told(), []
    drafter = KnowingDrafter(told, skill=1.0)
    draft = drafter.draft
    drafter.draft = lambda requests, rows: asked.extend(requests) or draft(requests, rows)
    engine = drafted_engine(drafter)
    began(engine, told, prompt(20), GREEDY)
    engine.turn()
    del asked[:]
    drafter.fail_rows = RuntimeError("injected")
    while not asked:
        engine.turn()
    assert asked[0].first == asked[0].position


def test_a_temperature_that_has_no_reciprocal_reaches_no_drafter():
    told, asked = Told(), []
    drafter = KnowingDrafter(told)
    draft = drafter.draft
    drafter.draft = lambda requests, rows: asked.extend(requests) or draft(requests, rows)
    engine = drafted_engine(drafter)
    began(engine, told, prompt(5), replace(GREEDY, temperature=1e-45))
    finish(engine)
    assert asked and all(np.isfinite(np.float32(1) / np.float32(request.temperature)) for request in asked)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_no_draft_is_longer_than_what_may_be_drawn(max_tokens):
    told, backend = Told(), VerifyingToy()
    engine = drafted_engine(KnowingDrafter(told, skill=1.0), backend)
    client, _ = began(engine, told, prompt(5), SamplingParams(max_tokens=max_tokens))
    finish(engine)
    assert client.tokens == alone(prompt(5), SamplingParams(max_tokens=max_tokens))
    assert [length for batch in backend.batches for _, length in batch] == [5, max_tokens - 1][:max_tokens]


class DraftedWorld(World):
    """The world of random histories, with a drafter that is sometimes right, wrong, failing or without an idea."""

    def __init__(self, writeback: str) -> None:
        super().__init__(writeback)
        self.drafter = KnowingDrafter(self._truth, skill=0.75)
        self.drafter.fails = self._failure
        self.backend = VerifyingToy()
        self.engine = drafted_engine(
            self.drafter, self.backend, num_blocks=16, num_slots=6, max_batch_sequences=3, queue_len_max=1,
            max_batch_tokens=131, writeback=writeback,
        )  # fmt: skip
        self._wanted: dict[str, list[int]] = {}

    def _truth(self, blocks: Sequence[int], position: int) -> Sequence[int]:
        tracked = next(t for t in reversed(self.tracked) if list(t.reservation.blocks) == list(blocks))
        wanted = self._wanted.get(tracked.name)
        if wanted is None:
            wanted = self._wanted[tracked.name] = [t.id for t in alone(tracked.prompt, tracked.sampling)]
        return wanted[position + 1 - len(tracked.prompt) :]

    def _failure(self, request: DraftRequest) -> Proposal | None:
        return WRONG["vocabulary"](request) if self.drafter.rng.random() < 0.1 else None


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(PLAYS, st.sampled_from(["adaptive", "on", "off"]))
def test_tokens_equal_the_undrafted_sequence_run_alone_whatever_else_happens(play, writeback):
    world = DraftedWorld(writeback)
    for action, number in play:
        getattr(world, action)(number)
        world.engine.check()
    world.ends()


class Prompter(KnowingDrafter):
    """For a model without the toy's rows."""

    target_layers = ()
    draft_width = 0

    def write_rows(self, segments, taps, rows) -> None:
        pass


@pytest.mark.parametrize("skill", [1.0, 0.5])
def test_on_the_native_backend_greedy_tokens_states_and_rows_have_the_bits_of_stepping(skill):
    backend = loaded("native")
    truth: dict[int, tuple[int, list[int]]] = {}
    drafter = Prompter(lambda blocks, at: truth[blocks[0]][1][at + 1 - truth[blocks[0]][0] :], skill=skill)
    wide = EngineSettings(
        num_blocks=64, num_slots=16, max_batch_sequences=8, draft_len_max=LEN_MAX, draft_adaptive=False
    )
    engine = Engine(backend, wide, drafter=drafter)
    running: list[tuple[Request, tuple[Client, object]]] = []
    for i, request in enumerate(requests()):
        client, reservation = submit(engine, request, str(i))
        wanted = [t.id for t in alone_on("native")[i].tokens]
        truth[reservation.blocks[0]] = len(request.ids), wanted
        running.append((request, (client, reservation)))
    finish(engine)
    assert drafter.drafted >= len(LENGTHS)
    for (_, pair), want in zip(running, alone_on("native"), strict=True):
        got = outcome(engine, *pair)
        assert got.tokens == want.tokens
        assert torch.equal(got.state, want.state) and torch.equal(got.rows, want.rows)
