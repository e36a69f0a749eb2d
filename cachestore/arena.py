"""Memory to register: anonymous pages that cost nothing until they are touched."""

from __future__ import annotations

import ctypes
import mmap


class Arena:
    """`length` bytes of zeroed memory; lives as long as this object, which must outlive every transport.

    Huge pages are asked for: cross-memory attach pins page by page, and with 4 KiB pages a 1 MiB pull takes twice as
    long.
    """

    def __init__(self, length: int) -> None:
        self._memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.length = length
        self.base = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))
        self.view = memoryview(self._memory)
