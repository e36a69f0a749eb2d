"""What a fetch answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from moonrelay.membership import Member

FetchMiss = Literal["stale_index", "tier_error", "fingerprint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """So many of the restored blocks came from this node, where it had them in memory or on disk."""

    node: Member
    blocks: int
    on_disk: bool


class FetchReport(NamedTuple):
    """What landed: `tokens` of the hit, all unless `miss_reason` says why not.

    `xxh3`: each restored block's checksum, None where it came in pieces. `bytes`, `transport` and the seconds are of
    the attempt that succeeded. From token `draft_first` on every block has the asked drafter's rows too, with
    checksums `draft_xxh3`; `draft_refused` blocks more should have had them by their lease.
    """

    tokens: int = 0
    miss_reason: FetchMiss | None = None
    detail: str = ""
    bytes: int = 0
    transport: str = ""
    note: str | None = None
    pull_seconds: float = 0.0
    verify_seconds: float = 0.0
    xxh3: tuple[int | None, ...] = ()
    places: tuple[Place, ...] = ()
    draft_first: int = 0
    draft_xxh3: tuple[int | None, ...] = ()
    draft_refused: int = 0
