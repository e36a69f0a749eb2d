"""A worker's side of the cache: fetch a hit into its own memory, offer new entries to a node.

A fetch is all or nothing. Any doubt (a lease refused, a node gone, a length or checksum that differs, a lease that
ended before the read did) is a miss with a reason; `landing` tells when the memory is the caller's again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import grpc

from cachestore.index import Kind
from cachestore.transports import Landing, Read, ReadReport, Slice, TransportSet
from moonrelay.errors import ServeError, StaleEpoch, TransferError, Unavailable
from moonrelay.membership import Member
from moonrelay.stubs.v1 import cache_pb2, cache_pb2_grpc
from moonrelay.stubs.v1.common_pb2 import Peer, Span
from moonrelay.stubs.v1.worker_pb2 import CacheHit

logger = logging.getLogger(__name__)

LEASE_MARGIN_MS = 500  # beyond the fetch's own deadline
LEASE_TTL_MS_MAX = 60_000  # nodes grant no longer ones
ABORT_WAIT_S = 0.05
RELEASE_TIMEOUT_S = 0.5
MESSAGE_BYTES_MAX = 64 << 20  # a million ids and every span of their blocks
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A node that comes back must be found within a request's patience.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_KIND = {"block": cache_pb2.ENTRY_KIND_BLOCK, "snapshot": cache_pb2.ENTRY_KIND_SNAPSHOT}
FetchMiss = Literal["stale_index", "tier_error", "fingerprint"]


class Nodes(Protocol):
    """Live cache nodes: `Membership`, or a test's list."""

    def find(self, instance_id: str, epoch: int) -> Member | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An entry that a node may pull. `depth`: index of the block; of a snapshot, tokens // block_tokens."""

    kind: Kind
    prefix_hash: bytes
    depth: int
    spans: Sequence[Span]
    parent: bytes | None = None  # blocks: the previous hash; None at depth 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchReport:
    """What landed: `tokens` of the hit with `miss_reason` None, or 0 and why."""

    tokens: int = 0
    miss_reason: FetchMiss | None = None
    detail: str = ""
    bytes: int = 0
    transport: str = ""
    note: str | None = None
    pull_seconds: float = 0.0
    verify_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    stored: int
    already_there: int
    refused: int
    in_progress: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one node gives to a fetch."""

    member: Member
    blocks: tuple[int, ...]
    snapshot: bool


class _Miss(Exception):  # an outcome, not an error; never leaves this module
    def __init__(self, reason: FetchMiss, detail: str) -> None:
        super().__init__(detail)
        self.reason: FetchMiss = reason


class CacheClient:
    """Loop thread only. One channel per node, replaced when the node comes back at another address."""

    def __init__(self, transports: TransportSet, nodes: Nodes) -> None:
        self._transports = transports
        self._nodes = nodes
        self._channels: dict[str, tuple[str, grpc.aio.Channel]] = {}
        self._replaced: list[grpc.aio.Channel] = []
        self._releases: set[grpc.aio.Call] = set()

    async def fetch(
        self, hit: CacheHit, root: bytes, hashes: Sequence[bytes], rows_into: Sequence[Slice], state_into: Slice,
        deadline_s: float, landing: Landing,
    ) -> FetchReport:  # fmt: skip
        """Bring blocks [0, N) and the snapshot at N; `rows_into` has one slice per block.

        Never raises for a node's failure. The caller keeps the memory while `landing.pending`, also when cancelled.
        """
        try:
            parts = self._parts(hit, hashes, rows_into)
            reports = await self._fetch_parts(parts, root, hashes, rows_into, state_into, deadline_s, landing)
        except _Miss as miss:
            logger.info("cache fetch missed", extra={"reason": miss.reason, "detail": str(miss)})
            return FetchReport(miss_reason=miss.reason, detail=str(miss))
        notes = [r.note for r in reports if r.note is not None]
        return FetchReport(
            tokens=hit.tokens,
            bytes=sum(r.bytes for r in reports),
            transport="+".join(sorted({r.transport for r in reports})),
            note=notes[0] if notes else None,
            pull_seconds=max(r.pull_seconds for r in reports),
            verify_seconds=sum(r.verify_seconds for r in reports),
        )

    async def publish(self, node: Member, root: bytes, offers: Sequence[Offer], deadline_s: float) -> PublishReport:
        """Have a node pull the offered entries; returns once they can be found. Parents come before children.

        The source memory must not change meanwhile; bytes that did are refused by their checksum.
        Raises: Unavailable, TransferError; then it is not stored, or not known to be.
        """
        entries = [
            cache_pb2.Entry(
                kind=_KIND[o.kind], prefix_hash=o.prefix_hash, depth=o.depth, spans=o.spans, parent=o.parent
            )
            for o in offers
        ]
        await self._close_replaced()
        request = cache_pb2.PublishRequest(root=root, source=self._transports.peer(), entries=entries)
        try:
            reply = await self._stub(node).Publish(request, timeout=_left_s(deadline_s))
        except grpc.aio.AioRpcError as error:
            raise _fault(node, error) from None
        return PublishReport(
            stored=reply.stored, already_there=reply.already_there, refused=reply.refused,
            in_progress=reply.in_progress,
        )  # fmt: skip

    async def close(self) -> None:
        self._replaced += [channel for _, channel in self._channels.values()]
        self._channels.clear()
        await self._close_replaced()

    async def _close_replaced(self) -> None:
        while self._replaced:
            await self._replaced.pop().close(grace=RELEASE_TIMEOUT_S)

    def _parts(self, hit: CacheHit, hashes: Sequence[bytes], rows_into: Sequence[Slice]) -> list[_Part]:
        """The hit by node. Raises: _Miss where a node is gone or the hit does not describe whole chains."""
        end = hit.snapshot.first_block
        blocks: dict[tuple[str, int], list[int]] = {}
        at = 0
        for run in hit.runs:
            if run.first_block != at or run.end_block <= at:
                raise _Miss("stale_index", "the hit's runs leave a gap")
            blocks.setdefault((run.node_id, run.node_epoch), []).extend(range(at, run.end_block))
            at = run.end_block
        if at != end or not 0 < end == len(rows_into) <= len(hashes):
            raise _Miss("stale_index", "the hit, its snapshot and the rows disagree on the depth")
        holder = (hit.snapshot.node_id, hit.snapshot.node_epoch)
        blocks.setdefault(holder, [])
        parts = []
        for key, indices in blocks.items():
            member = self._nodes.find(*key)
            if member is None:
                raise _Miss("stale_index", f"{key[0]} epoch {key[1]} is not a member")
            parts.append(_Part(member=member, blocks=tuple(indices), snapshot=key == holder))
        return parts

    async def _fetch_parts(
        self, parts: Sequence[_Part], root: bytes, hashes: Sequence[bytes], rows_into: Sequence[Slice],
        state_into: Slice, deadline_s: float, landing: Landing,
    ) -> list[ReadReport]:  # fmt: skip
        """Lease on every node, read, give the leases back. Raises: _Miss."""
        ttl_ms = min(LEASE_TTL_MS_MAX, int(_left_s(deadline_s) * 1000) + LEASE_MARGIN_MS)
        asked_s = time.monotonic()  # leases are counted from before they were granted
        snapshot_hash = hashes[len(rows_into) - 1]
        results = await asyncio.gather(
            *(self._lease(p, root, hashes, snapshot_hash, ttl_ms, deadline_s) for p in parts), return_exceptions=True
        )
        held = [(p, r) for p, r in zip(parts, results, strict=True) if isinstance(r, cache_pb2.LeaseReply)]
        try:
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            plan = [(p.member, _reads(p, lease, rows_into, state_into)) for p, lease in held]
            reports = await self._read(plan, deadline_s, landing)
            if time.monotonic() > asked_s + min(lease.ttl_ms for _, lease in held) / 1000:
                raise _Miss("tier_error", "a lease ended before the read did")
            return reports
        finally:
            if not landing.pending:  # else the leases end by themselves: their reads may still be under way
                for part, lease in held:
                    self._release(part.member, lease)

    async def _read(
        self, plan: Sequence[tuple[Member, list[Read]]], deadline_s: float, landing: Landing
    ) -> list[ReadReport]:
        """Pull from every node at once; the first failure stops the others. Raises: _Miss."""
        handles = []
        for member, reads in plan:
            handles.append(landing.add(self._transports.read(Peer.FromString(member.peer), reads, deadline_s)))
        try:
            return list(await asyncio.gather(*handles))
        except ServeError as error:
            for handle in handles:
                handle.abort()
            with contextlib.suppress(TimeoutError):  # most reads end at once, and then nothing needs quarantine
                async with asyncio.timeout(ABORT_WAIT_S):
                    await landing.ended()
            raise _Miss("stale_index" if isinstance(error, StaleEpoch) else "tier_error", str(error)) from None

    async def _lease(
        self, part: _Part, root: bytes, hashes: Sequence[bytes], snapshot_hash: bytes, ttl_ms: int, deadline_s: float
    ) -> cache_pb2.LeaseReply:
        request = cache_pb2.LeaseRequest(
            root=root,
            node_epoch=part.member.epoch,
            blocks=[hashes[i] for i in part.blocks],
            snapshots=[snapshot_hash] if part.snapshot else [],
            ttl_ms=ttl_ms,
        )
        try:
            reply: cache_pb2.LeaseReply = await self._stub(part.member).Lease(request, timeout=_left_s(deadline_s))
        except grpc.aio.AioRpcError as error:
            gone = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE)
            raise _Miss("stale_index" if error.code() in gone else "tier_error", error.details() or "") from None
        if len(reply.blocks) != len(request.blocks) or len(reply.snapshots) != len(request.snapshots):
            raise _Miss("tier_error", "the lease covers other entries than were asked for")
        return reply

    def _release(self, member: Member, lease: cache_pb2.LeaseReply) -> None:
        """Give a lease back without waiting: a request's first token does not wait for housekeeping, and a lease
        that nobody gives back ends by itself."""
        request = cache_pb2.ReleaseRequest(lease_id=lease.lease_id, fence=lease.fence)
        call = self._stub(member).Release(request, timeout=RELEASE_TIMEOUT_S)
        self._releases.add(call)
        call.add_done_callback(self._releases.discard)

    def _stub(self, member: Member) -> Any:
        address, channel = self._channels.get(member.instance_id, ("", None))
        if channel is None or address != member.grpc_address:
            if channel is not None:
                self._replaced.append(channel)
            channel = grpc.aio.insecure_channel(member.grpc_address, options=CHANNEL_OPTIONS)
            self._channels[member.instance_id] = (member.grpc_address, channel)
        return cache_pb2_grpc.CacheNodeStub(channel)


def _reads(part: _Part, lease: cache_pb2.LeaseReply, rows_into: Sequence[Slice], state_into: Slice) -> list[Read]:
    """Every leased span beside the part of our memory it belongs to. Raises: _Miss where the lengths differ."""
    reads: list[Read] = []
    places = [rows_into[i] for i in part.blocks] + [state_into] * part.snapshot
    for entry, place in zip([*lease.blocks, *lease.snapshots], places, strict=True):
        offset = place.offset
        for span in entry.spans:
            reads.append(Read(span, (Slice(place.pool, offset, span.length),)))
            offset += span.length
        if offset != place.offset + place.length:
            raise _Miss("fingerprint", f"an entry has {offset - place.offset} bytes where {place.length} belong")
    return reads


def _left_s(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())


def _fault(node: Member, error: grpc.aio.AioRpcError) -> ServeError:
    detail = f"{node.instance_id}: {error.code().name} {error.details()}"
    return Unavailable(detail) if error.code() is grpc.StatusCode.UNAVAILABLE else TransferError(detail)
