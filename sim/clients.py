"""Clients: conversations of several turns that check every token, and ask again until they are served."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from moonrelay.errors import DeadlineExceeded, ServeError
from sim.decode import Tokens
from sim.network import LinkLost
from sim.router import Ask, Result
from sim.toy import VOCAB, generate
from sim.world import Future, Process, Steps, World

BEYOND_STOP = 5  # tokens more that might be generated, were it not for the stop token
PATIENCE_MS = 2_500  # beyond a request's deadline: a router that was stopped answers when it goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """What a turn adds to its conversation. `hinted`: the client's renderer knows where messages end."""

    ids: tuple[int, ...]
    max_tokens: int
    stops: bool  # a token of the answer is a stop token
    pause_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    name: str
    tenant: str
    head: tuple[int, ...]  # leading system and tool declarations, shared with others
    hinted: bool
    turns: tuple[TurnPlan, ...]
    start_ms: float


@dataclass(slots=True)
class Served:
    """How a request ended, for the checkers of hits."""

    conversation: str
    prompt_tokens: int
    result: Result
    at: float


class Clients(Process):
    """Everybody outside the cluster; no fault strikes here."""

    role = "client"

    def __init__(self, world: World, conversations: list[Conversation], deadline_ms: float) -> None:
        super().__init__(world, "clients")
        self.clock_rate = 1.0
        self.deadline_ms = deadline_ms
        self.conversations = conversations
        self.healed = Future()
        self.open = len(conversations)
        self.served: list[Served] = []
        self.failed = 0

    def boot(self) -> None:
        for conversation in self.conversations:
            self.spawn(self._converse(conversation), conversation.name)

    def _converse(self, conversation: Conversation) -> Steps:
        yield conversation.start_ms
        history = conversation.head
        for number, turn in enumerate(conversation.turns):
            yield turn.pause_ms
            ids = history + turn.ids
            truth = generate(ids, turn.max_tokens)
            stop = frozenset(truth[-1:]) if turn.stops else frozenset()
            truth = truth[: truth.index(truth[-1]) + 1] if turn.stops else truth
            hints = ((len(conversation.head), 0), (len(ids), 1)) if conversation.hinted else ()
            limit = turn.max_tokens + (BEYOND_STOP if turn.stops else 0)
            yield from self._ask(conversation, number, ids, limit, stop, hints, truth)
            history = ids + tuple(truth)
        self.open -= 1

    def _ask(
        self,
        conversation: Conversation,
        number: int,
        ids: tuple[int, ...],
        max_tokens: int,
        stop: frozenset[int],
        hints: tuple[tuple[int, int], ...],
        truth: list[int],
    ) -> Steps:
        """Until it is answered. While faults last, one more try; then again when they are over."""
        tries = 0
        while True:
            tries += 1
            ask = Ask(
                request_id=f"{conversation.name}.{number}.{tries}",
                tenant=conversation.tenant,
                ids=ids,
                max_tokens=max_tokens,
                stop=stop,
                hints=hints,
                deadline_ms=self.deadline_ms,
            )
            done = yield from self._try(conversation, ask, truth)
            if done:
                return
            self.failed += 1
            if self.healed.done:
                self.world.counts["failed_after_heal"] += 1
                yield 200
            elif tries >= 2:
                yield self.healed
            else:
                yield 50

    def _try(self, conversation: Conversation, ask: Ask, truth: list[int]) -> Steps:
        """One request to a router of this moment's choice; whether it was answered well."""
        world = self.world
        routers = [name for name, process in world.processes.items() if process.role == "router"]
        router: Any = world.processes[self.rng.choice(routers)]
        began, disturbed, silent = world.now, router.disturbed, router.stopped
        stream = world.network.stream(self, router.name, "serve", ask)
        got: list[int] = []
        results: list[Result] = []
        error: ServeError | None = None
        try:
            while (event := (yield from stream.next(ask.deadline_ms + PATIENCE_MS))) is not None:
                if isinstance(event, Tokens):
                    got += event.ids
                    world.checkers.heard(ask.request_id, got, truth)
                else:
                    results.append(event)
        except ServeError as failed:
            error = failed
        finally:
            stream.close()
        if results and isinstance(error, LinkLost):
            error = None  # the answer was whole before the connection broke
        calm = router.alive and router.disturbed == disturbed and not silent
        late = world.now - began > ask.deadline_ms + world.network.weather.slow_max + 10
        world.checkers.require(
            not (calm and (late or isinstance(error, DeadlineExceeded))),
            "deadline",
            f"{ask.request_id}: {world.now - began:.0f} ms, {error!r}",
        )
        if error is not None:
            world.checkers.require(not results, "one_reply", f"{ask.request_id}: a result and then {error!r}")
            world.note(self.name, "failed", f"{ask.request_id} {error}")
            world.counts["request_failed"] += 1
            return False
        world.checkers.answered(ask.request_id, got, truth, len(results))
        self.served.append(Served(conversation.name, len(ask.ids), results[0], world.now))
        world.note(self.name, "answered", f"{ask.request_id} {results[0].cached}")
        world.counts["answered"] += 1
        world.counts["cached_tokens"] += results[0].cached
        return True


def ids_of(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB) for _ in range(count))
