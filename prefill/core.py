"""The owner's half of a handoff: when may its memory be used again? Pure; time comes in as `now_ms`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from engine.worker.timing import Timing
from moonrelay.errors import InvariantError


class Phase(Enum):
    COMPUTING = "computing"  # nobody outside knows an address
    PUBLISHED = "published"  # leased: the reader may start reading
    EXPIRED = "expired"  # the lease is over; a read that started under it may still run
    FREED = "freed"


class Event(Enum):
    PUBLISH = "publish"
    ABANDON = "abandon"  # the request ended here: an error, a cancel, or a turn that needs no handoff
    RELEASE = "release"  # the reader says that it is done
    LEASE_END = "lease_end"
    TRANSFER_END = "transfer_end"  # the longest transfer since the lease's end is over


NEXT: dict[tuple[Phase, Event], Phase] = {  # an absent pair raises InvariantError
    (Phase.COMPUTING, Event.PUBLISH): Phase.PUBLISHED,
    (Phase.COMPUTING, Event.ABANDON): Phase.FREED,
    (Phase.PUBLISHED, Event.ABANDON): Phase.PUBLISHED,  # the manifest is out: only its reader or time can end it
    (Phase.PUBLISHED, Event.RELEASE): Phase.FREED,
    (Phase.PUBLISHED, Event.LEASE_END): Phase.EXPIRED,
    (Phase.EXPIRED, Event.ABANDON): Phase.EXPIRED,
    (Phase.EXPIRED, Event.RELEASE): Phase.FREED,
    (Phase.EXPIRED, Event.TRANSFER_END): Phase.FREED,
    (Phase.FREED, Event.ABANDON): Phase.FREED,
    (Phase.FREED, Event.RELEASE): Phase.FREED,  # a repeated acknowledgement
}


def step(phase: Phase, event: Event) -> Phase:
    try:
        return NEXT[phase, event]
    except KeyError:
        raise InvariantError(f"handoff: {event.value} while {phase.value}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """What a manifest tells its reader. `fence` rises with every publish of this process."""

    fence: int
    lease_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffStats:
    num_computing: int
    num_published: int
    num_expired: int
    leased_bytes: int
    released: int  # all since start
    lease_expired: int
    stale_fences: int


@dataclass(slots=True, kw_only=True)
class _Handoff:
    phase: Phase = Phase.COMPUTING
    fence: int | None = None
    nbytes: int = 0
    deadline_ms: int | None = None  # of the running phase


ReleaseOutcome = Literal["freed", "already_free", "stale_fence"]


class HandoffTable:
    """Every handoff whose memory this process still owns. An id leaves the table when its memory is free."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._handoffs: dict[str, _Handoff] = {}
        self._last_fence = 0
        self._counts: Counter[str] = Counter()

    def begin(self, handoff_id: str) -> None:
        if handoff_id in self._handoffs:
            raise InvariantError(f"handoff {handoff_id} began twice")
        self._handoffs[handoff_id] = _Handoff()

    def publish(self, handoff_id: str, *, nbytes: int, now_ms: int) -> Lease:
        """Lend the memory out. The lease runs from now."""
        handoff = self._handoffs[handoff_id]
        handoff.phase = step(handoff.phase, Event.PUBLISH)
        self._last_fence += 1
        lease = Lease(fence=self._last_fence, lease_ms=self._timing.lease_ms(nbytes))
        handoff.fence, handoff.nbytes = lease.fence, nbytes
        handoff.deadline_ms = now_ms + lease.lease_ms
        return lease

    def release(self, handoff_id: str, *, fence: int) -> ReleaseOutcome:
        """The reader's acknowledgement. Only "freed" means that the caller must free the memory, now."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is None:
            return "already_free"
        if handoff.fence != fence:  # of an older handoff, or a guess while nothing is published
            self._counts["stale_fence"] += 1
            return "stale_fence"
        self._end(handoff_id, Event.RELEASE)
        self._counts["released"] += 1
        return "freed"

    def abandon(self, handoff_id: str) -> bool:
        """The request ended on this side; true where the memory is to be freed now."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is None:
            return False
        return self._end(handoff_id, Event.ABANDON)

    def expire(self, now_ms: int) -> list[str]:
        """Move on what time has ended; returns the ids whose memory is to be freed now."""
        freed = []
        for handoff_id, handoff in list(self._handoffs.items()):
            while handoff.deadline_ms is not None and handoff.deadline_ms <= now_ms:
                if handoff.phase is Phase.PUBLISHED:
                    self._counts["lease_expired"] += 1
                    handoff.phase = step(handoff.phase, Event.LEASE_END)
                    handoff.deadline_ms += self._timing.transfer_ms(handoff.nbytes)
                else:
                    self._end(handoff_id, Event.TRANSFER_END)
                    freed.append(handoff_id)
                    break
        return freed

    def next_deadline_ms(self) -> int | None:
        """When `expire` has to be called next."""
        return min((h.deadline_ms for h in self._handoffs.values() if h.deadline_ms is not None), default=None)

    def phase(self, handoff_id: str) -> Phase:
        """FREED for every id that is not, or no longer, in the table."""
        handoff = self._handoffs.get(handoff_id)
        return Phase.FREED if handoff is None else handoff.phase

    def __len__(self) -> int:
        return len(self._handoffs)

    def stats(self) -> HandoffStats:
        phases = Counter(h.phase for h in self._handoffs.values())
        return HandoffStats(
            num_computing=phases[Phase.COMPUTING],
            num_published=phases[Phase.PUBLISHED],
            num_expired=phases[Phase.EXPIRED],
            leased_bytes=sum(h.nbytes for h in self._handoffs.values()),
            released=self._counts["released"],
            lease_expired=self._counts["lease_expired"],
            stale_fences=self._counts["stale_fence"],
        )

    def check(self) -> None:
        """Fences are distinct and none is ahead; what is lent has an end."""
        fences = [h.fence for h in self._handoffs.values() if h.fence is not None]
        if len(set(fences)) != len(fences) or any(fence > self._last_fence for fence in fences):
            raise InvariantError("handoff fences are not distinct and rising")
        for handoff_id, handoff in self._handoffs.items():
            lent = handoff.phase in (Phase.PUBLISHED, Phase.EXPIRED)
            if handoff.phase is Phase.FREED or lent != (handoff.deadline_ms is not None):
                raise InvariantError(
                    f"handoff {handoff_id} is {handoff.phase.value} with deadline {handoff.deadline_ms}"
                )

    def _end(self, handoff_id: str, event: Event) -> bool:
        handoff = self._handoffs[handoff_id]
        handoff.phase = step(handoff.phase, event)
        if handoff.phase is Phase.FREED:
            del self._handoffs[handoff_id]
            return True
        return False
