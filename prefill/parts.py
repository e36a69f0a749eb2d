"""Which regions of a handoff are final, and when enough of them are to be worth a message. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

# A message and a read of its own cost both sides some tenths of a millisecond, in which 4 MiB move on one host.
PART_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffShape:
    """Units: blocks and KDA layers; `block_tokens` tokens a block; bytes of one of each (a layer's both parts)."""

    block_tokens: int
    prompt_tokens: int
    block_bytes: int
    num_layers: int
    layer_bytes: int

    @property
    def num_blocks(self) -> int:
        """The last one may be partly filled."""
        return -(-self.prompt_tokens // self.block_tokens)


@dataclass(slots=True, kw_only=True)
class Announcer:
    """Cuts what has become final into parts, in order, each named once. What is left comes with the manifest."""

    shape: HandoffShape
    part_bytes: int = PART_BYTES
    next_block: int = field(default=0, init=False)
    next_layer: int = field(default=0, init=False)

    def hold(self, num_blocks: int) -> None:
        """The follower has blocks [0, num_blocks): they are not announced from now on."""
        self.next_block = max(self.next_block, num_blocks)

    def rows(self, tokens_done: int) -> range:
        """The next part's blocks once `tokens_done` tokens were consumed; empty where they are not worth one yet.

        Only full blocks: the one in work still changes.
        """
        end = tokens_done // self.shape.block_tokens
        if (end - self.next_block) * self.shape.block_bytes < max(1, self.part_bytes):
            return range(0)
        first, self.next_block = self.next_block, end
        return range(first, end)

    def layers(self, layers_done: int) -> range:
        """The next part's KDA layers once the prompt's last pass has left `layers_done` of them; maybe empty.

        The last layers go with the manifest, which follows at once.
        """
        end = min(layers_done, self.shape.num_layers)
        ready = (end - self.next_layer) * self.shape.layer_bytes
        if ready < max(1, self.part_bytes) or end == self.shape.num_layers:
            return range(0)
        first, self.next_layer = self.next_layer, end
        return range(first, end)
