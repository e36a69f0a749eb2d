"""A simulated prefill worker: the real `HandoffTable` and `Announcer` between prompts and who reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from decode.manifest import Held
from engine.api import Finished, Progress, TokenSampled
from moonrelay.errors import HandoffRefused, InvariantError, Unavailable
from prefill.core import HandoffTable
from prefill.core import Phase as HandoffPhase
from prefill.parts import Announcer, HandoffShape
from sim.adapters import TIMING, PoolSizes
from sim.cached_worker import CachedWorker
from sim.memory import CELL_BYTES, Span
from sim.prompt import PromptRun
from sim.toy import BLOCK_TOKENS, NUM_LAYERS, ROW_CELLS, STATE_CELLS
from sim.worker import Prompt, span_of
from sim.worker_memory import Holding
from sim.world import Future, Steps, Violation, World

Emit = Callable[[Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Where the decode side can follow a handoff."""

    handoff_id: str
    source: str
    epoch: int
    fence: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Follow:
    handoff_id: str
    fence: int
    held: Held | None


@dataclass(frozen=True, slots=True)
class Rows:
    """Blocks from `first` on are final."""

    first: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Layers:
    """The state of KDA layers [first, end) is final: recurrent, conv."""

    first: int
    end: int
    recurrent: Span
    conv: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The whole promise."""

    opened: Opened
    next_token: int
    rows: tuple[Span, ...]
    state: tuple[Layers, ...]
    held: Held | None
    lease_ms: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    token: int
    cached: int
    reason: str | None  # why the worker restored less than the hit


@dataclass(frozen=True, slots=True)
class Ready:
    finish: str | None


class Lent:
    """One handoff in the making: its memory, and the log of what its follower is to hear."""

    def __init__(self, opened: Opened, holding: Holding, prompt: Prompt) -> None:
        self.opened, self.holding, self.prompt = opened, holding, prompt
        shape = HandoffShape(
            block_tokens=BLOCK_TOKENS,
            prompt_tokens=opened.prompt_tokens,
            block_bytes=ROW_CELLS * CELL_BYTES,
            num_layers=NUM_LAYERS,
            layer_bytes=2 * CELL_BYTES,
        )
        self.announcer = Announcer(shape=shape, part_bytes=1)
        self.held: Held | None = None
        self.state: list[Layers] = []
        self.over = False
        self._log: list[Any] = []
        self._wake = Future()

    def add(self, part: Any) -> None:
        self._log.append(part)
        self._wake.set()

    def end(self, part: Any) -> None:
        """The last part: the manifest, or None where the handoff was given up. Moot after one."""
        if not self.over:
            self.over = True
            self.add(part)

    def agree(self, held: Held) -> bool:
        """Whether the follower's blocks are this prompt's."""
        hashes = self.prompt.hashes
        if not 0 < held.num_blocks <= len(hashes) or held.root != self.prompt.root:
            return False
        if hashes[held.num_blocks - 1] != held.prefix_hash:
            return False
        self.held = held
        self.announcer.hold(held.num_blocks)
        return True

    def hear(self, number: int) -> Steps:
        """Part `number` of the log, without what the follower holds; rows may be empty then."""
        while number >= len(self._log):
            self._wake = Future()
            yield self._wake
        part = self._log[number]
        skip = self.held.num_blocks if self.held is not None else 0
        if isinstance(part, Rows) and part.first < skip:
            return Rows(skip, part.spans[skip - part.first :])
        if isinstance(part, Manifest) and skip and part.held is None:
            return replace(part, rows=part.rows[skip:], held=self.held)
        return part


class Prefill(CachedWorker):
    role = "prefill"

    def __init__(self, world: World, name: str, pools: PoolSizes) -> None:
        super().__init__(world, name, pools)
        self.table = HandoffTable(TIMING)
        self._lent: dict[str, Lent] = {}
        self._fences: dict[str, int] = {}
        self._num_handoffs = 0

    def rpc_prefill(self, prompt: Prompt, emit: Emit) -> Steps:
        """The whole life of a prompt here, in order."""
        run = PromptRun(self, prompt)
        try:
            yield from run.begin(len(prompt.ids))
            lent = self._begin(run)
            try:
                emit(lent.opened)
                self.world.phase("prefilling", self)
                self.watch_layers(run.holding, lambda layers: self._layers(lent, layers))
                run.submit(hold=True)
                token, reason = yield from self._compute(run, lent, emit)
                emit(FirstToken(token, run.cached, run.reason))
                if reason is None:
                    yield self.rng.random()  # checksums
                    self._publish(run, lent, token)
            finally:
                self.unwatch_layers(run.holding)
                if self.alive:
                    lent.end(None)
                    self._abandon(lent)
            run.store()
        finally:
            run.close()
        emit(Ready(reason))

    def rpc_follow(self, request: Follow, emit: Emit) -> Steps:
        """For the decode side: what of the handoff is final, as it becomes so; the manifest last."""
        outcome = self.table.follow(request.handoff_id, fence=request.fence)
        if outcome != "granted":
            raise HandoffRefused(f"handoff {outcome}", reason="withdrawn")
        self.world.checkers.fence(self, self._fences[request.handoff_id], request.fence)
        lent = self._lent[request.handoff_id]
        if request.held is not None:
            if not lent.agree(request.held):
                raise HandoffRefused("the blocks held are not this prompt's", reason="held")
            self.world.counts["delta_handoffs"] += 1
        self.world.phase("followed", self)
        number = 0
        while (part := (yield from lent.hear(number))) is not None:
            number += 1
            if isinstance(part, Manifest):
                emit(part)
                return
            if self._lend(lent, part):
                emit(part)
        raise HandoffRefused("handoff withdrawn", reason="withdrawn")

    def rpc_release_handoff(self, request: tuple[str, int]) -> None:
        handoff_id, fence = request
        outcome = self.table.release(handoff_id, fence=fence)
        if outcome in ("freed", "declined"):
            self.world.checkers.fence(self, self._fences.get(handoff_id), fence)
        if outcome == "freed":
            self._free(handoff_id, acknowledged=True)
        elif outcome == "declined":
            self.rows.unguard(handoff_id)
            self.state.unguard(handoff_id)
            self._lent[handoff_id].end(None)

    def _abandon(self, lent: Lent) -> None:
        """The request has ended here; its memory is free, or waits for its follower, or for time."""
        handoff_id = lent.opened.handoff_id
        if self.table.abandon(handoff_id, now_ms=self.now_ms()):
            self._free(handoff_id, acknowledged=False)
        elif self.table.phase(handoff_id) is HandoffPhase.EXPIRED:
            self._guard(lent, TIMING.transfer_ms(self.table._handoffs[handoff_id].nbytes))
        self._arm()

    def _compute(self, run: PromptRun, lent: Lent, emit: Emit) -> Steps:
        token = None
        while True:
            for event in (yield from run.events()):
                match event:
                    case Progress(tokens=done):
                        self._rows(lent, done)
                        emit(event)
                    case TokenSampled(token=drawn):
                        token = drawn.id
                    case Finished(reason="cancelled"):
                        raise Unavailable("the engine is stopping")
                    case Finished(reason=reason, tokens_in_state=consumed):
                        if token is None or consumed != len(run.prompt.ids):
                            raise InvariantError(f"state holds {consumed} of {len(run.prompt.ids)} prompt tokens")
                        return token, None if reason == "held" else reason

    def _rows(self, lent: Lent, tokens_done: int) -> None:
        """Log blocks that have become final."""
        blocks = lent.announcer.rows(tokens_done)
        if blocks:
            spans = tuple(span_of(self.rows, lent.holding.row_cells(block)) for block in blocks)
            lent.add(Rows(blocks[0], spans))

    def _layers(self, lent: Lent, layers_done: int) -> None:
        """Log layers that the prompt's last pass has left."""
        layers = lent.announcer.layers(layers_done)
        if layers:
            part = self._state_part(lent, layers[0], layers[-1] + 1)
            lent.state.append(part)
            lent.add(part)

    def _lend(self, lent: Lent, part: Rows | Layers) -> bool:
        """Whether a part may go to the follower; its memory is lent then."""
        cells = ROW_CELLS * len(part.spans) if isinstance(part, Rows) else part.recurrent.cells + part.conv.cells
        if not cells or not self.table.lend(lent.opened.handoff_id, nbytes=cells * CELL_BYTES):
            return False
        self._guard(lent, None)
        self.world.counts["parts"] += 1
        return True

    def _state_part(self, lent: Lent, first: int, end: int) -> Layers:
        slot, half = lent.holding.state_cells(), STATE_CELLS // 2
        recurrent, conv = slot[first:end], slot[half + first : half + end]
        return Layers(first, end, span_of(self.state, recurrent), span_of(self.state, conv))

    def _publish(self, run: PromptRun, lent: Lent, next_token: int) -> None:
        holding, handoff_id = lent.holding, lent.opened.handoff_id
        lease = self.table.publish(handoff_id, nbytes=holding.nbytes, now_ms=self.now_ms())
        if lease is None:  # its follower had given up
            lent.end(None)
            self._free(handoff_id, acknowledged=True)
            return
        self._guard(lent, lease.lease_ms + TIMING.transfer_ms(holding.nbytes))
        first = lent.held.num_blocks if lent.held is not None else 0
        if lent.announcer.next_layer < NUM_LAYERS:
            lent.state.append(self._state_part(lent, lent.announcer.next_layer, NUM_LAYERS))
        self.world.phase("handed_off", self)
        lent.end(
            Manifest(
                opened=lent.opened,
                next_token=next_token,
                rows=tuple(
                    span_of(self.rows, holding.row_cells(block))
                    for block in range(first, len(holding.reservation.blocks))
                ),
                state=tuple(lent.state),
                held=lent.held,
                lease_ms=lease.lease_ms,
            )
        )

    def _begin(self, run: PromptRun) -> Lent:
        self._num_handoffs += 1
        handoff_id = f"{run.prompt.request_id}.{self._num_handoffs}"
        fence = self._fences[handoff_id] = self.table.begin(handoff_id)
        assert run.holding is not None
        tokens = len(run.prompt.ids)
        opened = Opened(handoff_id=handoff_id, source=self.name, epoch=self.epoch, fence=fence, prompt_tokens=tokens)
        lent = self._lent[handoff_id] = Lent(opened, run.holding.share(), run.prompt)
        return lent

    def _guard(self, lent: Lent, ms: float | None) -> None:
        """Somebody may read it; for `ms` more, or (None) until something is heard."""
        until = float("inf") if ms is None else self.world.now + (ms - 2) / self.clock_rate
        holding, handoff_id = lent.holding, lent.opened.handoff_id
        self.rows.guard(handoff_id, all_rows(holding), "a handoff is lent", until)
        self.state.guard(handoff_id, holding.state_cells(), "a handoff is lent", until)

    def _arm(self) -> None:
        """Wake when the table's next deadline is due."""
        deadline = self.table.next_deadline_ms()
        if deadline is not None:
            self.after(max(0, deadline - self.now_ms()) + 1, self._expire)

    def _expire(self) -> None:
        for handoff_id in self.table.expire(self.now_ms()):
            self.world.counts["handoffs_expired"] += 1
            self._free(handoff_id, acknowledged=False)
        self._arm()

    def _free(self, handoff_id: str, *, acknowledged: bool) -> None:
        """Where only time has ended it, the guard has to have ended by itself: else the next owner finds it."""
        if acknowledged:
            self.rows.unguard(handoff_id)
            self.state.unguard(handoff_id)
        lent = self._lent.pop(handoff_id)
        lent.end(None)
        lent.holding.drop()

    def check(self) -> None:
        super().check()
        self.table.check()

    def settled(self) -> None:
        if len(self.table) or self._lent:
            raise Violation("books", f"{self.name} is idle with {self.table.stats()}")
        super().settled()


def all_rows(holding: Holding) -> Sequence[int]:
    return [cell for block in range(len(holding.reservation.blocks)) for cell in holding.row_cells(block)]
