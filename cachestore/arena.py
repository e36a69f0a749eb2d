"""Memory to register: anonymous pages that cost nothing until they are touched, huge ones where possible."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def ask_for_huge_pages(base: int, length: int) -> None:
    """Let pages that are touched from now on be huge: cross-memory attach pins page by page, and with 4 KiB pages a
    1 MiB pull takes twice as long. Advice only: a kernel without huge pages ignores it."""
    start = -(-base // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (base + length) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        _libc().madvise(start, end - start, mmap.MADV_HUGEPAGE)


class Arena:
    """`length` bytes of zeroed memory; lives as long as this object, which must outlive every transport."""

    def __init__(self, length: int) -> None:
        self._memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.length = length
        self.base = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))
        self.view = memoryview(self._memory)
        ask_for_huge_pages(self.base, length)
