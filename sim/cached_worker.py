"""A simulated worker's cache: restores a hit, whole, or says why not; offers what is new."""

from __future__ import annotations

from collections.abc import Sequence

from cachestore.entries import BLOCK, SNAPSHOT, Key, Offer
from moonrelay.errors import ServeError, StaleEpoch
from sim.adapters import TIMING, choose_node
from sim.cache_node import AskLease, Leased, NotHere, Publish
from sim.memory import CELL_BYTES, Landing, Pool, Span, Transfer
from sim.network import LinkLost
from sim.toy import BLOCK_TOKENS, ROW_CELLS, STATE_CELLS
from sim.worker import Hit, Holding, Prompt, Worker, slot_cells, span_of
from sim.world import Steps

ABORT_WAIT_MS, LEASE_MARGIN_MS = 10, 100
PUBLISHES_MAX = 3


class CachedWorker(Worker):
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

    def store(
        self, prompt: Prompt, holding: Holding, first: int, full: int, taken: Sequence[tuple[int, int]]
    ) -> None:
        """Offer blocks [first, full) and snapshots (tokens, slot) to a node, beside the request. Owns `taken`."""
        if not prompt.store or (first >= full and not taken) or self._publishing >= PUBLISHES_MAX:
            for _, slot in taken:
                self.drop_snapshot(slot)
            return
        holding.share()
        self._publishing += 1
        self.spawn(self._store(prompt, holding, first, full, taken), "store")

    def _store(
        self, prompt: Prompt, holding: Holding, first: int, full: int, taken: Sequence[tuple[int, int]]
    ) -> Steps:
        at = first if first < full else taken[0][0] // BLOCK_TOKENS - 1
        node = choose_node(self.members("cachestore"), prompt.root, prompt.hashes, at, next(iter(prompt.hits), None))
        entries: list[tuple[Offer, tuple[Span, ...]]] = []
        for index in range(first, full):
            parent = Key(prompt.root, BLOCK, prompt.hashes[index - 1]) if index else None
            key = Key(prompt.root, BLOCK, prompt.hashes[index])
            offer = Offer(key=key, parent=parent, depth=index, nbytes=ROW_CELLS * CELL_BYTES)
            entries.append((offer, (span_of(self.rows, holding.row_cells(index)),)))
        for tokens, slot in taken:
            depth = tokens // BLOCK_TOKENS
            name = prompt.hashes[depth - 1]
            offer = Offer(
                key=Key(prompt.root, SNAPSHOT, name),
                parent=Key(prompt.root, BLOCK, name),
                depth=depth,
                nbytes=STATE_CELLS * CELL_BYTES,
            )
            cells, half = slot_cells(slot), STATE_CELLS // 2
            entries.append((offer, (span_of(self.state, cells[:half]), span_of(self.state, cells[half:]))))
        try:
            if node is not None:
                self.world.phase("publishing", self)
                request = Publish(prompt.root, self.name, self.epoch, tuple(entries), prompt.tenant)
                yield from self.call(node.instance_id, "publish", request, 2_000)
                self.world.counts["published"] += 1
        except ServeError:
            self.world.counts["publish_failed"] += 1
        finally:
            self._publishing -= 1
        # A node that did not answer may still read: the offer's spans have checksums, so it refuses what changed.
        for _, slot in taken:
            self.drop_snapshot(slot)
        holding.drop()
