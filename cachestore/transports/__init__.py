"""Moving bytes between processes: the receiver pulls, by NIXL, our own TCP, or in memory for tests."""

from cachestore.transports.base import (
    Batch,
    ChecksumMismatch,
    Landing,
    Read,
    ReadHandle,
    ReadReport,
    ReadTimeout,
    Slice,
    Source,
    Transport,
)
from cachestore.transports.memory import MemoryFabric
from cachestore.transports.select import TransportSet

__all__ = [
    "Batch", "ChecksumMismatch", "Landing", "MemoryFabric", "Read", "ReadHandle", "ReadReport", "ReadTimeout",
    "Slice", "Source", "Transport", "TransportSet",
]  # fmt: skip
