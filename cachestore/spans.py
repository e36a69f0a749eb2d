"""Spans of leased entries as one word: what a lease's reply carries instead of thousands of messages."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from moonrelay.stubs.v1 import common_pb2

ARENA_POOL: Final = 0  # a node's memory, as readers name it
HOST, DISK = int(common_pb2.TIER_HOST), int(common_pb2.TIER_DISK)
_ARRAY: Final = np.dtype(
    [("pool", "<u4"), ("tier", "<u2"), ("last", "<u2"), ("offset", "<u8"), ("length", "<u8"), ("xxh3", "<u8")]
)
_RECORD: Final = struct.Struct("<IHHQQQ")
Record = tuple[int, int, int, int, int, int]  # pool, tier, last of its entry, offset, length, xxh3


def pack_entry(pool: int, regions: Sequence[tuple[int, int, int]]) -> bytes:
    """One entry's records, from (offset, length, xxh3) in order; found in memory."""
    if len(regions) == 1:
        return _RECORD.pack(pool, HOST, 1, *regions[0])
    final = len(regions) - 1
    return b"".join(_RECORD.pack(pool, HOST, i == final, *region) for i, region in enumerate(regions))


def mark_disk(packed: bytes, entries: Sequence[int]) -> bytes:
    """The same records, those of `entries` (by number) as found on disk."""
    records = np.frombuffer(packed, _ARRAY).copy()
    number = np.cumsum(records["last"]) - records["last"]
    records["tier"][np.isin(number, entries)] = DISK
    return records.tobytes()


def unpack(packed: bytes) -> list[Record]:
    """The records. Raises: ValueError where it is no whole number of entries."""
    if len(packed) % _RECORD.size:
        raise ValueError(f"{len(packed)} bytes are no whole number of records")
    records = list(_RECORD.iter_unpack(packed))
    if records and records[-1][2] != 1:
        raise ValueError("the last entry's records do not end")
    return records


class Columns(NamedTuple):
    """The same, field by field."""

    pools: Sequence[int]
    tiers: Sequence[int]
    lasts: Sequence[int]
    offsets: list[int]
    lengths: list[int]
    sums: list[int]

    def records(self) -> list[Record]:
        return list(zip(*self, strict=True))


def columns(packed: bytes) -> Columns:
    """The records' fields, without an object for each record. Raises: ValueError as `unpack`."""
    if len(packed) % _RECORD.size:
        raise ValueError(f"{len(packed)} bytes are no whole number of records")
    words = memoryview(packed).cast("Q").tolist()  # of little-endian machines, as all of ours are
    heads, count = words[0::4], len(packed) // _RECORD.size
    if count and heads.count(heads[0]) == count:  # as most often: one pool, one tier, each in one piece
        pool, tier, last = _head(heads[0])
        pools, tiers, lasts = [pool] * count, [tier] * count, [last] * count
    else:
        pools, tiers, lasts = (
            (list(column) for column in zip(*map(_head, heads), strict=True)) if count else ([],) * 3
        )
    if lasts and lasts[-1] != 1:
        raise ValueError("the last entry's records do not end")
    return Columns(pools, tiers, lasts, words[1::4], words[2::4], words[3::4])


def _head(word: int) -> tuple[int, int, int]:
    """Pool, tier, last."""
    return word & 0xFFFF_FFFF, word >> 32 & 0xFFFF, word >> 48
