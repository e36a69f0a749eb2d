"""Placement, snapshots and the account of a prompt: pure functions, no sockets."""

from __future__ import annotations

from dataclasses import replace

from fake_workers import fingerprint
from hypothesis import given
from hypothesis import strategies as st

from moonrelay.ids import InstanceId
from router.core import (
    CostModel,
    Load,
    Need,
    Worker,
    account,
    choose,
    handoff_s,
    name_retokenised,
    restore_s,
    serving,
)

NEED = Need(prompt_tokens=1_000)


def worker(role: str, name: str, **changes: object) -> Worker:
    base = Worker(
        instance_id=InstanceId(name),
        epoch=1,
        role=role,  # type: ignore[arg-type]
        address="",
        host_id="h1",
        fingerprint=fingerprint(),
        context_len=4_096,
        state_bytes=100_000_000,
        row_bytes=10_000,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


P0, P1 = worker("prefill", "p0"), worker("prefill", "p1")
D0, D1 = worker("decode", "d0"), worker("decode", "d1")
A0 = worker("aggregated", "a0")


def names(plan):
    return None if plan is None else tuple(str(w.instance_id) for w in plan.workers)


def test_a_path_needs_both_roles_of_one_fingerprint():
    other = fingerprint("w2")
    assert serving([P0]) == serving([D0]) == []
    assert serving([P0, replace(D0, fingerprint=other)]) == []
    assert serving([P0, D0, replace(D1, fingerprint=other)]) == [fingerprint()]
    assert serving([replace(A0, fingerprint=other)]) == [other]
    assert choose([P0, replace(D0, fingerprint=other)], {}, NEED) is None
    apart = replace(D0, misfits=frozenset({P0.key}))
    assert serving([P0, apart]) == [] and choose([P0, apart], {}, NEED) is None
    assert names(choose([P0, P1, apart], {}, NEED)) == ("p1", "d0")
    assert names(choose([P0, replace(D0, fingerprint=other), D1], {}, NEED)) == ("p0", "d1")


def test_the_least_loaded_pair_is_taken():
    fleet = [P0, P1, D0, D1]
    loads = {P0.key: Load(sequences=1, prompt_tokens=5_000), D1.key: Load(sequences=3)}
    assert names(choose(fleet, loads, NEED)) == ("p1", "d0")
    loads[P1.key] = Load(sequences=9, prompt_tokens=9_000)
    assert names(choose(fleet, loads, NEED)) == ("p0", "d0")


def test_what_other_routers_gave_a_worker_counts():
    assert names(choose([P0, replace(D0, busy=4), D1], {}, NEED)) == ("p0", "d1")
    mine = {D0.key: Load(sequences=4)}
    assert names(choose([P0, replace(D0, busy=4), replace(D1, busy=5)], mine, NEED)) == ("p0", "d0")


def test_a_pair_on_one_host_is_preferred_until_its_queue_costs_more():
    near, far = replace(D0, host_id="h2"), D1
    fleet = [replace(P0, host_id="h2"), near, far]
    assert names(choose(fleet, {}, NEED)) == ("p0", "d0")
    assert names(choose(fleet, {near.key: Load(sequences=50)}, NEED)) == ("p0", "d1")
    assert handoff_s(P0, D0, NEED, CostModel()) < handoff_s(P0, near, NEED, CostModel())


def test_requests_one_at_a_time_spread():
    """With no load at pick time the longest-unused worker is next (a fixed tie-break would starve the others)."""
    loads: dict = {}
    seen = []
    for turn in range(6):
        plan = choose([P0, P1, D0, D1], loads, NEED)
        seen.append(names(plan))
        for chosen in plan.workers:
            loads[chosen.key] = Load(chosen_at=turn + 1)
    assert {p for p, _ in seen} == {"p0", "p1"} and {d for _, d in seen} == {"d0", "d1"}
    assert max(seen.count(pair) for pair in seen) <= 3


def test_aggregated_workers_go_first_and_avoided_ones_not_at_all():
    assert names(choose([P0, D0, A0], {}, NEED)) == ("a0",)
    assert names(choose([P0, D0, A0], {}, NEED, avoid={A0.key})) == ("p0", "d0")
    assert choose([P0, D0, A0], {}, NEED, avoid={A0.key, D0.key}) is None
    restarted = replace(A0, epoch=2)
    assert names(choose([restarted], {}, NEED, avoid={A0.key})) == ("a0",)


def test_only_the_asked_fingerprint_serves():
    other = replace(A0, fingerprint=fingerprint("w2"))
    assert names(choose([P0, D0, other], {}, NEED, fingerprint=fingerprint())) == ("p0", "d0")


def test_the_worker_that_keeps_the_bundle_is_preferred_until_its_queue_costs_more():
    need = Need(prompt_tokens=2_048, hit_tokens=1_984, kept={P1.key: 1_984})
    for loads in ({}, {P0.key: Load(chosen_at=1), P1.key: Load(chosen_at=9)}):
        assert names(choose([P0, P1, D0], loads, need)) == ("p1", "d0")
    assert names(choose([P0, P1, D0], {P1.key: Load(sequences=1, prompt_tokens=900)}, need)) == ("p0", "d0")
    shallow = replace(need, kept={P1.key: 256})  # it would have to fetch all the same
    assert names(choose([P0, P1, D0], {P1.key: Load(chosen_at=9)}, shallow)) == ("p0", "d0")
    deep = Need(prompt_tokens=2_048, hit_tokens=256, kept={P1.key: 1_984})
    assert deep.computed_tokens(P1) == 64 and deep.computed_tokens(P0) == 1_792 and not deep.restores(P1)


def test_decode_that_holds_the_rows_is_preferred():
    wide = [replace(w, row_bytes=100_000) for w in (P0, D0, D1)]
    need = Need(prompt_tokens=2_048, hit_tokens=1_984, kept={D1.key: 1_984})
    assert names(choose(wide, {D1.key: Load(chosen_at=9)}, need)) == ("p0", "d1")


def test_a_shared_head_is_no_magnet():
    """One worker keeps the system prompt that all share; a quiet hour's requests spread all the same."""
    need = Need(prompt_tokens=3_300, hit_tokens=3_000, kept={P0.key: 3_000})
    small = [replace(w, state_bytes=450_000, row_bytes=1_200) for w in (P0, P1, D0)]
    loads: dict = {}
    seen = []
    for turn in range(20):
        plan = choose(small, loads, need)
        seen.append(names(plan)[0])
        loads[plan.prefill.key] = Load(chosen_at=turn + 1)
    assert seen.count("p0") == seen.count("p1") == 10


def test_bundles_on_disk_are_dearer():
    near = Need(prompt_tokens=100_000, hit_tokens=99_000)
    far = replace(near, disk_tokens=99_000)
    assert restore_s(P0, far, CostModel()) > 3 * restore_s(P0, near, CostModel()) > 0
    assert restore_s(P0, replace(far, kept={P0.key: 99_000}), CostModel()) == 0


def settle(**changes):
    base = {
        "prompt_tokens": 300,
        "hit_tokens": 128,
        "matchable_tokens": 192,
        "seen_tokens": 256,
        "index_lost": [("no_snapshot", 64), ("cold", 64), ("remainder", 44)],
        "restored": {"device": 0, "host": 0, "disk": 0, "remote": 128},
        "worker_reason": None,
    }
    return account(**{**base, **changes})


def test_the_account_joins_index_and_worker():
    whole = settle()
    assert (whole.cached_tokens, whole.miss_reason) == (128, "no_snapshot")
    failed = settle(restored={"remote": 0}, worker_reason="stale_index")
    assert failed.lost[0] == ("stale_index", 128) and failed.miss_reason == "stale_index"
    assert settle(restored={"remote": 0}, worker_reason="cold").miss_reason == "tier_error"
    deeper = settle(restored={"device": 200})
    assert deeper.lost == (("cold", 56), ("remainder", 44)) and deeper.matchable_tokens == 200


def test_what_other_ids_cost_is_named():
    lost = [("no_snapshot", 64), ("diverged", 256), ("remainder", 10)]
    named = name_retokenised(lost, 128, [(270, 400)], 64)
    assert named == (("no_snapshot", 64), ("diverged", 64), ("retokenised", 144), ("diverged", 48), ("remainder", 10))
    assert name_retokenised(lost, 128, [(0, 130)], 64) == tuple(lost)
    assert name_retokenised([("block_evicted", 64)], 0, [(0, 64)], 64) == (("block_evicted", 64),)


@given(
    lost=st.lists(st.tuples(st.sampled_from(["cold", "diverged", "no_snapshot"]), st.integers(1, 300)), max_size=5),
    hit=st.integers(0, 5),
    edges=st.lists(st.integers(0, 900), max_size=6),
)
def test_naming_loses_nothing(lost, hit, edges):
    edges = sorted(edges)
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    named = name_retokenised(lost, hit * 64, spans, 64)
    assert sum(n for _, n in named) == sum(n for _, n in lost) and all(n > 0 for _, n in named)
    kept = sum(n for reason, n in named if reason == "no_snapshot")
    assert kept == sum(n for reason, n in lost if reason == "no_snapshot")


@given(hit=st.integers(0, 10), cached=st.integers(0, 19), parts=st.lists(st.integers(0, 5), max_size=4))
def test_cached_and_lost_are_the_prompt(hit, cached, parts):
    index_lost = [("cold", n) for n in parts]
    prompt_tokens = hit + sum(parts)
    restored = min(cached, prompt_tokens)
    joined = account(
        prompt_tokens=prompt_tokens,
        hit_tokens=hit,
        matchable_tokens=hit,
        seen_tokens=hit,
        index_lost=index_lost,
        restored={"host": restored},
        worker_reason=None,
    )
    assert joined.cached_tokens + sum(n for _, n in joined.lost) == prompt_tokens
