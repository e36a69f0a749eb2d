"""Messages between simulated processes: unary calls and event streams with gRPC's promises, and its failures.

A stream's events arrive in order; its loss is a break that both ends hear of. A unary call may lose its request or
its answer, arrive twice, late, or after a younger one. Whoever calls a dead process is refused; a stopped one is
silent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import Any

from moonrelay.errors import ServeError, StaleEpoch
from sim.world import Future, Process, Steps, Task, World


class LinkLost(ServeError):
    """The other side could not be reached (`unreachable`: it has done nothing), or the connection broke."""

    code = "link_lost"

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


@dataclass(slots=True)
class Weather:
    """How bad the network is. Units: ms; the rest are probabilities per message."""

    delay_min: float = 0.2
    delay_max: float = 1.5
    lost: float = 0.0
    doubled: float = 0.0
    slow: float = 0.0
    slow_max: float = 400.0


class Link:
    """One call in flight, unary or streamed. The client's end is `next` or `reply`, the server's is `emit`."""

    __slots__ = (
        "_last_at",
        "broken",
        "client",
        "closed",
        "ended",
        "events",
        "id",
        "network",
        "reply",
        "server",
        "task",
        "unary",
        "waiting",
    )

    def __init__(self, network: Network, client: Process, server: Process, unary: bool) -> None:
        self.network, self.client, self.server, self.unary = network, client, server, unary
        self.id = next(network.ids)
        self.reply = Future()
        self.events: deque[Any] = deque()
        self.waiting: Future | None = None
        self.task: Task | None = None  # the handler
        self.closed = self.ended = False  # the client has left; the server has said its last word
        self.broken = False
        self._last_at = 0.0
        client.links[self.id] = server.links[self.id] = self

    # The server's end.

    def emit(self, event: Any) -> None:
        self._deliver(self._hear, event)

    def done(self, outcome: Future) -> None:
        """The handler has ended; what is emitted arrives before this does."""
        self.task = None
        self._deliver(self._end, outcome.value, outcome.error)

    def hear_loss(self) -> None:
        """The client has gone: the handler is cancelled."""
        if self.task is not None:
            self.task.cancel()
            self.task = None
        self._forget()

    # The client's end.

    def next(self, timeout_ms: float) -> Steps:
        """The next event; None at the stream's good end. Raises: what ended it, DeadlineExceeded."""
        while not self.events:
            if self.reply.done:
                if self.reply.error is not None:
                    raise self.reply.error
                return None
            self.waiting = Future()
            yield (self.waiting, timeout_ms)
        return self.events.popleft()

    def close(self) -> None:
        """Leave; where the server still works, it hears a cancel."""
        if self.closed or not self.client.alive:
            return
        self.closed = True
        if not self.ended:
            self.network.after_delay(self.server, self.hear_loss)
        self._forget()

    def fail(self, error: Exception) -> None:
        """Whoever reads it gets `error`, now: another part of the same work has failed."""
        self._end(None, error)
        self.ended = False  # the server still works: `close` tells it

    def break_(self, error: ServeError) -> None:
        """The connection is gone; the client's end hears of it, and of nothing after it."""
        self.broken = True
        if self.client.alive:
            self.network.after_delay(self.client, self._end, None, error)
        self._forget()

    def _deliver(self, what: Any, *args: Any) -> None:
        network, world = self.network, self.network.world
        if not self.client.alive or self.closed or self.broken:
            return
        delay = network.delay()
        if network.chance(network.weather.lost) and self.client is not self.server:
            network.world.counts["fault:lost"] += 1
            if self.unary:
                return  # the client waits for its deadline
            self.break_(LinkLost("the connection broke"))
            network.after_delay(self.server, self.hear_loss)
            return
        held_until = network.cut.get(frozenset((self.client.name, self.server.name)), 0.0) if network.cut else 0.0
        self._last_at = max(self._last_at, world.now + delay, held_until)
        world.at(self._last_at, self.client, what, *args)

    def _hear(self, event: Any) -> None:
        if self.closed or self.reply.done:
            return
        self.events.append(event)
        self._wake()

    def _end(self, value: Any, error: Exception | None) -> None:
        if self.reply.done:
            return
        self.ended = True
        self.reply.set(value, error)
        self._wake()
        self._forget()

    def _wake(self) -> None:
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting.set()

    def _forget(self) -> None:
        self.client.links.pop(self.id, None)
        self.server.links.pop(self.id, None)


class Network:
    """Who can talk to whom, and how badly."""

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, world.rng
        self.weather = Weather()
        self.ids = count(1)
        self.cut: dict[frozenset[str], float] = {}  # pairs that hear nothing of each other, until when
        world.network = self

    def call(self, client: Process, target: str, method: str, request: Any, timeout_ms: float) -> Steps:
        """A unary call. Raises: what the server raised, LinkLost, DeadlineExceeded."""
        link = self._open(client, target, method, request, unary=True)
        try:
            return (yield (link.reply, timeout_ms))
        finally:
            link.close()

    def stream(self, client: Process, target: str, method: str, request: Any) -> Link:
        """Open a streamed call; read it with `next`, leave it with `close`."""
        return self._open(client, target, method, request, unary=False)

    def delay(self) -> float:
        weather = self.weather
        if self.chance(weather.slow):
            self.world.counts["fault:delayed"] += 1
            return self.rng.uniform(weather.delay_max, weather.slow_max)
        return self.rng.uniform(weather.delay_min, weather.delay_max)

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def after_delay(self, process: Process, work: Any, *args: Any) -> None:
        self.world.at(self.world.now + self.delay(), process, work, *args)

    def reachable(self, one: Process, other: Process) -> bool:
        return not self.cut or self.cut.get(frozenset((one.name, other.name)), 0.0) <= self.world.now

    def drop_links(self, process: Process) -> None:
        """`process` died: whoever talked to it hears so."""
        for link in list(process.links.values()):
            if link.server is process:
                link.break_(LinkLost(f"{process.name} is gone"))
            else:
                link.closed = True
                self.after_delay(link.server, link.hear_loss)
                link._forget()
        process.links.clear()

    def inject(self, server: Process, method: str, request: Any) -> None:
        """A unary message out of nowhere: a replayed or forged one. Nobody waits for its answer."""
        link = Link(self, server, server, True)
        link.closed = True
        self.after_delay(server, self._arrive, server, link, method, request)

    def _open(self, client: Process, target: str, method: str, request: Any, *, unary: bool) -> Link:
        server = self.world.processes[target]
        link = Link(self, client, server, unary)
        if not server.alive:
            link.break_(LinkLost(f"{target} refuses connections", unreachable=True))
            return link
        if not self.reachable(client, server):
            self.world.counts["fault:cut"] += 1
            return link
        if self.chance(self.weather.lost):
            self.world.counts["fault:lost"] += 1
            if not unary:
                link.break_(LinkLost("the connection broke"))
            return link
        self.after_delay(server, self._arrive, server, link, method, request)
        if self.chance(self.weather.doubled):
            self.world.counts["fault:doubled"] += 1
            ghost = Link(self, client, server, unary)
            ghost.closed = True
            self.after_delay(server, self._arrive, server, ghost, method, request)
        return link

    def _arrive(self, server: Process, link: Link, method: str, request: Any) -> None:
        if link.closed and link.reply.done:
            return
        self.world.note(server.name, method, link.client.name)
        handler = getattr(server, "rpc_" + method)
        if link.unary:
            try:
                work, error = handler(request), None
            except ServeError as refused:
                work, error = None, refused
            if not hasattr(work, "send"):
                outcome = Future()
                outcome.set(work, error)
                link.done(outcome)
                return
        else:
            work = handler(request, link.emit)
        link.task = server.spawn(work, method)
        link.task.outcome.callbacks.append(link.done)


def expect_epoch(asked: int, mine: Process) -> None:
    """Raises: StaleEpoch."""
    if asked != mine.epoch:
        raise StaleEpoch(f"{mine.name} is at epoch {mine.epoch}, not {asked}")
