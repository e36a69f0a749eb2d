"""Every process in one thread; the seed decides the rest: the event queue, processes, their clocks and tasks.

A task is a generator. It yields what it waits for: a number (ms of its process's own clock), a `Future`, or
(future, ms), which raises `DeadlineExceeded` when the time passes first. A stopped process does nothing until it goes
on, and then everything that was due at once; a killed one never does anything again.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Generator
from heapq import heappop, heappush
from itertools import count
from typing import Any
from zlib import crc32

from moonrelay.errors import DeadlineExceeded, ServeError

Steps = Generator[Any, Any, Any]
EVENTS_MAX = 200_000  # of one run; a longer one is a livelock


class Violation(Exception):
    """An invariant was seen broken; `invariant` is its name in `sim.checkers.INVARIANTS`."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


class Future:
    """A value or an error, later; tasks wait for it."""

    __slots__ = ("callbacks", "done", "error", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.error: Exception | None = None
        self.callbacks: list[Callable[[Future], None]] = []

    def set(self, value: Any = None, error: Exception | None = None) -> None:
        """Only the first call counts."""
        if self.done:
            return
        self.done, self.value, self.error = True, value, error
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback(self)


class Task:
    """One generator of one process."""

    __slots__ = ("ended", "gen", "name", "outcome", "process", "running", "waits")

    def __init__(self, process: Process, gen: Steps, name: str) -> None:
        self.process, self.gen, self.name = process, gen, name
        self.outcome = Future()
        self.ended = self.running = False
        self.waits = 0  # which wait this is: a timer or an answer for an earlier one is nothing

    def step(self, wait: int, value: Any = None, error: Exception | None = None) -> None:
        """Go on after wait number `wait`."""
        if self.ended or wait != self.waits:
            return
        self.running = True
        self.process.task = self
        try:
            effect = self.gen.throw(error) if error is not None else self.gen.send(value)
        except StopIteration as stop:
            self._end(stop.value, None)
            return
        except ServeError as failed:
            self._end(None, failed)
            return
        finally:
            self.running = False
        self.waits += 1
        self._wait(effect)

    def cancel(self) -> None:
        """As a cancelled coroutine: its `finally` clauses run, and they wait for nothing."""
        if self.ended:
            return
        if self.running:
            self.process.world.soon(self.process, self.cancel)
            return
        self.ended = True
        self.process.tasks.pop(self, None)
        self.gen.close()

    def throw(self, error: Exception) -> None:
        """Whatever it waits for, it goes on with `error`."""
        if not self.ended:
            self.waits += 1
            self.step(self.waits, None, error)

    def _wait(self, effect: Any) -> None:
        process, wait = self.process, self.waits
        if type(effect) is tuple:
            future, ms = effect
            if not future.done:
                process.after(ms, self.step, wait, None, DeadlineExceeded("the wait's deadline passed"))
        elif type(effect) is Future:
            future = effect
        else:
            process.after(effect, self.step, wait)
            return
        if future.done:
            process.world.soon(process, self.step, wait, future.value, future.error)
        else:
            future.callbacks.append(lambda f: process.world.soon(process, self.step, wait, f.value, f.error))

    def _end(self, value: Any, error: Exception | None) -> None:
        self.ended = True
        self.process.tasks.pop(self, None)
        if error is not None and self.process.alive and not self.outcome.callbacks:
            raise Violation("one_reply", f"{self.process.name}: {self.name} failed and nobody hears: {error!r}")
        self.outcome.set(value, error)


class Process:
    """One simulated operating system process: a life of `name`, told from its other lives by `epoch`."""

    role = ""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.epoch = world, name, 0
        self.alive, self.stopped = True, False
        self.disturbed = 0  # how often a fault took time from it
        self.backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.tasks: dict[Task, None] = {}
        self.task: Task | None = None  # the one that runs, or ran last
        self.links: dict[int, Any] = {}  # connections of this life, see sim.network
        self.readers: dict[Any, None] = {}  # reads of others in our memory: they fail when we die
        self.pools: dict[str, Any] = {}
        rng = world.rng
        self.clock_offset_ms = rng.randrange(1, 1_000_000)  # monotonic clocks have nothing in common
        self.clock_rate = 1.0 + rng.uniform(-2e-4, 2e-4)
        self.rng = random.Random(rng.getrandbits(32))

    def now_ms(self) -> int:
        """This process's monotonic clock."""
        return int(self.world.now * self.clock_rate) + self.clock_offset_ms

    def after(self, ms: float, work: Callable[..., None], *args: Any) -> None:
        """Do `work` after `ms` of this process's clock."""
        world = self.world
        world.at(world.now + ms / self.clock_rate if ms > 0 else world.now, self, work, *args)

    def spawn(self, gen: Steps, name: str) -> Task:
        task = Task(self, gen, name)
        self.tasks[task] = None
        self.world.soon(self, task.step, 0)
        return task

    def boot(self) -> None:
        """Start its tasks."""

    def check(self) -> None:
        """Assert that its books balance now that nothing is going on."""

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True
        self.disturbed += 1

    def resume(self) -> None:
        """SIGCONT: everything that was due comes at once, in order."""
        self.stopped = False
        while self.backlog:
            work, args = self.backlog.popleft()
            self.world.soon(self, work, *args)

    def kill(self) -> None:
        """Nothing of this life runs any more; what its generators would clean up is gone with its memory."""
        self.alive = False
        self.disturbed += 1
        self.backlog.clear()
        for task in list(self.tasks):
            task.ended = True
        self.world.graves.append([task.gen for task in self.tasks])  # not collected, so that nothing of them runs
        self.tasks.clear()


class World:
    """The queue of what happens next. `now` is true time in ms; no process sees it."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.now = 0.0
        self.processes: dict[str, Process] = {}
        self.graves: list[list[Steps]] = []
        self.counts: Counter[str] = Counter()
        self.digest = 0
        self.lines: list[str] | None = [] if keep_trace else None
        self.phase_hooks: list[Callable[[str, Process, str], None]] = []
        self.network: Any = None
        self.transport = "rdma"  # how reads move: rdma, cma (the reader's thread copies), tcp (both sides run)
        self.stuck = self.flip = 0.0  # probabilities: a read hangs for long; a cell arrives altered
        self.model_faults = self.disk_faults = 0.0  # per step; per file written
        self.files: dict[str, Any] = {}  # what outlives a process, by its name
        self.checkers: Any = None
        self.acks: list[tuple[str, str, Any]] = []  # releases that were sent, for whoever replays them
        self._queue: list[tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        self._soon: deque[tuple[Process | None, Callable[..., None], tuple[Any, ...]]] = deque()
        self._tie = count()
        self.events = 0

    def at(self, time: float, process: Process | None, work: Callable[..., None], *args: Any) -> None:
        heappush(self._queue, (time, next(self._tie), process, work, args))

    def soon(self, process: Process | None, work: Callable[..., None], *args: Any) -> None:
        self._soon.append((process, work, args))

    def note(self, process: str, what: str, detail: str = "") -> None:
        """One line of the trace; equal seeds give equal digests."""
        line = f"{self.now:10.3f} {process} {what} {detail}"
        self.digest = crc32(line.encode(), self.digest)
        if self.lines is not None:
            self.lines.append(line)

    def phase(self, name: str, process: Process, detail: str = "") -> None:
        """A request entered a phase in `process`: faults may strike now."""
        self.counts["phase:" + name] += 1
        self.note(process.name, name, detail)
        for hook in self.phase_hooks:
            hook(name, process, detail)

    def run(self, until: float) -> None:
        """Everything that happens up to true time `until`."""
        while True:
            while self._soon:
                self._do(*self._soon.popleft())
            if not self._queue or self._queue[0][0] > until:
                break
            time, _, process, work, args = heappop(self._queue)
            if time > self.now:
                self.now = time
            self._do(process, work, args)
        self.now = max(self.now, until)

    def _do(self, process: Process | None, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.events += 1
        if self.events > EVENTS_MAX:
            raise Violation("deadline", f"{EVENTS_MAX} events and no end")
        if process is not None:
            if not process.alive:
                return
            if process.stopped:
                process.backlog.append((work, args))
                return
        work(*args)
