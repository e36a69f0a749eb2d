"""What only a handoff's owner can measure."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.worker.metrics import WorkerMetrics
from prefill.core import HandoffTable


class HandoffMetrics(Collector):
    """The handoff table as it stands when somebody scrapes; publishing is timed where it happens."""

    def __init__(self, metrics: WorkerMetrics, table: HandoffTable) -> None:
        self._table = table
        self.publish_seconds = metrics.histogram(
            "handoff_publish_seconds", "Last chunk done to manifest made, checksums included"
        )
        self.published_bytes = metrics.counter("handoff_published_bytes", "Bytes that manifests promised")
        metrics.registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats, prefix = self._table.stats(), "moonrelay_prefill_handoff"
        phases = GaugeMetricFamily(prefix + "s", "Handoffs whose memory is not free, by phase", labels=("phase",))
        phases.add_metric(("computing",), stats.num_computing)
        phases.add_metric(("lending",), stats.num_lending)
        phases.add_metric(("declined",), stats.num_declined)
        phases.add_metric(("published",), stats.num_published)
        phases.add_metric(("expired",), stats.num_expired)
        yield phases
        yield GaugeMetricFamily(prefix + "_leased_bytes", "Bytes lent to readers", stats.leased_bytes)
        yield CounterMetricFamily(prefix + "_released", "Ended by the reader's acknowledgement", stats.released)
        yield CounterMetricFamily(prefix + "_lease_expired", "Not acknowledged within the lease", stats.lease_expired)
        yield CounterMetricFamily(prefix + "_withdrawn", "Ended while regions were lent", stats.withdrawn)
        yield CounterMetricFamily(prefix + "_stale_fences", "Acknowledgements of another lease", stats.stale_fences)
