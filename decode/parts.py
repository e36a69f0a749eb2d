"""A handoff's regions as its reader sees them: announced, read, verified; and does the manifest agree? Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from decode.manifest import Manifest, Region, StateRegions, refused
from model.batch import FLOAT_BYTES, PoolLayout
from moonrelay.errors import HandoffRefused, InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Regions to read next. `rows`: by the block's index in the prompt."""

    rows: tuple[tuple[int, Region], ...] = ()
    state: tuple[StateRegions, ...] = ()

    @property
    def nbytes(self) -> int:
        rows = sum(region.length for _, region in self.rows)
        return rows + sum(part.recurrent.length + part.conv.length for part in self.state)

    def __bool__(self) -> bool:
        return bool(self.rows or self.state)


class Regions:
    """Takes announcements in order, says what to read, and is `complete` once all of it was verified.

    Blocks [0, held_blocks) are here already and may be neither announced nor written. Every region must be exactly a
    block, or exactly its layers' place in one slot: a wrong offset is refused even where its checksum would agree.
    """

    def __init__(
        self, layout: PoolLayout, *, prompt_tokens: int, pools: Mapping[int, int], held_blocks: int = 0
    ) -> None:
        self._layout, self._pools = layout, pools
        self._block_bytes = layout.block_floats * FLOAT_BYTES
        self._slot_bytes = layout.slot_floats * FLOAT_BYTES
        layers = layout.num_kda_layers
        self._recurrent_bytes = layout.recurrent_floats * FLOAT_BYTES
        self._layer_recurrent = self._recurrent_bytes // layers if layers else 0
        self._layer_conv = layout.conv_floats * FLOAT_BYTES // layers if layers else 0
        self._num_blocks = -(-prompt_tokens // layout.block_tokens)
        self._held_blocks = held_blocks
        self._rows: list[Region] = []  # from the first block that is not held
        self._state: list[StateRegions] = []
        self._slot: tuple[int, int] | None = None  # pool and offset of the source's slot
        self._places: set[tuple[int, int]] = set()  # of rows
        self._rows_taken = self._state_taken = 0
        self._reading: Wanted | None = None
        self._closed = False

    def rows(self, first_block: int, regions: Sequence[Region]) -> HandoffRefused | None:
        """Announced blocks from `first_block` on."""
        if self._closed:
            return refused("parts", "rows after the manifest")
        if first_block < self._held_blocks:
            return refused("held", f"block {first_block} is announced, the first {self._held_blocks} are held")
        if first_block != self._next_block or first_block + len(regions) > self._num_blocks:
            return refused(
                "row_spans",
                f"{len(regions)} blocks from {first_block} on, expected {self._next_block} of {self._num_blocks}",
            )
        return next((refusal for region in regions if (refusal := self._add_row(region)) is not None), None)

    def state(self, part: StateRegions) -> HandoffRefused | None:
        """An announced group of layers."""
        if self._closed:
            return refused("parts", "state after the manifest")
        return self._add_state(part)

    def close(self, manifest: Manifest) -> HandoffRefused | None:
        """The manifest names every region: those announced must be the same, the others are wanted now."""
        if self._closed:
            return refused("parts", "a second manifest")
        expected = self._num_blocks - self._held_blocks
        if len(manifest.rows) != expected:
            return refused("row_spans", f"{len(manifest.rows)} row regions, expected {expected}")
        if list(manifest.rows[: len(self._rows)]) != self._rows:
            return refused("parts", "the manifest's rows are not those announced")
        if list(manifest.state[: len(self._state)]) != self._state:
            return refused("parts", "the manifest's state is not the one announced")
        for region in manifest.rows[len(self._rows) :]:
            if (refusal := self._add_row(region)) is not None:
                return refusal
        for part in manifest.state[len(self._state) :]:
            if (refusal := self._add_state(part)) is not None:
                return refusal
        if self._next_layer != self._layout.num_kda_layers:
            return refused("state_spans", f"state of {self._next_layer} of {self._layout.num_kda_layers} layers")
        self._closed = True
        return None

    def take(self) -> Wanted:
        """What is announced and was not read yet; empty while a read runs. `verified` must follow."""
        if self._reading is not None:
            return Wanted()
        first = self._held_blocks + self._rows_taken
        rows = tuple(enumerate(self._rows[self._rows_taken :], first))
        wanted = Wanted(rows=rows, state=tuple(self._state[self._state_taken :]))
        if wanted:
            self._reading = wanted
        return wanted

    def verified(self) -> None:
        """What was taken last has landed with its checksums."""
        if self._reading is None:
            raise InvariantError("regions verified that nobody read")
        self._rows_taken += len(self._reading.rows)
        self._state_taken += len(self._reading.state)
        self._reading = None

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def complete(self) -> bool:
        """The manifest agrees and every region of it was verified."""
        everything = self._rows_taken == len(self._rows) and self._state_taken == len(self._state)
        return self._closed and self._reading is None and everything

    @property
    def _next_block(self) -> int:
        return self._held_blocks + len(self._rows)

    @property
    def _next_layer(self) -> int:
        return self._state[-1].end_layer if self._state else 0

    def _add_row(self, region: Region) -> HandoffRefused | None:
        if region.length != self._block_bytes:
            return refused("row_spans", f"a row region of {region.length} bytes, expected {self._block_bytes}")
        if not self._inside(region) or region.offset % self._block_bytes:
            return refused("span_bounds", f"a row region at {region.offset} of pool {region.pool} is no block")
        if (region.pool, region.offset) in self._places:
            return refused("span_bounds", f"the block at {region.offset} of pool {region.pool} is named twice")
        self._places.add((region.pool, region.offset))
        self._rows.append(region)
        return None

    def _add_state(self, part: StateRegions) -> HandoffRefused | None:
        first, end = part.first_layer, part.end_layer
        if first != self._next_layer or not first < end <= self._layout.num_kda_layers:
            return refused("state_spans", f"layers [{first}, {end}), expected from {self._next_layer} on")
        lengths = (part.recurrent.length, part.conv.length)
        expected = ((end - first) * self._layer_recurrent, (end - first) * self._layer_conv)
        if lengths != expected:
            return refused("state_spans", f"state regions of {lengths} bytes, expected {expected}")
        slot = part.recurrent.offset - first * self._layer_recurrent
        conv = slot + self._recurrent_bytes + first * self._layer_conv
        place = (part.recurrent.pool, slot)
        fits = part.conv.offset == conv and part.conv.pool == part.recurrent.pool and slot % self._slot_bytes == 0
        if not fits or not self._inside(part.recurrent) or not self._inside(part.conv):
            return refused("span_bounds", f"layers [{first}, {end}) are not at their place in a slot")
        if self._slot is not None and place != self._slot:
            return refused("span_bounds", f"layers [{first}, {end}) are in another slot than those before")
        self._slot = place
        self._state.append(part)
        return None

    def _inside(self, region: Region) -> bool:
        return region.offset >= 0 and region.offset + region.length <= self._pools.get(region.pool, -1)
