"""What a cache node measures: `moonrelay_cache_*`, base units seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cachestore.node.books import NodeStats
from moonrelay.errors import SettingsError

SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
OUTCOMES: Final = ("stored", "already_there", "in_progress", "refused")
TRANSPORTS: Final = ("nixl", "tcp", "memory")


class NodeMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.published = self._counter("published_entries", "Offered entries, by outcome", "reason")
        self.publish_failed = self._counter("publish_failed", "Publishes that stored nothing, by why", "reason")
        self.pulled_bytes = {
            name: self._counter(f"{name}_pulled_bytes", f"Bytes pulled from publishers over {name}")
            for name in TRANSPORTS
        }
        self.pull_seconds = Histogram(
            "moonrelay_cache_pull_seconds",
            "Pulling and verifying one publish",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.leases_granted = self._counter("leases_granted", "Leases given")
        self.leases_refused = self._counter("leases_refused", "Leases not given, by why", "reason")
        self.leases_expired = self._counter("leases_expired", "Leases that nobody gave back in time")
        self.index_lost = self._counter("index_rewrites", "Roots whose entries had vanished from Redis")
        for outcome in OUTCOMES:
            self.published.labels(outcome)

    def watch(self, stats: Callable[[], NodeStats]) -> None:
        """Show the core's books at every scrape."""
        self.registry.register(_Books(stats))

    def serve(self, listen: str) -> str:
        """Serve /metrics; returns the address. Raises: SettingsError when the port is taken."""
        host, _, port = listen.rpartition(":")
        try:
            server, _ = start_http_server(int(port), addr=host, registry=self.registry)
        except (OSError, ValueError) as error:
            raise SettingsError(f"metrics_listen {listen}: {error}") from None
        return f"{host}:{server.server_port}"

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"moonrelay_cache_{name}", help_text, labels, registry=self.registry)


class _Books(Collector):
    def __init__(self, stats: Callable[[], NodeStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        now = self._stats()
        for name, value, about in (
            ("capacity_bytes", now.capacity_bytes, "Memory for entries"),
            ("free_bytes", now.free_bytes, "Memory that holds nothing"),
            ("quarantined_bytes", now.quarantined_bytes, "Memory that a late read of ours may still write"),
            ("blocks", now.num_blocks, "Blocks that can be leased"),
            ("snapshots", now.num_snapshots, "Snapshots that can be leased"),
            ("hidden_entries", now.num_hidden, "Entries that are landing or leaving"),
            ("leases", now.num_leases, "Leases in force"),
        ):
            yield GaugeMetricFamily(f"moonrelay_cache_{name}", about, value=value)
        yield CounterMetricFamily("moonrelay_cache_evicted_blocks", "Blocks evicted", value=now.evicted_blocks)
        yield CounterMetricFamily(
            "moonrelay_cache_evicted_snapshots", "Snapshots evicted", value=now.evicted_snapshots
        )
