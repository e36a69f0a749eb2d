"""Taking in what publishers offer: room, pull, verify, commit, index; in that order, all or nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from cachestore.entries import BLOCK, SNAPSHOT, DraftOffer, Key, Offer
from cachestore.index import CacheIndex
from cachestore.lookup import Kind
from cachestore.node.books import Admission
from cachestore.node.core import NodeCore
from cachestore.node.drafts import DraftAdmission
from cachestore.node.index_writer import Identity, IndexWriter
from cachestore.node.landing import Lander, Wanted
from cachestore.node.metrics import NodeMetrics
from cachestore.node.room import Room
from cachestore.transports import TransportSet
from moonrelay.errors import DeadlineExceeded, InvalidRequest, Overloaded, ServeError, Unavailable
from moonrelay.prefix import HASH_BYTES
from moonrelay.stubs.v1 import cache_pb2, common_pb2
from moonrelay.valkey import FAILURES

logger = logging.getLogger(__name__)

ENTRIES_MAX = 65_536  # of one publish or lease
DRAFTER_CHARS_MAX = 128
PULLS_MAX = 4  # publishes pulling at once
PULLS_WAITING_MAX = 64
_KIND: dict[int, Kind] = {cache_pb2.ENTRY_KIND_BLOCK: "block", cache_pb2.ENTRY_KIND_SNAPSHOT: "snapshot"}


class Intake:
    """Publishing into the node's core."""

    def __init__(
        self, core: NodeCore, transports: TransportSet, index: CacheIndex, identity: Identity, metrics: NodeMetrics,
        *, pull_timeout_ms: int,
    ) -> None:  # fmt: skip
        self._core, self._metrics = core, metrics
        self._lander = Lander(core, transports, metrics)
        self.index = IndexWriter(core, index, identity, metrics)
        self.room = Room(core, self.index)
        self._pull_timeout_s = pull_timeout_ms / 1000
        self._pulls = asyncio.Semaphore(PULLS_MAX)
        self._num_waiting = 0

    async def publish(self, request: cache_pb2.PublishRequest, remaining_s: float | None) -> cache_pb2.PublishReply:
        """Admit, pull and verify, commit, then the same for drafter rows, index: in that order.

        Raises: ServeError; then nothing new is visible.
        """
        deadline_s = time.monotonic() + min(remaining_s or self._pull_timeout_s, self._pull_timeout_s)
        offers = read_offers(request)
        if self._num_waiting >= PULLS_WAITING_MAX:
            raise Overloaded(f"{PULLS_WAITING_MAX} publishes are waiting")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                await self._pulls.acquire()
        except TimeoutError:
            raise DeadlineExceeded("the publish's deadline passed while others were pulling") from None
        finally:
            self._num_waiting -= 1
        try:
            protect = [key for offer in offers for key in (offer.key, offer.parent) if key is not None]
            await self.room.make(lambda: self._core.missing_bytes(offers), protect)
            admission = self._core.admit(offers)
            entries = {offer.key: entry for offer, entry in zip(offers, request.entries, strict=True)}
            if admission.new:
                await self._pull(request.source, [(key, entries[key]) for key in admission.new], deadline_s)
            # Half of what is left, so that the entries are named in time even if their drafter rows do not come.
            draft_until_s = (time.monotonic() + deadline_s) / 2
            drafts = await self._take_drafts(request.source, list(entries.items()), draft_until_s)
        finally:
            self._pulls.release()
        visible = [*admission.new, *admission.already_there]
        try:
            # Known entries too: the index may have lost them.
            await self.index.write(visible)
        except FAILURES as error:
            raise Unavailable(f"the index cannot be written: {error}") from None
        return self._reply(admission, drafts)

    def _reply(self, admission: Admission, drafts: int) -> cache_pb2.PublishReply:
        counts = {
            "stored": len(admission.new),
            "already_there": len(admission.already_there),
            "in_progress": len(admission.in_progress),
            "refused": len(admission.refused),
        }
        for outcome, count in counts.items():
            self._metrics.published.labels(outcome).inc(count)
        return cache_pb2.PublishReply(**counts, drafts=drafts)

    async def _pull(
        self, source: common_pb2.Peer, new: Sequence[tuple[Key, cache_pb2.Entry]], deadline_s: float
    ) -> None:
        """Bring the bytes of admitted entries, verified, and commit them. All or none. Raises: ServeError."""

        def abort(keys: Sequence[Key]) -> None:
            for key in keys:
                self._core.abort(key)

        wanted = [Wanted(key, entry.spans, self._core.extents(key)) for key, entry in new]
        regions = await self._lander.bring(source, wanted, deadline_s, abort=abort, quarantine=self._core.quarantine)
        for each, found in zip(wanted, regions, strict=True):
            self._core.commit(each.key, found)

    async def _take_drafts(
        self, source: common_pb2.Peer, offered: Sequence[tuple[Key, cache_pb2.Entry]], deadline_s: float
    ) -> int:
        """Bring drafter rows for blocks that are here; how many came. Whatever goes wrong costs only them."""
        entries = {key: entry for key, entry in offered if entry.drafter}
        offers = [
            DraftOffer(key=key, drafter=entry.drafter, nbytes=sum(span.length for span in entry.draft_spans))
            for key, entry in entries.items()
        ]
        if not offers:
            return 0
        stored = failed = 0
        admission = DraftAdmission()
        try:
            protect = [key for key, _ in offered]  # their snapshots too
            await self.room.make(lambda: self._core.missing_draft_bytes(offers), protect)
            admission = self._core.admit_drafts(offers)
            wanted = [Wanted(key, entries[key].draft_spans, self._core.draft_extents(key)) for key in admission.new]
            if wanted:
                regions = await self._lander.bring(
                    source, wanted, deadline_s,
                    abort=self._core.abort_drafts, quarantine=self._core.quarantine_drafts,
                )  # fmt: skip
                came = zip(wanted, regions, strict=True)
                stored = sum(self._core.commit_draft(each.key, found) for each, found in came)
        except ServeError as error:
            failed = len(offers) - len(admission.already_there) - len(admission.refused)
            logger.info("drafter rows not taken", extra={"reason": str(error), "blocks": failed})
        counts = {
            "stored": stored,
            "already_there": len(admission.already_there),
            "refused": len(admission.refused),
            "failed": failed,
        }
        for outcome, count in counts.items():
            self._metrics.published_drafts.labels(outcome).inc(count)
        return stored


def read_offers(request: cache_pb2.PublishRequest) -> list[Offer]:
    """The request's entries, checked. Raises: InvalidRequest."""
    if len(request.root) != HASH_BYTES:
        raise InvalidRequest(f"expected {HASH_BYTES} bytes", param="root")
    if not 0 < len(request.entries) <= ENTRIES_MAX:
        raise InvalidRequest("a publish offers 1 to 65,536 entries", param="entries")
    offers: dict[Key, Offer] = {}
    for entry in request.entries:
        kind = _KIND.get(entry.kind)
        if kind is None:
            raise InvalidRequest("expected BLOCK or SNAPSHOT", param="entries.kind")
        if len(entry.prefix_hash) != HASH_BYTES or (entry.HasField("parent") and len(entry.parent) != HASH_BYTES):
            raise InvalidRequest(f"expected {HASH_BYTES} bytes", param="entries.prefix_hash")
        nbytes = sum(span.length for span in entry.spans)
        if not nbytes or any(span.length == 0 for span in entry.spans):
            raise InvalidRequest("an entry's spans are not empty", param="entries.spans")
        if bool(entry.drafter) != bool(entry.draft_spans) or len(entry.drafter) > DRAFTER_CHARS_MAX:
            raise InvalidRequest("drafter rows have a drafter, with a name of 1 to 128 characters", param="drafter")
        if entry.drafter and (kind != BLOCK or any(span.length == 0 for span in entry.draft_spans)):
            raise InvalidRequest("drafter rows are of blocks, and not empty", param="entries.draft_spans")
        key = Key(request.root, kind, entry.prefix_hash)
        rests_on = entry.prefix_hash if kind == SNAPSHOT else entry.parent if entry.HasField("parent") else None
        if (kind == BLOCK and (entry.depth > 0) != entry.HasField("parent")) or (
            kind == SNAPSHOT and not entry.depth
        ):
            raise InvalidRequest(
                "a block has a parent unless it is the first; a snapshot has tokens", param="entries"
            )
        if key in offers:
            raise InvalidRequest("an entry is offered twice", param="entries")
        parent = Key(request.root, BLOCK, rests_on) if rests_on is not None else None
        offers[key] = Offer(key=key, parent=parent, depth=entry.depth, nbytes=nbytes)
    return list(offers.values())
