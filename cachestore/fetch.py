"""One fetch of a hit: lease, read, verify, and where that fails the next shallower alternative.

What has landed and agrees with its leased checksum stays where it is for the alternatives: a block is named by its
hash, whoever had it. Blocks whose read went wrong, and nodes that do not answer, are not asked again.

A drafter's rows of the blocks come with them, after everything that the hit needs. Where they are missing or wrong
the report's `draft_first` is deeper, and the hit stays one; only where they may still land late is it given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple, Protocol

import grpc

from cachestore.fetch_part import DraftRead, NodeKey, OtherForm, Part, UnreadableLease, run_of_drafts
from cachestore.fetch_report import FetchMiss, FetchReport, Place
from cachestore.repeated import Repeated
from cachestore.transports import Batch, ChecksumMismatch, Landing, ReadHandle, ReadReport, Slice, TransportSet
from moonrelay.errors import ServeError, StaleEpoch
from moonrelay.membership import Member
from moonrelay.stubs.v1 import cache_pb2
from moonrelay.stubs.v1.common_pb2 import Peer
from moonrelay.stubs.v1.worker_pb2 import CacheHit, CacheRun

logger = logging.getLogger(__name__)

LEASE_TTL_MS = 6_000  # renewed at a third for as long as a read goes on
LEASE_MARGIN_MS = 500  # beyond the fetch's own deadline
ABORT_WAIT_S = 0.05
DRAFT_STILL_S = 0.1  # a hit that is there waits so long for a next span of drafter rows
DRAFT_WAIT_S = 0.4  # and for all of them
ATTEMPT_S_MIN = 0.02  # with less time left an alternative is not begun


class Nodes(Protocol):
    """Live cache nodes: `Membership`, or a test's list."""

    def find(self, instance_id: str, epoch: int) -> Member | None: ...


class LeaseCalls(Protocol):
    """A node's leases, as calls. Errors are grpc's."""

    async def lease(
        self, node: Member, request: cache_pb2.LeaseRequest, timeout_s: float
    ) -> cache_pb2.LeaseReply: ...

    async def renew(self, node: Member, lease: cache_pb2.LeaseReply, timeout_s: float) -> bool: ...

    def release(self, node: Member, lease: cache_pb2.LeaseReply) -> None: ...


class Target(NamedTuple):
    """Where a fetch goes: one slice per block, one for the state, and with a `drafter` one per block for its rows.

    All are the caller's again once nothing lands.
    """

    root: bytes
    hashes: Sequence[bytes]
    rows: Sequence[Slice]
    state: Slice
    deadline_s: float
    landing: Landing
    drafter: str = ""
    drafts: Sequence[Slice] = ()


_Landed = tuple[int | None, NodeKey, bool]  # a block that is in its place, verified: xxh3, whence, from its disk


class _Miss(Exception):  # an outcome, not an error; never leaves this module
    def __init__(self, reason: FetchMiss, detail: str) -> None:
        super().__init__(detail)
        self.reason: FetchMiss = reason


class Fetch:
    """Made for one hit; `run` once."""

    def __init__(self, transports: TransportSet, nodes: Nodes, calls: LeaseCalls, target: Target) -> None:
        self._transports, self._nodes, self._calls, self._to = transports, nodes, calls, target
        self._landed: dict[int, _Landed] = {}
        self._members: dict[NodeKey, Member] = {}  # that blocks came from
        self._silent: set[NodeKey] = set()
        self._bad: set[tuple[NodeKey, int]] = set()  # a node's entry that did not agree with its checksum

    async def run(self, hit: CacheHit) -> FetchReport:
        """The hit or the deepest alternative that can be had; never raises for a node's failure."""
        bundles = [hit, *hit.alternatives]
        first: _Miss | None = None
        size, rest = divmod(hit.tokens, max(1, len(self._to.rows)))  # tokens of a block
        for number, bundle in enumerate(bundles):
            left_s = self._to.deadline_s - time.monotonic()
            if first is not None and (self._to.landing.pending or left_s < ATTEMPT_S_MIN):
                break  # late bytes may still land where the alternative would
            # A node that does not answer must leave time for those that would.
            share = 1 + _another_could(bundle, bundles[number + 1 :])
            try:
                if not size or rest or bundle.tokens != bundle.snapshot.first_block * size:
                    raise _Miss("stale_index", "the hit's tokens are not those of its blocks")
                parts, reports = await self._attempt(bundle, time.monotonic() + left_s / share)
            except _Miss as miss:
                logger.info("cache fetch missed", extra={"reason": miss.reason, "detail": str(miss)})
                first = first or miss
                continue
            return self._report(bundle, parts, reports, first if bundle.tokens < hit.tokens else None)
        assert first is not None
        return FetchReport(miss_reason=first.reason, detail=str(first))

    def _report(
        self, bundle: CacheHit, parts: Sequence[Part], reports: Sequence[ReadReport], missed: _Miss | None
    ) -> FetchReport:
        end = bundle.snapshot.first_block
        xxh3, places = self._origins(parts, end)
        if len(parts) == len(reports) == 1 and missed is None and not parts[0].drafts:
            transport, nbytes, pull_seconds, verify_seconds, note = reports[0]
            return FetchReport(
                bundle.tokens, None, "", nbytes, transport, note, pull_seconds, verify_seconds, xxh3, places,
                draft_first=bundle.tokens,
            )  # fmt: skip
        drafts: dict[int, DraftRead] = {d.block: d for part in parts for d in part.landed_drafts()}
        first = run_of_drafts(set(drafts), end)
        return FetchReport(
            tokens=bundle.tokens,
            miss_reason=missed.reason if missed else None,
            detail=str(missed or ""),
            bytes=sum(part.nbytes for part in parts) + sum(draft.nbytes for draft in drafts.values()),
            transport="+".join(sorted({p.handle.transport for p in parts if p.handle and p.handle.transport})),
            note=next((r.note for r in reports if r.note is not None), None),
            pull_seconds=max((r.pull_seconds for r in reports), default=0.0),
            verify_seconds=sum(r.verify_seconds for r in reports),
            xxh3=xxh3,
            places=places,
            draft_first=bundle.tokens // end * first,
            draft_xxh3=tuple(drafts[i].xxh3 for i in range(first, end)),
            draft_refused=sum(len(part.drafts) for part in parts) - (end - first),
        )

    def _origins(self, parts: Sequence[Part], end: int) -> tuple[tuple[int | None, ...], tuple[Place, ...]]:
        """Each block's checksum, and where they came from."""
        if len(parts) == 1 and len(parts[0].sums) == end and True not in parts[0].on_disk:
            return tuple(parts[0].sums), (Place(node=parts[0].member, blocks=end, on_disk=False),)
        for part in parts:
            self._note_landed(part, len(part.sums))
        xxh3, nodes, on_disk = zip(*(self._landed[i] for i in range(end)), strict=True)
        places = (
            Place(node=self._members[node], blocks=count, on_disk=disk)
            for (node, disk), count in Counter(zip(nodes, on_disk, strict=True)).items()
        )
        return xxh3, tuple(places)

    async def _attempt(self, bundle: CacheHit, until_s: float) -> tuple[list[Part], list[ReadReport]]:
        """Lease on every node, read, give the leases back. Raises: _Miss."""
        parts = self._parts(bundle)
        end = bundle.snapshot.first_block
        try:
            if len(parts) == 1:
                await self._lease_part(parts[0], self._to.hashes[end - 1], until_s)
            else:
                await self._lease(parts, self._to.hashes[end - 1], until_s)
            plans = list(zip(parts, self._reads(parts, end), strict=True))
            reports = await self._read(plans, until_s)
            for part in parts:
                if time.monotonic() > part.valid_until_s:
                    raise _Miss("tier_error", "a lease ended before the read did")
            return parts, reports
        finally:
            if not self._to.landing.pending:  # else the leases end by themselves: their reads may still be under way
                for part in parts:
                    if part.lease is not None:
                        self._calls.release(part.member, part.lease)

    def _parts(self, bundle: CacheHit) -> list[Part]:
        """What is missing of the bundle, by node. Raises: _Miss where a node is gone or known to fail, or the bundle
        does not describe whole chains."""
        end = bundle.snapshot.first_block
        at = 0
        for run in bundle.runs:
            if run.first_block != at or run.end_block <= at:
                raise _Miss("stale_index", "the hit's runs leave a gap")
            at = run.end_block
        if at != end or not 0 < end <= min(len(self._to.rows), len(self._to.hashes)):
            raise _Miss("stale_index", "the hit, its snapshot and the rows disagree on the depth")
        parts: dict[NodeKey, Part] = {}
        for run in bundle.runs:
            missing = list(self._missing(run))
            if missing:
                self._part(parts, run).ranges += missing
        self._part(parts, bundle.snapshot).snapshot = end
        for part in parts.values():
            if self._bad and any((part.key, entry) in self._bad for entry in part.entries()):
                raise _Miss("tier_error", f"{part.key[0]} has a part that does not agree with its checksum")
        return list(parts.values())

    def _part(self, parts: dict[NodeKey, Part], run: CacheRun) -> Part:
        key = (run.node_id, run.node_epoch)
        member = self._nodes.find(*key)
        if member is None or key in self._silent:
            raise _Miss("stale_index", f"{key[0]} epoch {key[1]} is not a member, or does not answer")
        if key not in parts:
            parts[key] = Part(member=member, ranges=[])
        return parts[key]

    def _missing(self, run: CacheRun) -> Iterator[tuple[int, int]]:
        """The run without what is in its place already."""
        if not self._landed:
            yield run.first_block, run.end_block
            return
        at = run.first_block
        while at < run.end_block:
            if at in self._landed:
                at += 1
                continue
            stop = next((i for i in range(at, run.end_block) if i in self._landed), run.end_block)
            yield at, stop
            at = stop

    async def _lease(self, parts: Sequence[Part], snapshot: bytes, until_s: float) -> None:
        """All parts at once. Raises: _Miss; then some of them may hold a lease."""
        results = await asyncio.gather(
            *(self._lease_part(part, snapshot, until_s) for part in parts), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _lease_part(self, part: Part, snapshot: bytes, until_s: float) -> None:
        left_ms = int(1000 * (self._to.deadline_s - time.monotonic()))
        request = cache_pb2.LeaseRequest(
            root=self._to.root,
            node_epoch=part.member.epoch,
            chains=[
                cache_pb2.Chain(last=self._to.hashes[end - 1], first_block=first, count=end - first)
                for first, end in part.ranges
            ],
            snapshot=snapshot if part.snapshot else b"",
            ttl_ms=min(LEASE_TTL_MS, max(1, left_ms) + LEASE_MARGIN_MS),
            drafter=self._to.drafter,
        )
        asked_s = time.monotonic()  # a lease is counted from before it was granted
        try:
            reply = self._calls.lease(part.member, request, max(0.001, until_s - asked_s))
            part.prepare(self._to.rows, self._to.state)  # while the request is on its way
            part.lease = await reply
        except grpc.aio.AioRpcError as error:
            gone = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE)
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                self._silent.add(part.key)
            raise _Miss("stale_index" if error.code() in gone else "tier_error", error.details() or "") from None
        part.valid_until_s = asked_s + part.lease.ttl_ms / 1000

    def _reads(self, parts: Sequence[Part], end: int) -> list[Batch]:
        """What each part brings. Raises: _Miss where a lease does not fit what was asked for."""
        try:
            batches = [part.reads() for part in parts]
        except UnreadableLease as error:
            raise _Miss("tier_error", str(error)) from None
        except OtherForm as error:
            raise _Miss("fingerprint", str(error)) from None
        if self._to.drafter:
            for part in parts:
                part.read_offer(self._to.drafts)
            first = run_of_drafts({block for part in parts for block in part.offered}, end)
            for part, batch in zip(parts, batches, strict=True):
                part.add_drafts(batch, first, self._to.drafts)
        return batches

    async def _read(self, plans: Sequence[tuple[Part, Batch]], until_s: float) -> list[ReadReport]:
        """Pull from every node at once, renewing the leases; the first failure that costs more than drafter rows
        stops the others. Raises: _Miss."""
        handles: list[ReadHandle] = []
        parts = [part for part, _ in plans]
        renewing: Repeated | None = None
        try:
            for part, batch in plans:
                read = self._transports.read(_peer(part.member.peer), batch, until_s, at_once=len(plans) == 1)
                part.handle = self._to.landing.add(read)
                handles.append(part.handle)
            if not all(handle.settled.done() for handle in handles):
                period_s = min(part.lease.ttl_ms for part in parts if part.lease is not None) / 3000
                renewing = Repeated(period_s, lambda: self._renew_all(parts, period_s))
            if len(handles) == 1 and not parts[0].drafts:  # without the set's share of a short read's time
                with contextlib.suppress(ServeError):
                    return [await handles[0].settled]
            else:
                await self._settled(parts, handles)
        except asyncio.CancelledError:
            for handle in handles:
                handle.abort()
            raise
        finally:
            if renewing is not None:
                renewing.stop()
        error = next((found for handle in handles if (found := _failed(handle)) is not None), None)
        if error is not None:
            for handle in handles:
                handle.abort()
            with contextlib.suppress(TimeoutError):  # most reads end at once, and then nothing needs quarantine
                async with asyncio.timeout(ABORT_WAIT_S):
                    await self._to.landing.ended()
            if not all(part.whole for part in parts):
                self._salvage(parts)
                raise _Miss("stale_index" if isinstance(error, StaleEpoch) else "tier_error", str(error))
            logger.info("drafter rows did not come", extra={"reason": str(error)})
        return [handle.settled.result() for handle in handles if _failed(handle) is None]

    async def _settled(self, parts: Sequence[Part], handles: Sequence[ReadHandle]) -> None:
        """Until every read is over, or one has failed that costs more than drafter rows. Where nothing but such rows
        is missing they are given up once they stand still, or take long."""
        waiting = {handle.settled for handle in handles if not handle.settled.done()}
        looks_s = DRAFT_STILL_S / 2 if any(part.drafts for part in parts) else None
        moved = (0, 0.0)  # spans that had landed when one last did, and when that was
        landed_s = 0.0
        while waiting:
            _, waiting = await asyncio.wait(waiting, timeout=looks_s, return_when=asyncio.FIRST_EXCEPTION)
            if any(_failed(handle) and not part.whole for part, handle in zip(parts, handles, strict=True)):
                return
            if looks_s is None or not all(part.landed for part in parts):
                continue
            now_s, count = time.monotonic(), sum(handle.verified for handle in handles)
            landed_s = landed_s or now_s
            if count != moved[0]:
                moved = count, now_s
            if now_s - moved[1] >= DRAFT_STILL_S or now_s - landed_s >= DRAFT_WAIT_S:
                looks_s = None
                for handle in handles:
                    if not handle.settled.done():
                        handle.abort()

    async def _renew_all(self, parts: Sequence[Part], timeout_s: float) -> None:
        await asyncio.gather(*(self._renew(part, timeout_s) for part in parts))

    async def _renew(self, part: Part, timeout_s: float) -> None:
        asked_s = time.monotonic()
        assert part.lease is not None
        if await self._calls.renew(part.member, part.lease, timeout_s):
            part.valid_until_s = asked_s + part.lease.ttl_ms / 1000

    def _salvage(self, parts: Sequence[Part]) -> None:
        """After a failed read that has ended: keep what landed and agrees, note what did not and who is silent."""
        for part in parts:
            if part.handle is None or not part.handle.ended.done():
                continue
            entries, whole = part.entries(), part.whole_entries
            if time.monotonic() <= part.valid_until_s:
                self._note_landed(part, min(whole, len(part.sums)))
            error = _failed(part.handle)
            if isinstance(error, ChecksumMismatch):
                if whole < len(entries):  # else only drafter rows
                    self._bad.add((part.key, entries[whole]))
            elif error is not None and not part.handle.aborted:
                self._silent.add(part.key)

    def _note_landed(self, part: Part, blocks: int) -> None:
        """The part's first blocks are in their place."""
        self._members[part.key] = part.member
        landed = zip(part.sums, repeat(part.key), part.on_disk, strict=False)
        self._landed.update(zip(part.blocks()[:blocks], landed, strict=False))


@lru_cache(64)
def _peer(packed: bytes) -> Peer:
    """A member's description. To look at only."""
    made: Peer = Peer.FromString(packed)
    return made


def _failed(handle: ReadHandle) -> BaseException | None:
    """Why a read did not succeed; None where it did, or is still going on."""
    return handle.settled.exception() if handle.settled.done() else None


def _another_could(bundle: CacheHit, others: Sequence[CacheHit]) -> bool:
    """Whether one of them does without this one's nodes."""
    if not others:
        return False
    mine = _nodes(bundle)
    return any(mine.isdisjoint(_nodes(other)) for other in others)


def _nodes(bundle: CacheHit) -> set[NodeKey]:
    return {(run.node_id, run.node_epoch) for run in (*bundle.runs, bundle.snapshot)}
