"""What goes when room is needed: runs against a slow twin, and the rules of worth one by one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachestore.density import OCTAVES, PRIOR, HitDensity
from cachestore.entries import BLOCK, SNAPSHOT, Key, Offer
from cachestore.retention import Retention
from cachestore.runs import Runs

ROOT = b"r" * 16


def block(path: str) -> Offer:
    """The block at the end of a path of letters."""
    key = Key(ROOT, BLOCK, path.encode())
    parent = Key(ROOT, BLOCK, path[:-1].encode()) if path[:-1] else None
    return Offer(key=key, parent=parent, depth=len(path) - 1, nbytes=1)


def cut(path: str, nbytes: int = 4) -> Offer:
    """The snapshot at the end of a path."""
    at = Key(ROOT, BLOCK, path.encode())
    return Offer(key=Key(ROOT, SNAPSHOT, at.prefix_hash), parent=at, depth=len(path), nbytes=nbytes)


def keep(retention: Retention, *offers: Offer, now_s: float = 0) -> None:
    retention.advance(int(1000 * now_s))
    retention.passed(offers)
    for offer in offers:
        retention.add(offer, offer.nbytes)
    for offer in offers:
        retention.show(offer.key)


def prompt(path: str, known: int = 0) -> list[Offer]:
    """Its blocks beyond the known ones, and the snapshot at its end."""
    return [*(block(path[:end]) for end in range(known + 1, len(path) + 1)), cut(path)]


def names(keys: list[Key]) -> list[str]:
    """Snapshots in capitals."""
    return [key.prefix_hash.decode().upper() if key.kind == SNAPSHOT else key.prefix_hash.decode() for key in keys]


def test_blocks_that_no_snapshot_stands_on_go_before_anything_useful():
    retention = Retention()
    keep(retention, *prompt("a"))
    keep(retention, block("b"), block("bb"), now_s=1)
    keep(retention, block("aa"), now_s=2)
    assert names(retention.victims(99)) == ["bb", "b", "aa", "A", "a"]


def test_a_snapshot_takes_the_blocks_along_that_only_it_needs():
    retention = Retention()
    keep(retention, *prompt("aaa"))
    keep(retention, *prompt("aab", known=2))
    assert set(names(retention.victims(5))) in ({"AAA", "aaa"}, {"AAB", "aab"})


def test_what_saves_more_work_a_byte_stays():
    retention = Retention()
    keep(retention, *prompt("a" * 9), now_s=0)
    keep(retention, *prompt("bb"), now_s=1)  # younger, and worth a quarter of the other
    assert names(retention.victims(1)) == ["BB"]


def test_of_equal_worth_the_older_goes():
    retention = Retention()
    keep(retention, *prompt("aa"), now_s=0)
    keep(retention, *prompt("bb"), now_s=600)
    assert names(retention.victims(1)) == ["AA"]
    retention.restore(cut("aa"), 4)
    retention.hit([cut("aa").key])
    retention.advance(1_300_000)
    assert names(retention.victims(1)) == ["BB"]


def test_a_passed_snapshot_loses_to_the_deeper_one_once_that_was_learned():
    retention = Retention()
    for turn in range(40):  # conversations whose second prompt goes on from the first one's end, and their third
        now_s = 100 * turn
        name = chr(1_000 + turn)
        keep(retention, *prompt(name * 4), now_s=now_s)
        retention.hit([cut(name * 4).key])
        keep(retention, *prompt(name * 6, known=4), now_s=now_s + 20)
        retention.advance(1000 * (now_s + 40))
        retention.hit([cut(name * 6).key])
        if turn < 39:
            retention.victims(99)
    assert names(retention.victims(1)) == [(chr(1_000 + 39) * 4).upper()]


def test_a_ghost_teaches_what_its_class_is_worth():
    """Prompts of one kind come back after they were evicted, those of the other never do."""
    learned = Retention()
    for turn in range(60):
        now_s = 50.0 * turn
        name = chr(1_000 + turn)
        keep(learned, *prompt(name * 4), cut(name * 2), now_s=now_s)
        learned.victims(99)
        keep(learned, *prompt(name * 4), now_s=now_s + 5)  # comes again, and would have hit its end
        learned.victims(99)
    keep(learned, *prompt("aaaa"), cut("aa"), now_s=5_000)
    assert names(learned.victims(1)) == ["AA"]


def test_pinned_and_protected_entries_stay_and_everything_under_them():
    retention = Retention()
    keep(retention, *prompt("aa"))
    retention.pin(cut("aa").key)
    assert retention.victims(99) == []
    retention.unpin(cut("aa").key)
    assert retention.victims(99, protect=[block("aa").key]) == [cut("aa").key]
    keep(retention, *prompt("b"))
    assert names(retention.victims(99)) == ["aa", "a", "B", "b"]


def test_what_was_restored_goes_first():
    retention = Retention()
    keep(retention, *prompt("aaaa"))
    assert names(retention.victims(1)) == ["AAAA"]
    retention.restore(cut("aaaa"), 4)
    keep(retention, block("c"))  # of no use to anybody, but the other was to go already
    assert names(retention.victims(1)) == ["AAAA"]


def test_density_is_one_over_age_before_anything_is_known_and_learned_after():
    density = HitDensity()
    before = [density.density((0, 0, 0), octave) for octave in range(OCTAVES)]
    assert before == sorted(before, reverse=True) and before[5] == pytest.approx(2 * before[6], rel=0.01)
    for _ in range(512):  # every life of one class is hit in its seventh octave, of the other never
        for octave in range(8):
            density.enter((0, 0, 0), octave)
            density.enter((1, 0, 0), octave)
        density.hit((0, 0, 0), 7)
    assert density.density((0, 0, 0), 7) > 50 * density.density((1, 0, 0), 7)
    assert density.density((0, 0, 0), 0) > density.density((0, 0, 0), 8)  # a hit that is still to come counts
    assert 0 < density.density((1, 0, 0), 0) < PRIOR


actions = st.lists(
    st.tuples(st.sampled_from(["block", "block", "cut", "drop"]), st.text("ab", min_size=1, max_size=7)), max_size=60
)


@settings(max_examples=150, deadline=None)
@given(actions)
def test_runs_agree_with_walking_block_by_block(steps):
    runs, blocks, cuts = Runs(), {}, {}
    for action, path in steps:
        offer = cut(path) if action == "cut" else block(path)
        if action == "block" and offer.key not in blocks:
            blocks[offer.key] = offer
            runs.add_block(offer, offer.nbytes)
        elif action == "cut" and offer.key not in cuts:
            cuts[offer.key] = offer
            runs.add_snapshot(offer.key, offer.parent)
        elif action == "drop" and cut(path).key in cuts:
            runs.drop_snapshot(cuts.pop(cut(path).key).parent)
        elif action == "drop" and offer.key in blocks:
            runs.drop_block(blocks.pop(offer.key).key)
        runs.check({k: o.parent for k, o in blocks.items()}, {k: o.parent for k, o in cuts.items()})
        for found in cuts.values():
            run = runs.at(found.parent)
            assert (run is not None) == (found.parent in blocks)
            if run is not None:
                assert run.worth() == slow_worth(found.parent, blocks, cuts)


def slow_worth(at, blocks, cuts):
    """Where a snapshot's saving begins, and the bytes that it alone keeps."""
    children = Counter(offer.parent for offer in blocks.values())
    ends = {offer.parent for offer in cuts.values()}
    alone, nbytes, here = not children[at], 0, at
    while True:
        if alone:
            nbytes += blocks[here].nbytes
        parent = blocks[here].parent
        if parent not in blocks:
            return blocks[here].depth, nbytes
        if parent in ends:
            return blocks[here].depth, nbytes
        alone = alone and children[parent] == 1
        here = parent


def test_equal_histories_have_equal_victims():
    def run() -> list[str]:
        retention, known = Retention(), set()
        for turn in range(50):
            path = "ab"[turn % 2] + chr(1_000 + turn % 7) + "x" * (turn % 5)
            new = [offer for offer in prompt(path) if offer.key not in known]
            known.update(offer.key for offer in new)
            keep(retention, *new, now_s=turn * 7)
        return names(retention.victims(10**6))

    assert run() == run() and len(run()) > 20
