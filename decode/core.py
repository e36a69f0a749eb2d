"""The reader's half of a handoff: when may read bytes be adopted, and when is landing memory free again?

Pure; time comes in as `now_ms`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from moonrelay.errors import InvariantError


class Phase(Enum):
    RESERVED = "reserved"  # memory set aside, nothing asked for
    FOLLOWING = "following"  # regions are announced; no read of ours is running
    PULLING = "pulling"  # our own read writes into it
    ADOPTED = "adopted"  # verified; the engine's until the turn ends
    QUARANTINED = "quarantined"  # given up, but our own read may still land
    RELEASED = "released"  # free


class Event(Enum):
    OPENED = "opened"  # an acceptable handoff was opened, or its manifest came
    READ_STARTED = "read_started"
    READ_ENDED = "read_ended"  # no byte of it can land any more, however it ended
    COMPLETE = "complete"  # every region landed in time with its checksum, and the manifest agrees
    REFUSED = "refused"  # a promise, a checksum or a read failed, or the owner withdrew
    DEADLINE = "deadline"  # the time for the phase is over
    CANCELLED = "cancelled"  # the caller went away
    FINISHED = "finished"  # the engine has ended the turn


GIVEN_UP = (Event.REFUSED, Event.DEADLINE, Event.CANCELLED)
NEXT: dict[tuple[Phase, Event], Phase] = {  # an absent pair raises InvariantError
    (Phase.RESERVED, Event.OPENED): Phase.FOLLOWING,
    **{(Phase.RESERVED, event): Phase.RELEASED for event in GIVEN_UP},
    (Phase.FOLLOWING, Event.READ_STARTED): Phase.PULLING,
    (Phase.FOLLOWING, Event.COMPLETE): Phase.ADOPTED,
    **{(Phase.FOLLOWING, event): Phase.RELEASED for event in GIVEN_UP},
    (Phase.PULLING, Event.READ_ENDED): Phase.FOLLOWING,
    **{(Phase.PULLING, event): Phase.QUARANTINED for event in GIVEN_UP},  # our own read may still land
    (Phase.QUARANTINED, Event.READ_ENDED): Phase.RELEASED,  # only the transport can end it
    **{(Phase.QUARANTINED, event): Phase.QUARANTINED for event in GIVEN_UP},
    (Phase.ADOPTED, Event.FINISHED): Phase.RELEASED,
    (Phase.ADOPTED, Event.DEADLINE): Phase.ADOPTED,  # moot
    (Phase.RELEASED, Event.OPENED): Phase.RELEASED,  # late
    **{(Phase.RELEASED, event): Phase.RELEASED for event in GIVEN_UP},
}


def step(phase: Phase, event: Event) -> Phase:
    try:
        return NEXT[phase, event]
    except KeyError:
        raise InvariantError(f"reservation: {event.value} while {phase.value}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderStats:
    num_reserved: int
    num_following: int
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
    ttl_end_ms: int
    deadline_ms: int | None  # the same while RESERVED: `expire` ends only what nobody came for


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
            prompt_tokens=prompt_tokens, nbytes=nbytes, ttl_end_ms=now_ms + ttl_ms, deadline_ms=now_ms + ttl_ms
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
            reader.deadline_ms = None  # from here whoever follows watches `ttl_end_ms`, and each read has its own
        if reader.phase is Phase.RELEASED:
            del self._readers[reservation_id]
        return reader.phase

    def phase(self, reservation_id: str) -> Phase:
        reader = self._readers.get(reservation_id)
        return Phase.RELEASED if reader is None else reader.phase

    def prompt_tokens(self, reservation_id: str) -> int:
        return self._readers[reservation_id].prompt_tokens

    def ttl_end_ms(self, reservation_id: str) -> int:
        """When waiting for parts has to end; a turn that was adopted by then goes on."""
        return self._readers[reservation_id].ttl_end_ms

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
            num_following=phases[Phase.FOLLOWING],
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
