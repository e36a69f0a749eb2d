"""A read's plan: every byte once, in few segments, and each span judged by its own checksum wherever groups end."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachestore.arena import Arena
from cachestore.checksum import checksum
from cachestore.transports import Batch, ChecksumMismatch, Read, Slice, Source, plan
from cachestore.transports.pools import Pools

OURS, THEIRS, ROOM = 1, 7, 1 << 16


@st.composite
def reads(draw: st.DrawFn) -> list[Read]:
    """Spans of any length, also none; some follow the one before on one side, on both, or on none; some land in
    pieces."""
    made, theirs, ours = [], 0, 0
    for length in draw(st.lists(st.sampled_from([0, 1, 7, 64, 300]), max_size=12)):
        theirs += draw(st.sampled_from([0, 0, 5]))
        ours += draw(st.sampled_from([0, 0, 3]))
        cut = draw(st.integers(0, length)) if draw(st.booleans()) else length
        into = [Slice(OURS, ours, cut)]
        if cut < length:
            gap = draw(st.sampled_from([0, 9]))
            into.append(Slice(OURS, ours + cut + gap, length - cut))
            ours += gap
        made.append(Read(Source(THEIRS, theirs, length, 0), tuple(into)))
        theirs, ours = theirs + length, ours + length
    return made


@settings(max_examples=150, deadline=None)
@given(wanted=reads(), group_bytes=st.sampled_from([1, 50, 1_000]), segments_max=st.integers(1, 4), data=st.data())
def test_every_byte_moves_once_and_the_first_wrong_span_is_named(
    wanted: list[Read], group_bytes: int, segments_max: int, data: st.DataObject
) -> None:
    pools, source, landing = Pools(), Arena(ROOM), Arena(ROOM)
    pools.register(OURS, landing.base, ROOM)
    source.view[:] = bytes(i * 31 % 251 for i in range(ROOM))
    sums = [checksum(source.view[span.offset : span.offset + span.length]) for span, _ in wanted]
    bad = data.draw(st.none() | st.integers(0, len(wanted) - 1)) if wanted else None
    if bad is not None:
        sums[bad] ^= 1
    promised = [Read(span._replace(xxh3=xxh3), into) for (span, into), xxh3 in zip(wanted, sums, strict=True)]
    batch = Batch.of(promised)
    plan.check(batch, pools)
    handle = SimpleNamespace(verified=None)
    verifier = plan.Verifier(batch, pools, handle)
    moved = 0
    with mock.patch.multiple(plan, GROUP_BYTES=group_bytes, GROUP_SEGMENTS=segments_max):
        groups = list(plan.groups(batch))
    for group in groups:
        assert 0 < len(group) <= segments_max and sum(segment.length for segment in group) <= group_bytes
        for one in group:
            here = source.view[one.remote_offset : one.remote_offset + one.length]
            landing.view[one.offset : one.offset + one.length] = here
            moved += one.length
    assert moved == sum(span.length for span, _ in wanted)
    try:
        for group in groups:
            verifier.landed(group)
    except ChecksumMismatch as error:
        assert bad is not None and f"span {bad} of {len(wanted)}" in str(error)
    else:
        assert bad is None
    assert handle.verified == (len(wanted) if bad is None else bad)
    for span, into in wanted:
        landed = b"".join(landing.view[s.offset : s.offset + s.length] for s in into)
        assert landed == source.view[span.offset : span.offset + span.length]


@pytest.mark.parametrize(("gap_theirs", "gap_ours", "segments"), [(0, 0, 1), (0, 4, 8), (4, 0, 8)])
def test_what_goes_on_without_a_gap_on_both_sides_is_one_segment(
    gap_theirs: int, gap_ours: int, segments: int
) -> None:
    made = [
        Read(Source(THEIRS, i * (64 + gap_theirs), 64, 0), (Slice(OURS, i * (64 + gap_ours), 64),)) for i in range(8)
    ]
    [group] = plan.groups(Batch.of(made))
    assert len(group) == segments and sum(one.length for one in group) == 8 * 64
