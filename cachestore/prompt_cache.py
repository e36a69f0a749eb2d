"""The cache as a worker's prompts use it: restore a hit into given memory, offer what is new. Losses are values."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Literal, Protocol

from redis.asyncio import Redis

from cachestore.client import CacheClient, FetchReport, Offer
from cachestore.device_entries import DeviceEntries
from cachestore.index import CacheIndex
from cachestore.transports import Landing, Slice, TransportSet
from moonrelay.errors import TransferError, Unavailable
from moonrelay.membership import Member, Membership
from moonrelay.stubs.v1 import common_pb2, worker_pb2

logger = logging.getLogger(__name__)
Extent = tuple[int, int, int]  # pool, offset, length
Outcome = Literal["stored", "already_there", "refused", "in_progress", "failed", "no_node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What the cache gave. `xxh3`: each restored block's checksum, verified; None where it came in pieces.

    From token `draft_first` on the blocks have the drafter's rows too, with checksums `draft_xxh3`; `draft_refused`
    blocks more were to have them, and these did not come or did not agree.
    """

    usage: common_pb2.CacheUsage
    xxh3: tuple[int | None, ...] = ()
    draft_first: int = 0
    draft_xxh3: tuple[int | None, ...] = ()
    draft_refused: int = 0


class Observer(Protocol):
    """Who counts."""

    def fetched(self, transport: str, nbytes: int) -> None: ...

    def published(self, outcome: Outcome, entries: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Life:
    instance_id: str
    epoch: int


class WorkerCache:
    """A worker's transports and cache client behind the few calls that its prompts make. Loop thread only."""

    def __init__(
        self,
        transports: TransportSet,
        membership: Membership,
        transfer_ms: Callable[[int], int],
        observer: Observer,
        device: DeviceEntries | None = None,
    ) -> None:
        self.device = device  # None: the index is not told what this worker keeps
        self.transports = transports
        self.peer = transports.peer()
        self._client = CacheClient(transports, membership)
        self._membership, self._transfer_ms, self._observer = membership, transfer_ms, observer

    @classmethod
    async def open(
        cls,
        *,
        instance_id: str,
        epoch: int,
        host: str,
        advertise: str,
        transport: Literal["auto", "nixl", "tcp"],
        pools: Mapping[int, tuple[int, int]],
        membership: Membership,
        transfer_ms: Callable[[int], int],
        observer: Observer,
        redis: Redis | None = None,
    ) -> WorkerCache:
        """Register `pools` (address and length by id) once and start. Raises: Unavailable.

        With `redis`, run `device.run()` beside: it tells the index what this worker keeps.
        """
        transports = TransportSet.open(instance_id, epoch, host, transport, advertise)
        for pool, (address, length) in pools.items():
            transports.register(pool, address, length)
        await transports.start()
        life = _Life(instance_id=instance_id, epoch=epoch)
        device = DeviceEntries(CacheIndex(redis), life) if redis is not None else None
        return cls(transports, membership, transfer_ms, observer, device)

    def checked_span(self, pool: int, offset: int, length: int) -> common_pb2.Span:
        """A range of our memory with the checksum of what is there now. From any thread."""
        return self.transports.span(pool, offset, length)

    def landing(self) -> Landing:
        return Landing()

    async def restore(
        self,
        hit: worker_pb2.CacheHit,
        root: bytes,
        hashes: Sequence[bytes],
        rows: Sequence[Extent],
        state: Extent,
        landing: Landing,
        *,
        drafter: str = "",
        drafts: Sequence[Extent] = (),
    ) -> Restored:
        """Bring the hit, or where that fails an alternative of it, into `rows` and `state`: whole, or nothing. With a
        `drafter` also its rows into `drafts`, one extent per block, as far as there are any.

        `usage.lost` says what is missing of the hit, and why. The memory is the caller's again once `landing` is not
        pending, also where this is cancelled.
        """
        nbytes = sum(length for _, _, length in (*rows, state, *drafts))
        deadline_s = time.monotonic() + self._transfer_ms(nbytes) / 1000
        report = await self._client.fetch(
            hit, root, hashes, [Slice(*extent) for extent in rows], Slice(*state), deadline_s, landing,
            drafter=drafter, draft_into=[Slice(*extent) for extent in drafts],
        )  # fmt: skip
        if report.tokens:
            self._observer.fetched(report.transport, report.bytes)
        return Restored(
            usage=self._usage(hit, report), xxh3=report.xxh3, draft_first=report.draft_first,
            draft_xxh3=report.draft_xxh3, draft_refused=report.draft_refused,
        )  # fmt: skip

    def _usage(self, hit: worker_pb2.CacheHit, report: FetchReport) -> common_pb2.CacheUsage:
        """Cached tokens by tier, and the hit's lost ones with their reason."""
        usage = common_pb2.CacheUsage(
            cached_tokens=report.tokens, matchable_tokens=hit.matchable_tokens, seen_tokens=hit.seen_tokens
        )
        size = hit.tokens // hit.snapshot.first_block if hit.snapshot.first_block else 0
        for place in report.places:
            tokens = place.blocks * size
            if common_pb2.Peer.FromString(place.node.peer).host_id != self.peer.host_id:
                usage.cached_remote += tokens
            elif place.on_disk:
                usage.cached_disk += tokens
            else:
                usage.cached_host += tokens
        if report.miss_reason is not None:
            usage.miss_reason = common_pb2.MissReason.Value(f"MISS_REASON_{report.miss_reason.upper()}")
            usage.lost.add(reason=usage.miss_reason, tokens=hit.tokens - report.tokens)
        return usage

    async def store(
        self,
        hit: worker_pb2.CacheHit | None,
        root: bytes,
        hashes: Sequence[bytes],
        blocks: Sequence[tuple[int, common_pb2.Span]],
        snapshots: Sequence[tuple[int, Sequence[common_pb2.Span]]],
        *,
        drafter: str = "",
        drafts: Mapping[int, common_pb2.Span] = MappingProxyType({}),
    ) -> None:
        """Offer blocks (by index) and snapshots (by depth in blocks) to one node; ends when it has answered.
        `drafts`: the rows that `drafter` left for some of these blocks, by index.

        What a node refuses, or cannot take in time, is counted and forgotten.
        """
        first = blocks[0][0] if blocks else snapshots[0][0] - 1
        node = choose_node(self._membership.members("cachestore"), root, hashes, first, hit)
        if node is None:
            self._observer.published("no_node", len(blocks) + len(snapshots))
            return
        offers = [
            Offer(
                kind="block",
                prefix_hash=hashes[i],
                depth=i,
                spans=[span],
                parent=hashes[i - 1] if i else None,
                drafter=drafter if i in drafts else "",
                draft_spans=[drafts[i]] if i in drafts else [],
            )
            for i, span in blocks
        ]
        offers += [
            Offer(kind="snapshot", prefix_hash=hashes[depth - 1], depth=depth, spans=spans)
            for depth, spans in snapshots
        ]
        nbytes = sum(span.length for offer in offers for span in (*offer.spans, *offer.draft_spans))
        # The node pulls as long as a read may take, and has its index to write.
        deadline_s = time.monotonic() + 2 * self._transfer_ms(nbytes) / 1000
        try:
            report = await self._client.publish(node, root, offers, deadline_s)
        except (TransferError, Unavailable) as error:
            logger.info("publish failed", extra={"node": node.instance_id, "reason": str(error)})
            self._observer.published("failed", len(offers))
            return
        self._observer.published("stored", report.stored)
        self._observer.published("already_there", report.already_there)
        self._observer.published("refused", report.refused)
        self._observer.published("in_progress", report.in_progress)

    def announce(self, root: bytes, hashes: Sequence[bytes], first: int, end: int, snapshots: Sequence[int]) -> None:
        """See `DeviceEntries`."""
        if self.device is not None:
            self.device.announce(root, hashes, first, end, snapshots)

    def withdraw(self, root: bytes, blocks: Sequence[bytes], snapshots: Sequence[bytes]) -> None:
        if self.device is not None:
            self.device.withdraw(root, blocks, snapshots)

    async def close(self) -> None:
        if self.device is not None:
            await self.device.forget()
        await self._client.close()
        await self.transports.close()


def choose_node(
    nodes: Sequence[Member],
    root: bytes,
    hashes: Sequence[bytes],
    first_new: int,
    hit: worker_pb2.CacheHit | None,
) -> Member | None:
    """Where blocks from `first_new` on are stored. Pure.

    A conversation that goes on (most of its blocks were found) stays where its state is: one node then has the whole
    chain. Otherwise the first new block decides by rendezvous hashing, so that equal prompts meet on one node while
    conversations that only share their beginning spread over all.
    """
    ready = [node for node in nodes if node.state == "ready"]
    if hit is not None and 2 * first_new >= len(hashes):
        for node in ready:
            if (node.instance_id, node.epoch) == (hit.snapshot.node_id, hit.snapshot.node_epoch):
                return node
    key = root + hashes[first_new]
    return max(ready, key=lambda node: blake2b(key + node.instance_id.encode(), digest_size=8).digest(), default=None)
