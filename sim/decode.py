"""A simulated decode worker: the real `ReaderTable` and `check_manifest` before its pools, then the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from decode.bandwidth import Bandwidth
from decode.core import Event, Phase, ReaderTable
from decode.manifest import Held, Mine, Region, Split, StateRegions, check_manifest, check_opened, refused
from decode.manifest import Manifest as CheckedManifest
from decode.manifest import Opened as CheckedOpened
from decode.parts import Regions, Wanted
from engine.api import SamplingParams
from moonrelay.errors import (
    DeadlineExceeded,
    HandoffRefused,
    InvariantError,
    ServeError,
    StaleEpoch,
    Unavailable,
)
from sim.adapters import FINGERPRINT, LAYOUT, TIMING, VOCAB, PoolSizes
from sim.cached_worker import CachedWorker
from sim.memory import CELL_BYTES, Landing, Span, Transfer
from sim.prefill import Follow, Layers, Manifest, Opened, Rows
from sim.toy import BLOCK_TOKENS, STATE_CELLS
from sim.turn import Turn
from sim.worker import Hit
from sim.worker_memory import Holding, Want
from sim.world import Steps, Violation, World

RESERVATION_MS = 2_500
Emit = Callable[[Any], None]
POOL_NAMES: Final = ("rows", "state")
POOLS: Final = {0: 1 << 40, 1: 1 << 40}
WHOLE: Final = Split(tp_size=1, tp_rank=0, first_head=0, end_head=LAYOUT.num_heads)


@dataclass(frozen=True, slots=True)
class Reserve:
    request_id: str
    prompt_tokens: int
    max_tokens: int
    root: bytes
    hashes: Sequence[bytes]
    write_back: bool


@dataclass(frozen=True, slots=True)
class Writeback:
    """What the turn's own blocks go on from: the prompt's hashes, and its ids after them."""

    root: bytes
    hashes: Sequence[bytes]
    tail: tuple[int, ...]
    hits: tuple[Hit, ...]
    tenant: str  # for the checkers only


@dataclass(frozen=True, slots=True)
class Adopt:
    request_id: str
    reservation_id: str
    opened: Opened
    sampling: SamplingParams
    writeback: Writeback | None
    prompt: tuple[int, ...]  # for the checkers only: no worker looks at it


@dataclass(frozen=True, slots=True)
class Adopted:
    pass


@dataclass(frozen=True, slots=True)
class Tokens:
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    reason: str


class Decode(CachedWorker):
    role = "decode"

    def __init__(self, world: World, name: str, pools: PoolSizes) -> None:
        super().__init__(world, name, pools)
        self.table = ReaderTable()
        self._bandwidth = Bandwidth(TIMING)
        self._held: dict[str, Held] = {}
        self._holdings: dict[str, Holding] = {}
        self._num_reservations = 0

    def rpc_reserve(self, request: Reserve) -> str:
        """Raises: Overloaded, RequestTooLarge."""
        want = Want(
            tokens=request.prompt_tokens + request.max_tokens,
            hashes=request.hashes[: request.prompt_tokens // BLOCK_TOKENS],
            state=False,
            write_back=request.write_back,
        )
        holding = self.memory.try_reserve(want)
        self._num_reservations += 1
        reservation_id = f"{request.request_id}.{self._num_reservations}"
        self.table.reserve(
            reservation_id,
            prompt_tokens=request.prompt_tokens,
            nbytes=holding.nbytes,
            ttl_ms=RESERVATION_MS,
            now_ms=self.now_ms(),
        )
        self._holdings[reservation_id] = holding
        shared = holding.reservation.shared
        if shared:
            held = Held(root=request.root, prefix_hash=request.hashes[shared - 1], num_blocks=shared)
            self._held[reservation_id] = held
        self._arm()
        self.world.phase("reserved", self)
        return reservation_id

    def rpc_release_reservation(self, reservation_id: str) -> None:
        if self.table.phase(reservation_id) is Phase.RESERVED:
            self._move(reservation_id, Event.CANCELLED)

    def rpc_adopt(self, request: Adopt, emit: Emit) -> Steps:
        """A handed-over request from its manifest to its last token, in order."""
        holding, manifest = yield from self._adopt(request)
        turn = Turn(self, request, holding, manifest.next_token)
        try:
            self.world.checkers.adopted(self, request, holding)
            self.submit(
                request.request_id,
                holding,
                turn.box,
                ids=(manifest.next_token,),
                sampling=request.sampling,
                restored=manifest.opened.prompt_tokens,
                write_back=request.writeback is not None,
            )
            turn.submitted = True
            self.world.phase("adopted", self)
            emit(Adopted())
            while True:
                ids, ended = yield from turn.hear()
                if ids:
                    self.world.phase("decoding", self)
                    emit(Tokens(tuple(ids)))
                if ended is not None:
                    if ended not in ("stop", "length"):
                        raise Unavailable("the engine is stopping")
                    emit(Done(ended))
                    return
        finally:
            turn.close()
            self._move(request.reservation_id, Event.FINISHED)

    def _adopt(self, request: Adopt) -> Steps:
        """Follow, read, verify. Raises: HandoffRefused; the reservation is then released, or quarantined."""
        reservation_id, opened = request.reservation_id, request.opened
        phase = self.table.phase(reservation_id)
        if phase is not Phase.RESERVED:
            if phase is Phase.RELEASED:  # else it is being read by the call that came first
                self._ack(opened)
            raise self._counted("reservation")
        mine = self._mine(reservation_id)
        refusal = check_opened(checked_opened(opened), mine)
        if refusal is not None:
            self._move(reservation_id, Event.REFUSED)
            self._ack(opened)
            raise self._counted(refusal.reason)
        self._move(reservation_id, Event.OPENED)
        landing = Landing()
        try:
            manifest = yield from self._follow(request, mine, landing)
        except GeneratorExit:
            self._give_up(reservation_id, Event.CANCELLED, opened, landing)
            raise
        except DeadlineExceeded as late:
            self._give_up(reservation_id, Event.DEADLINE, opened, landing)
            raise self._counted("deadline") from late
        except HandoffRefused as unkept:
            self._give_up(reservation_id, Event.REFUSED, opened, landing)
            raise self._counted(unkept.reason) from unkept
        except ServeError as failed:
            self._give_up(reservation_id, Event.REFUSED, opened, landing)
            raise self._counted("stale_epoch" if isinstance(failed, StaleEpoch) else "transfer") from failed
        self._move(reservation_id, Event.COMPLETE)
        self._ack(opened)
        return self._holdings[reservation_id], manifest

    def _follow(self, adopt: Adopt, mine: Mine, landing: Landing) -> Steps:
        """Hear parts and read them, until the manifest agrees and everything is here."""
        reservation_id, opened = adopt.reservation_id, adopt.opened
        holding = self._holdings[reservation_id]
        held = self._held.get(reservation_id)
        regions = Regions(
            LAYOUT,
            prompt_tokens=mine.prompt_tokens,
            pools=POOLS,
            held_blocks=held.num_blocks if held is not None else 0,
        )
        stream = self.world.network.stream(
            self, opened.source, "follow", Follow(opened.handoff_id, opened.fence, held)
        )
        lease_end: int | None = None
        try:
            while not regions.closed:
                left = self.table.ttl_end_ms(reservation_id) - self.now_ms()
                part = yield from stream.next(max(0, left))
                if part is None:
                    raise refused("withdrawn", "the parts ended before the manifest")
                if isinstance(part, Manifest):
                    lease_end = self.now_ms() + part.lease_ms
                refusal = self._hear(regions, part, opened, mine, held)
                if refusal is not None:
                    raise refusal
                while wanted := regions.take():
                    yield from self._read(reservation_id, opened, wanted, holding, landing, lease_end)
                    regions.verified()
        finally:
            stream.close()
        if not regions.complete:
            raise InvariantError("the manifest is here and something is not read")
        return part

    def _hear(
        self, regions: Regions, part: Any, opened: Opened, mine: Mine, held: Held | None
    ) -> HandoffRefused | None:
        match part:
            case Rows(first=first, spans=spans):
                return regions.rows(first, [_region(span) for span in spans])
            case Layers():
                return regions.state(_state_regions(part))
            case _:
                manifest = _checked(part)
                return check_manifest(manifest, checked_opened(opened), mine, held) or regions.close(manifest)

    def _read(
        self, reservation_id: str, opened: Opened, wanted: Wanted, holding: Holding, landing: Landing,
        lease_end: int | None,
    ) -> Steps:  # fmt: skip
        slot, half = holding.state_cells(), STATE_CELLS // 2
        reads = [(_span(region), self.rows, holding.row_cells(index)) for index, region in wanted.rows]
        for part in wanted.state:
            first, end = part.first_layer, part.end_layer
            reads.append((_span(part.recurrent), self.state, slot[first:end]))
            reads.append((_span(part.conv), self.state, slot[half + first : half + end]))
        patience = self._bandwidth.read_ms((opened.source, opened.epoch), wanted.nbytes)
        if lease_end is not None:
            patience = min(patience, max(0, lease_end - self.now_ms()))
        deadline = self.now_ms() + patience
        self._move(reservation_id, Event.READ_STARTED)
        began, disturbed = self.world.now, self.disturbed
        transfer = landing.add(Transfer(self.world, self, opened.source, opened.epoch, reads))
        self.world.phase("pulling", self)
        try:
            yield (transfer.result, patience)
        except DeadlineExceeded:
            transfer.abort()
            raise
        finally:
            if disturbed == self.disturbed:
                self.world.checkers.waited(self, self.world.now - began, TIMING.transfer_ms(wanted.nbytes))
            if transfer.ended.done:
                self._move(reservation_id, Event.READ_ENDED)
        if self.now_ms() > deadline:
            raise refused("deadline", "the read ended after its time")

    def _give_up(self, reservation_id: str, event: Event, opened: Opened, landing: Landing) -> None:
        """Nothing is adopted. The memory is free, and the owner told, when no byte of ours can land any more."""
        for transfer in landing.transfers:
            transfer.abort()
        if self.table.phase(reservation_id) is Phase.PULLING and not landing.pending:
            self._move(reservation_id, Event.READ_ENDED)

        def over() -> None:
            self._move(reservation_id, Event.READ_ENDED)
            self._ack(opened)

        holding = self._holdings[reservation_id]
        if self._move(reservation_id, event) is Phase.QUARANTINED:
            self.quarantine(holding, landing, over)
        else:
            self._ack(opened)

    def _mine(self, reservation_id: str) -> Mine:
        return Mine(
            fingerprint=FINGERPRINT,
            layout=LAYOUT,
            vocab_size=VOCAB,
            prompt_tokens=self.table.prompt_tokens(reservation_id),
            epochs={record.instance_id: record.epoch for record in self.members("prefill")},
        )

    def _counted(self, reason: Any) -> HandoffRefused:
        self.world.counts["refused:" + reason] += 1
        return refused(reason, "nothing is adopted")

    def _ack(self, opened: Opened) -> None:
        self.tell(opened.source, "release_handoff", (opened.handoff_id, opened.fence))

    def _move(self, reservation_id: str, event: Event) -> Phase:
        phase = self.table.step(reservation_id, event)
        if phase is Phase.RELEASED:
            self._free(reservation_id)
        return phase

    def _free(self, reservation_id: str) -> None:
        holding = self._holdings.pop(reservation_id, None)
        self._held.pop(reservation_id, None)
        if holding is not None:
            holding.drop()

    def _arm(self) -> None:
        deadline = self.table.next_deadline_ms()
        if deadline is not None:
            self.after(max(0, deadline - self.now_ms()) + 1, self._expire)

    def _expire(self) -> None:
        for reservation_id in self.table.expire(self.now_ms()):
            self.world.counts["reservations_expired"] += 1
            self._free(reservation_id)
        self._arm()

    def check(self) -> None:
        super().check()
        self.table.check()

    def settled(self) -> None:
        if len(self.table) or self._holdings:
            raise Violation("books", f"{self.name} is idle with {self.table.stats()}")
        super().settled()


def checked_opened(opened: Opened) -> CheckedOpened:
    """As the real checks want it: bytes, and the source's pools by id."""
    return CheckedOpened(
        handoff_id=opened.handoff_id,
        fingerprint=FINGERPRINT,
        layout=LAYOUT,
        split=WHOLE,
        prompt_tokens=opened.prompt_tokens,
        instance_id=opened.source,
        epoch=opened.epoch,
        pools=POOLS,
        fence=opened.fence,
    )


def _checked(manifest: Manifest) -> CheckedManifest:
    return CheckedManifest(
        opened=checked_opened(manifest.opened),
        next_token=manifest.next_token,
        sampler_position=manifest.opened.prompt_tokens + 1,
        rows=[_region(span) for span in manifest.rows],
        state=[_state_regions(part) for part in manifest.state],
        held=manifest.held,
        lease_ms=manifest.lease_ms,
    )


def _state_regions(part: Layers) -> StateRegions:
    return StateRegions(
        first_layer=part.first, end_layer=part.end, recurrent=_region(part.recurrent), conv=_region(part.conv)
    )


def _region(span: Span) -> Region:
    pool = POOL_NAMES.index(span.pool)
    return Region(pool=pool, offset=span.first * CELL_BYTES, length=span.cells * CELL_BYTES, xxh3=span.xxh3)


def _span(region: Region) -> Span:
    cells = region.length // CELL_BYTES
    return Span(POOL_NAMES[region.pool], region.offset // CELL_BYTES, cells, region.xxh3)
