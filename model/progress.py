"""How far the running pass is, layer by layer, for whoever wants a layer's state before the pass has ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Final

LAYER_BITS: Final = 16  # of the cell's value; above them the pass's number


class _Cell(ctypes.Structure):
    """Shared with `network.cpp`, which adds 1 to `value` after each KDA layer of the pass's last tile and, while
    `watchers` is not 0, signals `fd`."""

    _fields_ = (("value", ctypes.c_int64), ("watchers", ctypes.c_int32), ("fd", ctypes.c_int32))


class LayerProgress:
    """One writer (the thread that runs passes), any number of readers. An aligned 64-bit cell needs no lock.

    What a layer wrote before it was counted is complete: the count is stored with release order.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._cell = _Cell(0, 0, self.fd)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._cell)

    def begin(self, number: int) -> None:
        """Pass `number`, higher than any before it, begins. The writer's."""
        self._cell.value = number << LAYER_BITS

    def layer_done(self) -> None:
        """One more KDA layer of this pass has written its state. The writer's, where it is not C++."""
        self._cell.value += 1
        if self._cell.watchers:
            os.eventfd_write(self.fd, 1)

    def layers(self, number: int) -> int | None:
        """How many KDA layers pass `number` has left; None once it is over, 0 before it began."""
        value = int(self._cell.value)
        running = value >> LAYER_BITS
        if running != number:
            return 0 if running < number else None
        return value & ((1 << LAYER_BITS) - 1)

    def watch(self, change: int) -> None:
        """`change` (1 or -1) readers more want `fd` signalled. One thread only."""
        self._cell.watchers += change

    def clear(self) -> None:
        """Take the signals that have come."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        os.close(self.fd)
