"""A worker's side of the cache: fetch a hit into its own memory, offer new entries to a node.

A fetch ends with a whole bundle or with nothing. Any doubt (a lease refused, a node gone, a length or checksum that
differs, a lease that ended before the read did) is a miss with a reason; `landing` tells when the memory is the
caller's again. How a fetch goes on after a failure: `fetch.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from cachestore.fetch import LEASE_TTL_MS, Fetch, Nodes, Target
from cachestore.fetch_report import FetchMiss, FetchReport
from cachestore.lines import LineClient
from cachestore.lookup import Kind
from cachestore.transports import Landing, Slice, TransportSet
from moonrelay.errors import ServeError, TransferError, Unavailable
from moonrelay.membership import Member
from moonrelay.stubs.v1 import cache_pb2, cache_pb2_grpc
from moonrelay.stubs.v1.common_pb2 import Span
from moonrelay.stubs.v1.worker_pb2 import CacheHit

LEASE_TTL_MS_MAX = 60_000  # nodes grant no longer ones
RELEASE_AFTER_S = 0.05  # an ended lease waits so long for the next lease to carry it
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An entry that a node may pull. `depth`: index of the block; of a snapshot, tokens // block_tokens."""

    kind: Kind
    prefix_hash: bytes
    depth: int
    spans: Sequence[Span]
    parent: bytes | None = None  # blocks: the previous hash; None at depth 0
    drafter: str = ""  # blocks: whose rows `draft_spans` are
    draft_spans: Sequence[Span] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    stored: int
    already_there: int
    refused: int
    in_progress: int
    drafts: int  # blocks whose drafter rows were taken


@dataclass(slots=True)
class _Line:
    """A node as it is dialled, and the leases of it that have ended and that it has not been told of."""

    addresses: tuple[str, str]
    channel: grpc.aio.Channel
    stub: Any
    ended: list[cache_pb2.ReleaseRequest]
    fast: LineClient | None
    timer: asyncio.TimerHandle | None = None


class CacheClient:
    """Loop thread only. One channel per node, replaced when the node comes back at another address."""

    def __init__(self, transports: TransportSet, nodes: Nodes) -> None:
        self._transports = transports
        self._nodes = nodes
        self._lines: dict[str, _Line] = {}
        self._replaced: list[grpc.aio.Channel] = []
        self._releases: set[grpc.aio.Call] = set()

    def fetch(
        self, hit: CacheHit, root: bytes, hashes: Sequence[bytes], rows_into: Sequence[Slice], state_into: Slice,
        deadline_s: float, landing: Landing, *, drafter: str = "", draft_into: Sequence[Slice] = (),
    ) -> Coroutine[Any, Any, FetchReport]:  # fmt: skip
        """Bring blocks [0, N) and the snapshot at N, of the hit or of an alternative; one slice in `rows_into` per
        block of the hit. With a `drafter` its rows too, as far as there are any, one slice in `draft_into` per block.

        Never raises for a node's failure. The caller keeps the memory while `landing.pending`, also when cancelled.
        """
        target = Target(root, hashes, rows_into, state_into, deadline_s, landing, drafter, draft_into)
        return Fetch(self._transports, self._nodes, self, target).run(hit)

    async def publish(self, node: Member, root: bytes, offers: Sequence[Offer], deadline_s: float) -> PublishReport:
        """Have a node pull the offered entries; returns once they can be found. Parents come before children.

        The source memory must not change meanwhile; bytes that did are refused by their checksum.
        Raises: Unavailable, TransferError; then it is not stored, or not known to be.
        """
        entries = [
            cache_pb2.Entry(
                kind=_KIND[o.kind],
                prefix_hash=o.prefix_hash,
                depth=o.depth,
                spans=o.spans,
                parent=o.parent,
                drafter=o.drafter,
                draft_spans=o.draft_spans,
            )
            for o in offers
        ]
        await self._close_replaced()
        request = cache_pb2.PublishRequest(root=root, source=self._transports.peer(), entries=entries)
        try:
            reply = await self._line(node).stub.Publish(request, timeout=_left_s(deadline_s))
        except grpc.aio.AioRpcError as error:
            raise _fault(node, error) from None
        return PublishReport(
            stored=reply.stored, already_there=reply.already_there, refused=reply.refused,
            in_progress=reply.in_progress, drafts=reply.drafts,
        )  # fmt: skip

    async def close(self) -> None:
        for line in self._lines.values():
            self._retire(line)
        for call in list(self._releases):
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                await call
        self._lines.clear()
        await self._close_replaced()

    # Leases, as a fetch calls them.

    def lease(
        self, node: Member, request: cache_pb2.LeaseRequest, timeout_s: float
    ) -> Coroutine[Any, Any, cache_pb2.LeaseReply]:
        line = self._line(node)
        if line.ended:
            request.ended.extend(line.ended)
            line.ended.clear()
        if line.fast is not None:
            return line.fast.call("Lease", request, cache_pb2.LeaseReply, timeout_s)
        return _reply(line.stub.Lease(request, timeout=timeout_s))

    async def renew(self, node: Member, lease: cache_pb2.LeaseReply, timeout_s: float) -> bool:
        """Whether the lease has its time anew."""
        request = cache_pb2.RenewRequest(lease_id=lease.lease_id, fence=lease.fence)
        line = self._line(node)
        try:
            if line.fast is not None:
                await line.fast.call("Renew", request, cache_pb2.RenewReply, timeout_s)
            else:
                await line.stub.Renew(request, timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return True

    def release(self, node: Member, lease: cache_pb2.LeaseReply) -> None:
        """Give a lease back without waiting, with the next lease if one comes soon: a request's first token does not
        wait for housekeeping, and a lease that nobody gives back ends by itself."""
        line = self._line(node)
        line.ended.append(cache_pb2.ReleaseRequest(lease_id=lease.lease_id, fence=lease.fence))
        if line.timer is None:
            line.timer = asyncio.get_running_loop().call_later(RELEASE_AFTER_S, self._flush, line)

    def _flush(self, line: _Line) -> None:
        if line.timer is not None:
            line.timer.cancel()
            line.timer = None
        for request in line.ended:
            if line.fast is not None:
                line.fast.tell("Release", request)
                continue
            call = line.stub.Release(request, timeout=RELEASE_TIMEOUT_S)
            self._releases.add(call)
            call.add_done_callback(self._releases.discard)
        line.ended.clear()

    def _retire(self, line: _Line) -> None:
        self._flush(line)
        if line.fast is not None:
            line.fast.close()
        self._replaced.append(line.channel)

    async def _close_replaced(self) -> None:
        while self._replaced:
            await self._replaced.pop().close(grace=RELEASE_TIMEOUT_S)

    def _line(self, member: Member) -> _Line:
        line = self._lines.get(member.instance_id)
        addresses = (member.grpc_address, member.line_address)
        if line is None or line.addresses != addresses:
            if line is not None:
                self._retire(line)
            channel = grpc.aio.insecure_channel(member.grpc_address, options=CHANNEL_OPTIONS)
            fast = LineClient(member.line_address) if member.line_address else None
            line = _Line(addresses, channel, cache_pb2_grpc.CacheNodeStub(channel), [], fast)
            self._lines[member.instance_id] = line
        return line


async def _reply(call: Awaitable[cache_pb2.LeaseReply]) -> cache_pb2.LeaseReply:
    return await call


def _left_s(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())


def _fault(node: Member, error: grpc.aio.AioRpcError) -> ServeError:
    detail = f"{node.instance_id}: {error.code().name} {error.details()}"
    return Unavailable(detail) if error.code() is grpc.StatusCode.UNAVAILABLE else TransferError(detail)


__all__ = ["LEASE_TTL_MS", "CacheClient", "FetchMiss", "FetchReport", "Nodes", "Offer", "PublishReport"]
