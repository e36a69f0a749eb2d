"""Leased chains, kept as arrays, against the plain walk through the books."""

from __future__ import annotations

import random

import pytest

from cachestore.entries import BLOCK, SNAPSHOT, Key, Offer
from cachestore.node import chains
from cachestore.node.books import Region, Stored
from cachestore.node.chains import Chains
from cachestore.node.core import NodeCore
from cachestore.node.states import VISIBLE
from cachestore.spans import pack_entry

ROOT = bytes(16)
PAGE = 4_096
POOL = 3


def key(path: str) -> Key:
    return Key(ROOT, BLOCK, f"{path:-<16}".encode())


def offer(path: str) -> Offer:
    parent = key(path[:-1]) if len(path) > 1 else None
    return Offer(key=key(path), parent=parent, depth=len(path) - 1, nbytes=PAGE)


def naive(core: NodeCore, path: str, first: int, count: int) -> list[Stored] | None:
    """Follow every block's parent."""
    if not count or first + count != len(path):
        return None
    found = [core.entry(key(path[: depth + 1])) for depth in range(first, first + count)]
    return None if any(e is None or e.state not in VISIBLE for e in found) else found  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(6))
def test_what_is_kept_is_what_the_books_say(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "KEPT_ENTRIES_MAX", 30)  # so that some are dropped
    rng = random.Random(seed)
    core, checksums, served = NodeCore(14 * PAGE, disk_bytes=1 << 20), iter(range(10**9)), 0
    kept = Chains(core, POOL)
    for now_ms in range(600):
        path = "".join(rng.choice("ab") for _ in range(rng.randint(1, 7)))
        match rng.randrange(5):
            case 0:
                offers = [offer(path[:n]) for n in range(rng.randint(1, len(path)), len(path) + 1)]
                core.reclaim(core.victims(core.missing_bytes(offers), now_ms))
                for new in core.admit(offers).new:
                    core.commit(new, [Region(e.offset, e.length, next(checksums)) for e in core.extents(new)])
            case 1:
                core.reclaim(core.victims(rng.randint(1, 3) * PAGE, now_ms))
            case 2 if (waiting := core.next_writes()) is not None:
                for each in waiting[0]:
                    if core.begin_write(each, PAGE):
                        core.written(each)  # as a victim it stays on disk
            case 3 if there := [each for each in core.visible() if core.on_disk([each])]:
                each = rng.choice(there)
                if core.begin_promote([each]):
                    regions = [Region(e.offset, e.length, next(checksums)) for e in core.extents(each)]
                    if rng.random() < 0.5:
                        core.promoted(each, regions)
                    else:
                        core.refuse(each)
            case _:
                leaving = core.victims(PAGE, now_ms)  # the index cannot be told: they come back
                assert all(kept.find(each, len(each.prefix_hash.strip(b"-")) - 1, 1) is None for each in leaving)
                core.restore(leaving)
        for _ in range(4):
            path = "".join(rng.choice("ab") for _ in range(rng.randint(1, 7)))
            first = rng.randint(0, len(path) - 1)
            count = len(path) - first + rng.choice([0, 0, 0, 1, -1])
            expected, found = naive(core, path, first, count), kept.find(key(path), first, count)
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                served += 1
                assert found.entries == expected
                packed = [pack_entry(POOL, [(r.offset, r.length, r.xxh3) for r in e.regions]) for e in expected]
                assert found.packed == packed
                assert found.spans == (b"".join(packed) if all(packed) else b"")
    assert served > 50
    assert kept._num_entries == sum(len(c.found.entries) for c in kept._kept.values())


def test_a_snapshot_is_found_by_itself() -> None:
    core = NodeCore(10 * PAGE)
    kept, cut = Chains(core, POOL), Key(ROOT, SNAPSHOT, key("a").prefix_hash)
    assert kept.single(cut) is None
    core.admit([offer("a"), Offer(key=cut, parent=key("a"), depth=1, nbytes=PAGE)])
    assert kept.single(cut) is None  # it has not landed
    [extent] = core.extents(cut)
    core.commit(cut, [Region(extent.offset, PAGE, 9)])
    found = kept.single(cut)
    assert found is not None and found.spans == found.packed[0] == pack_entry(POOL, [(extent.offset, PAGE, 9)])
