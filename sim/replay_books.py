"""The same node without its arena, its index and its wire: planner and retention alone, several times as fast.

For comparisons. It differs from the whole in one thing: it never forgets which blocks it has seen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cachestore.entries import BLOCK, SNAPSHOT, Key, Offer
from cachestore.planner import MESSAGE, plan
from cachestore.retention import Retention
from sim.replay_cores import ROOT, LruRetention, Places, Policy, Sizes, settings_of, wanted
from sim.traces import Request


@dataclass(frozen=True, slots=True)
class Known:
    """What `plan` asks of a lookup."""

    tokens: int
    seen_tokens: int


class Books:
    """Serves prompts in the order of their arrival."""

    def __init__(self, sizes: Sizes, budget_bytes: int, policy: Policy, places: Places) -> None:
        self._sizes, self._places = sizes, places
        self._retention = LruRetention() if policy == "lru" else Retention()
        self._free_bytes = budget_bytes
        self._held: dict[Key, int] = {}  # what takes bytes, and how many
        self._blocks: dict[int, Offer] = {}  # every block ever seen
        self._cuts: dict[int, Offer] = {}  # every snapshot ever planned
        self.snapshots = 0

    def serve(self, request: Request) -> int:
        """The tokens that the cache gave this prompt."""
        size = self._sizes.block_tokens
        self._retention.advance(request.time_ms)
        usable = request.blocks[: (request.prompt_tokens - 1) // size]
        seen = hit = 0
        for depth, number in enumerate(usable, 1):
            if number not in self._blocks:
                break
            seen = depth
            if number in self._cuts and self._cuts[number].key in self._held:
                hit = depth
        if hit:
            self._retention.hit([self._cuts[usable[hit - 1]].key])
        known = Known(hit * size, seen * size)
        planned = plan(
            [(request.prompt_tokens, MESSAGE)], request.prompt_tokens, size, known, settings_of(self._places)
        )
        offers = [self._block(request, depth) for depth in range(hit, len(request.blocks))]
        offers += [self._cut(request, p.tokens // size) for p in planned if wanted(p, self._places)]
        self._store(offers)
        return hit * size

    def check(self) -> None:
        """Raises: InvariantError."""
        self._retention.check(here=self._held, shown=self._held.keys(), pins=Counter())

    def _store(self, offers: list[Offer]) -> None:
        new = [offer for offer in offers if offer.key not in self._held]
        missing = sum(offer.nbytes for offer in new) - self._free_bytes
        if missing > 0:
            protect = [key for offer in offers for key in (offer.key, offer.parent) if key is not None]
            self._free_bytes += sum(self._held.pop(key) for key in self._retention.victims(missing, protect))
        self._retention.passed(offers)
        admitted = []
        for offer in new:
            if offer.nbytes > self._free_bytes:
                break
            self._free_bytes -= offer.nbytes
            self._held[offer.key] = offer.nbytes
            self._retention.add(offer, offer.nbytes)
            admitted.append(offer.key)
            self.snapshots += offer.key.kind == SNAPSHOT
        for key in admitted:
            self._retention.show(key)

    def _block(self, request: Request, depth: int) -> Offer:
        """The one at `depth`."""
        number = request.blocks[depth]
        offer = self._blocks.get(number)
        if offer is None:
            parent = self._blocks[request.blocks[depth - 1]].key if depth else None
            key = Key(ROOT, BLOCK, number.to_bytes(16, "big"))
            offer = self._blocks[number] = Offer(key=key, parent=parent, depth=depth, nbytes=self._sizes.block_bytes)
        return offer

    def _cut(self, request: Request, depth: int) -> Offer:
        """The snapshot after `depth` blocks."""
        number = request.blocks[depth - 1]
        offer = self._cuts.get(number)
        if offer is None:
            block = self._blocks[number].key
            key = Key(ROOT, SNAPSHOT, block.prefix_hash)
            offer = self._cuts[number] = Offer(key=key, parent=block, depth=depth, nbytes=self._sizes.snapshot_bytes)
        return offer
