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
    *((Phase.COMPUTING, e) for e in (Event.LEASE_END, Event.TRANSFER_END)),
    *((Phase.LENDING, e) for e in (Event.LEASE_END, Event.TRANSFER_END)),
    *((Phase.DECLINED, e) for e in (Event.LEND, Event.LEASE_END, Event.TRANSFER_END)),
    *((Phase.PUBLISHED, e) for e in (Event.LEND, Event.PUBLISH, Event.TRANSFER_END)),
    *((Phase.EXPIRED, e) for e in (Event.LEND, Event.PUBLISH, Event.LEASE_END)),
    *((Phase.FREED, e) for e in (Event.LEND, Event.PUBLISH, Event.LEASE_END, Event.TRANSFER_END)),
}


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, Event)), ids=lambda x: x.value)
def test_every_pair_is_either_in_the_table_or_impossible(phase, event):
    assert ((phase, event) in NEXT) != ((phase, event) in IMPOSSIBLE)
    if (phase, event) in IMPOSSIBLE:
        with pytest.raises(InvariantError):
            step(phase, event)


def test_published_memory_is_never_freed_before_acknowledgement_or_time():
    for event in (Event.LEND, Event.PUBLISH, Event.ABANDON, Event.LEASE_END, Event.TRANSFER_END):
        assert NEXT.get((Phase.PUBLISHED, event)) is not Phase.FREED


def test_lent_memory_is_never_freed_while_its_sequence_or_its_reader_may_use_it():
    assert not {e for (phase, e), after in NEXT.items() if phase is Phase.LENDING and after is Phase.FREED}


def test_release_frees_once_and_repeats_are_harmless():
    table = HandoffTable(TIMING)
    fence = table.begin("a")
    assert table.publish("a", nbytes=1_000, now_ms=0).fence == fence
    assert table.release("a", fence=fence) == "freed"
    assert table.release("a", fence=fence) == "already_free"
    assert table.expire(10**9) == [] and len(table) == 0


def test_an_older_fence_frees_and_follows_nothing():
    table = HandoffTable(TIMING)
    first = table.begin("a")
    table.publish("a", nbytes=1, now_ms=0)
    assert table.release("a", fence=first) == "freed"
    second = table.begin("a")  # the id comes again, for a retried request
    assert second > first
    assert table.release("a", fence=first) == "stale_fence"
    assert table.follow("a", fence=first) == "stale_fence"
    table.publish("a", nbytes=1, now_ms=0)
    assert table.release("a", fence=first) == "stale_fence"
    assert table.phase("a") is Phase.PUBLISHED
    assert table.stats().stale_fences == 3


def test_a_handoff_is_followed_once_and_not_after_its_end():
    table = HandoffTable(TIMING)
    fence = table.begin("a")
    assert table.follow("b", fence=fence) == "unknown"
    assert table.follow("a", fence=fence) == "granted"
    assert table.follow("a", fence=fence) == "taken"
    table.lend("a", nbytes=1)
    table.abandon("a", now_ms=0)
    assert table.follow("a", fence=fence) == "unknown"


def test_a_request_that_ends_while_regions_are_lent_keeps_them_for_the_longest_transfer():
    table = HandoffTable(TIMING)
    fence = table.begin("a")
    assert table.lend("a", nbytes=500_000) and table.lend("a", nbytes=500_000)
    assert table.abandon("a", now_ms=50) is False
    assert table.phase("a") is Phase.EXPIRED and not table.lend("a", nbytes=1)
    assert table.next_deadline_ms() == 50 + 100 + 1_000
    assert table.expire(1_149) == [] and table.expire(1_150) == ["a"]
    fence = table.begin("b")
    table.lend("b", nbytes=1)
    table.abandon("b", now_ms=0)
    assert table.release("b", fence=fence) == "freed"  # the follower was told, and answered
    assert table.stats().withdrawn == 2 and len(table) == 0


@pytest.mark.parametrize("end", ["publish", "abandon"])
def test_a_follower_that_gives_up_early_leaves_the_memory_to_the_sequence(end):
    table = HandoffTable(TIMING)
    fence = table.begin("a")
    table.lend("a", nbytes=1)
    assert table.release("a", fence=fence) == table.release("a", fence=fence) == "declined"
    assert not table.lend("a", nbytes=1)
    assert table.phase("a") is Phase.DECLINED and table.expire(10**9) == []
    assert table.stats().released == 1
    if end == "publish":
        assert table.publish("a", nbytes=1, now_ms=0) is None
    else:
        assert table.abandon("a", now_ms=0) is True
    assert len(table) == 0


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
    assert table.abandon("a", now_ms=0) is True
    assert table.abandon("a", now_ms=0) is False
    table.begin("b")
    lease = table.publish("b", nbytes=1, now_ms=0)
    assert table.abandon("b", now_ms=0) is False
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
            st.sampled_from(["begin", "follow", "lend", "publish", "release", "abandon", "expire"]),
            st.integers(0, 900),
        ),
        max_size=80,
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
            fences[name] = table.begin(name)
            begun += 1
        elif action == "follow" and name in fences:
            table.follow(name, fence=fences[name])
        elif action == "lend":
            assert table.lend(name, nbytes=dt) == (phase in (Phase.COMPUTING, Phase.LENDING))
        elif action == "publish" and phase in (Phase.COMPUTING, Phase.LENDING, Phase.DECLINED):
            freed += table.publish(name, nbytes=dt * 100, now_ms=now_ms) is None
        elif action == "release" and name in fences:
            freed += table.release(name, fence=fences[name]) == "freed"
        elif action == "abandon":
            freed += table.abandon(name, now_ms=now_ms)
        elif action == "expire":
            freed += len(table.expire(now_ms))
        table.check()
        assert begun - freed == len(table)
    for number in range(4):
        freed += table.abandon(f"h{number}", now_ms=now_ms)
    freed += len(table.expire(now_ms + 10**7))
    assert freed == begun and table.next_deadline_ms() is None
