"""Drafter training as Ray actors: generators write, trainers learn, bounded queues between.

The driver moves references only: samples go from a generator's node to a trainer's, states from trainer to trainer.
An actor that dies is replaced; a generator's successor writes from other prompts, a trainer's takes over the last
round's mean state.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError

from train.draft_prompts import Prompt
from train.draft_roles import DraftSettings, GeneratorRole, PromptSource, TrainerRole, write_held_out
from train.draft_run import EXPORT, STATE_FILE, Journal

log = logging.getLogger(__name__)

WAIT_S = 60.0  # for any actor to answer; slower than that is reported, not an error
ROLES = ("generator", "trainer")  # resources that a cluster's nodes declare, one for each actor they take


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """How many actors of each role, and how many written batches may wait for each trainer.

    `address`: a running cluster's, or None for one on this machine.
    """

    generators: int = 1
    trainers: int = 1
    queue_max: int = 4
    address: str | None = None


@dataclass(slots=True)
class Seat:
    """A place in the fleet; who sits there may change."""

    role: str
    index: int
    actor: Any
    lives: int = 0
    call: Any = None  # the reference whose arrival ends the call in flight
    result: Any = None  # that of the large part of its answer


def connect(fleet: Fleet) -> None:
    """Raises: ConnectionError if `fleet.address` does not answer."""
    if fleet.address is not None:
        ray.init(address=fleet.address, logging_level=logging.WARNING)
        return
    seats = fleet.generators + fleet.trainers
    ray.init(num_cpus=seats + 1, include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False)


class Pipeline:
    """The driver. One thread; it never waits for a trainer while a generator has room to write."""

    def __init__(
        self,
        settings: DraftSettings,
        fleet: Fleet,
        prompts: PromptSource,
        journal: Journal,
        show: Callable[[str], None],
    ) -> None:
        self._settings, self._fleet, self._prompts = settings, fleet, prompts
        self._journal, self._show = journal, show
        self._placed = set(ROLES) <= ray.cluster_resources().keys()  # type: ignore[no-untyped-call]
        self._ready: deque[Any] = deque()
        self._states: list[Any] = []  # of the last round, one a trainer that came through it
        self._round: list[tuple[dict[str, float], Any]] = []  # what the trainers that are done with it answered
        self._written = self._restarts = self._rounds = 0
        self.trainers = [self._seat("trainer", index) for index in range(fleet.trainers)]
        self._first_step = max(ray.get([seat.actor.step.remote() for seat in self.trainers]))
        self.generators = [self._seat("generator", index) for index in range(fleet.generators)]

    def run(self, held_out: list[Prompt], after_round: Callable[[Pipeline], None] = lambda _: None) -> None:
        """Until the journal's budget is used up. `after_round` is called between rounds, with no trainer at work."""
        measured = self._placed_on(ray.remote(write_held_out), "generator").remote(self._settings, held_out)
        while self._journal.progress() < 1.0:
            self._feed_generators()
            if all(seat.call is None for seat in self.trainers) and self._ready:
                self._start_round()
            pending = {seat.call: seat for seat in (*self.generators, *self.trainers) if seat.call is not None}
            done, _ = ray.wait(list(pending), num_returns=1, timeout=WAIT_S, fetch_local=False)
            if not done:
                log.warning("no actor has answered for %d s", WAIT_S)
            for reference in done:
                self._take(pending[reference])
            if self._round and all(seat.call is None for seat in self.trainers):
                self._end_round(measured)
                after_round(self)
        self._save()
        self._show(self._journal.write(self._ask(self.trainers[0], "evaluate", measured) or {}))
        self._journal.draw()

    # Actors

    def _placed_on(self, remote: Any, role: str) -> Any:
        return remote.options(num_cpus=1, resources={role: 1} if self._placed else None)

    def _seat(self, role: str, index: int, lives: int = 0) -> Seat:
        if role == "trainer":
            actor = self._placed_on(ray.remote(TrainerRole), role).remote(self._settings, index)
            if self._states:
                actor.adopt.remote(*self._states)
            else:
                actor.restore.remote(self._settings.folder / STATE_FILE)
        else:
            word = f"{self._settings.seed}:{self._first_step}:{index}:{lives}"
            seed = random.Random(word).getrandbits(31)
            actor = self._placed_on(ray.remote(GeneratorRole), role).remote(self._settings, self._prompts, seed)
        return Seat(role=role, index=index, actor=actor, lives=lives)

    def _replace(self, seat: Seat, why: RayError) -> None:
        log.warning("%s %d died and is replaced: %s", seat.role, seat.index, type(why).__name__)
        self._restarts += 1
        new = self._seat(seat.role, seat.index, seat.lives + 1)
        seat.actor, seat.lives = new.actor, new.lives

    # Calls

    def _feed_generators(self) -> None:
        room = self._fleet.queue_max * self._fleet.trainers - len(self._ready)
        room -= sum(seat.call is not None for seat in self.generators)
        for seat in [seat for seat in self.generators if seat.call is None][: max(0, room)]:
            produce = seat.actor.produce.options(num_returns=2)
            seat.call, seat.result = produce.remote(self._settings.batch_samples)

    def _start_round(self) -> None:
        batches, self._ready, self._round = list(self._ready), deque(), []
        for seat in self.trainers:
            learn = seat.actor.learn.options(num_returns=2)
            own = batches[seat.index :: len(self.trainers)]
            seat.call, seat.result = learn.remote(self._journal.progress(), *own)

    def _take(self, seat: Seat) -> None:
        """A call has ended, one way or the other."""
        reference, result = seat.call, seat.result
        seat.call = seat.result = None
        try:
            answer = ray.get(reference)
        except RayActorError as error:
            self._replace(seat, error)
        except ObjectLostError as error:  # what it was given died with another node: the next round brings more
            log.warning("%s %d: %s", seat.role, seat.index, type(error).__name__)
        else:
            if seat.role == "generator":
                self._written += answer
                self._ready.append(result)
            else:
                self._round.append((answer, result))

    def _end_round(self, measured: Any) -> None:
        """All trainers that came through go on from the mean of their states."""
        self._rounds += 1
        learnt = [(numbers, state) for numbers, state in self._round if "step" in numbers]
        answers, self._round = [numbers for numbers, _ in learnt or self._round], []
        record = {name: sum(numbers[name] for numbers in answers) / len(answers) for name in answers[0]}
        if learnt:
            self._states = [state for _, state in learnt]
            if len(self.trainers) > 1:
                for seat in self.trainers:
                    seat.actor.adopt.remote(*self._states)
            if self._journal.due("evaluate"):
                record |= self._ask(self.trainers[0], "evaluate", measured) or {}
            if self._journal.due("save"):
                self._save()
        counts = {
            "round": self._rounds,
            "tokens": self._written,
            "queued": len(self._ready),
            "restarts": self._restarts,
        }
        self._show(self._journal.write(record | counts))

    def _ask(self, seat: Seat, method: str, *args: Any) -> Any:
        """Its answer, or None from an actor that died over it."""
        try:
            return ray.get(getattr(seat.actor, method).remote(*args))
        except RayActorError as error:
            self._replace(seat, error)
            return None

    def _save(self) -> None:
        folder = self._settings.folder
        self._ask(self.trainers[0], "save", folder / STATE_FILE, folder / EXPORT)
