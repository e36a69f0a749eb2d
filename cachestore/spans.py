"""Spans of leased entries as one word: what a lease's reply carries instead of thousands of messages."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from moonrelay.stubs.v1 import common_pb2

ARENA_POOL: Final = 0  # a node's memory, as readers name it
HOST, DISK = int(common_pb2.TIER_HOST), int(common_pb2.TIER_DISK)
RECORD: Final = np.dtype(
    [("pool", "<u4"), ("tier", "<u2"), ("last", "<u2"), ("offset", "<u8"), ("length", "<u8"), ("xxh3", "<u8")]
)
_PACK: Final = struct.Struct("<IHHQQQ").pack


def pack_entry(pool: int, regions: Sequence[tuple[int, int, int]]) -> bytes:
    """One entry's records, from (offset, length, xxh3) in order; found in memory."""
    if len(regions) == 1:
        return _PACK(pool, HOST, 1, *regions[0])
    final = len(regions) - 1
    return b"".join(_PACK(pool, HOST, i == final, *region) for i, region in enumerate(regions))


def mark_disk(packed: bytes, entries: Sequence[int]) -> bytes:
    """The same records, those of `entries` (by number) as found on disk."""
    records = np.frombuffer(packed, RECORD).copy()
    number = np.cumsum(records["last"]) - records["last"]
    records["tier"][np.isin(number, entries)] = DISK
    return records.tobytes()


def unpack(packed: bytes) -> npt.NDArray[np.void]:
    """The records. Raises: ValueError where it is no whole number of entries."""
    records = np.frombuffer(packed, RECORD)
    if len(records) and records["last"][-1] != 1:
        raise ValueError("the last entry's records do not end")
    return records
