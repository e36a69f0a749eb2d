"""What drafting did is counted by tenant and context length, from closed sets, and said of a request in the log."""

from __future__ import annotations

import logging

import pytest

from engine.api import DraftReport, Finished
from engine.observer import StepReport
from engine.worker.drafting import OTHERS, TENANTS_MAX, context_bucket
from engine.worker.metrics import WorkerMetrics

REPORT = DraftReport(
    drafted=40, accepted=24, verify_steps=10, plain_steps=2, draft_s=0.004, verify_s=0.01, saved_s=0.02
)


def finished(draft: DraftReport | None = REPORT, tokens: int = 500) -> Finished:
    return Finished(reason="stop", tokens_in_state=tokens, draft=draft)


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"moonrelay_decode_{name}", labels) or 0.0


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [
        (1, "1k"),
        (1024, "1k"),
        (1025, "4k"),
        (65536, "64k"),
        (262144, "256k"),
        (262145, "longer"),
        (1 << 30, "longer"),
    ],
)
def test_contexts_are_a_closed_set(tokens, bucket):
    assert context_bucket(tokens) == bucket


def test_a_request_is_counted_and_logged(caplog):
    metrics = WorkerMetrics("decode", "m")
    with caplog.at_level(logging.INFO):
        metrics.drafting.request_done("r-1", "acme", finished(), 36)
    where = {"tenant": "acme", "context": "1k"}
    assert value(metrics, "draft_tokens_total", **where) == 40
    assert value(metrics, "draft_accepted_tokens_total", **where) == 24
    assert value(metrics, "draft_verify_steps_total", **where) == 10
    assert value(metrics, "draft_plain_steps_total", **where) == 2
    assert value(metrics, "draft_saved_seconds_total", **where) == pytest.approx(0.02)
    [record] = caplog.records
    shown = {"request_id": "r-1", "tokens_per_verify_step": 3.4, "saved_seconds": 0.02, "completion_tokens": 36}
    assert {name: getattr(record, name) for name in shown} == shown


def test_where_drafting_cost_more_it_says_so():
    metrics = WorkerMetrics("decode", "m")
    worse = DraftReport(drafted=4, accepted=0, verify_steps=1, plain_steps=9, draft_s=1, verify_s=1, saved_s=-0.5)
    metrics.drafting.request_done("r", "", finished(worse), 10)
    where = {"tenant": "unnamed", "context": "1k"}
    assert value(metrics, "draft_lost_seconds_total", **where) == 0.5
    assert value(metrics, "draft_saved_seconds_total", **where) == 0


def test_without_a_drafter_or_a_step_nothing_is_counted(caplog):
    metrics = WorkerMetrics("decode", "m")
    idle = DraftReport(drafted=0, accepted=0, verify_steps=0, plain_steps=0, draft_s=0, verify_s=0, saved_s=0)
    with caplog.at_level(logging.INFO):
        metrics.drafting.request_done("r", "a", finished(None), 3)
        metrics.drafting.request_done("r", "a", finished(idle), 3)
    assert not caplog.records


def test_tenants_past_the_most_share_one_label():
    metrics = WorkerMetrics("decode", "m")
    for number in range(TENANTS_MAX + 3):
        metrics.drafting.request_done("r", f"t{number}", finished(), 1)
    assert value(metrics, "draft_verify_steps_total", tenant=OTHERS, context="1k") == 30
    assert value(metrics, "draft_verify_steps_total", tenant="t0", context="1k") == 10


def test_steps_set_the_length_and_count_what_was_ignored():
    metrics = WorkerMetrics("decode", "m")
    step = {"num_sequences": 3, "num_prompt_tokens": 0, "num_decode_tokens": 9, "num_tokens_drawn": 5}
    times = {"forward_s": 0.1, "sample_s": 0.1, "total_s": 0.3}
    metrics.step_done(StepReport(**step, **times, num_verified=2, num_drafted=6, ignored={"empty": 2}))
    metrics.step_done(StepReport(**step, **times))
    assert value(metrics, "draft_length") == 3
    assert value(metrics, "drafts_ignored_total", reason="empty") == 2
