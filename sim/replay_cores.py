"""One cache node of a given size, as a trace's prompts see it: the real planner, node core, retention and lookup.

Time is the trace's; transfers take none. A prompt asks, leases its hit, and what it computed is published at once.
Only prompts count: a trace has no generated ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cachestore.entries import BLOCK, SNAPSHOT, Key, Offer
from cachestore.index_memory import MemoryIndex
from cachestore.lookup import EntryName, Kind
from cachestore.node.books import Region
from cachestore.node.core import NodeCore
from cachestore.node.leases import Lease
from cachestore.node.naming import index_entries
from cachestore.planner import BRANCH, MESSAGE, Planned, PlannerSettings, plan
from cachestore.retention import WORTH, Rank, Retention, Tracked
from moonrelay.errors import InvariantError
from sim.traces import Request

ROOT = b"replay".ljust(16, b"\0")
LEASE_MS = 1
RENEW_MS = 600_000
Policy = Literal["worth", "lru"]
Places = Literal["end", "end+branch", "planner"]  # where snapshots are taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a model's cached objects, in bytes."""

    row_bytes: int  # a token
    snapshot_bytes: int
    block_tokens: int

    @property
    def block_bytes(self) -> int:
        return self.row_bytes * self.block_tokens


@dataclass(frozen=True, slots=True)
class Node:
    """The only life of the only node."""

    instance_id: str = "node"
    epoch: int = 1


class LruRetention(Retention):
    """What others do: the least recently used snapshot goes, whatever it is worth."""

    def _rank(self, kept: Tracked) -> Rank:
        rank = super()._rank(kept)
        return (WORTH, kept.life.since_ms) if rank[0] == WORTH and kept.life is not None else rank


class LruCore(NodeCore):
    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes, longest_transfer_ms=0)
        self._retention = LruRetention()


def settings_of(places: Places) -> PlannerSettings:
    """The planner's own, or those that take no interval."""
    return PlannerSettings() if places == "planner" else PlannerSettings(interval_tokens=0)


def wanted(planned: Planned, places: Places) -> bool:
    return places != "end" or planned.kind != BRANCH


class Cache:
    """Serves prompts in the order of their arrival."""

    def __init__(self, sizes: Sizes, budget_bytes: int, policy: Policy, places: Places) -> None:
        self._sizes, self._places = sizes, places
        self._core = LruCore(budget_bytes) if policy == "lru" else NodeCore(budget_bytes, longest_transfer_ms=0)
        self._index = MemoryIndex(sizes.block_tokens)
        self._node = Node()
        self._renewed_ms = 0
        self.snapshots = 0  # that were ever stored

    def serve(self, request: Request) -> int:
        """The tokens that the cache gave this prompt."""
        now_ms, size = request.time_ms, self._sizes.block_tokens
        self._core.expire(now_ms)  # as a node does many times a second
        if now_ms - self._renewed_ms >= RENEW_MS:
            self._index.renew(ROOT, self._node, now_ms=now_ms)
            self._renewed_ms = now_ms
        hashes = [number.to_bytes(16, "big") for number in request.blocks]
        match = self._index.match(ROOT, hashes, request.prompt_tokens, [self._node], now_ms=now_ms)
        if match.tokens:
            self._use(hashes[match.tokens // size - 1], now_ms)
        planned = plan(
            [(request.prompt_tokens, MESSAGE)], request.prompt_tokens, size, match, settings_of(self._places)
        )
        depths = [p.tokens // size for p in planned if wanted(p, self._places)]
        self._publish(hashes, match.tokens // size, depths, now_ms)
        return match.tokens

    def check(self) -> None:
        """Raises: InvariantError."""
        self._core.check()

    def _use(self, end: bytes, now_ms: int) -> None:
        """Lease the hit as a reader does, and give it back."""
        lease = self._core.lease([Key(ROOT, BLOCK, end), Key(ROOT, SNAPSHOT, end)], LEASE_MS, now_ms)
        if not isinstance(lease, Lease):
            raise InvariantError("the index names what the node does not have")
        self._core.release(lease.id, lease.fence)

    def _publish(self, hashes: Sequence[bytes], first: int, snapshots: Sequence[int], now_ms: int) -> None:
        """Offer the blocks from `first` on, and a snapshot at each depth."""
        offers = []
        for depth in range(first, len(hashes)):
            parent = Key(ROOT, BLOCK, hashes[depth - 1]) if depth else None
            key = Key(ROOT, BLOCK, hashes[depth])
            offers.append(Offer(key=key, parent=parent, depth=depth, nbytes=self._sizes.block_bytes))
        for depth in snapshots:
            block = Key(ROOT, BLOCK, hashes[depth - 1])
            key = Key(ROOT, SNAPSHOT, hashes[depth - 1])
            offers.append(Offer(key=key, parent=block, depth=depth, nbytes=self._sizes.snapshot_bytes))
        missing = self._core.missing_bytes(offers)
        if missing:
            protect = [key for offer in offers for key in (offer.key, offer.parent) if key is not None]
            victims = self._core.victims(missing, now_ms, protect)
            self._index.remove(ROOT, self._node, [_name(key) for key in victims], now_ms=now_ms)
            self._core.reclaim(victims)
        new = self._core.admit(offers).new
        for key in new:
            self._core.commit(key, [Region(e.offset, e.length, 0) for e in self._core.extents(key)])
            self.snapshots += key.kind == SNAPSHOT
        self._index.write(ROOT, self._node, index_entries(new, self._held), now_ms=now_ms)

    def _held(self, key: Key) -> tuple[Offer, Literal["host"]] | None:
        entry = self._core.entry(key)
        return (entry.offer, "host") if entry is not None and entry.regions else None


def _name(key: Key) -> EntryName:
    kind: Kind = "block" if key.kind == BLOCK else "snapshot"
    return kind, key.prefix_hash
