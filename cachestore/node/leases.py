"""Whom the node promised which entries, and until when. Pure; `now_ms` is the node's own clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from cachestore.entries import Key

LEASES_MAX = 4_096


class Lease(NamedTuple):
    id: str
    fence: int
    keys: tuple[Key, ...]
    ttl_ms: int
    expires_ms: int


class Leases:
    """Timed rights to read. A last transfer may outlive one: the keys of an expired lease stay covered until then."""

    def __init__(self, longest_transfer_ms: int) -> None:
        self._longest_transfer_ms = longest_transfer_ms
        self._leases: dict[str, Lease] = {}
        self._quiet: list[tuple[int, int, tuple[Key, ...]]] = []  # until when, fence, keys of an expired lease
        self._fence = 0

    def __len__(self) -> int:
        return len(self._leases)

    def next_fence(self) -> int:
        """A number above every one before."""
        self._fence += 1
        return self._fence

    def grant(self, keys: Sequence[Key], ttl_ms: int, now_ms: int) -> Lease | None:
        """A lease of `keys`; None when there are too many."""
        if len(self._leases) >= LEASES_MAX:
            return None
        fence = self.next_fence()
        lease = Lease(f"lease-{fence}", fence, tuple(keys), ttl_ms, now_ms + ttl_ms)
        self._leases[lease.id] = lease
        return lease

    def renew(self, lease_id: str, fence: int, now_ms: int) -> Lease | None:
        """The lease with its time begun anew; None where it has ended or the fence is another's."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.fence != fence or lease.expires_ms <= now_ms:
            return None
        self._leases[lease_id] = lease._replace(expires_ms=now_ms + lease.ttl_ms)
        return self._leases[lease_id]

    def release(self, lease_id: str, fence: int) -> Lease | None:
        """The reader has finished: the lease that ended; None where there is no such lease. Idempotent."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.fence != fence:
            return None
        return self._leases.pop(lease_id)

    def expire(self, now_ms: int) -> int:
        """End leases whose time is over; how many. Their keys stay covered for the longest transfer."""
        over = [lease for lease in self._leases.values() if lease.expires_ms <= now_ms]
        for lease in over:
            del self._leases[lease.id]
            heappush(self._quiet, (lease.expires_ms + self._longest_transfer_ms, lease.fence, lease.keys))
        return len(over)

    def take_quiet(self, now_ms: int) -> list[Key]:
        """Keys of expired leases whose last transfer has ended; once for each lease that named them."""
        keys: list[Key] = []
        while self._quiet and self._quiet[0][0] <= now_ms:
            keys += heappop(self._quiet)[2]
        return keys

    def oldest_fence(self) -> int | None:
        """Of the leases in force and of last transfers; None where there are none."""
        fences = [lease.fence for lease in self._leases.values()] + [fence for _, fence, _ in self._quiet]
        return min(fences, default=None)

    def covered(self) -> Counter[Key]:
        """How many leases, or last transfers, cover each key."""
        groups = [lease.keys for lease in self._leases.values()] + [keys for _, _, keys in self._quiet]
        return Counter(key for keys in groups for key in keys)
