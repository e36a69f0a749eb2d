"""A simulated prefill worker: the real `HandoffTable` and `Announcer` between prompts and who reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from decode.manifest import Held
from engine.api import Finished, Progress, TokenSampled
from moonrelay.errors import HandoffRefused, InvariantError, Unavailable
from prefill.core import HandoffTable
from prefill.core import Phase as HandoffPhase
from prefill.parts import Announcer, HandoffShape
from sim.adapters import TIMING
from sim.cached_worker import CachedWorker
from sim.memory import CELL_BYTES, Span
from sim.prompt import PromptRun
from sim.toy import BLOCK_TOKENS, NUM_LAYERS, ROW_CELLS, STATE_CELLS
from sim.worker import Holding, Prompt, span_of
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
    """One handoff in the making: its memory, and what its follower is to hear."""

    def __init__(self, opened: Opened, holding: Holding, announcer: Announcer) -> None:
        self.opened, self.holding, self.announcer = opened, holding, announcer
        self.held: Held | None = None
        self.state: list[Layers] = []
        self.ended = False
        self._parts: deque[Any] = deque()
        self._wake = Future()

    def tell(self, part: Any) -> None:
        self._parts.append(part)
        self._wake.set()

    def end(self) -> None:
        self.ended = True
        self._wake.set()

    def hear(self) -> Steps:
        """The next part; None at the end of a handoff that was given up."""
        while not self._parts:
            if self.ended:
                return None
            self._wake = Future()
            yield self._wake
        return self._parts.popleft()


class Prefill(CachedWorker):
    role = "prefill"

    def __init__(self, world: World, name: str, **pools: int) -> None:
        super().__init__(world, name, **pools)
        self.table = HandoffTable(TIMING)
        self._lent: dict[str, Lent] = {}
        self._prompts: dict[str, Prompt] = {}
        self._fences: dict[str, int] = {}
        self._num_handoffs = 0

    def rpc_prefill(self, prompt: Prompt, emit: Emit) -> Steps:
        """The whole life of a prompt here, in order."""
        run = PromptRun(self, prompt)
        try:
            yield from run.begin(len(prompt.ids))
            lent = self._begin(run)
            handoff_id = lent.opened.handoff_id
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
                lent.end()
                if self.alive:
                    if self.table.abandon(handoff_id, now_ms=self.now_ms()):
                        self._free(handoff_id, acknowledged=False)
                    elif self.table.phase(handoff_id) is HandoffPhase.EXPIRED:
                        self._guard(lent, TIMING.transfer_ms(self.table._handoffs[handoff_id].nbytes))
                    self._arm()
            run.store()
        finally:
            run.close()
        emit(Ready(reason))

    def rpc_follow(self, request: Follow, emit: Emit) -> Steps:
        """For the decode side: what of the handoff is final, as it becomes so; the manifest last."""
        outcome = self.table.follow(request.handoff_id, fence=request.fence)
        lent = self._lent.get(request.handoff_id)
        if outcome != "granted" or lent is None:
            raise HandoffRefused(f"handoff {outcome}", reason="withdrawn")
        self.world.checkers.fence(self, self._fences[request.handoff_id], request.fence)
        self._agree(lent, request.held)
        self.world.phase("followed", self)
        while (part := (yield from lent.hear())) is not None:
            emit(part)
            if isinstance(part, Manifest):
                return
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

    def _agree(self, lent: Lent, held: Held | None) -> None:
        """Blocks that the follower has need not be announced, where they are this prompt's."""
        prompt = self._prompts[lent.opened.handoff_id]
        if held is None or lent.announcer.next_block or held.num_blocks > len(prompt.hashes):
            return
        if held.root == prompt.root and prompt.hashes[held.num_blocks - 1] == held.prefix_hash:
            lent.held = held
            lent.announcer.hold(held.num_blocks)
            self.world.counts["delta_handoffs"] += 1

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
        """Announce blocks that have become final."""
        blocks = lent.announcer.rows(tokens_done)
        if blocks and self._lend(lent, len(blocks) * ROW_CELLS):
            cells = lent.holding.row_cells
            lent.tell(Rows(blocks[0], tuple(span_of(self.rows, cells(block)) for block in blocks)))

    def _layers(self, lent: Lent, layers_done: int) -> None:
        """Announce layers that the prompt's last pass has left."""
        layers = lent.announcer.layers(layers_done)
        if layers and self._lend(lent, 2 * len(layers)):
            part = self._state_part(lent, layers[0], layers[-1] + 1)
            lent.state.append(part)
            lent.tell(part)

    def _lend(self, lent: Lent, cells: int) -> bool:
        handoff_id = lent.opened.handoff_id
        if not self.table.lend(handoff_id, nbytes=cells * CELL_BYTES):
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
        if lease is None:
            self._free(handoff_id, acknowledged=True)
            return
        self._guard(lent, lease.lease_ms + TIMING.transfer_ms(holding.nbytes))
        first = lent.held.num_blocks if lent.held is not None else 0
        if lent.announcer.next_layer < NUM_LAYERS:
            lent.state.append(self._state_part(lent, lent.announcer.next_layer, NUM_LAYERS))
        self.world.phase("handed_off", self)
        lent.tell(
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
        shape = HandoffShape(
            block_tokens=BLOCK_TOKENS,
            prompt_tokens=tokens,
            block_bytes=ROW_CELLS * CELL_BYTES,
            num_layers=NUM_LAYERS,
            layer_bytes=2 * CELL_BYTES,
        )
        opened = Opened(handoff_id=handoff_id, source=self.name, epoch=self.epoch, fence=fence, prompt_tokens=tokens)
        lent = Lent(opened, run.holding.share(), Announcer(shape=shape, part_bytes=1))
        self._lent[handoff_id] = lent
        self._prompts[handoff_id] = run.prompt
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
        self._prompts.pop(handoff_id)
        self._lent.pop(handoff_id).holding.drop()

    def check(self) -> None:
        super().check()
        self.table.check()

    def settled(self) -> None:
        if len(self.table) or self._lent:
            raise Violation("books", f"{self.name} is idle with {self.table.stats()}")
        super().settled()


def all_rows(holding: Holding) -> Sequence[int]:
    return [cell for block in range(len(holding.reservation.blocks)) for cell in holding.row_cells(block)]
