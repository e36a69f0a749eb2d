"""How long a read may take: from its bytes and from what reads from that peer have taken before. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from engine.worker.timing import Timing

GRACE_MS: Final = 500  # messages, scheduling, a peer that is busy for a moment
SLACK: Final = 8  # times the expected duration: a link shared by that many readers is slow, not broken
WEIGHT: Final = 0.25  # of the newest measurement
SAMPLE_BYTES_MIN: Final = 1 << 20  # shorter reads measure messages, not the link
PEERS_MAX: Final = 1024


class Bandwidth:
    """A moving average per peer and epoch. Its deadlines are never longer than the owner expects (`Timing`)."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._bytes_per_s: OrderedDict[tuple[str, int], float] = OrderedDict()

    def observe(self, peer: tuple[str, int], nbytes: int, seconds: float) -> None:
        """A verified read. Short ones are ignored."""
        if nbytes < SAMPLE_BYTES_MIN or seconds <= 0:
            return
        sample = nbytes / seconds
        known = self._bytes_per_s.pop(peer, sample)
        self._bytes_per_s[peer] = known + WEIGHT * (sample - known)
        if len(self._bytes_per_s) > PEERS_MAX:
            self._bytes_per_s.popitem(last=False)

    def slow(self, peer: tuple[str, int]) -> None:
        """A read passed its deadline: what was measured before no longer counts."""
        self._bytes_per_s.pop(peer, None)

    def bytes_per_s(self, peer: tuple[str, int]) -> float | None:
        """The average, at least the floor below which a link counts as broken; None before the first measurement."""
        known = self._bytes_per_s.get(peer)
        return None if known is None else max(known, float(self._timing.transfer_min_bytes_per_s))

    def read_ms(self, peer: tuple[str, int], nbytes: int) -> int:
        """The longest a read of `nbytes` may take."""
        longest, known = self._timing.transfer_ms(nbytes), self.bytes_per_s(peer)
        if known is None:
            return longest
        return min(longest, GRACE_MS + int(1000 * SLACK * nbytes / known))
