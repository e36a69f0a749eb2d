"""The memory of row blocks and state slots: two tensors over page-aligned anonymous mappings.

A page that was never written costs nothing, so pools are sized for the worst case. The addresses stay put for the
life of the process: transports register the pools once, and peers on the host read them in place.
"""

from __future__ import annotations

import mmap

import torch

from engine.settings import EngineSettings
from model.batch import FLOAT_BYTES, PoolLayout
from moonrelay.errors import SettingsError


def mapped_floats(rows: int, width: int) -> torch.Tensor:
    """[rows, width] fp32 zeros, page-aligned, private to this process, backed by pages only where written.

    Raises: SettingsError if the address space cannot hold it.
    """
    num_bytes = rows * width * FLOAT_BYTES
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise SettingsError(f"a pool of {rows} x {width} floats cannot be mapped: {error.strerror}") from None
    return torch.frombuffer(mapping, dtype=torch.float32).view(rows, width)


class Pools:
    """`rows` [num_blocks, block_floats] and `state` [num_slots, slot_floats], fp32."""

    def __init__(self, layout: PoolLayout, settings: EngineSettings) -> None:
        self.layout = layout
        self.rows = mapped_floats(settings.num_blocks, layout.block_floats)
        self.state = mapped_floats(settings.num_slots, layout.slot_floats)

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + self.state.nbytes

    def copy_state(self, source: int, target: int) -> None:
        """A snapshot: the whole slot, recurrent state and conv history together."""
        self.state[target].copy_(self.state[source])
