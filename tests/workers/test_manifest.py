"""Every promise of a manifest is checked before a byte is pulled, and each refusal has its own word."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from decode.manifest import REFUSALS, Manifest, Mine, Region, check_manifest
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
BLOCK, RECURRENT, CONV = 64 * 2 * 5 * 4, 3 * 2 * 4 * 6 * 4, 3 * 3 * 2 * (2 * 4 + 6) * 4
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
MINE = Mine(
    fingerprint=FINGERPRINT,
    layout=LAYOUT,
    tp_size=1,
    vocab_size=272,
    prompt_tokens=130,
    epochs={"prefill-0": 7, "prefill-1": 3},
)
GOOD = Manifest(
    handoff_id="h",
    fingerprint=FINGERPRINT,
    layout=LAYOUT,
    tp_size=1,
    tokens_in_state=130,
    next_token=271,
    sampler_position=131,
    rows=tuple(Region(pool=0, offset=i * BLOCK, length=BLOCK, xxh3=i) for i in (2, 0, 9)),
    state=(Region(pool=1, offset=0, length=RECURRENT, xxh3=1), Region(pool=1, offset=RECURRENT, length=CONV, xxh3=2)),
    instance_id="prefill-0",
    epoch=7,
    pools={0: 10 * BLOCK, 1: RECURRENT + CONV},
    fence=1,
    lease_ms=1,
)


def other_fingerprint(**changes):
    return replace(GOOD, fingerprint=msgspec.structs.replace(FINGERPRINT, **changes))


def with_row(index, **changes):
    rows = list(GOOD.rows)
    rows[index] = replace(rows[index], **changes)
    return replace(GOOD, rows=tuple(rows))


CASES = [
    ("fingerprint", other_fingerprint(model="n")),
    ("fingerprint", other_fingerprint(weights_revision="x")),
    ("fingerprint", other_fingerprint(tokenizer_revision="x")),
    ("fingerprint", other_fingerprint(layout_version="2")),
    ("fingerprint", other_fingerprint(numerics_version="torch-1")),
    ("fingerprint", other_fingerprint(block_tokens=128)),
    ("dtype", other_fingerprint(row_dtype="float8_e4m3")),
    ("dtype", other_fingerprint(snapshot_dtype="bfloat16")),
    ("layout", replace(GOOD, layout=replace(LAYOUT, num_heads=4))),
    ("layout", replace(GOOD, layout=replace(LAYOUT, conv_history=4))),
    ("tp_size", replace(GOOD, tp_size=2)),
    ("tp_size", replace(GOOD, tp_size=0)),
    ("tokens_in_state", replace(GOOD, tokens_in_state=129, sampler_position=130)),
    ("tokens_in_state", replace(GOOD, tokens_in_state=131, sampler_position=132)),
    ("tokens_in_state", replace(GOOD, tokens_in_state=0, sampler_position=1)),
    ("row_spans", replace(GOOD, rows=GOOD.rows[:2])),
    ("row_spans", replace(GOOD, rows=(*GOOD.rows, GOOD.rows[0]))),
    ("row_spans", with_row(2, length=BLOCK - 4)),
    ("state_spans", replace(GOOD, state=GOOD.state[:1])),
    ("state_spans", replace(GOOD, state=GOOD.state[::-1])),
    ("state_spans", replace(GOOD, state=())),
    ("span_bounds", with_row(1, offset=10 * BLOCK - 1)),
    ("span_bounds", with_row(1, offset=-1)),
    ("span_bounds", with_row(1, pool=2)),
    ("next_token", replace(GOOD, next_token=272)),
    ("next_token", replace(GOOD, next_token=-1)),
    ("sampler_position", replace(GOOD, sampler_position=130)),
    ("sampler_position", replace(GOOD, sampler_position=132)),
    ("fence", replace(GOOD, fence=0)),
    ("fence", replace(GOOD, lease_ms=0)),
    ("stale_epoch", replace(GOOD, epoch=6)),
    ("stale_epoch", replace(GOOD, instance_id="prefill-1")),
]


def test_a_kept_promise_is_accepted():
    assert check_manifest(GOOD, MINE) is None


def test_an_instance_that_membership_has_not_shown_yet_is_accepted():
    assert check_manifest(replace(GOOD, instance_id="prefill-9"), MINE) is None


@pytest.mark.parametrize(("reason", "manifest"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_a_broken_promise_is_refused_for_its_reason(reason, manifest):
    refusal = check_manifest(manifest, MINE)
    assert isinstance(refusal, HandoffRefused)
    assert refusal.reason == reason


def test_exact_multiples_of_a_block_need_no_extra_block():
    manifest = replace(GOOD, tokens_in_state=128, sampler_position=129, rows=GOOD.rows[:2])
    assert check_manifest(manifest, replace(MINE, prompt_tokens=128)) is None


def test_the_refusals_are_a_closed_set_and_those_of_the_manifest_are_all_tried():
    found_later = {"reservation", "checksum", "transfer", "deadline"}
    assert {reason for reason, _ in CASES} | found_later == set(REFUSALS)
