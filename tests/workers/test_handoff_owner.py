"""The owner's half of a handoff: table total, leases, fences, and memory freed exactly once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.worker.timing import Timing
from moonrelay.errors import InvariantError, SettingsError
from prefill.core import NEXT, Event, HandoffTable, Phase, step

TIMING = Timing(transfer_floor_ms=100, transfer_min_bytes_per_s=1_000_000, lease_floor_ms=500)
IMPOSSIBLE = {
    (Phase.COMPUTING, Event.RELEASE),
    (Phase.COMPUTING, Event.LEASE_END),
    (Phase.COMPUTING, Event.TRANSFER_END),
    (Phase.PUBLISHED, Event.PUBLISH),
    (Phase.PUBLISHED, Event.TRANSFER_END),
    (Phase.EXPIRED, Event.PUBLISH),
    (Phase.EXPIRED, Event.LEASE_END),
    (Phase.FREED, Event.PUBLISH),
    (Phase.FREED, Event.LEASE_END),
    (Phase.FREED, Event.TRANSFER_END),
}


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, Event)), ids=lambda x: x.value)
def test_every_pair_is_either_in_the_table_or_impossible(phase, event):
    assert ((phase, event) in NEXT) != ((phase, event) in IMPOSSIBLE)
    if (phase, event) in IMPOSSIBLE:
        with pytest.raises(InvariantError):
            step(phase, event)


def test_published_memory_is_never_freed_before_acknowledgement_or_time():
    for event in (Event.PUBLISH, Event.ABANDON, Event.LEASE_END, Event.TRANSFER_END):
        assert NEXT.get((Phase.PUBLISHED, event)) is not Phase.FREED


def test_release_frees_once_and_repeats_are_harmless():
    table = HandoffTable(TIMING)
    table.begin("a")
    lease = table.publish("a", nbytes=1_000, now_ms=0)
    assert table.release("a", fence=lease.fence) == "freed"
    assert table.release("a", fence=lease.fence) == "already_free"
    assert table.expire(10**9) == [] and len(table) == 0


def test_an_older_fence_frees_nothing():
    table = HandoffTable(TIMING)
    table.begin("a")
    first = table.publish("a", nbytes=1, now_ms=0)
    assert table.release("a", fence=first.fence) == "freed"
    table.begin("a")  # the id comes again, for a retried request
    assert table.release("a", fence=first.fence) == "stale_fence"
    second = table.publish("a", nbytes=1, now_ms=0)
    assert second.fence > first.fence
    assert table.release("a", fence=first.fence) == "stale_fence"
    assert table.phase("a") is Phase.PUBLISHED
    assert table.stats().stale_fences == 2


def test_memory_outlives_its_lease_by_the_longest_transfer():
    table = HandoffTable(TIMING)
    table.begin("a")
    lease = table.publish("a", nbytes=1_000_000, now_ms=50)
    assert lease.lease_ms == 500 + 2 * 1_000
    end = 50 + lease.lease_ms
    assert table.next_deadline_ms() == end
    assert table.expire(end - 1) == [] and table.phase("a") is Phase.PUBLISHED
    assert table.expire(end) == [] and table.phase("a") is Phase.EXPIRED
    assert table.next_deadline_ms() == end + 1_100
    assert table.expire(end + 1_099) == []
    assert table.expire(end + 1_100) == ["a"]
    assert table.stats().lease_expired == 1 and len(table) == 0


def test_a_late_sweep_still_ends_everything():
    table = HandoffTable(TIMING)
    table.begin("a")
    table.publish("a", nbytes=0, now_ms=0)
    assert table.expire(10**6) == ["a"]


def test_abandoned_while_computing_frees_at_once_but_not_once_published():
    table = HandoffTable(TIMING)
    table.begin("a")
    assert table.abandon("a") is True
    assert table.abandon("a") is False
    table.begin("b")
    lease = table.publish("b", nbytes=1, now_ms=0)
    assert table.abandon("b") is False
    assert table.phase("b") is Phase.PUBLISHED
    assert table.release("b", fence=lease.fence) == "freed"


def test_a_lease_that_cannot_cover_a_late_read_is_refused():
    with pytest.raises(SettingsError, match="handoff_lease_ms"):
        Timing(transfer_floor_ms=300, transfer_min_bytes_per_s=1, lease_floor_ms=599)


@given(nbytes=st.integers(0, 1 << 40), more=st.integers(0, 1 << 40))
def test_times_grow_with_bytes(nbytes, more):
    assert TIMING.transfer_ms(nbytes + more) >= TIMING.transfer_ms(nbytes) >= TIMING.transfer_floor_ms
    assert TIMING.lease_ms(nbytes) >= 2 * TIMING.transfer_ms(nbytes)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(["begin", "publish", "release", "abandon", "expire"]),
            st.integers(0, 900),
        ),
        max_size=60,
    )
)
def test_any_order_of_events_frees_each_handoff_exactly_once(script):
    """A random world: what the table hands back equals what was begun, and `check` holds at each step."""
    table, begun, freed, now_ms = HandoffTable(TIMING), 0, 0, 0
    fences: dict[str, int] = {}
    for number, action, dt in script:
        name, now_ms = f"h{number}", now_ms + dt
        phase = table.phase(name)
        if action == "begin" and phase is Phase.FREED:
            table.begin(name)
            begun += 1
        elif action == "publish" and phase is Phase.COMPUTING:
            fences[name] = table.publish(name, nbytes=dt * 100, now_ms=now_ms).fence
        elif action == "release" and name in fences:
            freed += table.release(name, fence=fences[name]) == "freed"
        elif action == "abandon":
            freed += table.abandon(name)
        elif action == "expire":
            freed += len(table.expire(now_ms))
        table.check()
        assert begun - freed == len(table)
    for number in range(4):
        freed += table.abandon(f"h{number}")
    freed += len(table.expire(now_ms + 10**7))
    assert freed == begun and table.next_deadline_ms() is None
