"""What only a handoff's reader can measure."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from decode.core import ReaderTable
from decode.manifest import REFUSALS
from engine.worker.metrics import FINE_SECONDS, WorkerMetrics


class ReaderMetrics(Collector):
    """Handoffs by transport and refusals by reason; the reservations as they stand when somebody scrapes."""

    def __init__(self, metrics: WorkerMetrics, table: ReaderTable) -> None:
        self._table = table
        self.bytes = metrics.counter("handoff_bytes", "Bytes pulled and verified", ("transport",))
        self.pull_seconds = metrics.histogram(
            "handoff_pull_seconds", "Reading a handoff's bytes", FINE_SECONDS, ("transport",)
        )
        self.verify_seconds = metrics.histogram(
            "handoff_verify_seconds", "Checking a handoff's bytes", FINE_SECONDS, ("transport",)
        )
        self.refused = metrics.counter("handoff_refused", "Handoffs not adopted, by why", ("reason",))
        for reason in REFUSALS:  # a counter that is absent until it first counts cannot alert
            self.refused.labels(reason)
        self.acks_failed = metrics.counter("handoff_acks_failed", "Acknowledgements that did not reach the owner")
        metrics.registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats, prefix = self._table.stats(), "moonrelay_decode_reservation"
        phases = GaugeMetricFamily(prefix + "s", "Reservations that are not released, by phase", labels=("phase",))
        phases.add_metric(("reserved",), stats.num_reserved)
        phases.add_metric(("pulling",), stats.num_pulling)
        phases.add_metric(("adopted",), stats.num_adopted)
        phases.add_metric(("quarantined",), stats.num_quarantined)
        yield phases
        yield CounterMetricFamily(prefix + "s_expired", "Reservations that nobody came for", stats.expired)
