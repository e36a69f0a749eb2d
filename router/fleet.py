"""What the router asks of the fleet and of the cache index; `cluster.py` answers from membership and Redis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from moonrelay.ids import PrefixHash
from moonrelay.stubs.v1 import worker_pb2
from router.core import Worker, WorkerRole

ROLES: Final[tuple[WorkerRole, ...]] = ("prefill", "decode", "aggregated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What the index holds of a prompt. tokens + lost = prompt tokens; `hit` is None where tokens is 0."""

    tokens: int
    matchable_tokens: int
    lost: tuple[tuple[str, int], ...]
    hit: worker_pb2.CacheHit | None


class Fleet(Protocol):
    """The workers that may be given requests now."""

    def workers(self) -> Sequence[Worker]: ...

    async def changed(self, until_s: float) -> None:
        """Return when the view has changed, or at `until_s` (the loop's clock)."""
        ...


class Index(Protocol):
    async def match(self, root: bytes, hashes: Sequence[PrefixHash], block_tokens: int, prompt_tokens: int) -> Match:
        """One lookup. An index that cannot be asked is a miss for the reason `tier_error`, never an error."""
        ...


def cold(prompt_tokens: int, reason: str) -> Match:
    return Match(tokens=0, matchable_tokens=0, lost=((reason, prompt_tokens),), hit=None)
