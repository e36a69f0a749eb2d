"""The reader's half of a handoff: table total, reservations expire, quarantine ends only by the transport."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.core import NEXT, Event, Phase, ReaderTable, step
from moonrelay.errors import InvariantError

IMPOSSIBLE = {
    *((Phase.RESERVED, e) for e in (Event.VERIFIED, Event.TRANSFER_ENDED, Event.FINISHED)),
    *((Phase.PULLING, e) for e in (Event.PUBLISHED, Event.TRANSFER_ENDED, Event.FINISHED)),
    *((Phase.QUARANTINED, e) for e in (Event.PUBLISHED, Event.VERIFIED, Event.REFUSED, Event.FINISHED)),
    *((Phase.ADOPTED, e) for e in (Event.PUBLISHED, Event.VERIFIED, Event.REFUSED, Event.TRANSFER_ENDED)),
    (Phase.ADOPTED, Event.CANCELLED),  # the engine ends an adopted turn: cancel it there, then FINISHED
    *((Phase.RELEASED, e) for e in (Event.VERIFIED, Event.TRANSFER_ENDED, Event.FINISHED)),
}
AS_DESIGNED = {  # the protocol's own rows; the rest are cancellations and repeats
    (Phase.RESERVED, Event.PUBLISHED): Phase.PULLING,
    (Phase.RESERVED, Event.DEADLINE): Phase.RELEASED,
    (Phase.PULLING, Event.VERIFIED): Phase.ADOPTED,
    (Phase.PULLING, Event.REFUSED): Phase.RELEASED,
    (Phase.PULLING, Event.DEADLINE): Phase.QUARANTINED,
    (Phase.QUARANTINED, Event.TRANSFER_ENDED): Phase.RELEASED,
    (Phase.ADOPTED, Event.DEADLINE): Phase.ADOPTED,
    (Phase.RELEASED, Event.PUBLISHED): Phase.RELEASED,
}


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, Event)), ids=lambda x: x.value)
def test_every_pair_is_either_in_the_table_or_impossible(phase, event):
    assert ((phase, event) in NEXT) != ((phase, event) in IMPOSSIBLE)
    if (phase, event) in IMPOSSIBLE:
        with pytest.raises(InvariantError):
            step(phase, event)


def test_the_table_holds_the_protocol():
    assert {pair: NEXT[pair] for pair in AS_DESIGNED} == AS_DESIGNED


def test_nothing_is_adopted_but_by_verification_and_no_running_read_is_freed():
    assert {pair for pair, after in NEXT.items() if after is Phase.ADOPTED and pair[0] is not Phase.ADOPTED} == {
        (Phase.PULLING, Event.VERIFIED)
    }
    frees_a_pull = {e for (phase, e), after in NEXT.items() if phase is Phase.PULLING and after is Phase.RELEASED}
    assert frees_a_pull == {Event.REFUSED}


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
    assert table.step("r", Event.PUBLISHED) is Phase.RELEASED  # late


def test_a_pull_outlives_the_reservation_time():
    table = reserved()
    table.step("r", Event.PUBLISHED)
    assert table.expire(10**9) == [] and table.next_deadline_ms() is None
    assert table.step("r", Event.VERIFIED) is Phase.ADOPTED
    assert table.expire(10**9) == []
    assert table.step("r", Event.FINISHED) is Phase.RELEASED


@pytest.mark.parametrize("event", [Event.DEADLINE, Event.CANCELLED], ids=lambda e: e.value)
def test_quarantine_counts_bytes_until_the_transport_ends_it(event):
    table = reserved()
    table.step("r", Event.PUBLISHED)
    assert table.step("r", event) is Phase.QUARANTINED
    assert table.stats().quarantined_bytes == 4096
    assert table.step("r", Event.DEADLINE) is Phase.QUARANTINED
    table.check()
    assert table.step("r", Event.TRANSFER_ENDED) is Phase.RELEASED
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
