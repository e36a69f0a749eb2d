"""The engine's settings; a worker's own settings struct builds one of these."""

from __future__ import annotations

from typing import Literal

import msgspec

from moonrelay.errors import SettingsError
from moonrelay.settings import check_range

DraftRule = Literal["standard", "block"]
TILE_TOKENS = 64  # a prompt may be cut only at multiples of this, or results would depend on the cut
BOUNDS = {
    "block_tokens": (TILE_TOKENS, 1 << 16),
    "num_blocks": (1, 1 << 28),
    "num_slots": (1, 1 << 20),
    "max_batch_tokens": (1, 1 << 20),
    "prefill_share_tokens": (TILE_TOKENS, 1 << 20),
    "max_batch_sequences": (1, 1 << 16),
    "queue_len_max": (0, 1 << 20),
    "draft_len_max": (0, TILE_TOKENS - 1),  # so that a verified run meets at most one snapshot boundary
    "draft_read_len_max": (0, TILE_TOKENS - 1),
}


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Budgets of one engine. Blocks and slots untouched so far cost no memory."""

    block_tokens: int = 64
    num_blocks: int = 4096
    num_slots: int = 64  # sequences and snapshots together
    max_batch_tokens: int = 512  # per step, decoding sequences' tokens included
    prefill_share_tokens: int = 128  # prompt tokens per step while others decode: bounds the gap between their tokens
    max_batch_sequences: int = 32  # how many may be in steps at once; the rest wait, first come first served
    queue_len_max: int = 256
    # Turns that are written back copy their state at block boundaries into a slot of their own. on: it is set aside
    # with the reservation; adaptive: taken while slots are free, given up when a sequence or a snapshot needs one.
    writeback: Literal["on", "off", "adaptive"] = "adaptive"
    draft_len_max: int = 0  # tokens drafted for one step of a sequence; 0: none, though a drafter's rows are written
    draft_read_len_max: int = 0  # the same for drafts read from the text, where that is more than draft_len_max
    draft_rule: DraftRule = "block"  # which refusals verification can avoid, see engine/verify.py
    draft_adaptive: bool = True  # draft only what pays; off: always draft_len_max

    def __post_init__(self) -> None:
        check_range(self, BOUNDS)
        if self.block_tokens % TILE_TOKENS:
            raise SettingsError(f"block_tokens must be a multiple of {TILE_TOKENS}, found {self.block_tokens}")
        if self.max_batch_tokens < self.max_batch_sequences + TILE_TOKENS:
            raise SettingsError(
                f"max_batch_tokens must hold max_batch_sequences decoding tokens and {TILE_TOKENS} of a prompt: "
                f"at least {self.max_batch_sequences + TILE_TOKENS}, found {self.max_batch_tokens}"
            )
