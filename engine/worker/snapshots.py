"""Snapshots as a worker stores them: in place in their slots, in the form that its fingerprint names."""

from __future__ import annotations

import torch

from engine.worker.memory import STATE_POOL, Extent
from model.batch import FLOAT_BYTES, PoolLayout
from model.ops.snapshot import SnapshotDtype, packed


class SnapshotForm:
    """`state` is the engine's slots. Only slots of snapshots are encoded, never one that a sequence goes on with.

    The stored form takes the beginning of its slot: it saves transfers and the nodes' memory, not the worker's own.
    """

    def __init__(self, state: torch.Tensor, layout: PoolLayout, dtype: SnapshotDtype) -> None:
        self._state, self._layout, self._dtype = state, layout, dtype
        self._regions = packed.region_bytes(layout, dtype)
        self.nbytes = sum(self._regions)
        self.exact = dtype == "fp32"

    def extent(self, slot: int) -> Extent:
        """Where the stored form of a snapshot lies, or lands."""
        return Extent(STATE_POOL, slot * self._layout.slot_floats * FLOAT_BYTES, self.nbytes)

    def parts(self, slot: int) -> list[Extent]:
        """The regions that are offered, each with a checksum of its own."""
        parts, offset = [], self.extent(slot).offset
        for length in self._regions:
            parts.append(Extent(STATE_POOL, offset, length))
            offset += length
        return parts

    def encode(self, slot: int) -> None:
        """A state, as it was copied, becomes a snapshot to be stored. Once. From any thread."""
        packed.encode(self._state[slot], self._layout, self._dtype)

    def decode(self, slot: int) -> None:
        """A stored form that landed in `slot` becomes a state that a sequence can go on from."""
        packed.decode(self._state[slot], self._layout, self._dtype)

    def restore(self, source: int, target: int) -> None:
        """The state of the stored snapshot `source`, into another slot."""
        if self.exact:
            self._state[target].copy_(self._state[source])
        else:
            bytes_ = self._state.view(torch.uint8)
            bytes_[target, : self.nbytes] = bytes_[source, : self.nbytes]
            self.decode(target)
