"""The life of an entry in a node, as one table. An absent pair raises InvariantError.

    LANDING ──▶ HOST ◀──▶ WRITING ──▶ BOTH ◀──▶ DISK ◀──▶ PROMOTING        LEAVING: not leased, not written, not read;
                 │                                │                         the index is being told
                 └────────────▶ LEAVING ◀─────────┘

| state | memory | file | can be leased |
|---|---|---|---|
| LANDING | being filled by our read from the publisher | no | no |
| HOST | verified | no | yes |
| WRITING | verified, held | being written; its room is taken | yes |
| BOTH | verified | yes | yes |
| DISK | no | yes | after promotion |
| PROMOTING | being filled from the file | yes, held | no; who asks waits |
| LEAVING | what it had | what it had | no |
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from moonrelay.errors import InvariantError


class State(Enum):
    __hash__ = object.__hash__  # in C: a lease asks for each entry's state

    LANDING = auto()
    HOST = auto()
    WRITING = auto()
    BOTH = auto()
    DISK = auto()
    PROMOTING = auto()
    LEAVING = auto()


class Event(Enum):
    VERIFIED = auto()  # its bytes are in memory and have their checksums
    WRITE = auto()
    WRITTEN = auto()
    UNWRITTEN = auto()  # the file did not come about
    DROP_MEMORY = auto()
    DROP_FILE = auto()
    PROMOTE = auto()
    REFUSED = auto()  # memory or file do not have their checksum: it is gone at once
    WITHDRAW = auto()  # nothing else holds it: the index is told first
    KEPT_IN_MEMORY = auto()  # the index could not be told
    KEPT_ON_DISK = auto()


NEXT: Final = {
    (State.LANDING, Event.VERIFIED): State.HOST,
    (State.HOST, Event.WRITE): State.WRITING,
    (State.HOST, Event.WITHDRAW): State.LEAVING,
    (State.WRITING, Event.WRITTEN): State.BOTH,
    (State.WRITING, Event.UNWRITTEN): State.HOST,
    (State.BOTH, Event.DROP_MEMORY): State.DISK,
    (State.BOTH, Event.DROP_FILE): State.HOST,
    (State.DISK, Event.PROMOTE): State.PROMOTING,
    (State.DISK, Event.WITHDRAW): State.LEAVING,
    (State.PROMOTING, Event.VERIFIED): State.BOTH,
    (State.PROMOTING, Event.UNWRITTEN): State.DISK,  # the read was never begun
    (State.LEAVING, Event.KEPT_IN_MEMORY): State.HOST,
    (State.LEAVING, Event.KEPT_ON_DISK): State.DISK,
}

IN_MEMORY: Final = frozenset({State.HOST, State.WRITING, State.BOTH})  # verified, and may be leased
ON_DISK: Final = frozenset({State.DISK, State.PROMOTING})  # leased only after promotion
VISIBLE: Final = IN_MEMORY | ON_DISK  # the index names it
WITH_FILE: Final = frozenset({State.WRITING, State.BOTH, State.DISK, State.PROMOTING})


def after(state: State, event: Event) -> State:
    """Raises: InvariantError."""
    if (state, event) not in NEXT:
        raise InvariantError(f"{event.name} while {state.name}")
    return NEXT[state, event]
