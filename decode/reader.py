"""Pulls a handoff into reserved memory and says whether it may be decoded from.

The table in `decode.core` decides; this moves the bytes, keeps the memory and tells the owner when it is done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cachestore.transports import ChecksumMismatch, Read, ReadHandle, ReadReport, Slice, TransportSet
from decode.acks import Acks
from decode.core import Event, Phase, ReaderTable
from decode.manifest import Manifest, Mine, Refusal, Region, check_manifest, refused
from decode.metrics import ReaderMetrics
from engine.worker.expiry import Expiry, now_ms
from engine.worker.memory import Holding
from engine.worker.prompt import PromptRunner
from engine.worker.timing import Timing
from engine.worker.wire import fingerprint_from_wire, layout_from_wire
from model.batch import PoolLayout
from moonrelay.errors import DeadlineExceeded, HandoffRefused, StaleEpoch, TransferError
from moonrelay.prefix import Fingerprint
from moonrelay.stubs.v1 import common_pb2, worker_pb2

log = logging.getLogger(__name__)
TP_SIZE = 1
# Prefill may queue and take long; the router gives back what it does not use: time only ends what it forgot.
TTL_MS_PER_PROMPT_TOKEN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What this worker is, as far as a manifest must agree with it."""

    fingerprint: Fingerprint
    layout: PoolLayout
    vocab_size: int


class Reader:
    """Every reservation from `reserve` to the end of its turn. On the event loop's thread only."""

    def __init__(
        self,
        prompts: PromptRunner,
        table: ReaderTable,
        transports: TransportSet,
        acks: Acks,
        metrics: ReaderMetrics,
        *,
        identity: Identity,
        timing: Timing,
        reservation_ttl_ms: int,
        epochs: Callable[[], Mapping[str, int]],
    ) -> None:
        self.table = table
        self._prompts, self._transports, self._acks, self._metrics = prompts, transports, acks, metrics
        self._identity, self._timing, self._epochs = identity, timing, epochs
        self._reservation_ttl_ms = reservation_ttl_ms
        self._holdings: dict[str, Holding] = {}
        self._expiry = Expiry(table.next_deadline_ms, self._expire)
        self._num_reservations = 0

    async def run(self) -> None:
        """End reservations that nobody comes for; until cancelled."""
        await self._expiry.run()

    async def drained(self) -> None:
        """Until every reservation is released; quarantined ones count, their memory is still written to."""
        await self._expiry.until(lambda: len(self.table) == 0)

    def reserve(self, request_id: str, *, prompt_tokens: int, max_tokens: int) -> tuple[str, int]:
        """Set memory aside; returns the reservation's id and how many ms it lives.

        Raises: Overloaded, RequestTooLarge, Unavailable.
        """
        holding = self._prompts.memory.try_reserve(prompt_tokens + max_tokens)
        self._num_reservations += 1
        reservation_id = f"{request_id}.{self._num_reservations}"
        ttl_ms = self._reservation_ttl_ms + TTL_MS_PER_PROMPT_TOKEN * prompt_tokens
        self.table.reserve(
            reservation_id, prompt_tokens=prompt_tokens, nbytes=holding.nbytes, ttl_ms=ttl_ms, now_ms=now_ms()
        )
        self._holdings[reservation_id] = holding
        self._expiry.change()
        return reservation_id, ttl_ms

    def release(self, reservation_id: str) -> None:
        """Give back what was never adopted. A pull or a turn in progress is ended by cancelling its own call."""
        if self.table.phase(reservation_id) is Phase.RESERVED:
            self._move(reservation_id, Event.CANCELLED)

    def finish(self, reservation_id: str) -> None:
        """The turn is over; a sequence that still lives on the memory is cancelled with it."""
        self._move(reservation_id, Event.FINISHED)

    async def adopt(self, reservation_id: str, wire: worker_pb2.Manifest) -> tuple[Holding, ReadReport]:
        """Check, pull, verify. The caller calls `finish` later; the owner is told that we are done reading.

        Raises: HandoffRefused; the reservation is then released, or quarantined until our read has ended.
        """
        refusal = self._judge(reservation_id, wire)
        if refusal is not None:
            self._acks.send(wire)
            raise self._counted(refusal)
        self._move(reservation_id, Event.PUBLISHED)
        holding = self._holdings[reservation_id]
        try:
            report = await self._pull(reservation_id, wire, holding)
        except HandoffRefused as failed:
            raise self._counted(failed) from failed.__cause__
        self._move(reservation_id, Event.VERIFIED)
        self._acks.send(wire)
        self._metrics.pulled(report, len(wire.rows) + len(wire.state))
        return holding, report

    def _judge(self, reservation_id: str, wire: worker_pb2.Manifest) -> HandoffRefused | None:
        if self.table.phase(reservation_id) is not Phase.RESERVED:
            return refused("reservation", f"no waiting reservation {reservation_id}")
        mine = Mine(
            fingerprint=self._identity.fingerprint,
            layout=self._identity.layout,
            tp_size=TP_SIZE,
            vocab_size=self._identity.vocab_size,
            prompt_tokens=self.table.prompt_tokens(reservation_id),
            epochs=self._epochs(),
        )
        refusal = check_manifest(manifest_from_wire(wire), mine)
        if refusal is not None:
            self._move(reservation_id, Event.REFUSED)
        return refusal

    async def _pull(self, reservation_id: str, wire: worker_pb2.Manifest, holding: Holding) -> ReadReport:
        """Read every region into the holding. Raises: HandoffRefused, with the reservation moved on."""
        targets = [*holding.rows(0, len(wire.rows)), *holding.state_parts()]
        reads = [Read(s, (Slice(*t),)) for s, t in zip((*wire.rows, *wire.state), targets, strict=True)]
        nbytes = sum(target.length for target in targets)
        # The lease began before the manifest reached us; only a read inside it counts.
        deadline_s = time.monotonic() + min(self._timing.transfer_ms(nbytes), wire.lease_ms) / 1000
        handle = self._transports.read(wire.source, reads, deadline_s)
        try:
            report = await handle
        except asyncio.CancelledError:
            self._give_up(reservation_id, Event.CANCELLED, wire, handle)
            raise
        except (DeadlineExceeded, StaleEpoch, TransferError) as failed:
            late = isinstance(failed, DeadlineExceeded)
            self._give_up(reservation_id, Event.DEADLINE if late else Event.REFUSED, wire, handle)
            raise refused(_reason(failed), str(failed)) from failed
        if time.monotonic() > deadline_s:
            self._give_up(reservation_id, Event.REFUSED, wire, handle)
            raise refused("deadline", "the read ended after its lease")
        return report

    def _give_up(self, reservation_id: str, event: Event, wire: worker_pb2.Manifest, handle: ReadHandle) -> None:
        """Nothing is adopted. The memory is free, and the owner told, when no byte of ours can land any more."""

        def over() -> None:
            self._move(reservation_id, Event.TRANSFER_ENDED)
            self._acks.send(wire)

        holding = self._holdings[reservation_id]
        if self._move(reservation_id, event) is Phase.QUARANTINED:
            log.warning("landing memory quarantined", extra={"nbytes": holding.nbytes, "event": event.value})
            self._prompts.quarantine(holding, _ended(handle), over)
        else:
            self._acks.send(wire)

    def _counted(self, refusal: HandoffRefused) -> HandoffRefused:
        self._metrics.refuse(refusal.reason)
        return refusal

    def _expire(self, now: int) -> None:
        for reservation_id in self.table.expire(now):
            self._free(reservation_id)

    def _move(self, reservation_id: str, event: Event) -> Phase:
        """Step the table and free the memory where that released it."""
        phase = self.table.step(reservation_id, event)
        if phase is Phase.RELEASED:
            self._free(reservation_id)
        self._expiry.change()
        return phase

    def _free(self, reservation_id: str) -> None:
        holding = self._holdings.pop(reservation_id, None)
        if holding is not None:
            holding.drop()


async def _ended(handle: ReadHandle) -> None:
    """Shielded: our own end must not cancel the transport's."""
    await asyncio.shield(handle.ended)


def _reason(failed: Exception) -> Refusal:
    match failed:
        case DeadlineExceeded():
            return "deadline"
        case StaleEpoch():
            return "stale_epoch"
        case ChecksumMismatch():
            return "checksum"
        case _:
            return "transfer"


def manifest_from_wire(wire: worker_pb2.Manifest) -> Manifest:
    return Manifest(
        handoff_id=wire.handoff_id,
        fingerprint=fingerprint_from_wire(wire.fingerprint),
        layout=layout_from_wire(wire.layout),
        tp_size=wire.tp_size,
        tokens_in_state=wire.tokens_in_state,
        next_token=wire.next_token,
        sampler_position=wire.sampler_position,
        rows=[_region(span) for span in wire.rows],
        state=[_region(span) for span in wire.state],
        instance_id=wire.source.instance_id,
        epoch=wire.source.epoch,
        pools={pool.id: pool.length for pool in wire.source.pools},
        fence=wire.fence,
        lease_ms=wire.lease_ms,
    )


def _region(span: common_pb2.Span) -> Region:
    return Region(pool=span.pool, offset=span.offset, length=span.length, xxh3=span.xxh3)
