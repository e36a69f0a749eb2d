"""The reader's half of a handoff: table total, reservations expire, quarantine ends only by the transport."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.core import GIVEN_UP, NEXT, Event, Phase, ReaderTable, step
from moonrelay.errors import InvariantError

READS = (Event.READ_STARTED, Event.READ_ENDED)
IMPOSSIBLE = {
    *((Phase.RESERVED, e) for e in (*READS, Event.COMPLETE, Event.FINISHED)),
    *((Phase.FOLLOWING, e) for e in (Event.OPENED, Event.READ_ENDED, Event.FINISHED)),
    *((Phase.PULLING, e) for e in (Event.OPENED, Event.READ_STARTED, Event.COMPLETE, Event.FINISHED)),
    *((Phase.QUARANTINED, e) for e in (Event.OPENED, Event.READ_STARTED, Event.COMPLETE, Event.FINISHED)),
    *((Phase.ADOPTED, e) for e in (Event.OPENED, *READS, Event.COMPLETE, Event.REFUSED)),
    (Phase.ADOPTED, Event.CANCELLED),  # the engine ends an adopted turn: cancel it there, then FINISHED
    *((Phase.RELEASED, e) for e in (*READS, Event.COMPLETE, Event.FINISHED)),
}
AS_DESIGNED = {  # the protocol's own rows; the rest are cancellations and repeats
    (Phase.RESERVED, Event.OPENED): Phase.FOLLOWING,
    (Phase.RESERVED, Event.DEADLINE): Phase.RELEASED,
    (Phase.FOLLOWING, Event.READ_STARTED): Phase.PULLING,
    (Phase.PULLING, Event.READ_ENDED): Phase.FOLLOWING,
    (Phase.FOLLOWING, Event.COMPLETE): Phase.ADOPTED,
    (Phase.FOLLOWING, Event.REFUSED): Phase.RELEASED,
    (Phase.PULLING, Event.DEADLINE): Phase.QUARANTINED,
    (Phase.QUARANTINED, Event.READ_ENDED): Phase.RELEASED,
    (Phase.ADOPTED, Event.DEADLINE): Phase.ADOPTED,
    (Phase.RELEASED, Event.OPENED): Phase.RELEASED,
}


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, Event)), ids=lambda x: x.value)
def test_every_pair_is_either_in_the_table_or_impossible(phase, event):
    assert ((phase, event) in NEXT) != ((phase, event) in IMPOSSIBLE)
    if (phase, event) in IMPOSSIBLE:
        with pytest.raises(InvariantError):
            step(phase, event)


def test_the_table_holds_the_protocol():
    assert {pair: NEXT[pair] for pair in AS_DESIGNED} == AS_DESIGNED


def test_nothing_is_adopted_but_when_complete_and_no_running_read_is_freed():
    assert {pair for pair, after in NEXT.items() if after is Phase.ADOPTED and pair[0] is not Phase.ADOPTED} == {
        (Phase.FOLLOWING, Event.COMPLETE)
    }
    assert not {e for (phase, e), after in NEXT.items() if phase is Phase.PULLING and after is Phase.RELEASED}
    assert {e for (phase, e), after in NEXT.items() if phase is Phase.QUARANTINED and after is Phase.RELEASED} == {
        Event.READ_ENDED
    }


def reserved(ttl_ms: int = 100) -> ReaderTable:
    table = ReaderTable()
    table.reserve("r", prompt_tokens=7, nbytes=4096, ttl_ms=ttl_ms, now_ms=0)
    return table


def test_a_reservation_nobody_comes_for_ends_by_itself():
    table = reserved()
    assert table.next_deadline_ms() == 100
    assert table.expire(99) == []
    assert table.expire(100) == ["r"]
    assert table.phase("r") is Phase.RELEASED and table.stats().expired == 1
    assert table.step("r", Event.OPENED) is Phase.RELEASED  # late


def test_a_followed_reservation_is_not_swept_and_knows_its_end():
    table = reserved()
    table.step("r", Event.OPENED)
    assert table.expire(10**9) == [] and table.next_deadline_ms() is None and table.ttl_end_ms("r") == 100
    for _ in range(3):
        assert table.step("r", Event.READ_STARTED) is Phase.PULLING
        assert table.step("r", Event.READ_ENDED) is Phase.FOLLOWING
    assert table.step("r", Event.COMPLETE) is Phase.ADOPTED
    assert table.expire(10**9) == []
    assert table.step("r", Event.FINISHED) is Phase.RELEASED


@pytest.mark.parametrize("event", GIVEN_UP, ids=lambda e: e.value)
def test_quarantine_counts_bytes_until_the_transport_ends_it(event):
    table = reserved()
    table.step("r", Event.OPENED)
    table.step("r", Event.READ_STARTED)
    assert table.step("r", event) is Phase.QUARANTINED
    assert table.stats().quarantined_bytes == 4096
    assert table.step("r", Event.DEADLINE) is Phase.QUARANTINED
    table.check()
    assert table.step("r", Event.READ_ENDED) is Phase.RELEASED
    assert table.stats().quarantined_bytes == 0 and len(table) == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(list(Event)), st.integers(0, 60)), max_size=80))
def test_any_order_of_legal_events_keeps_the_account(script):
    table, now_ms, made, released = ReaderTable(), 0, 0, 0
    for number, event, dt in script:
        name, now_ms = f"r{number}", now_ms + dt
        released += len(table.expire(now_ms))
        before = table.phase(name)
        if before is Phase.RELEASED:
            table.reserve(name, prompt_tokens=1, nbytes=1, ttl_ms=50, now_ms=now_ms)
            made += 1
        elif (before, event) in NEXT:
            released += table.step(name, event) is Phase.RELEASED
        table.check()
        assert made - released == len(table)
