"""How long a transfer may take and how long memory is lent for it: pure functions of the bytes.

All durations are in ms and are counted by the clock of the process that owns them; they never travel as instants.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonrelay.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """`transfer_floor_ms` covers messages and scheduling; bytes are charged at a bandwidth that only a broken link
    falls below; `lease_floor_ms` is the shortest lease."""

    transfer_floor_ms: int
    transfer_min_bytes_per_s: int
    lease_floor_ms: int

    def __post_init__(self) -> None:
        if min(self.transfer_floor_ms, self.transfer_min_bytes_per_s, self.lease_floor_ms) < 1:
            raise SettingsError(
                "handoff_timeout_ms, transfer_min_bytes_per_s, handoff_lease_ms: expected at least 1, found "
                f"{self.transfer_floor_ms}, {self.transfer_min_bytes_per_s}, {self.lease_floor_ms}"
            )
        if self.lease_floor_ms < 2 * self.transfer_floor_ms:
            raise SettingsError(
                "handoff_lease_ms must cover a read that starts late and takes its whole deadline: "
                f"at least 2 x handoff_timeout_ms = {2 * self.transfer_floor_ms}, found {self.lease_floor_ms}"
            )

    def transfer_ms(self, nbytes: int) -> int:
        """The longest a read of `nbytes` may take; past it the reader gives up and quarantines."""
        return self.transfer_floor_ms + -(-1000 * nbytes // self.transfer_min_bytes_per_s)

    def lease_ms(self, nbytes: int) -> int:
        """How long the owner promises to keep `nbytes`: a read may start late by a whole read's time."""
        return self.lease_floor_ms + 2 * (self.transfer_ms(nbytes) - self.transfer_floor_ms)
