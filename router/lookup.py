"""Asking the cache: a prompt's hashes, the deepest bundle that fits, where to keep new snapshots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Final

from cachestore.planner import plan, wants_turn
from moonrelay.ids import PrefixHash
from moonrelay.prefix import Fingerprint, prefix_hashes, prefix_root
from router import core
from router.core import Need
from router.fleet import Index, Match
from router.metrics import RouterMetrics
from router.turn import Turn

OFF_LOOP_TOKENS: Final = 16_384  # hashing this much takes some milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """One prompt under one fingerprint. `snapshot_at`: the planner's choice, in tokens, ascending.

    `writeback`: decode may keep the turn, which a later prompt can go on from.
    """

    fingerprint: Fingerprint
    prompt_tokens: int
    root: bytes
    hashes: Sequence[PrefixHash]
    match: Match
    snapshot_at: tuple[int, ...]
    store: bool
    writeback: bool

    @property
    def need(self) -> Need:
        match = self.match
        return Need(
            prompt_tokens=self.prompt_tokens,
            hit_tokens=match.tokens,
            disk_tokens=match.disk_tokens,
            kept=match.kept,
        )


class Lookups:
    def __init__(self, index: Index, threads: Executor, metrics: RouterMetrics) -> None:
        self._index = index
        self._threads = threads
        self._metrics = metrics

    async def ask(self, turn: Turn, fingerprint: Fingerprint) -> Lookup:
        """Hash and match; never fails, an index out of reach is a miss.

        A prompt that replays generated tokens takes no snapshots and is not stored: nobody will send its generated
        part, cut off where a worker died, as a prompt, and what decode made of it took another path.
        """
        began = time.perf_counter()
        ids, block_tokens = turn.ids, fingerprint.block_tokens
        root = prefix_root(fingerprint, turn.call.tenant)
        if len(ids) > OFF_LOOP_TOKENS:
            loop = asyncio.get_running_loop()
            hashes = await loop.run_in_executor(self._threads, prefix_hashes, root, ids, block_tokens)
        else:
            hashes = prefix_hashes(root, ids, block_tokens)
        match = await self._index.match(root, hashes, fingerprint, turn.call.tenant, len(ids))
        if turn.prompt.retokenised:
            lost = core.name_retokenised(match.lost, match.tokens, turn.prompt.retokenised, block_tokens)
            match = replace(match, lost=lost)
        first = not turn.generated
        planned = plan(turn.prompt.hints, len(ids), block_tokens, match) if first else ()
        self._metrics.stage["match"].observe(time.perf_counter() - began)
        return Lookup(
            fingerprint=fingerprint,
            prompt_tokens=len(ids),
            root=root,
            hashes=hashes,
            match=match,
            snapshot_at=tuple(snapshot.tokens for snapshot in planned),
            store=first,
            writeback=first and wants_turn(one_shot=turn.prompt.one_shot),
        )
