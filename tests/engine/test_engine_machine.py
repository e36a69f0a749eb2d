"""Any order of reserve, submit, resume, restore, cancel, release and failure, between steps and during them: every
sequence gets the tokens it would get alone, and the books balance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy import VOCAB, Client, ToyBackend, alone, finish, quiet_engine

from engine.api import Failed, Finished, Reservation, SamplingParams, SequenceSpec, SnapshotTaken
from engine.engine import Engine
from engine.worker.wire import after_first_token
from moonrelay.errors import Overloaded

LAWS: list[dict[str, object]] = [
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.6, "top_p": 0.7, "seed": 2**63, "choice": 1},
    {"temperature": 1.3, "top_k": 5, "seed": 1, "top_logprobs": 2},
    {"stop_token_ids": tuple(range(0, VOCAB, 6))},
    {"presence_penalty": 1.5, "frequency_penalty": 0.25, "logit_bias": ((3, 2.0), (5, -100.0)), "generated": (7, 7)},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9, "frequency_penalty": -0.5, "logit_bias": ((2, 1.0),)},
]
CUTS = [(), (), (64,), (128,), (64, 192), (256,)]


def some_prompt(length: int, salt: int) -> list[int]:
    return np.random.default_rng([length, salt]).integers(0, VOCAB, length).tolist()


@dataclass(eq=False)
class Tracked:
    """A submitted sequence and what it must come to."""

    name: str
    prompt: list[int]
    sampling: SamplingParams  # of the whole sequence
    client: Client
    reservation: Reservation
    skipped: int = 0  # tokens an earlier part drew
    held: bool = False
    drawn: tuple[int, ...] = ()  # by the earlier part

    def ids(self) -> list[int]:
        """Everything that its rows may hold, in order."""
        return [*self.prompt, *self.drawn, *(token.id for token in self.client.tokens)]

    def check(self) -> None:
        want = alone(self.prompt, self.sampling)[self.skipped :]
        got, end = self.client.tokens, self.client.end
        assert got == want[: len(got)]
        if isinstance(end, Finished) and end.reason != "cancelled":
            assert len(got) == (1 if self.held else len(want))
            # The last token drawn is one that no state has seen.
            assert end.tokens_in_state == len(self.prompt) + self.skipped + len(got) - 1


@dataclass(eq=False)
class Kept:
    """Blocks retained beyond their reservation's life, and a snapshot at their end."""

    ids: list[int]
    blocks: tuple[int, ...]
    slot: int


class World:
    """One small engine, its callers' memory, and what they may do; every action takes one number to decide by."""

    def __init__(self, writeback: str) -> None:
        self.backend = ToyBackend()
        self.engine = quiet_engine(
            self.backend, num_blocks=16, num_slots=6, max_batch_sequences=3, queue_len_max=1, max_batch_tokens=131,
            writeback=writeback,
        )  # fmt: skip
        self.kept: list[Kept] = []
        self.idle: list[Reservation] = []
        self.tracked: list[Tracked] = []
        self.open: list[Tracked] = []  # memory not released
        self.snapshots: list[tuple[Tracked, SnapshotTaken]] = []

    # -- actions --------------------------------------------------------------------------------------------------

    def reserves(self, number: int) -> None:
        reservation = self._reserve(number % 330 + 1)
        if reservation is not None:
            self.idle.append(reservation)

    def submits(self, number: int) -> None:
        """A new sequence, sometimes on memory that was reserved long before."""
        number, use_idle = divmod(number, 3)
        number, draws = divmod(number, 6)
        number, law = divmod(number, len(LAWS))
        number, cuts = divmod(number, len(CUTS))
        number, hold = divmod(number, 3)
        number, write_back = divmod(number, 2)
        draws = draws * 12 + 1 if write_back else draws + 1
        prompt = some_prompt(number % 290 + 1, law)
        sampling = SamplingParams(max_tokens=draws, **LAWS[law])
        fitting = [r for r in self.idle if r.tokens >= len(prompt) + draws] if use_idle == 0 else []
        reservation = fitting[0] if fitting else self._reserve(len(prompt) + draws - 1)
        if reservation is None:
            return
        tracked = Tracked(self._name(), prompt, sampling, Client(), reservation, held=hold == 0)
        spec = {"ids": prompt, "sampling": sampling, "hold_after_first": hold == 0, "snapshot_at": CUTS[cuts]}
        spec["write_back"] = write_back == 1
        if self._submit(tracked, spec):
            self.idle = [r for r in self.idle if r is not reservation]
        elif not fitting:
            self.idle.append(reservation)

    def resumes(self, number: int) -> None:
        """A held prompt goes on in place: its first token is consumed by another sequence on the same memory."""
        held = [t for t in self.open if isinstance(t.client.end, Finished) and t.client.end.reason == "held"]
        if not held:
            return
        before = held[number % len(held)]
        (first,) = before.client.tokens
        rest = after_first_token(before.sampling, first.id)
        after = replace(before, name=self._name(), client=Client(), skipped=1, held=False, drawn=(first.id,))
        spec = {"ids": [first.id], "sampling": rest, "restored": before.client.end.tokens_in_state}
        if self._submit(after, {**spec, "write_back": number % 2 == 0}):
            self.open.remove(before)

    def restores(self, number: int) -> None:
        """A snapshot and the rows before it, copied to other memory, then the rest of the prompt."""
        if not self.snapshots:
            return
        source, taken = self.snapshots.pop(number % len(self.snapshots))
        reservation = None
        if source in self.open and source.skipped == 0 and taken.tokens < len(source.prompt):
            reservation = self._reserve(len(source.prompt) + source.sampling.max_tokens)
        if reservation is not None:
            copy_bundle(self.engine, source.reservation, taken, reservation)
            copy = replace(source, name=self._name(), client=Client(), reservation=reservation, held=False)
            ids = source.prompt[taken.tokens :]
            if not self._submit(copy, {"ids": ids, "sampling": source.sampling, "restored": taken.tokens}):
                self.engine.release(reservation)
        self.engine.release_snapshot(taken.slot)

    def keeps(self, number: int) -> None:
        """The blocks below a snapshot outlive their reservation: the device tier's part."""
        if not self.snapshots:
            return
        source, taken = self.snapshots.pop(number % len(self.snapshots))
        blocks = range(taken.tokens // 64)
        spoiled = isinstance(source.client.end, Failed)
        if source not in self.open or spoiled or len(source.ids()) < taken.tokens:
            self.engine.release_snapshot(taken.slot)
            return
        self.engine.retain(source.reservation, blocks)
        self.kept.append(Kept(source.ids()[: taken.tokens], source.reservation.blocks[: len(blocks)], taken.slot))

    def shares(self, number: int) -> None:
        """A new sequence begins with kept blocks as they are and a copy of their snapshot."""
        if not self.kept:
            return
        number, which = divmod(number, len(self.kept))
        number, law = divmod(number, len(LAWS))
        kept = self.kept[which]
        prompt = kept.ids + some_prompt(number % 90 + 1, law)
        sampling = SamplingParams(max_tokens=number % 70 + 1, **LAWS[law])
        try:
            reservation = self.engine.reserve(
                len(prompt) + sampling.max_tokens, shared=kept.blocks, write_back=number % 2 == 0
            )
        except Overloaded:
            return
        self.engine.state[reservation.slot] = self.engine.state[kept.slot]
        tracked = Tracked(self._name(), prompt, sampling, Client(), reservation)
        spec = {"ids": prompt[len(kept.ids) :], "sampling": sampling, "restored": len(kept.ids)}
        if not self._submit(tracked, {**spec, "write_back": number % 2 == 0}):
            self.engine.release(reservation)

    def evicts(self, number: int) -> None:
        if self.kept:
            kept = self.kept.pop(number % len(self.kept))
            self.engine.drop(kept.blocks)
            self.engine.release_snapshot(kept.slot)

    def turns(self, number: int) -> None:
        for _ in range(number % 5 + 1):
            self.engine.turn()
        self._collect_snapshots()

    def interrupts(self, number: int) -> None:
        """Something happens on another thread while a pass runs."""
        action = (self.cancels, self.cancels, self.releases, self.submits, self.reserves)[number % 5]
        self.backend.during_next = lambda: action(number // 5)
        self.turns(0)

    def cancels(self, number: int) -> None:
        if self.tracked:
            self.engine.cancel(self.tracked[-1 - number % min(len(self.tracked), 4)].name)

    def releases(self, number: int) -> None:
        """Ended or not: a live sequence is cancelled by it."""
        if self.open:
            tracked = self.open.pop(number % len(self.open))
            self.engine.release(tracked.reservation)
            self.engine.release(tracked.reservation)

    def fails(self, number: int) -> None:
        self.backend.raise_next = RuntimeError("injected")
        self.turns(number)

    # -- the end --------------------------------------------------------------------------------------------------

    def ends(self) -> None:
        self.backend.raise_next = self.backend.during_next = None
        finish(self.engine)
        self._collect_snapshots()
        for tracked in self.tracked:
            assert isinstance(tracked.client.end, Finished | Failed)
            tracked.check()
        for reservation in [*self.idle, *(t.reservation for t in self.open)]:
            self.engine.release(reservation)
        for _, taken in self.snapshots:
            self.engine.release_snapshot(taken.slot)
        while self.kept:
            self.evicts(0)
        stats = self.engine.stats()
        assert (stats.free_blocks, stats.free_slots) == (stats.num_blocks, stats.num_slots)
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        self.engine.check()

    # -- details --------------------------------------------------------------------------------------------------

    def _name(self) -> str:
        return f"s{len(self.tracked)}"

    def _reserve(self, tokens: int) -> Reservation | None:
        try:
            reservation = self.engine.reserve(tokens)
        except Overloaded:
            return None
        for block in reservation.blocks:  # whatever an earlier owner left there must not matter
            self.engine.rows[block] = float("nan")
        self.engine.state[reservation.slot] = float("nan")
        return reservation

    def _submit(self, tracked: Tracked, spec: dict[str, object]) -> bool:
        spec = {"request_id": tracked.name, **spec}
        try:
            self.engine.submit(SequenceSpec(**spec), tracked.reservation, tracked.client)
        except Overloaded:
            return False
        self.tracked.append(tracked)
        self.open.append(tracked)
        return True

    def _collect_snapshots(self) -> None:
        for tracked in self.tracked:
            taken = [e for e in tracked.client.events if isinstance(e, SnapshotTaken)]
            self.snapshots += [(tracked, event) for event in taken]
            tracked.client.events = [e for e in tracked.client.events if e not in taken]


def copy_bundle(engine: Engine, source: Reservation, taken: SnapshotTaken, target: Reservation) -> None:
    for i in range(taken.tokens // engine.settings.block_tokens):
        engine.rows[target.blocks[i]] = engine.rows[source.blocks[i]]
    engine.state[target.slot] = engine.state[taken.slot]


ACTIONS = (
    ["reserves"] + ["submits"] * 5 + ["turns"] * 6 + ["resumes"] * 3 + ["restores"] * 2
    + ["cancels"] + ["releases"] * 2 + ["interrupts"] * 2 + ["keeps"] * 3 + ["shares"] * 3 + ["evicts"]
)  # fmt: skip
PLAYS = st.lists(st.tuples(st.sampled_from([*ACTIONS, "fails"]), st.integers(0, 2**24)), min_size=30, max_size=80)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(PLAYS, st.sampled_from(["adaptive", "on", "off"]))
def test_tokens_equal_the_sequence_run_alone_whatever_else_happens(play, writeback):
    world = World(writeback)
    for action, number in play:
        getattr(world, action)(number)
        world.engine.check()
    world.ends()
