"""What the router asks of the fleet and of the cache index; `cluster.py` answers from membership and Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, Protocol

from moonrelay.ids import PrefixHash
from moonrelay.prefix import Fingerprint
from moonrelay.stubs.v1 import worker_pb2
from router.core import Worker, WorkerKey, WorkerRole

GAP_WAIT_S: Final = 10.0
ROLES: Final[tuple[WorkerRole, ...]] = ("prefill", "decode", "aggregated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What the index holds of a prompt. tokens + lost = prompt tokens; `hit` is None where tokens is 0.

    `seen_tokens`: how deep the prompt's blocks are or were known; `disk_tokens`: of the hit's; `kept`: how deep the
    bundles of it go that workers have themselves.
    """

    tokens: int
    matchable_tokens: int
    lost: tuple[tuple[str, int], ...]
    hit: worker_pb2.CacheHit | None
    seen_tokens: int = 0
    disk_tokens: int = 0
    kept: Mapping[WorkerKey, int] = field(default_factory=dict)


class Fleet(Protocol):
    """The workers that may be given requests now."""

    def workers(self) -> Sequence[Worker]: ...

    def present(self) -> Set[WorkerKey] | None:
        """All workers that show signs of life, draining ones too; None while nobody can say."""
        ...

    async def changed(self, until_s: float) -> None:
        """Return when the view has changed, or at `until_s` (the loop's clock)."""
        ...


class Gap:
    """When the fleet's last whole path went. Workers that only had to write themselves again are back in a second."""

    def __init__(self) -> None:
        self.whole = False
        self._since_s: float | None = None

    def note(self, whole: bool, now_s: float) -> None:
        """A fresh view, on the loop's clock."""
        if self.whole and not whole:
            self._since_s = now_s
        self.whole = whole

    def until_s(self, now_s: float) -> float:
        """Until when a path may well come back; now where there never was one."""
        return now_s if self._since_s is None else max(now_s, self._since_s + GAP_WAIT_S)


class Index(Protocol):
    async def match(
        self, root: bytes, hashes: Sequence[PrefixHash], fingerprint: Fingerprint, tenant: str, prompt_tokens: int
    ) -> Match:
        """One lookup. An index that cannot be asked is a miss for the reason `tier_error`, never an error."""
        ...


def cold(prompt_tokens: int, reason: str) -> Match:
    return Match(tokens=0, matchable_tokens=0, lost=((reason, prompt_tokens),), hit=None)
