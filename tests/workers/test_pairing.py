"""Pairs that can never fit are known from membership, each misfit by its own word, and said by both workers."""

from __future__ import annotations

import logging

import msgspec
import pytest

from engine.worker.metrics import WorkerMetrics
from engine.worker.pairs import Pairs
from moonrelay.membership import Member
from moonrelay.pairing import MISFITS, describe, unfit
from moonrelay.prefix import Fingerprint

FINGERPRINT = Fingerprint(
    model="m", weights_revision="w", tokenizer_revision="t", row_dtype="float32", snapshot_dtype="float32",
    layout_version="1", numerics_version="native-1", block_tokens=64,
)  # fmt: skip
LAYOUT = {"block_tokens": 64, "num_heads": 4}
OWNER = Member(
    instance_id="prefill-0", role="prefill", epoch=1, grpc_address="a:1", fingerprint=FINGERPRINT, layout=LAYOUT,
    readable_by=("nixl", "tcp"), reads_by=("nixl", "tcp"), drafter="d1",
)  # fmt: skip
READER = msgspec.structs.replace(OWNER, instance_id="decode-0", role="decode", epoch=2)


def other(**changes) -> Member:
    return msgspec.structs.replace(OWNER, **changes)


def fingerprint(**changes) -> Member:
    return other(fingerprint=msgspec.structs.replace(FINGERPRINT, **changes))


CASES = [
    ("fingerprint", fingerprint(weights_revision="x")),
    ("fingerprint", fingerprint(numerics_version="torch")),
    ("fingerprint", other(fingerprint=None)),
    ("dtype", fingerprint(row_dtype="float8")),
    ("dtype", fingerprint(snapshot_dtype="bfloat16")),
    ("drafter", other(drafter="d2")),
    ("drafter", other(drafter="")),
    ("layout", other(layout={**LAYOUT, "num_heads": 8})),
    ("layout", other(layout=None)),
    ("tp_size", other(tp_size=2)),
    ("transport", other(readable_by=("rdma",))),
]


@pytest.mark.parametrize(("reason", "owner"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_a_pair_that_can_never_fit_says_why(reason, owner):
    assert unfit(owner, READER) == reason


def test_every_misfit_is_tried_and_what_fits_fits():
    assert {reason for reason, _ in CASES} == set(MISFITS)
    assert unfit(OWNER, READER) is None
    assert unfit(other(readable_by=()), READER) is None
    assert unfit(OWNER, msgspec.structs.replace(READER, reads_by=("tcp",))) is None


def test_a_pair_with_two_drafters_is_refused_by_both_names():
    owner = other(drafter="")
    reason = unfit(owner, READER)
    assert reason == "drafter"
    assert describe(owner, READER, reason) == "prefill-0: drafter none; decode-0: drafter d1"


@pytest.mark.parametrize(("reason", "owner"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_what_does_not_agree_is_said_of_both(reason, owner):
    theirs, ours = describe(owner, READER, reason).split("; decode-0: ")
    assert theirs.removeprefix("prefill-0: ") != ours


class View:
    """A membership whose members a test sets."""

    def __init__(self, *members: Member) -> None:
        self.now = members

    def members(self, role: str) -> tuple[Member, ...]:
        return tuple(m for m in self.now if m.role == role)

    def find(self, instance_id: str, epoch: int) -> Member | None:
        return next((m for m in self.now if (m.instance_id, m.epoch) == (instance_id, epoch)), None)


def test_a_worker_that_fits_nobody_says_so_until_one_comes(caplog):
    view, metrics = View(READER, other(tp_size=2)), WorkerMetrics("decode", "m")
    pairs = Pairs(metrics, view, "decode-0", 2, "reader")

    def counted() -> float | None:
        return metrics.registry.get_sample_value("moonrelay_decode_pairs_unfit", {"reason": "tp_size"})

    with caplog.at_level(logging.ERROR):
        pairs.look()
        pairs.look()
    assert [record.message for record in caplog.records] == ["worker does not fit", "no worker fits this one"]
    assert counted() == 1
    caplog.clear()
    view.now = (*view.now, other(instance_id="prefill-1"))
    pairs.look()
    assert not caplog.records and counted() == 1
    view.now = (READER, other(epoch=9))  # it came back as one that fits
    pairs.look()
    assert not caplog.records and counted() == 0
