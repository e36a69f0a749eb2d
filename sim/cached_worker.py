"""A simulated worker's cache: restores a hit, whole, or says why not; offers what is new."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cachestore.entries import BLOCK, SNAPSHOT, Key, Offer
from cachestore.lookup import Entry, EntryName
from moonrelay.errors import ServeError, StaleEpoch
from sim.adapters import TIMING, PoolSizes, choose_node
from sim.cache_node import AskLease, Leased, NotHere, Publish
from sim.memory import CELL_BYTES, Landing, Pool, Span, Transfer
from sim.network import LinkLost
from sim.toy import BLOCK_TOKENS, ROW_CELLS, STATE_CELLS
from sim.worker import Hit, Prompt, Worker, span_of
from sim.worker_memory import Holding, slot_cells
from sim.world import Steps, World

ABORT_WAIT_MS, LEASE_MARGIN_MS = 10, 100
PUBLISHES_MAX, PUBLISH_MS = 3, 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A chain's blocks [0, end); those from `first` on, and its snapshots, are new to the cache nodes."""

    root: bytes
    hashes: Sequence[bytes]
    first: int
    end: int
    publish: bool
    hits: tuple[Hit, ...]
    tenant: str  # for the checkers only


class CachedWorker(Worker):
    def __init__(self, world: World, name: str, pools: PoolSizes) -> None:
        super().__init__(world, name, pools)
        self._publishing = 0
        self._untold: deque[tuple[str, bytes, Any]] = deque()
        self._telling = False
        self.memory.announce, self.memory.withdraw = self._announce, self._withdraw

    def fetch(self, prompt: Prompt, holding: Holding, landing: Landing) -> Steps:
        """Bring a hit into `holding`, whole: (tokens, None); or (0, why). A shallower one where the first is gone."""
        deadline = self.now_ms() + TIMING.transfer_ms(holding.nbytes)
        reason = None
        for hit in prompt.hits:
            tokens, why = yield from self._fetch(prompt, hit, holding, landing)
            if tokens:
                return tokens, None
            reason = reason or why
            if landing.pending or self.now_ms() >= deadline:
                break
            self.world.counts["fallbacks"] += 1
        return 0, reason

    def _fetch(self, prompt: Prompt, hit: Hit, holding: Holding, landing: Landing) -> Steps:
        depth = hit.tokens // BLOCK_TOKENS
        parts: dict[tuple[str, int], list[int]] = {}
        for run in hit.runs:
            parts.setdefault((run.node_id, run.epoch), []).extend(range(run.first, min(run.end, depth)))
        holder = (hit.snapshot.node_id, hit.snapshot.epoch)
        parts.setdefault(holder, [])
        nbytes = CELL_BYTES * (ROW_CELLS * depth + STATE_CELLS)
        transfer_ms = TIMING.transfer_ms(nbytes)
        asked = self.now_ms()
        held: list[tuple[str, Leased]] = []
        transfers: list[Transfer] = []
        try:
            for (name, epoch), blocks in parts.items():
                if self.find(name, epoch) is None:
                    return 0, "stale_index"
                keys = [Key(prompt.root, BLOCK, prompt.hashes[i]) for i in blocks]
                keys += [Key(prompt.root, SNAPSHOT, prompt.hashes[depth - 1])] * ((name, epoch) == holder)
                ask = AskLease(prompt.root, epoch, tuple(keys), transfer_ms + LEASE_MARGIN_MS, prompt.tenant)
                leased = yield from self.call(name, "lease", ask)
                held.append((name, leased))
                reads = self._reads(leased, blocks, holding)
                transfers.append(landing.add(Transfer(self.world, self, name, epoch, reads)))
            self.world.phase("restoring", self)
            for transfer in transfers:
                yield (transfer.result, max(0, asked + transfer_ms - self.now_ms()))
        except (LinkLost, NotHere, StaleEpoch) as gone:
            yield from self._abort(landing)
            return 0, "stale_index" if not isinstance(gone, LinkLost) or gone.unreachable else "tier_error"
        except ServeError:
            yield from self._abort(landing)
            return 0, "tier_error"
        finally:
            if not landing.pending:
                for name, leased in held:
                    self._release(name, leased)
        if self.now_ms() > asked + min(leased.ttl_ms for _, leased in held):
            return 0, "tier_error"  # a lease ended before the read did
        return hit.tokens, None

    def _abort(self, landing: Landing) -> Steps:
        for transfer in landing.transfers:
            transfer.abort()
        if landing.pending:
            yield ABORT_WAIT_MS

    def _reads(self, leased: Leased, blocks: Sequence[int], holding: Holding) -> list[tuple[Span, Pool, range]]:
        reads = []
        places = [(self.rows, holding.row_cells(i)) for i in blocks]
        if len(leased.spans) > len(blocks):
            places.append((self.state, holding.state_cells()))
        for spans, (pool, cells) in zip(leased.spans, places, strict=True):
            at = 0
            for span in spans:
                reads.append((span, pool, cells[at : at + span.cells]))
                at += span.cells
        return reads

    def _release(self, name: str, leased: Leased) -> None:
        self.tell(name, "release", (leased.lease_id, leased.fence))

    def offer(self, bundle: Bundle, holding: Holding, taken: Sequence[tuple[int, int]]) -> None:
        """Keep blocks [0, end) of a chain here, and offer what is new to a node, beside the request.

        `taken`: snapshots (tokens, slot); their slots become the callee's.
        """
        holding.share()
        self.background += 1
        self.spawn(self._offer(bundle, holding, taken), "offer")

    def _offer(self, bundle: Bundle, holding: Holding, taken: Sequence[tuple[int, int]]) -> Steps:
        depths = [(tokens // BLOCK_TOKENS, slot) for tokens, slot in taken]
        depths = [(depth, slot) for depth, slot in depths if depth <= bundle.end]
        try:
            self.memory.keep(holding, bundle.root, bundle.hashes[: bundle.end], depths)
            if bundle.publish and self._publishing < PUBLISHES_MAX:
                self._publishing += 1
                try:
                    yield from self._put(bundle, holding, depths)
                finally:
                    self._publishing -= 1
        except ServeError:
            self.world.counts["publish_failed"] += 1
        # A node that did not answer may still read: the offer's spans have checksums, so it refuses what changed.
        self.background -= 1
        for _, slot in taken:
            self.memory.drop_snapshot(slot)
        holding.drop()

    def _put(self, bundle: Bundle, holding: Holding, depths: Sequence[tuple[int, int]]) -> Steps:
        root, hashes, first = bundle.root, bundle.hashes, bundle.first
        at = first if first < bundle.end else depths[0][0] - 1
        node = choose_node(self.members("cachestore"), root, hashes, at, next(iter(bundle.hits), None))
        if node is None:
            return
        entries: list[tuple[Offer, tuple[Span, ...]]] = []
        for index in range(first, bundle.end):
            parent = Key(root, BLOCK, hashes[index - 1]) if index else None
            key = Key(root, BLOCK, hashes[index])
            offer = Offer(key=key, parent=parent, depth=index, nbytes=ROW_CELLS * CELL_BYTES)
            entries.append((offer, (span_of(self.rows, holding.row_cells(index)),)))
        for depth, slot in depths:
            name, nbytes = hashes[depth - 1], STATE_CELLS * CELL_BYTES
            offer = Offer(key=Key(root, SNAPSHOT, name), parent=Key(root, BLOCK, name), depth=depth, nbytes=nbytes)
            cells, half = slot_cells(slot), STATE_CELLS // 2
            entries.append((offer, (span_of(self.state, cells[:half]), span_of(self.state, cells[half:]))))
        self.world.phase("publishing", self)
        request = Publish(root, self.name, self.epoch, tuple(entries), bundle.tenant)
        yield from self.call(node.instance_id, "publish", request, PUBLISH_MS)
        self.world.counts["published"] += 1

    # What is kept here, told to the index in order and best effort.

    def _announce(self, root: bytes, hashes: Sequence[bytes], first: int, depths: Sequence[int]) -> None:
        entries: dict[EntryName, Entry] = {}
        for index in range(first, len(hashes)):
            parent = hashes[index - 1] if index else None
            nbytes = ROW_CELLS * CELL_BYTES
            entries["block", hashes[index]] = Entry(nbytes=nbytes, tier="device", first=0, parent=parent)
        for depth in depths:
            entries["snapshot", hashes[depth - 1]] = Entry(nbytes=STATE_CELLS * CELL_BYTES, tier="device")
        self._untold.append(("write", root, entries))
        self._tell_index()

    def _withdraw(self, root: bytes, blocks: Sequence[bytes], snapshots: Sequence[bytes]) -> None:
        names = [*(("block", name) for name in blocks), *(("snapshot", name) for name in snapshots)]
        self._untold.append(("remove", root, names))
        self._tell_index()

    def _tell_index(self) -> None:
        if not self._telling:
            self._telling = True
            self.spawn(self._tell_all(), "announce")

    def _tell_all(self) -> Steps:
        while self._untold:
            method, root, what = self._untold.popleft()
            with suppress(ServeError):
                yield from self.index(method, root, self, what)
        self._telling = False

    @property
    def instance_id(self) -> str:
        return self.name
