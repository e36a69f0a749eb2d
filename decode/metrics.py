"""What only a handoff's reader can measure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from decode.core import ReaderTable
from decode.manifest import REFUSALS
from engine.worker.metrics import FINE_SECONDS, WorkerMetrics

if TYPE_CHECKING:
    from decode.reader import Adoption

BYTES: Final = tuple(float(1 << shift) for shift in range(14, 36, 2))
COUNTS: Final = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
READ_FAILURES: Final = ("checksum", "transfer", "deadline")


class ReaderMetrics(Collector):
    """Handoffs by transport and refusals by reason; the reservations as they stand when somebody scrapes."""

    def __init__(self, metrics: WorkerMetrics, table: ReaderTable) -> None:
        self._table = table
        self._bytes = metrics.counter("handoff_bytes", "Bytes pulled and verified", ("transport",))
        self._pull_seconds = metrics.histogram(
            "handoff_pull_seconds", "Reading a handoff's bytes", FINE_SECONDS, ("transport",)
        )
        self._verify_seconds = metrics.histogram(
            "handoff_verify_seconds", "Checking a handoff's bytes", FINE_SECONDS, ("transport",)
        )
        self._after_manifest = metrics.histogram(
            "handoff_after_manifest_seconds",
            "Manifest received to adopted: what following could not hide",
            FINE_SECONDS,
        )
        self._held_tokens = metrics.counter("handoff_held_tokens", "Prompt tokens whose rows need not move")
        self._refused = metrics.counter("handoff_refused", "Handoffs not adopted, by why", ("reason",))
        for reason in REFUSALS:  # a counter that is absent until it first counts cannot alert
            self._refused.labels(reason)
        self._nixl_seconds = metrics.vllm_histogram("nixl_xfer_time_seconds", "One handoff over NIXL", FINE_SECONDS)
        self._nixl_bytes = metrics.vllm_histogram("nixl_bytes_transferred", "Bytes of one handoff over NIXL", BYTES)
        self._nixl_regions = metrics.vllm_histogram("nixl_num_descriptors", "Regions of one handoff", COUNTS)
        self._nixl_failed = metrics.vllm_counter("nixl_num_failed_transfers", "Handoffs whose read failed")
        self.acks_failed = metrics.counter("handoff_acks_failed", "Acknowledgements that did not reach the owner")
        metrics.registry.register(self)

    def pulled(self, report: Adoption, regions: int) -> None:
        """A handoff that was verified."""
        self._bytes.labels(report.transport).inc(report.bytes)
        self._pull_seconds.labels(report.transport).observe(report.pull_seconds)
        self._verify_seconds.labels(report.transport).observe(report.verify_seconds)
        self._after_manifest.observe(report.after_manifest_seconds)
        self._held_tokens.inc(report.held_tokens)
        if report.transport == "nixl":
            self._nixl_seconds.observe(report.pull_seconds)
            self._nixl_bytes.observe(report.bytes)
            self._nixl_regions.observe(regions)

    def refuse(self, reason: str) -> None:
        self._refused.labels(reason).inc()
        if reason in READ_FAILURES:
            self._nixl_failed.inc()

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats, prefix = self._table.stats(), "moonrelay_decode_reservation"
        phases = GaugeMetricFamily(prefix + "s", "Reservations that are not released, by phase", labels=("phase",))
        phases.add_metric(("reserved",), stats.num_reserved)
        phases.add_metric(("following",), stats.num_following)
        phases.add_metric(("pulling",), stats.num_pulling)
        phases.add_metric(("adopted",), stats.num_adopted)
        phases.add_metric(("quarantined",), stats.num_quarantined)
        yield phases
        yield CounterMetricFamily(prefix + "s_expired", "Reservations that nobody came for", stats.expired)
