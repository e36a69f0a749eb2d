"""The owner's half of a handoff: when may its memory be used again? Pure; time comes in as `now_ms`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from engine.worker.timing import Timing
from moonrelay.errors import InvariantError


class Phase(Enum):
    COMPUTING = "computing"  # no region was named to anybody
    LENDING = "lending"  # final regions are announced while the sequence writes others
    DECLINED = "declined"  # the follower gave up, its reads are over; the request goes on or ends
    PUBLISHED = "published"  # complete and leased: the reader may start reading anything of it
    EXPIRED = "expired"  # no new read may start; one that has may still run
    FREED = "freed"


class Event(Enum):
    LEND = "lend"  # regions are announced to the follower
    PUBLISH = "publish"
    ABANDON = "abandon"  # the request ended here: an error, a cancel, or a turn that needs no handoff
    RELEASE = "release"  # the reader says that it is done
    LEASE_END = "lease_end"
    TRANSFER_END = "transfer_end"  # the longest transfer since the lease's end is over


NEXT: dict[tuple[Phase, Event], Phase] = {  # an absent pair raises InvariantError
    (Phase.COMPUTING, Event.LEND): Phase.LENDING,
    (Phase.COMPUTING, Event.PUBLISH): Phase.PUBLISHED,
    (Phase.COMPUTING, Event.ABANDON): Phase.FREED,
    (Phase.COMPUTING, Event.RELEASE): Phase.DECLINED,
    (Phase.LENDING, Event.LEND): Phase.LENDING,
    (Phase.LENDING, Event.PUBLISH): Phase.PUBLISHED,
    (Phase.LENDING, Event.ABANDON): Phase.EXPIRED,  # the follower is told; its read may run
    (Phase.LENDING, Event.RELEASE): Phase.DECLINED,  # the sequence still writes: not free yet
    (Phase.DECLINED, Event.PUBLISH): Phase.FREED,
    (Phase.DECLINED, Event.ABANDON): Phase.FREED,
    (Phase.DECLINED, Event.RELEASE): Phase.DECLINED,
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
    """What a manifest tells its reader."""

    fence: int
    lease_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffStats:
    num_computing: int
    num_lending: int
    num_declined: int
    num_published: int
    num_expired: int
    leased_bytes: int
    released: int  # all since start
    lease_expired: int
    withdrawn: int
    stale_fences: int


@dataclass(slots=True, kw_only=True)
class _Handoff:
    fence: int
    phase: Phase = Phase.COMPUTING
    followed: bool = False
    nbytes: int = 0  # named to the reader so far
    deadline_ms: int | None = None  # of the running phase


ReleaseOutcome = Literal["freed", "declined", "already_free", "stale_fence"]
FollowOutcome = Literal["granted", "unknown", "stale_fence", "taken"]


class HandoffTable:
    """Every handoff whose memory this process still owns. An id leaves the table when its memory is free.

    `fence` rises with every `begin` of this process; a follower and an acknowledgement must name it.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._handoffs: dict[str, _Handoff] = {}
        self._last_fence = 0
        self._counts: Counter[str] = Counter()

    def begin(self, handoff_id: str) -> int:
        """A handoff that may be followed from now on; returns its fence."""
        if handoff_id in self._handoffs:
            raise InvariantError(f"handoff {handoff_id} began twice")
        self._last_fence += 1
        self._handoffs[handoff_id] = _Handoff(fence=self._last_fence)
        return self._last_fence

    def follow(self, handoff_id: str, *, fence: int) -> FollowOutcome:
        """One reader per handoff, for good: its acknowledgement alone ends the loan."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is None or handoff.phase in (Phase.DECLINED, Phase.EXPIRED):
            return "unknown"
        if handoff.fence != fence:
            self._counts["stale_fence"] += 1
            return "stale_fence"
        if handoff.followed:
            return "taken"
        handoff.followed = True
        return "granted"

    def lend(self, handoff_id: str, *, nbytes: int) -> bool:
        """`nbytes` more are announced; false where the follower has given up and nothing may be announced."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is None or handoff.phase not in (Phase.COMPUTING, Phase.LENDING):
            return False
        handoff.phase = step(handoff.phase, Event.LEND)
        handoff.nbytes += nbytes
        return True

    def publish(self, handoff_id: str, *, nbytes: int, now_ms: int) -> Lease | None:
        """Lend all `nbytes` of it; the lease runs from now. None: the reader had given up, free the memory now."""
        handoff = self._handoffs[handoff_id]
        if handoff.phase is Phase.DECLINED:
            self._end(handoff_id, Event.PUBLISH)
            return None
        handoff.phase = step(handoff.phase, Event.PUBLISH)
        lease = Lease(fence=handoff.fence, lease_ms=self._timing.lease_ms(nbytes))
        handoff.nbytes, handoff.deadline_ms = nbytes, now_ms + lease.lease_ms
        return lease

    def release(self, handoff_id: str, *, fence: int) -> ReleaseOutcome:
        """The reader's acknowledgement. Only "freed" means that the caller must free the memory, now."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is None:
            return "already_free"
        if handoff.fence != fence:  # of an older handoff, or a guess
            self._counts["stale_fence"] += 1
            return "stale_fence"
        first = handoff.phase is not Phase.DECLINED
        self._counts["released"] += first
        return "freed" if self._end(handoff_id, Event.RELEASE) else "declined"

    def abandon(self, handoff_id: str, *, now_ms: int) -> bool:
        """The request ended on this side; true where the memory is to be freed now."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is None:
            return False
        if handoff.phase is Phase.LENDING:
            self._counts["withdrawn"] += 1
            handoff.deadline_ms = now_ms + self._timing.transfer_ms(handoff.nbytes)
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
            num_lending=phases[Phase.LENDING],
            num_declined=phases[Phase.DECLINED],
            num_published=phases[Phase.PUBLISHED],
            num_expired=phases[Phase.EXPIRED],
            leased_bytes=sum(h.nbytes for h in self._handoffs.values()),
            released=self._counts["released"],
            lease_expired=self._counts["lease_expired"],
            withdrawn=self._counts["withdrawn"],
            stale_fences=self._counts["stale_fence"],
        )

    def check(self) -> None:
        """Fences are distinct and none is ahead; what waits for time alone has an end."""
        fences = [h.fence for h in self._handoffs.values()]
        if len(set(fences)) != len(fences) or any(fence > self._last_fence for fence in fences):
            raise InvariantError("handoff fences are not distinct and rising")
        for handoff_id, handoff in self._handoffs.items():
            timed = handoff.phase in (Phase.PUBLISHED, Phase.EXPIRED)
            if handoff.phase is Phase.FREED or timed != (handoff.deadline_ms is not None):
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
