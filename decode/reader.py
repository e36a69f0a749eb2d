"""Follows a handoff, reads it into reserved memory and says whether it may be decoded from.

The tables in `decode.core` and `decode.parts` decide; this moves the bytes, keeps the memory and tells the owner when
it is done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cachestore.transports import ChecksumMismatch, Read, ReadHandle, ReadReport, Slice, TransportSet
from decode.bandwidth import Bandwidth
from decode.core import Event, Phase, ReaderTable
from decode.held import HeldBlocks, held_prefix
from decode.inbox import Inbox
from decode.manifest import Held, Mine, Refusal, Region, check_opened, refused
from decode.metrics import ReaderMetrics
from decode.owners import Owners
from decode.parts import Wanted
from decode.wire import held_to_wire, opened_from_wire
from engine.worker.expiry import Expiry, now_ms
from engine.worker.layers import layer_extents
from engine.worker.memory import Holding
from engine.worker.prompt import PromptRunner
from engine.worker.timing import Timing
from model.batch import PoolLayout
from moonrelay.errors import DeadlineExceeded, HandoffRefused, StaleEpoch, TransferError
from moonrelay.prefix import Fingerprint
from moonrelay.stubs.v1 import common_pb2, worker_pb2

log = logging.getLogger(__name__)
# Prefill may queue and take long; the router gives back what it does not use: time only ends what it forgot.
TTL_MS_PER_PROMPT_TOKEN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What this worker is, as far as a manifest must agree with it."""

    fingerprint: Fingerprint
    layout: PoolLayout
    vocab_size: int
    drafter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """A handoff that may be decoded from, and what it took. Seconds of all its reads; waiting is not in them.

    The drafter's rows are there from token `draft_first` on.
    """

    holding: Holding
    next_token: int
    tokens_in_state: int
    draft_first: int
    bytes: int
    held_tokens: int
    transport: str
    pull_seconds: float
    verify_seconds: float
    after_manifest_seconds: float


@dataclass(slots=True, kw_only=True)
class _Reserved:
    holding: Holding
    held: Held | None


@dataclass(slots=True, kw_only=True)
class _Pull:
    """One adoption in the making."""

    reservation_id: str
    source: worker_pb2.HandoffOpened
    holding: Holding
    inbox: Inbox
    reports: list[ReadReport] = field(default_factory=list)
    num_regions: int = 0

    @property
    def peer(self) -> tuple[str, int]:
        return self.source.source.instance_id, self.source.source.epoch


class Reader:
    """Every reservation from `reserve` to the end of its turn. On the event loop's thread only."""

    def __init__(
        self,
        prompts: PromptRunner,
        table: ReaderTable,
        transports: TransportSet,
        owners: Owners,
        held: HeldBlocks,
        metrics: ReaderMetrics,
        *,
        identity: Identity,
        timing: Timing,
        reservation_ttl_ms: int,
        epochs: Callable[[], Mapping[str, int]],
    ) -> None:
        self.table = table
        self._prompts, self._transports, self._owners, self._metrics = prompts, transports, owners, metrics
        self._held, self._identity, self._epochs = held, identity, epochs
        self._bandwidth = Bandwidth(timing)
        self._reservation_ttl_ms = reservation_ttl_ms
        self._reserved: dict[str, _Reserved] = {}
        self._expiry = Expiry(table.next_deadline_ms, self._expire)
        self._num_reservations = 0

    async def run(self) -> None:
        """End reservations that nobody comes for; until cancelled."""
        await self._expiry.run()

    async def drained(self) -> None:
        """Until every reservation is released; quarantined ones count, their memory is still written to."""
        await self._expiry.until(lambda: len(self.table) == 0)

    def reserve(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        max_tokens: int,
        root: bytes,
        hashes: Sequence[bytes],
        write_back: bool = False,
    ) -> worker_pb2.ReserveReply:
        """Set memory aside, with what this worker still has of the prompt in it.

        Raises: Overloaded, RequestTooLarge, Unavailable.
        """
        holding, num_held = self._held.reserve(prompt_tokens + max_tokens, root, hashes, write_back=write_back)
        self._num_reservations += 1
        reservation_id = f"{request_id}.{self._num_reservations}"
        ttl_ms = self._reservation_ttl_ms + TTL_MS_PER_PROMPT_TOKEN * prompt_tokens
        self.table.reserve(
            reservation_id, prompt_tokens=prompt_tokens, nbytes=holding.nbytes, ttl_ms=ttl_ms, now_ms=now_ms()
        )
        self._reserved[reservation_id] = _Reserved(holding=holding, held=held_prefix(root, hashes, num_held))
        self._expiry.change()
        held_tokens = num_held * self._identity.layout.block_tokens
        return worker_pb2.ReserveReply(reservation_id=reservation_id, ttl_ms=ttl_ms, held_tokens=held_tokens)

    def release(self, reservation_id: str) -> None:
        """Give back what was never adopted. A pull or a turn in progress is ended by cancelling its own call."""
        if self.table.phase(reservation_id) is Phase.RESERVED:
            self._move(reservation_id, Event.CANCELLED)

    def finish(self, reservation_id: str) -> None:
        """The turn is over; a sequence that still lives on the memory is cancelled with it."""
        self._move(reservation_id, Event.FINISHED)

    async def adopt(self, request: worker_pb2.AdoptRequest) -> Adoption:
        """Follow, read, verify. The caller calls `finish` later; the owner is told that we are done reading.

        Raises: HandoffRefused; the reservation is then released, or quarantined until our read has ended.
        """
        source, parts = request.opened, None
        pull = self._begin(request.reservation_id, source)
        try:
            parts = await self._owners.follow(source, held_to_wire(self._reserved[pull.reservation_id].held))
            self._prompts.spawn(pull.inbox.collect(parts))
            await self._read_all(pull)
        except asyncio.CancelledError:
            if self.table.phase(pull.reservation_id) is Phase.FOLLOWING:
                self._end(pull, Event.CANCELLED)
            raise
        finally:
            if parts is not None:
                parts.cancel()
        self._move(pull.reservation_id, Event.COMPLETE)
        self._acknowledge(source)
        return self._adopted(pull)

    def _begin(self, reservation_id: str, source: worker_pb2.HandoffOpened) -> _Pull:
        """Accept what was opened. Raises: HandoffRefused."""
        phase, opened = self.table.phase(reservation_id), opened_from_wire(source)
        if phase is not Phase.RESERVED:
            if phase is Phase.RELEASED:  # else it is being read by the call that came first
                self._acknowledge(source)
            raise self._counted(refused("reservation", f"no waiting reservation {reservation_id}"))
        reserved = self._reserved[reservation_id]
        mine = Mine(
            fingerprint=self._identity.fingerprint,
            layout=self._identity.layout,
            vocab_size=self._identity.vocab_size,
            prompt_tokens=self.table.prompt_tokens(reservation_id),
            epochs=self._epochs(),
            drafter=self._identity.drafter,
        )
        refusal = check_opened(opened, mine)
        if refusal is not None:
            self._move(reservation_id, Event.REFUSED)
            self._acknowledge(source)
            raise self._counted(refusal)
        self._move(reservation_id, Event.OPENED)
        inbox = Inbox(opened, mine, reserved.held)
        return _Pull(reservation_id=reservation_id, source=source, holding=reserved.holding, inbox=inbox)

    async def _read_all(self, pull: _Pull) -> None:
        """Read regions as they are announced, until all are verified and the manifest agrees.

        Raises: HandoffRefused, with the reservation moved on and the owner told, or to be told when our read ends.
        """
        regions = pull.inbox.regions
        while not regions.complete:
            if pull.inbox.refusal is not None:
                self._end(pull, Event.REFUSED)
                raise self._counted(pull.inbox.refusal)
            wanted = regions.take()
            if not wanted:
                await self._wait(pull)
                continue
            pull.reports.append(await self._read(pull, wanted))
            pull.num_regions += len(wanted.rows) + 2 * len(wanted.state)
            regions.verified()

    async def _wait(self, pull: _Pull) -> None:
        """For the owner's next part. Raises: HandoffRefused past the reservation's time."""
        left_s = (self.table.ttl_end_ms(pull.reservation_id) - now_ms()) / 1000
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                await pull.inbox.changed.wait()
            pull.inbox.changed.clear()
        except TimeoutError:
            self._end(pull, Event.DEADLINE)
            raise self._counted(refused("deadline", "the reservation's time is over")) from None

    async def _read(self, pull: _Pull, wanted: Wanted) -> ReadReport:
        """One read of what is announced. Raises: HandoffRefused."""
        began_s = time.monotonic()
        deadline_s = began_s + self._bandwidth.read_ms(pull.peer, wanted.nbytes) / 1000
        manifest = pull.inbox.manifest
        if manifest is not None:  # the lease began before the manifest reached us; only a read inside it counts
            deadline_s = min(deadline_s, pull.inbox.manifest_s + manifest.lease_ms / 1000)
        self._move(pull.reservation_id, Event.READ_STARTED)
        handle = self._transports.read(pull.source.source, self._reads(pull.holding, wanted), deadline_s)
        try:
            report = await handle
        except asyncio.CancelledError:
            self._give_up(pull, Event.CANCELLED, handle)
            raise
        except DeadlineExceeded as late:
            self._bandwidth.slow(pull.peer)
            self._give_up(pull, Event.DEADLINE, handle)
            raise self._counted(refused("deadline", str(late))) from late
        except (StaleEpoch, TransferError) as failed:
            self._move(pull.reservation_id, Event.READ_ENDED)
            self._end(pull, Event.REFUSED)
            raise self._counted(refused(_reason(failed), str(failed))) from failed
        self._move(pull.reservation_id, Event.READ_ENDED)
        if time.monotonic() > deadline_s:
            self._end(pull, Event.REFUSED)
            raise self._counted(refused("deadline", "the read ended after its lease"))
        self._bandwidth.observe(pull.peer, report.bytes, report.pull_seconds + report.verify_seconds)
        return report

    def _reads(self, holding: Holding, wanted: Wanted) -> list[Read]:
        reads = [Read(_span(region), (Slice(*holding.rows(i, i + 1)[0]),)) for i, region in wanted.rows]
        num_layers, parts = self._identity.layout.num_kda_layers, holding.state_parts()
        for part in wanted.state:
            recurrent, conv = layer_extents(parts, num_layers, part.first_layer, part.end_layer)
            reads.append(Read(_span(part.recurrent), (Slice(*recurrent),)))
            reads.append(Read(_span(part.conv), (Slice(*conv),)))
        return reads

    def _adopted(self, pull: _Pull) -> Adoption:
        manifest, reserved, now_s = pull.inbox.manifest, self._reserved[pull.reservation_id], time.monotonic()
        assert manifest is not None, "complete only after the manifest"
        held_tokens = 0 if reserved.held is None else reserved.held.num_blocks * self._identity.layout.block_tokens
        adoption = Adoption(
            holding=pull.holding,
            next_token=manifest.next_token,
            tokens_in_state=manifest.tokens_in_state,
            draft_first=self._draft_first(manifest.draft_first, held_tokens, pull.holding),
            bytes=sum(report.bytes for report in pull.reports),
            held_tokens=held_tokens,
            transport=pull.reports[-1].transport if pull.reports else "none",
            pull_seconds=sum(report.pull_seconds for report in pull.reports),
            verify_seconds=sum(report.verify_seconds for report in pull.reports),
            after_manifest_seconds=now_s - pull.inbox.manifest_s,
        )
        self._metrics.pulled(adoption, pull.num_regions)
        return adoption

    def _draft_first(self, came_from: int, held_tokens: int, holding: Holding) -> int:
        """Of held blocks our own book says which have the drafter's rows; of the others the manifest."""
        if came_from > held_tokens or holding.found is None:
            return came_from
        return holding.found.drafted_from * self._identity.layout.block_tokens

    def _end(self, pull: _Pull, event: Event) -> None:
        """Nothing is adopted and no read of ours is running."""
        self._move(pull.reservation_id, event)
        self._acknowledge(pull.source)

    def _give_up(self, pull: _Pull, event: Event, handle: ReadHandle) -> None:
        """Nothing is adopted. The memory is free, and the owner told, when no byte of ours can land any more."""

        def over() -> None:
            self._end(pull, Event.READ_ENDED)

        log.warning("landing memory quarantined", extra={"nbytes": pull.holding.nbytes, "event": event.value})
        self._move(pull.reservation_id, event)
        self._prompts.quarantine(pull.holding, _ended(handle), over)

    def _acknowledge(self, source: worker_pb2.HandoffOpened) -> None:
        self._owners.acknowledge(source.source_address, source.handoff_id, source.fence)

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
        reserved = self._reserved.pop(reservation_id, None)
        if reserved is not None:
            reserved.holding.drop()


async def _ended(handle: ReadHandle) -> None:
    """Shielded: our own end must not cancel the transport's."""
    await asyncio.shield(handle.ended)


def _span(region: Region) -> common_pb2.Span:
    return common_pb2.Span(pool=region.pool, offset=region.offset, length=region.length, xxh3=region.xxh3)


def _reason(failed: Exception) -> Refusal:
    match failed:
        case StaleEpoch():
            return "stale_epoch"
        case ChecksumMismatch():
            return "checksum"
        case _:
            return "transfer"
