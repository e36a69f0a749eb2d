"""What drafting does for a worker's requests: counted by tenant and context length, and said of each in the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from engine.api import DraftReport, Finished
from moonrelay.stubs.v1 import worker_pb2

if TYPE_CHECKING:
    from engine.observer import StepReport
    from engine.worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)
TENANTS_MAX: Final = 64  # label values live as long as the process: later tenants share one
OTHERS, UNNAMED = "others", "unnamed"
CONTEXTS: Final = ((1 << 10, "1k"), (4 << 10, "4k"), (16 << 10, "16k"), (64 << 10, "64k"), (256 << 10, "256k"))
LONGEST: Final = "longer"
LABELS: Final = ("tenant", "context")


def context_bucket(tokens: int) -> str:
    """The closed set of lengths: the first bound that a sequence of as many tokens stays below or meets."""
    return next((name for bound, name in CONTEXTS if tokens <= bound), LONGEST)


class DraftMetrics:
    """Requests are counted on the event loop's thread, steps on the engine's."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._drafted = metrics.counter("draft_tokens", "Drafted tokens that were verified", LABELS)
        self._accepted = metrics.counter("draft_accepted_tokens", "Drafted tokens that were kept", LABELS)
        self._verify_steps = metrics.counter("draft_verify_steps", "Steps of a request that verified a draft", LABELS)
        self._plain_steps = metrics.counter("draft_plain_steps", "Steps of a request without a draft", LABELS)
        self._saved = metrics.counter("draft_saved_seconds", "Estimated, where drafting paid for a request", LABELS)
        self._lost = metrics.counter("draft_lost_seconds", "Estimated, where it cost more than it saved", LABELS)
        self._ignored = metrics.counter("drafts_ignored", "Drafts not verified, by what was wrong", ("reason",))
        self._cold = metrics.counter("drafter_cold_tokens", "Cached prompt tokens that the drafter does not see")
        self._refused = metrics.counter(
            "drafter_rows_refused_blocks", "Restored blocks whose drafter rows a cache node had and that did not come"
        )
        self.length = metrics.gauge("draft_length", "Drafted tokens per request in the last step that verified any")
        self._tenants: set[str] = set()

    def step_done(self, report: StepReport) -> None:
        """On the engine's thread."""
        if report.num_verified:
            self.length.set(report.num_drafted / report.num_verified)
        for reason, count in report.ignored.items():
            self._ignored.labels(reason).inc(count)

    def cold(self, tokens: int) -> None:
        """A prompt began with as many cached tokens whose drafter rows are not there."""
        self._cold.inc(tokens)

    def rows_refused(self, blocks: int) -> None:
        self._refused.inc(blocks)

    def request_done(self, request_id: str, tenant: str, finished: Finished, tokens: int) -> None:
        """A request of `tokens` generated here ended."""
        report, bucket = finished.draft, context_bucket(finished.tokens_in_state)
        if report is None or not report.verify_steps + report.plain_steps:
            return  # no drafter, or a prompt that is decoded elsewhere
        labels = (self._tenant(tenant), bucket)
        self._drafted.labels(*labels).inc(report.drafted)
        self._accepted.labels(*labels).inc(report.accepted)
        self._verify_steps.labels(*labels).inc(report.verify_steps)
        self._plain_steps.labels(*labels).inc(report.plain_steps)
        (self._saved if report.saved_s >= 0 else self._lost).labels(*labels).inc(abs(report.saved_s))
        log.info("request drafted", extra=log_fields(request_id, tenant, bucket, report, tokens))

    def _tenant(self, tenant: str) -> str:
        name = tenant or UNNAMED
        if name not in self._tenants:
            if len(self._tenants) >= TENANTS_MAX:
                return OTHERS
            self._tenants.add(name)
        return name


def log_fields(request_id: str, tenant: str, bucket: str, report: DraftReport, tokens: int) -> dict[str, object]:
    """Units: tokens, steps, seconds. `tokens_per_verify_step` counts the token that the target itself adds."""
    steps = report.verify_steps
    return {
        "request_id": request_id,
        "tenant": tenant,
        "context": bucket,
        "completion_tokens": tokens,
        "drafted_tokens": report.drafted,
        "accepted_tokens": report.accepted,
        "verify_steps": steps,
        "plain_steps": report.plain_steps,
        "tokens_per_verify_step": round((report.accepted + steps) / steps, 3) if steps else None,
        "draft_seconds": round(report.draft_s, 5),
        "verify_seconds": round(report.verify_s, 5),
        "saved_seconds": round(report.saved_s, 5),
    }


def draft_to_wire(report: DraftReport | None) -> worker_pb2.DraftUsage | None:
    if report is None:
        return None
    return worker_pb2.DraftUsage(
        drafted_tokens=report.drafted,
        accepted_tokens=report.accepted,
        verify_steps=report.verify_steps,
        plain_steps=report.plain_steps,
        saved_seconds=report.saved_s,
        draft_seconds=report.draft_s,
        verify_seconds=report.verify_s,
    )
