"""What both simulated workers share: the real scheduler over toy pools, and holdings with several users."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.api import SampledToken, SamplingParams, SequenceSpec, SnapshotTaken
from engine.core import Events, Scheduler
from engine.step import Drawn, Step
from moonrelay.errors import ServeError
from sim.adapters import CONTEXT_LEN, PoolSizes, engine_settings
from sim.drafting import Drafter
from sim.memory import Landing, Pool, Span
from sim.redis import Member
from sim.toy import BLOCK_TOKENS, consume, next_token
from sim.worker_memory import Holding, WorkerMemory, block_cells, slot_cells
from sim.world import Future, Steps, Violation, World

STEP_MS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """The bundle chosen for a prompt, as the index named it."""

    tokens: int
    runs: tuple[Any, ...]  # of cachestore.index.Run
    snapshot: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One attempt's prompt as the router sends it to a worker."""

    request_id: str
    ids: Sequence[int]
    sampling: SamplingParams
    root: bytes
    hashes: Sequence[bytes]
    hits: tuple[Hit, ...]  # the deepest first; the others are for when it cannot be fetched
    snapshot_at: tuple[int, ...]
    store: bool
    write_back: bool
    tenant: str  # for the checkers only: no process looks at it


class Mailbox:
    """Events of one sequence, for one task; what comes after `close` goes to `late`."""

    def __init__(self, late: Callable[[Any], None]) -> None:
        self._late, self._closed = late, False
        self.request_id = ""
        self._events: deque[Any] = deque()
        self._wake: Future | None = None

    def emit(self, event: Any) -> None:
        if self._closed:
            self._late(event)
            return
        self._events.append(event)
        if self._wake is not None:
            self._wake.set()

    def batch(self, timeout_ms: float) -> Steps:
        if not self._events:
            self._wake = Future()
            yield (self._wake, timeout_ms)
        events = list(self._events)
        self._events.clear()
        return events

    def close(self) -> None:
        self._closed = True
        while self._events:
            self._late(self._events.popleft())


class Worker(Member):
    def __init__(self, world: World, name: str, pools: PoolSizes) -> None:
        super().__init__(world, name)
        self.scheduler = Scheduler(
            engine_settings(pools), context_len=CONTEXT_LEN, has_drafter=pools.draft_len_max > 0
        )
        self.memory = WorkerMemory(
            world, name, self.scheduler, kept_share=pools.kept_share, on_change=self._memory_changed
        )
        self.rows, self.state = self.memory.rows, self.memory.state
        self.pools = {"rows": self.rows, "state": self.state}
        self._drafter = Drafter(self.scheduler, self.rows, self.state, self.rng, pools.draft_len_max)
        self.quarantined = self.background = 0
        self._watchers: dict[int, Callable[[int], None]] = {}  # by reservation
        self._finished_early: dict[int, tuple[int, int]] = {}  # slot: the first layer's state before the pass
        self._work = Future()
        self._num_ids = 0

    def boot(self) -> None:
        super().boot()
        self.spawn(self._engine(), "engine")

    def busy(self) -> int:
        stats = self.scheduler.stats()
        return stats.num_running + stats.num_waiting

    def discard(self, event: Any) -> None:
        """An event that came after its request had gone: only a snapshot has to be given back."""
        if isinstance(event, SnapshotTaken):
            self.own_snapshot(event.slot)
            self.memory.drop_snapshot(event.slot)

    def own_snapshot(self, slot: int) -> None:
        self.state.freeze(slot_cells(slot), "a snapshot")
        self.memory.own_snapshot(slot)

    def quarantine(self, holding: Holding, landing: Landing, then: Callable[[], None] | None = None) -> None:
        """Keep `holding` from everybody until nothing can land in it any more."""
        self.world.counts["quarantines"] += 1
        holding.share()
        self.quarantined += 1
        self.spawn(self._await_end(holding, landing, then), "quarantine")

    def _await_end(self, holding: Holding, landing: Landing, then: Callable[[], None] | None) -> Steps:
        yield from landing.wait_ended()
        self.quarantined -= 1
        holding.drop()
        if then is not None:
            then()

    # The engine's thread.

    def submit(self, prompt_id: str, holding: Holding, box: Mailbox, **spec: Any) -> None:
        """Raises: Overloaded."""
        self._num_ids += 1
        made = SequenceSpec(request_id=f"{prompt_id}/{self._num_ids}", **spec)
        self.scheduler.submit(made, holding.reservation, box.emit)
        box.request_id = made.request_id
        self._wake_engine()

    def cancel(self, box: Mailbox) -> None:
        self.scheduler.cancel(box.request_id)
        self._wake_engine()

    def _memory_changed(self) -> None:
        self._wake_engine()
        if self.memory.waiting:
            self.world.soon(self, self.memory.serve_waiting)

    def _wake_engine(self) -> None:
        self._work.set()

    def _engine(self) -> Steps:
        scheduler = self.scheduler
        while True:
            self._deliver(scheduler.reap())
            step = scheduler.plan()
            self.memory.serve_waiting()
            if step is None:
                if not scheduler.has_work:
                    self._work = Future()
                    yield self._work
                continue
            for _, slot in step.copies:
                self.state.assign(slot_cells(slot), "a snapshot")
            self._guard_step(step)
            yield STEP_MS * (0.5 + self.rng.random())
            if self._watchers and self._early_layers(step):
                yield STEP_MS * self.rng.random()
            events = self._complete(step)
            self._deliver(events)
            self._drafter.propose(step.sequences)
            self.memory.serve_waiting()

    def _guard_step(self, step: Step) -> None:
        """Nobody may be given what a running step writes to."""
        slots = [*(s.reservation.slot for s in step.sequences), *(slot for _, slot in step.copies)]
        self.state.guard(id(step), [c for slot in slots for c in slot_cells(slot)], "a step runs on them")
        rows = [c for s in step.sequences for b in s.reservation.blocks for c in block_cells(b)]
        self.rows.guard(id(step), rows, "a step runs on them")

    def _complete(self, step: Step) -> Events:
        self.rows.unguard(id(step))
        self.state.unguard(id(step))
        if self.world.network.chance(self.world.model_faults):
            self.world.counts["fault:model"] += 1
            self._finished_early.clear()
            return self.scheduler.fault(step, ServeError("the model failed"))
        drawn = [token for index in range(len(step.segments)) if (token := self._draw(step, index)) is not None]
        for source, target in step.copies:
            self.state.write(slot_cells(target), self.state.read(slot_cells(source)))
        self._drafter.fold(step, drawn)
        return self.scheduler.complete(step, drawn)

    def _draw(self, step: Step, index: int) -> Drawn | None:
        verified = step.verification.draws if step.verification is not None else {}
        if index not in verified:
            return self._forward(step.segments[index])
        self.world.counts["verified_segments"] += 1
        return self._drafter.verify(step.segments[index], step.draws[verified[index]])

    def _forward(self, segment: Any) -> SampledToken | None:
        """The toy model on the pools' cells, in place."""
        start, end = segment.start, segment.start + len(segment.ids)
        first, last = start // BLOCK_TOKENS, (end - 1) // BLOCK_TOKENS
        slot = slot_cells(segment.slot)
        state = self.state.read(slot)
        if segment.slot in self._finished_early:  # the first layer's old state, once more for the whole pass
            state[0], state[2] = self._finished_early.pop(segment.slot)
        rows = {i: self.rows.read(block_cells(segment.blocks[i])) for i in range(first, last + 1)}
        consume(segment.ids, start, state, rows)  # type: ignore[arg-type]
        self.state.write(slot, state)
        for index, cells in rows.items():
            self.rows.write(block_cells(segment.blocks[index]), cells)
        if segment.logits == "none":
            return None
        every = [self.rows.read(block_cells(block)) for block in segment.blocks[: last + 1]]
        return SampledToken(id=next_token(state, every))

    def watch_layers(self, holding: Holding | None, told: Callable[[int], None]) -> None:
        """Call `told` with the number of finished layers while the last pass of the prompt on `holding` runs."""
        assert holding is not None
        self._watchers[holding.reservation.id] = told

    def unwatch_layers(self, holding: Holding | None) -> None:
        if holding is not None:
            self._watchers.pop(holding.reservation.id, None)

    def _early_layers(self, step: Step) -> bool:
        """The first layer of watched prompts' last passes is done: its state is final, and told of."""
        told = False
        for segment, sequence in zip(step.segments, step.sequences, strict=True):
            watcher = self._watchers.get(sequence.reservation.id)
            if watcher is None or segment.logits == "none" or sequence.last_id is not None:
                continue
            slot = slot_cells(segment.slot)
            state = self.state.read(slot)
            rows: Any = {i: [0, 0] for i in range(len(segment.blocks))}
            consume(segment.ids, segment.start, state, rows)
            self._finished_early[segment.slot] = (self.state.values[slot[0]], self.state.values[slot[2]])
            self.state.write((slot[0], slot[2]), (state[0], state[2]))
            watcher(1)
            told = True
        return told

    def _deliver(self, events: Events) -> None:
        for sequence, event in events:
            sequence.emit(event)

    # Books.

    def check(self) -> None:
        self.world.counts["check:books"] += 1
        self.scheduler.check()
        self.memory.bundles.check()

    def settled(self) -> None:
        """Nothing goes on any more. Raises: Violation where memory is held that nobody merely keeps."""
        self.check()
        memory = self.memory
        if memory.holdings or memory.waiting or self.quarantined or self.background:
            raise Violation("books", f"{self.name} is idle and holds {len(memory.holdings)} reservations")
        stats, kept = self.scheduler.stats(), len(list(memory.bundles.blocks))
        slots = len(list(memory.bundles.slots))
        if stats.free_blocks + kept != stats.num_blocks or stats.free_slots + slots != stats.num_slots:
            raise Violation("books", f"{self.name} is idle with {stats}; {kept} blocks and {slots} slots are kept")
        if sorted(memory.snapshots) != sorted(memory.bundles.slots):
            raise Violation("books", f"{self.name} is idle with snapshots {memory.snapshots}")


def span_of(pool: Pool, cells: range) -> Span:
    found = pool.span(cells[0], len(cells))
    return replace(found, pool=pool.name.rpartition("/")[2])
