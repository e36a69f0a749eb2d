"""What the cache bench gets: values of one size, one or many at a time, from sets that together outgrow a cache."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
WORKING_SET_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class Load:
    """`sets` different groups of `values` values; a get brings one group. Our stack stores a group as a bundle: the
    values as a chain of blocks, and a snapshot of one page at its end."""

    values: int
    value_bytes: int

    @property
    def name(self) -> str:
        size = f"{self.value_bytes // MIB} MiB" if self.value_bytes >= MIB else f"{self.value_bytes // KIB} KiB"
        return size if self.values == 1 else f"{self.values} x {size}"

    @property
    def bytes(self) -> int:
        return self.values * self.value_bytes

    @property
    def sets(self) -> int:
        return max(2, min(16, WORKING_SET_BYTES // self.bytes))

    @property
    def must_win(self) -> bool:
        """Where we have to be ahead of every peer: batches, and single values of 4 MiB and above."""
        return self.values > 1 or self.value_bytes >= 4 * MIB


LOADS = (
    Load(1, 64 * KIB),
    Load(1, MIB),
    Load(1, 4 * MIB),
    Load(1, 16 * MIB),
    Load(32, 64 * KIB),
    Load(32, MIB),
)
READ_SIZES = (64 * KIB, MIB, 4 * MIB, 16 * MIB)
LEASE_BLOCKS = 2_000
