"""The one place where the simulator names what of the real services it runs, beyond their cores' own calls."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from cachestore import planner
from cachestore.index_memory import MemoryIndex
from cachestore.lookup import NOTHING, Match, explain
from cachestore.prompt_cache import choose_node as real_choose_node
from engine.settings import EngineSettings
from engine.worker.timing import Timing
from model.batch import PoolLayout
from moonrelay.prefix import Fingerprint, prefix_root
from moonrelay.stubs.v1.worker_pb2 import CacheHit, CacheRun
from router import core
from sim.toy import BLOCK_TOKENS, VOCAB

FINGERPRINT: Final = Fingerprint(
    model="toy",
    weights_revision="1",
    tokenizer_revision="1",
    row_dtype="fp32",
    snapshot_dtype="fp32",
    layout_version="1",
    numerics_version="toy-1",
    block_tokens=BLOCK_TOKENS,
)
# Sizes such that one layer's rows of a block, and one layer's recurrent or conv state, are one cell each.
LAYOUT: Final = PoolLayout(
    block_tokens=BLOCK_TOKENS,
    num_mla_layers=2,
    row_width=16,
    num_kda_layers=2,
    num_heads=8,
    key_dim=8,
    value_dim=16,
    conv_history=4,
)
CONTEXT_LEN: Final = 2_048
TIMING: Final = Timing(transfer_floor_ms=120, transfer_min_bytes_per_s=20_000_000, lease_floor_ms=400)
LONGEST_TRANSFER_MS: Final = 400
PLANNER: Final = planner.PlannerSettings(head_blocks_min=1, interval_tokens=256)
__all__ = ["VOCAB", "prefix_root"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """A worker's memory. `kept_share`: how much of it may keep what finished prompts and turns leave.

    `draft_len_max`: tokens that may be drafted for one step; 0: there is no drafter.
    """

    num_blocks: int
    num_slots: int
    kept_share: float
    writeback: Literal["on", "off", "adaptive"]
    draft_len_max: int = 0


def engine_settings(pools: PoolSizes) -> EngineSettings:
    return EngineSettings(
        block_tokens=BLOCK_TOKENS,
        num_blocks=pools.num_blocks,
        num_slots=pools.num_slots,
        max_batch_tokens=256,
        prefill_share_tokens=128,
        max_batch_sequences=6,
        queue_len_max=16,
        writeback=pools.writeback,
        draft_len_max=pools.draft_len_max,
    )


def plan(hints: Iterable[tuple[int, int]], prompt_tokens: int, match: Match) -> tuple[int, ...]:
    """Where prefill keeps the state, in tokens."""
    return tuple(p.tokens for p in planner.plan(hints, prompt_tokens, BLOCK_TOKENS, match, PLANNER))


def wants_turn() -> bool:
    return planner.wants_turn(one_shot=False, settings=PLANNER)


def cold(prompt_tokens: int) -> Match:
    """What an index out of reach says."""
    reason: Any = "tier_error"
    return explain(NOTHING, prompt_tokens, BLOCK_TOKENS, ())._replace(lost=((reason, prompt_tokens),))


def account(match: Match, prompt_tokens: int, cached: int, reason: str | None) -> core.CacheAccount:
    """The router's own sum of what the cache gave and what was lost. Asserts that it adds up."""
    return core.account(
        prompt_tokens=prompt_tokens,
        hit_tokens=match.tokens,
        matchable_tokens=match.matchable_tokens,
        seen_tokens=match.seen_tokens,
        index_lost=match.lost,
        restored={"host": cached},
        worker_reason=reason,
    )


def choose_node(nodes: Sequence[Any], root: bytes, hashes: Sequence[bytes], first: int, hit: Any) -> Any:
    """Where new entries go: the real choice. `hit`: anything with the snapshot's node_id and epoch."""
    if hit is not None:
        hit = CacheHit(snapshot=CacheRun(node_id=hit.snapshot.node_id, node_epoch=hit.snapshot.epoch))
    return real_choose_node(nodes, root, hashes, first, hit)


class IndexTwin(MemoryIndex):
    """The real in-memory twin of the index, with what faults do to a server."""

    def __init__(self) -> None:
        super().__init__(BLOCK_TOKENS)

    def lose(self, rng: random.Random) -> None:
        """Drop single entries, as a server that evicts against our advice would."""
        for at in self._roots.values():
            for held in at.lives.values():
                for names in (held.blocks, held.snapshots):
                    for name in [name for name in names if rng.random() < 0.4]:
                        del names[name]
