"""A cache node's gRPC service, and what the node does by itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import grpc

from cachestore.client import LEASE_TTL_MS_MAX
from cachestore.entries import BLOCK, SNAPSHOT, Key
from cachestore.node.chains import Chains, Found
from cachestore.node.core import NodeCore
from cachestore.node.index_writer import Identity
from cachestore.node.intake import ENTRIES_MAX, Intake
from cachestore.node.metrics import NodeMetrics
from cachestore.node.replication import Replication
from cachestore.node.tiers import DiskTier
from cachestore.spans import ARENA_POOL, mark_disk
from moonrelay.errors import InvalidRequest, InvariantError, Overloaded, ServeError, StaleEpoch
from moonrelay.membership import Load, Membership
from moonrelay.status import grpc_status
from moonrelay.stubs.v1 import cache_pb2, cache_pb2_grpc
from moonrelay.valkey import raise_if_cancelled

logger = logging.getLogger(__name__)

TICK_S = 0.25  # expiring leases, load for the heartbeat
CHECK_SPACING = 100  # the books are checked for at most a hundredth of the time
PROMOTE_TIMEOUT_S = 10.0  # of a lease that names no deadline
T = TypeVar("T")


class NotHere(ServeError):
    """An entry that a lease names is not in this node: the index was behind."""

    code = "not_found"


class CacheNodeEdge(cache_pb2_grpc.CacheNodeServicer):
    """The service. A restarted node is another epoch, and has what its disk has."""

    def __init__(
        self, core: NodeCore, intake: Intake, identity: Identity, metrics: NodeMetrics,
        on_bug: Callable[[BaseException], None], disk: DiskTier | None = None,
        replication: Replication | None = None,
    ) -> None:  # fmt: skip
        self._core, self._intake, self._identity, self._metrics = core, intake, identity, metrics
        self._on_bug, self._disk, self._replication = on_bug, disk, replication
        self._chains = Chains(core, ARENA_POOL)
        self._owed: list[Callable[[], None]] = []  # what answered calls have left to do
        metrics.watch(core.stats)

    async def Publish(self, request: cache_pb2.PublishRequest, context: Any) -> cache_pb2.PublishReply:
        reply = await self._answer(context, "publish", self._intake.publish(request, context.time_remaining()))
        if self._disk is not None:
            self._disk.wake()
        return reply

    async def Lease(self, request: cache_pb2.LeaseRequest, context: Any) -> cache_pb2.LeaseReply:
        return await self._answer(context, "lease", self._lease(request, context.time_remaining()))

    async def Renew(self, request: cache_pb2.RenewRequest, context: Any) -> cache_pb2.RenewReply:
        return await self._answer(context, "lease", self._renewed(request))

    async def Release(self, request: cache_pb2.ReleaseRequest, context: Any) -> cache_pb2.ReleaseReply:
        self._core.release(request.lease_id, request.fence)
        return cache_pb2.ReleaseReply()

    async def run(self, membership: Membership) -> None:
        """Expire leases, report load, let the disk see what is new; check the books when nothing is going on."""
        was_idle, check_at_s = False, 0.0
        while True:
            raise_if_cancelled()
            await asyncio.sleep(TICK_S)
            self._metrics.leases_expired.inc(self._core.expire(_now_ms()))
            stats = self._core.stats()
            membership.update(load=Load(free_bytes=stats.free_bytes, capacity_bytes=stats.capacity_bytes))
            if self._disk is not None:
                self._disk.wake()
            idle = not (stats.num_hidden or stats.num_leases or stats.quarantined_bytes)
            if idle and not was_idle and (started := time.monotonic()) >= check_at_s:
                self._core.check()
                check_at_s = time.monotonic() + CHECK_SPACING * (time.monotonic() - started)
                was_idle = True
            elif not idle:
                was_idle = False

    def at_once(self, name: str, request: Any) -> Any:
        """The reply to a lease call that waits for nothing; None where its method has to be awaited, and where it is
        refused, which the method says and counts."""
        try:
            if name == "Lease":
                return self._lease_from_memory(request)
            if name == "Renew":
                return self._renew(request)
            self._core.release(request.lease_id, request.fence)
            return cache_pb2.ReleaseReply()
        except ServeError:
            return None
        except Exception as bug:
            self._on_bug(bug)
            raise

    async def _lease(self, request: cache_pb2.LeaseRequest, remaining_s: float | None) -> cache_pb2.LeaseReply:
        """All of the named entries or none; what is on disk only is read into memory first.

        Raises: InvalidRequest, StaleEpoch, NotHere, Overloaded, DeadlineExceeded, Unavailable.
        """
        reply = self._lease_from_memory(request)
        if reply is not None:
            return reply
        found = self._named(request)
        from_disk = [i for i, packed in enumerate(chain.from_iterable(each.packed for each in found)) if not packed]
        if self._disk is not None:
            wait_s = min(remaining_s or PROMOTE_TIMEOUT_S, PROMOTE_TIMEOUT_S)
            keys = [entry.offer.key for each in found for entry in each.entries]
            await self._disk.ensure(keys, time.monotonic() + wait_s)
            found = self._named(request)
        if not all(each.spans for each in found):
            raise NotHere("an entry is on disk only")
        return self._granted(request, found, from_disk)

    def _lease_from_memory(self, request: cache_pb2.LeaseRequest) -> cache_pb2.LeaseReply | None:
        """None where something is on disk only."""
        if request.ended:
            self._after(partial(self._end, request))
        if request.node_epoch != self._identity.epoch:
            raise StaleEpoch(f"this node's epoch is {self._identity.epoch}, not {request.node_epoch}")
        if not 0 < request.ttl_ms <= LEASE_TTL_MS_MAX:
            raise InvalidRequest(f"expected 1 to {LEASE_TTL_MS_MAX} ms, found {request.ttl_ms}", param="ttl_ms")
        found = self._named(request)
        for each in found:
            if not each.spans:
                return None
        return self._granted(request, found, [])

    def _granted(
        self, request: cache_pb2.LeaseRequest, found: Sequence[Found], from_disk: Sequence[int]
    ) -> cache_pb2.LeaseReply:
        """Lease what is all in memory now; `from_disk`: those, by number, that were not when they were asked for."""
        # What rests on a chain's deepest block cannot leave before it: holding that one holds all.
        ends = [Key(request.root, BLOCK, each.last) for each in request.chains]
        ends += [Key(request.root, SNAPSHOT, request.snapshot)] * bool(request.snapshot)
        now_ms = _now_ms()
        lease = self._core.grant(ends, request.ttl_ms, now_ms)
        if lease is None and request.ended:  # among them may be what is too many
            self._end(request)
            lease = self._core.grant(ends, request.ttl_ms, now_ms)
        if lease is None:
            raise Overloaded("too many leases are in force")
        if isinstance(lease, Key):
            raise NotHere(f"a {lease.kind} is not here")
        self._after(partial(self._used, request, ends, now_ms))
        spans = b"".join([each.spans for each in found])
        if from_disk:
            spans = mark_disk(spans, from_disk)
        drafts = _draft_spans(found, request.drafter) if request.drafter else b""
        return cache_pb2.LeaseReply(
            lease_id=lease.id, fence=lease.fence, ttl_ms=lease.ttl_ms, spans=spans, draft_spans=drafts
        )

    def _after(self, step: Callable[[], None]) -> None:
        """Housekeeping that no reader waits for: what a call leaves to do once its answer is on its way."""
        if not self._owed:
            asyncio.get_running_loop().call_soon(self._pay)
        self._owed.append(step)

    def _pay(self) -> None:
        owed, self._owed = self._owed, []
        try:
            for step in owed:
                step()
        except Exception as bug:
            self._on_bug(bug)
            raise

    def _end(self, request: cache_pb2.LeaseRequest) -> None:
        for ended in request.ended:
            self._core.release(ended.lease_id, ended.fence)

    def _used(self, request: cache_pb2.LeaseRequest, ends: Sequence[Key], now_ms: int) -> None:
        self._core.used(ends, now_ms)
        self._metrics.leases_granted.inc()
        if request.snapshot and self._replication is not None:
            self._replication.leased(ends[-1])

    def _named(self, request: cache_pb2.LeaseRequest) -> list[Found]:
        """What a lease names, chain by chain, then the snapshot.

        Raises: InvalidRequest, NotHere; then the index, which named it, is put right.
        """
        chains, root = list(request.chains), request.root
        counts = [each.count for each in chains]
        if not 0 < sum(counts) + bool(request.snapshot) <= ENTRIES_MAX or 0 in counts:
            raise InvalidRequest(f"a lease names 1 to {ENTRIES_MAX} entries", param="chains")
        named: list[Found] = []
        for each in chains:
            last = Key(root, BLOCK, each.last)
            found = self._chains.find(last, each.first_block, each.count)
            if found is None:
                self._intake.index.note([last])
                raise NotHere("a block is not here")
            named.append(found)
        if request.snapshot:
            cut = Key(request.root, SNAPSHOT, request.snapshot)
            snapshot = self._chains.single(cut)
            if snapshot is None:
                self._intake.index.note([cut])
                raise NotHere("a snapshot is not here")
            named.append(snapshot)
        return named

    async def _renewed(self, request: cache_pb2.RenewRequest) -> cache_pb2.RenewReply:
        return self._renew(request)

    def _renew(self, request: cache_pb2.RenewRequest) -> cache_pb2.RenewReply:
        lease = self._core.renew(request.lease_id, request.fence, _now_ms())
        if lease is None:
            raise NotHere("the lease has ended")
        return cache_pb2.RenewReply(ttl_ms=lease.ttl_ms)

    async def _answer(self, context: Any, what: str, call: Coroutine[Any, Any, T]) -> T:
        """The one place where a fault becomes a status. A broken invariant ends the process."""
        try:
            return await call
        except ServeError as error:
            refused = self._metrics.publish_failed if what == "publish" else self._metrics.leases_refused
            refused.labels(error.code).inc()
            status = grpc.StatusCode.NOT_FOUND if isinstance(error, NotHere) else grpc_status(error)
            await context.abort(status, str(error))
            raise InvariantError("an aborted call went on") from error
        except InvariantError as bug:
            self._on_bug(bug)
            raise


def _draft_spans(found: Sequence[Found], drafter: str) -> bytes:
    """The drafter's rows, from the deepest block upwards until one has none."""
    packed: list[bytes] = []
    for entry in chain.from_iterable(reversed(each.entries) for each in reversed(found)):
        if entry.offer.key.kind == BLOCK:
            if entry.draft is None or entry.draft.drafter != drafter:
                break
            packed.append(entry.draft.packed)
    return b"".join(packed)


def _now_ms() -> int:
    return int(time.monotonic() * 1000)
