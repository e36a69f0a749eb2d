"""Bundles that one node serves too often are offered to another: it pulls them like anything that is published."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final, Protocol

from cachestore.client import Offer, PublishReport
from cachestore.entries import SNAPSHOT, Key
from cachestore.lookup import Kind
from cachestore.node.books import Region
from cachestore.node.core import NodeCore
from cachestore.node.index_writer import Identity
from cachestore.node.leases import Lease
from cachestore.node.metrics import NodeMetrics
from cachestore.node.states import VISIBLE
from cachestore.node.tiers import DiskTier
from cachestore.spans import ARENA_POOL
from moonrelay.errors import ServeError
from moonrelay.ids import Role
from moonrelay.membership import Member
from moonrelay.stubs.v1.common_pb2 import Span

logger = logging.getLogger(__name__)

HALF_LIFE_MS: Final = 60_000
WATCHED_MAX = 4_096  # snapshots whose use is counted
WAITING_MAX = 16  # hot ones that wait for their turn; more are looked at when they are leased again
BATCH_BYTES = 256 << 20  # of one offer, so that no pull of the other node takes long
BATCH_TIMEOUT_S = 5.0
LEASE_TTL_MS = int(1000 * BATCH_TIMEOUT_S) + 1_000  # renewed before each batch


class Heat:
    """Which snapshots are leased so often that another node should have them too. Pure.

    A lease counts one; every minute the count is halved. At `after` a snapshot is hot, once; then it is counted anew.
    """

    def __init__(self, after: int) -> None:
        self._after = after
        self._counts: OrderedDict[Key, tuple[int, int]] = OrderedDict()  # count, and when it was halved

    def leased(self, key: Key, now_ms: int) -> bool:
        """Whether this lease makes it hot."""
        count, halved_ms = self._counts.pop(key, (0, now_ms))
        halvings = (now_ms - halved_ms) // HALF_LIFE_MS
        count = (count >> min(halvings, 62)) + 1
        if count >= self._after:
            return True
        self._counts[key] = (count, halved_ms + halvings * HALF_LIFE_MS)
        if len(self._counts) > WATCHED_MAX:
            self._counts.popitem(last=False)
        return False


class Publisher(Protocol):
    """`CacheClient`, as far as it is used."""

    async def publish(
        self, node: Member, root: bytes, offers: Sequence[Offer], deadline_s: float
    ) -> PublishReport: ...


class Members(Protocol):
    def members(self, role: Role) -> Sequence[Member]: ...


class Replication:
    """Loop thread only. One bundle at a time, under a lease of our own; `after` 0: never."""

    def __init__(
        self, core: NodeCore, disk: DiskTier, publisher: Publisher, members: Members, identity: Identity,
        metrics: NodeMetrics, *, after: int,
    ) -> None:  # fmt: skip
        self._core, self._disk, self._publisher, self._members = core, disk, publisher, members
        self._identity, self._metrics = identity, metrics
        self._heat = Heat(after) if after else None
        self._hot: asyncio.Queue[Key] = asyncio.Queue(WAITING_MAX)
        self._given: OrderedDict[Key, set[tuple[str, int]]] = OrderedDict()  # whom it was offered to

    def leased(self, snapshot: Key) -> None:
        """A reader was given this snapshot and its blocks."""
        if self._heat is not None and self._heat.leased(snapshot, _now_ms()) and not self._hot.full():
            self._hot.put_nowait(snapshot)

    async def run(self) -> None:
        """Let other nodes have what is hot, for as long as this runs."""
        while True:
            snapshot = await self._hot.get()
            target = self._choose(snapshot)
            if target is None:
                continue
            try:
                nbytes = await self._give(snapshot, target)
            except ServeError as error:
                self._metrics.replicated.labels("failed").inc()
                logger.info("bundle not replicated", extra={"node": target.instance_id, "reason": str(error)})
                continue
            self._metrics.replicated.labels("stored" if nbytes else "already_there").inc()
            self._metrics.replicated_bytes.inc(nbytes)

    def _choose(self, snapshot: Key) -> Member | None:
        """The node that should have it next: by rendezvous, among those that it was not offered to yet."""
        given = self._given.setdefault(snapshot, {(self._identity.instance_id, self._identity.epoch)})
        self._given.move_to_end(snapshot)
        if len(self._given) > WATCHED_MAX:
            self._given.popitem(last=False)
        others = [m for m in self._members.members("cachestore") if m.state == "ready"]
        free = [m for m in others if (m.instance_id, m.epoch) not in given]
        name = snapshot.root + snapshot.prefix_hash
        return max(free, key=lambda m: blake2b(name + m.instance_id.encode(), digest_size=8).digest(), default=None)

    async def _give(self, snapshot: Key, target: Member) -> int:
        """Have `target` pull the snapshot and the blocks below it; how many bytes it took. Raises: ServeError."""
        chain = self._chain(snapshot)
        await self._disk.ensure(chain, time.monotonic() + BATCH_TIMEOUT_S)
        # What rests on a chain's deepest block cannot leave before it: holding the two ends holds all.
        lease = self._core.lease(chain[-2:], LEASE_TTL_MS, _now_ms())
        if not isinstance(lease, Lease):
            return 0  # it left meanwhile, or too many leases are in force
        taken = 0
        for offers in self._batches(chain):
            if self._core.renew(lease.id, lease.fence, _now_ms()) is None:
                return taken
            # Where this fails the lease ends by itself: the other node may be in the middle of its read.
            report = await self._publisher.publish(target, snapshot.root, offers, time.monotonic() + BATCH_TIMEOUT_S)
            if report.refused:
                break
            if report.stored or report.drafts:
                taken += sum(span.length for offer in offers for span in offer.spans)
        self._core.release(lease.id, lease.fence)
        self._given[snapshot].add((target.instance_id, target.epoch))
        return taken

    def _chain(self, snapshot: Key) -> list[Key]:
        """The snapshot and, before it, every block below it down to where this node's run begins."""
        chain: list[Key] = []
        at: Key | None = snapshot
        while at is not None and (entry := self._core.entry(at)) is not None and entry.state in VISIBLE:
            chain.append(at)
            at = entry.offer.parent
        return chain[::-1]

    def _batches(self, chain: Sequence[Key]) -> Iterator[list[Offer]]:
        """The chain as offers, parents first, a bounded number of bytes at a time."""
        batch: list[Offer] = []
        nbytes = 0
        for key in chain:
            entry = self._core.entry(key)
            if entry is None or not entry.regions:
                return  # not in memory any more: what follows is of no use without it
            if batch and nbytes + entry.nbytes > BATCH_BYTES:
                yield batch
                batch, nbytes = [], 0
            kind: Kind = "snapshot" if key.kind == SNAPSHOT else "block"
            parent = entry.offer.parent if kind == "block" else None
            batch.append(
                Offer(
                    kind=kind, prefix_hash=key.prefix_hash, depth=entry.offer.depth, spans=_spans(entry.regions),
                    parent=parent.prefix_hash if parent is not None else None,
                    drafter=entry.draft.drafter if entry.draft is not None else "",
                    draft_spans=_spans(entry.draft.regions) if entry.draft is not None else (),
                )
            )  # fmt: skip
            nbytes += entry.nbytes
        if batch:
            yield batch


def _spans(regions: Sequence[Region]) -> list[Span]:
    return [Span(pool=ARENA_POOL, offset=r.offset, length=r.length, xxh3=r.xxh3) for r in regions]


def _now_ms() -> int:
    return int(time.monotonic() * 1000)
