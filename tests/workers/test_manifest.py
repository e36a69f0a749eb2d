"""Every promise of a manifest is checked before a byte is pulled, and each refusal has its own word."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from decode.manifest import (
    REFUSALS,
    Held,
    Manifest,
    Mine,
    Opened,
    Region,
    Split,
    StateRegions,
    check_manifest,
    check_opened,
)
from decode.parts import Regions
from model.batch import PoolLayout
from moonrelay.errors import HandoffRefused
from moonrelay.prefix import Fingerprint

LAYOUT = PoolLayout(
    block_tokens=64,
    num_mla_layers=2,
    row_width=5,
    num_kda_layers=3,
    num_heads=2,
    key_dim=4,
    value_dim=6,
    conv_history=3,
)
BLOCK, REC, CONV = 64 * 2 * 5 * 4, 2 * 4 * 6 * 4, 3 * 2 * (2 * 4 + 6) * 4  # bytes of a block, of a layer's parts
SLOT = 3 * (REC + CONV)
HELD = Held(root=b"r" * 16, prefix_hash=b"h" * 16, num_blocks=1)
FINGERPRINT = Fingerprint(
    model="m",
    weights_revision="w",
    tokenizer_revision="t",
    row_dtype="float32",
    snapshot_dtype="float32",
    layout_version="1",
    numerics_version="native-1",
    block_tokens=64,
)
WHOLE = Split(tp_size=1, tp_rank=0, first_head=0, end_head=2)
MINE = Mine(
    fingerprint=FINGERPRINT,
    layout=LAYOUT,
    vocab_size=272,
    prompt_tokens=130,
    epochs={"prefill-0": 7, "prefill-1": 3},
    drafter="d1",
)
OPENED = Opened(
    handoff_id="h",
    fingerprint=FINGERPRINT,
    layout=LAYOUT,
    split=WHOLE,
    prompt_tokens=130,
    instance_id="prefill-0",
    epoch=7,
    pools={0: 10 * BLOCK, 1: 4 * SLOT},
    fence=1,
    drafter="d1",
)


def row(block: int, xxh3: int = 1) -> Region:
    return Region(pool=0, offset=block * BLOCK, length=BLOCK, xxh3=xxh3)


def layers(first: int, end: int, slot: int = 2) -> StateRegions:
    """Layers of a slot as an honest owner names them."""
    base, count = slot * SLOT, end - first
    return StateRegions(
        first_layer=first,
        end_layer=end,
        recurrent=Region(pool=1, offset=base + first * REC, length=count * REC, xxh3=first),
        conv=Region(pool=1, offset=base + 3 * REC + first * CONV, length=count * CONV, xxh3=end),
    )


ROWS = (row(2), row(0), row(9))
GOOD = Manifest(
    opened=OPENED,
    next_token=271,
    sampler_position=131,
    rows=ROWS,
    state=(layers(0, 1), layers(1, 3)),
    held=None,
    lease_ms=1,
)


def opened_as(**changes) -> Manifest:
    return replace(GOOD, opened=replace(OPENED, **changes))


def other_fingerprint(**changes) -> Manifest:
    return opened_as(fingerprint=msgspec.structs.replace(FINGERPRINT, **changes))


def with_row(index: int, **changes) -> Manifest:
    rows = list(GOOD.rows)
    rows[index] = replace(rows[index], **changes)
    return replace(GOOD, rows=tuple(rows))


def with_state(index: int, **changes) -> Manifest:
    state = list(GOOD.state)
    state[index] = replace(state[index], **changes)
    return replace(GOOD, state=tuple(state))


def moved(region: Region, by: int) -> Region:
    return replace(region, offset=region.offset + by)


SECOND = GOOD.state[1]
IDENTITY_CASES = [
    ("fingerprint", other_fingerprint(model="n")),
    ("fingerprint", other_fingerprint(weights_revision="x")),
    ("fingerprint", other_fingerprint(tokenizer_revision="x")),
    ("fingerprint", other_fingerprint(layout_version="2")),
    ("fingerprint", other_fingerprint(numerics_version="torch-1")),
    ("fingerprint", other_fingerprint(block_tokens=128)),
    ("dtype", other_fingerprint(row_dtype="float8_e4m3")),
    ("dtype", other_fingerprint(snapshot_dtype="bfloat16")),
    ("drafter", opened_as(drafter="d2")),
    ("drafter", opened_as(drafter="")),
    ("layout", opened_as(layout=replace(LAYOUT, draft_width=2))),
    ("layout", opened_as(layout=replace(LAYOUT, num_heads=4))),
    ("layout", opened_as(layout=replace(LAYOUT, conv_history=4))),
    ("tp_size", opened_as(split=Split(tp_size=2, tp_rank=0, first_head=0, end_head=1))),
    ("tp_size", opened_as(split=Split(tp_size=0, tp_rank=0, first_head=0, end_head=2))),
    ("tp_size", opened_as(split=Split(tp_size=1, tp_rank=0, first_head=0, end_head=1))),
    ("tokens_in_state", opened_as(prompt_tokens=129)),
    ("tokens_in_state", opened_as(prompt_tokens=131)),
    ("tokens_in_state", opened_as(prompt_tokens=0)),
    ("fence", opened_as(fence=0)),
    ("stale_epoch", opened_as(epoch=6)),
    ("stale_epoch", opened_as(instance_id="prefill-1")),
]
MANIFEST_CASES = [
    ("row_spans", replace(GOOD, rows=GOOD.rows[:2])),
    ("row_spans", replace(GOOD, rows=(*GOOD.rows, row(1)))),
    ("row_spans", with_row(2, length=BLOCK - 4)),
    ("state_spans", replace(GOOD, state=GOOD.state[:1])),
    ("state_spans", replace(GOOD, state=GOOD.state[1:])),
    ("state_spans", replace(GOOD, state=GOOD.state[::-1])),
    ("state_spans", replace(GOOD, state=())),
    ("state_spans", replace(GOOD, state=(*GOOD.state, layers(2, 3)))),
    ("state_spans", replace(GOOD, state=(layers(0, 1), layers(1, 4)))),
    ("state_spans", with_state(1, recurrent=replace(SECOND.recurrent, length=REC))),
    ("state_spans", with_state(1, conv=replace(SECOND.conv, length=CONV))),
    ("span_bounds", with_row(1, offset=10 * BLOCK)),
    ("span_bounds", with_row(1, offset=BLOCK + 4)),
    ("span_bounds", with_row(1, offset=-BLOCK)),
    ("span_bounds", with_row(1, pool=2)),
    ("span_bounds", with_row(1, offset=2 * BLOCK)),  # the block before it, again
    ("span_bounds", with_state(1, recurrent=moved(SECOND.recurrent, 4))),
    ("span_bounds", with_state(1, recurrent=moved(SECOND.recurrent, REC))),
    ("span_bounds", with_state(1, conv=moved(SECOND.conv, -CONV))),
    ("span_bounds", with_state(1, conv=replace(SECOND.conv, pool=0))),
    ("span_bounds", replace(GOOD, state=(layers(0, 1), layers(1, 3, slot=3)))),
    ("span_bounds", replace(GOOD, state=(layers(0, 3, slot=4),))),
    ("next_token", replace(GOOD, next_token=272)),
    ("next_token", replace(GOOD, next_token=-1)),
    ("sampler_position", replace(GOOD, sampler_position=130)),
    ("sampler_position", replace(GOOD, sampler_position=132)),
    ("fence", replace(GOOD, lease_ms=0)),
    ("held", replace(GOOD, held=HELD)),
    ("drafter", replace(GOOD, draft_first=131)),
    ("drafter", replace(GOOD, draft_first=-1)),
    ("parts", opened_as(handoff_id="g")),
    ("parts", opened_as(fence=2)),
    ("parts", opened_as(pools={0: 10 * BLOCK, 1: 5 * SLOT})),
    ("parts", opened_as(instance_id="prefill-9")),
]


def regions(held_blocks: int = 0) -> Regions:
    return Regions(LAYOUT, prompt_tokens=130, pools=OPENED.pools, held_blocks=held_blocks)


def verdict(manifest: Manifest) -> HandoffRefused | None:
    """What a manifest that nothing was announced of meets."""
    return check_manifest(manifest, OPENED, MINE, None) or regions().close(manifest)


def test_a_kept_promise_is_accepted():
    assert check_opened(OPENED, MINE) is None and verdict(GOOD) is None


def test_an_instance_that_membership_has_not_shown_yet_is_accepted():
    assert check_opened(replace(OPENED, instance_id="prefill-9"), MINE) is None


@pytest.mark.parametrize(
    ("reason", "manifest"), IDENTITY_CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(IDENTITY_CASES)]
)
def test_a_pair_that_cannot_fit_is_refused_when_opened_and_again_by_its_manifest(reason, manifest):
    for refusal in (check_opened(manifest.opened, MINE), verdict(manifest)):
        assert isinstance(refusal, HandoffRefused) and refusal.reason == reason


@pytest.mark.parametrize(
    ("reason", "manifest"), MANIFEST_CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(MANIFEST_CASES)]
)
def test_a_broken_promise_is_refused_for_its_reason(reason, manifest):
    refusal = verdict(manifest)
    assert isinstance(refusal, HandoffRefused) and refusal.reason == reason


def test_exact_multiples_of_a_block_need_no_extra_block():
    opened = replace(OPENED, prompt_tokens=128)
    manifest = replace(GOOD, opened=opened, sampler_position=129, rows=GOOD.rows[:2])
    assert check_manifest(manifest, opened, replace(MINE, prompt_tokens=128), None) is None
    taken = Regions(LAYOUT, prompt_tokens=128, pools=OPENED.pools)
    assert taken.close(manifest) is None


def test_parts_are_read_as_they_come_and_the_manifest_brings_the_rest():
    taken = regions()
    assert taken.rows(0, ROWS[:1]) is None and taken.state(layers(0, 1)) is None
    first = taken.take()
    assert [i for i, _ in first.rows] == [0] and first.state == (layers(0, 1),)
    assert first.nbytes == BLOCK + REC + CONV
    assert taken.rows(1, ROWS[1:2]) is None and not taken.take()  # one read at a time
    taken.verified()
    assert [i for i, _ in taken.take().rows] == [1]
    taken.verified()
    assert taken.close(GOOD) is None and not taken.complete
    rest = taken.take()
    assert [i for i, _ in rest.rows] == [2] and rest.state == (layers(1, 3),)
    assert not taken.complete
    taken.verified()
    assert taken.complete and not taken.take()


@pytest.mark.parametrize(
    ("reason", "announce"),
    [
        ("row_spans", lambda r: r.rows(1, ROWS[1:])),
        ("row_spans", lambda r: r.rows(0, ROWS[:1]) or r.rows(0, ROWS[:1])),
        ("row_spans", lambda r: r.rows(0, (*ROWS, row(1)))),
        ("span_bounds", lambda r: r.rows(0, ROWS[:1]) or r.rows(1, ROWS[:1])),
        ("state_spans", lambda r: r.state(layers(1, 3))),
        ("state_spans", lambda r: r.state(layers(0, 1)) or r.state(layers(0, 1))),
        ("parts", lambda r: r.rows(0, (row(5),)) or r.close(GOOD)),
        ("parts", lambda r: r.rows(0, (row(2, xxh3=9),)) or r.close(GOOD)),
        ("parts", lambda r: r.state(layers(0, 2)) or r.close(GOOD)),
        ("parts", lambda r: r.close(GOOD) or r.close(GOOD)),
        ("parts", lambda r: r.close(GOOD) or r.rows(0, ROWS[:1])),
        ("parts", lambda r: r.close(GOOD) or r.state(layers(0, 1))),
    ],
)
def test_parts_that_contradict_the_prompt_each_other_or_the_manifest_are_refused(reason, announce):
    refusal = announce(regions())
    assert isinstance(refusal, HandoffRefused) and refusal.reason == reason


def test_held_blocks_are_agreed_on_by_name_and_never_announced_or_read():
    manifest = replace(GOOD, rows=ROWS[1:], held=HELD)
    assert check_manifest(manifest, OPENED, MINE, HELD) is None
    for other in (
        replace(HELD, root=b"s" * 16),
        replace(HELD, prefix_hash=b"i" * 16),
        replace(HELD, num_blocks=2),
        None,
    ):
        assert check_manifest(replace(manifest, held=other), OPENED, MINE, HELD).reason == "held"
    taken = regions(held_blocks=1)
    assert taken.rows(0, ROWS[:1]).reason == "held"
    assert regions(held_blocks=1).close(GOOD).reason == "row_spans"
    taken = regions(held_blocks=1)
    assert taken.close(manifest) is None
    assert [i for i, _ in taken.take().rows] == [1, 2]
    taken.verified()
    assert taken.complete


def test_the_refusals_are_a_closed_set_and_those_of_the_manifest_are_all_tried():
    found_later = {"reservation", "withdrawn", "checksum", "transfer", "deadline"}
    assert {reason for reason, _ in IDENTITY_CASES + MANIFEST_CASES} | found_later == set(REFUSALS)
