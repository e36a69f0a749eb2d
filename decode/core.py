"""The reader's half of a handoff: when may pulled bytes be adopted, and when is landing memory free again?

Pure; time comes in as `now_ms`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from moonrelay.errors import InvariantError


class Phase(Enum):
    RESERVED = "reserved"  # memory set aside, nothing asked for
    PULLING = "pulling"  # our own reads write into it
    ADOPTED = "adopted"  # verified; the engine's until the turn ends
    QUARANTINED = "quarantined"  # given up, but our own read may still land
    RELEASED = "released"  # free


class Event(Enum):
    PUBLISHED = "published"  # an acceptable manifest came
    VERIFIED = "verified"  # every region landed in time with its checksum
    REFUSED = "refused"  # the manifest, a checksum or a read failed; no read is running
    DEADLINE = "deadline"  # the time for the phase is over
    CANCELLED = "cancelled"  # the caller went away
    TRANSFER_ENDED = "transfer_ended"  # the transport says that our late read is over
    FINISHED = "finished"  # the engine has ended the turn


NEXT: dict[tuple[Phase, Event], Phase] = {  # an absent pair raises InvariantError
    (Phase.RESERVED, Event.PUBLISHED): Phase.PULLING,
    (Phase.RESERVED, Event.REFUSED): Phase.RELEASED,
    (Phase.RESERVED, Event.DEADLINE): Phase.RELEASED,
    (Phase.RESERVED, Event.CANCELLED): Phase.RELEASED,
    (Phase.PULLING, Event.VERIFIED): Phase.ADOPTED,
    (Phase.PULLING, Event.REFUSED): Phase.RELEASED,
    (Phase.PULLING, Event.DEADLINE): Phase.QUARANTINED,  # our own read may still land
    (Phase.PULLING, Event.CANCELLED): Phase.QUARANTINED,
    (Phase.QUARANTINED, Event.TRANSFER_ENDED): Phase.RELEASED,
    (Phase.QUARANTINED, Event.DEADLINE): Phase.QUARANTINED,  # only the transport can end it
    (Phase.QUARANTINED, Event.CANCELLED): Phase.QUARANTINED,
    (Phase.ADOPTED, Event.FINISHED): Phase.RELEASED,
    (Phase.ADOPTED, Event.DEADLINE): Phase.ADOPTED,  # moot
    (Phase.RELEASED, Event.PUBLISHED): Phase.RELEASED,  # late
    (Phase.RELEASED, Event.REFUSED): Phase.RELEASED,
    (Phase.RELEASED, Event.DEADLINE): Phase.RELEASED,
    (Phase.RELEASED, Event.CANCELLED): Phase.RELEASED,
}


def step(phase: Phase, event: Event) -> Phase:
    try:
        return NEXT[phase, event]
    except KeyError:
        raise InvariantError(f"reservation: {event.value} while {phase.value}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderStats:
    num_reserved: int
    num_pulling: int
    num_adopted: int
    num_quarantined: int
    quarantined_bytes: int
    expired: int  # reservations ended by their TTL, all since start


@dataclass(slots=True, kw_only=True)
class _Reader:
    phase: Phase = Phase.RESERVED
    prompt_tokens: int
    nbytes: int
    deadline_ms: int | None


class ReaderTable:
    """Every reservation whose memory is not free. An id leaves the table when it is released."""

    def __init__(self) -> None:
        self._readers: dict[str, _Reader] = {}
        self._expired = 0

    def reserve(self, reservation_id: str, *, prompt_tokens: int, nbytes: int, ttl_ms: int, now_ms: int) -> None:
        """`nbytes` is what the landing memory holds, for the quarantine's account."""
        if reservation_id in self._readers:
            raise InvariantError(f"reservation {reservation_id} made twice")
        self._readers[reservation_id] = _Reader(
            prompt_tokens=prompt_tokens, nbytes=nbytes, deadline_ms=now_ms + ttl_ms
        )

    def step(self, reservation_id: str, event: Event) -> Phase:
        """Move one reservation on; on RELEASED out of another phase the caller frees the memory, once.

        An id that is not in the table is one that was released: late events leave it so.
        """
        reader = self._readers.get(reservation_id)
        if reader is None:
            return step(Phase.RELEASED, event)
        reader.phase = step(reader.phase, event)
        if reader.phase is not Phase.RESERVED:
            reader.deadline_ms = None  # from here the read's own deadline counts
        if reader.phase is Phase.RELEASED:
            del self._readers[reservation_id]
        return reader.phase

    def phase(self, reservation_id: str) -> Phase:
        reader = self._readers.get(reservation_id)
        return Phase.RELEASED if reader is None else reader.phase

    def prompt_tokens(self, reservation_id: str) -> int:
        return self._readers[reservation_id].prompt_tokens

    def expire(self, now_ms: int) -> list[str]:
        """Release what nobody came for; returns the ids whose memory is to be freed now."""
        late = [i for i, r in self._readers.items() if r.deadline_ms is not None and r.deadline_ms <= now_ms]
        for reservation_id in late:
            self.step(reservation_id, Event.DEADLINE)
        self._expired += len(late)
        return late

    def next_deadline_ms(self) -> int | None:
        """When `expire` has to be called next."""
        return min((r.deadline_ms for r in self._readers.values() if r.deadline_ms is not None), default=None)

    def __len__(self) -> int:
        return len(self._readers)

    def stats(self) -> ReaderStats:
        phases = Counter(r.phase for r in self._readers.values())
        quarantined = sum(r.nbytes for r in self._readers.values() if r.phase is Phase.QUARANTINED)
        return ReaderStats(
            num_reserved=phases[Phase.RESERVED],
            num_pulling=phases[Phase.PULLING],
            num_adopted=phases[Phase.ADOPTED],
            num_quarantined=phases[Phase.QUARANTINED],
            quarantined_bytes=quarantined,
            expired=self._expired,
        )

    def check(self) -> None:
        """Only a waiting reservation has a deadline here, and a released one is not kept."""
        for reservation_id, reader in self._readers.items():
            waiting = reader.phase is Phase.RESERVED
            if reader.phase is Phase.RELEASED or waiting != (reader.deadline_ms is not None):
                raise InvariantError(
                    f"reservation {reservation_id}: {reader.phase.value}, deadline {reader.deadline_ms}"
                )
