"""What the engine hands to a model backend: ragged segments over two pools.

Torch-free: the scheduler's core builds these and is tested without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    import torch

    from model.config import ModelConfig
    from model.progress import LayerProgress

FLOAT_BYTES = 4  # rows and state are fp32 in the pools; narrower stored forms are converted at their edge


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's share of a forward pass: `ids` follow the `start` tokens its slot has already consumed.

    Units: start in tokens; blocks index the row pool, the i-th covers tokens [i*block_tokens, (i+1)*block_tokens).
    """

    ids: Sequence[int]
    start: int
    slot: int
    blocks: Sequence[int]
    logits: Literal["none", "last", "all"] = "last"
    record: int | None = None  # verify: leave the slot as it is and write what the tokens do to it here

    def num_logits(self) -> int:
        return {"none": 0, "last": 1, "all": len(self.ids)}[self.logits]


class Fold(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [first, first + tokens) of a verified segment become part of its slot, which has consumed `start`."""

    record: int
    slot: int
    tokens: int
    start: int
    first: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    """Shapes of one row block and one state slot, in floats, in the order in which they are stored.

    A block is contiguous as [mla_layer][token][row_width]: row = normed latent, then the raw shared key. Behind them
    come the drafter's rows, [draft_layer][token][numbers of one layer]: `draft_width` floats a token in all.
    A slot is contiguous as [kda_layer][head][K][V], then conv history [kda_layer][q|k|v][conv-1][channels], oldest
    first, values before convolution and SiLU.
    """

    block_tokens: int
    num_mla_layers: int
    row_width: int
    num_kda_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    conv_history: int
    draft_width: int = 0

    @property
    def mla_floats(self) -> int:
        """The target's part of a block."""
        return self.num_mla_layers * self.block_tokens * self.row_width

    @property
    def draft_floats(self) -> int:
        """The drafter's part of a block, behind the target's."""
        return self.block_tokens * self.draft_width

    @property
    def block_floats(self) -> int:
        return self.mla_floats + self.draft_floats

    @property
    def recurrent_floats(self) -> int:
        return self.num_kda_layers * self.num_heads * self.key_dim * self.value_dim

    @property
    def conv_floats(self) -> int:
        channels = self.num_heads * (2 * self.key_dim + self.value_dim)
        return self.num_kda_layers * self.conv_history * channels

    @property
    def slot_floats(self) -> int:
        return self.recurrent_floats + self.conv_floats

    def record_floats(self, tokens: int) -> int:
        """What verifying up to `tokens` tokens of one sequence leaves behind: per head and token the normed key, the
        decay and the correction; per token the convolutions' raw inputs."""
        heads = self.num_heads * (2 * self.key_dim + self.value_dim)
        return 2 * self.num_kda_layers * tokens * heads


class Backend(Protocol):
    """Runs the network on a ragged batch. Implementations: `model.network` (torch), `model.native` (C++).

    `draft_width`: the drafter's floats a token in the row pool, which `forward` steps over. 0 without a drafter; set
    it before the pools are made. `embedding` and `lm_head` [vocab, hidden], as stored: drafters share them.
    """

    name: str
    config: ModelConfig
    draft_width: int
    embedding: torch.Tensor
    lm_head: torch.Tensor

    def layout(self, block_tokens: int) -> PoolLayout:
        """Of the pools that `forward` takes, the drafter's rows included."""
        ...

    def forward(
        self,
        segments: Sequence[Segment],
        rows: torch.Tensor,
        state: torch.Tensor,
        *,
        progress: LayerProgress | None = None,
    ) -> torch.Tensor:
        """Consume every segment's ids; append their rows and advance their slots in place; return logits.

        Shapes: rows [num_blocks, block_floats] fp32; state [num_slots, slot_floats] fp32 (both contiguous, CPU);
                result [sum of num_logits, vocab] fp32, in segment order.
        `progress`, if given, counts the KDA layers whose state is final for every segment that ends in this pass.
        A slot at start 0 is treated as zero whatever it holds, so a reused slot needs no clearing.
        A row's result depends on its own sequence alone, never on the batch, the chunking or the thread count
        (see `DESIGN.md`, numerics), within one backend.
        """
        ...


class Verifier(Backend, Protocol):
    """A backend that can also look ahead: judge drafted tokens without advancing, then advance by what is kept.

    One whose threads sleep between passes may offer `rouse()`, called where a verification or a draft is to come.
    """

    def tap(self, layers: Sequence[int]) -> None:
        """Choose the layers, ascending, whose running sums `forward` gives out in `taps`."""
        ...

    def forward(
        self,
        segments: Sequence[Segment],
        rows: torch.Tensor,
        state: torch.Tensor,
        *,
        progress: LayerProgress | None = None,
        records: torch.Tensor | None = None,
        taps: torch.Tensor | None = None,
        taps_at: int = 0,
    ) -> torch.Tensor:
        """A segment with a `record` is verified: its rows are written, its slot stays, and `fold` advances it later.
        Logits, rows and what a fold leaves have the bits of stepping.

        Shapes: records [num_records, record_floats(most tokens)] fp32; taps [room, num_taps, hidden] fp32 is filled,
                from row `taps_at` on and for each token, with the running sum (not the mix) after each tapped layer.
        """
        ...

    def fold(self, folds: Sequence[Fold], state: torch.Tensor, records: torch.Tensor) -> None:
        """Advance each slot by tokens of its record; zero tokens leave it as it was."""
        ...
