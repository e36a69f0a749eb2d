"""What a cache node measures: `moonrelay_cache_*`, base units seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cachestore.node.books import NodeStats
from cachestore.node.files import ScanCounts

SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
OUTCOMES: Final = ("stored", "already_there", "in_progress", "refused")
DRAFT_OUTCOMES: Final = ("stored", "already_there", "refused", "failed")
DISK_STATES: Final = ("off", "recovering", "ready")
TRANSPORTS: Final = ("nixl", "tcp", "memory")


class NodeMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.published = self._counter("published_entries", "Offered entries, by outcome", "reason")
        self.published_drafts = self._counter(
            "published_drafts", "Blocks whose drafter rows were offered, by outcome", "reason"
        )
        self.publish_failed = self._counter("publish_failed", "Publishes that stored nothing, by why", "reason")
        self.pulled_bytes = {
            name: self._counter(f"{name}_pulled_bytes", f"Bytes pulled from publishers over {name}")
            for name in TRANSPORTS
        }
        self.pull_seconds = self._seconds("pull_seconds", "Pulling and verifying one publish")
        self.leases_granted = self._counter("leases_granted", "Leases given")
        self.leases_refused = self._counter("leases_refused", "Leases not given, by why", "reason")
        self.leases_expired = self._counter("leases_expired", "Leases that nobody gave back in time")
        self.index_lost = self._counter("index_rewrites", "Roots whose entries had vanished from Redis")
        self.index_up = self._gauge("index_up", "1: the index answers. 0: serving what leases name, nothing is found")
        self.index_up.set(1)
        self.index_untold = self._gauge("index_untold_entries", "Changes that the index could not be told yet")
        self.written_bytes = self._counter("disk_written_bytes", "Bytes of files written")
        self.promoted_bytes = self._counter("disk_promoted_bytes", "Bytes brought from disk into memory")
        self.promote_seconds = self._seconds("disk_promote_seconds", "Reading and verifying what one lease wants")
        self.not_written = self._counter("disk_not_worth_it", "Not written: the disk is full, nobody asked for it")
        self.disk_errors = self._counter("disk_errors", "Writes and deletions that failed, by why", "reason")
        self.refused_files = self._counter("disk_refused_entries", "Not served, by what is wrong with them", "reason")
        self.replicated = self._counter("replicated_bundles", "Hot bundles offered to other nodes, by end", "reason")
        self.replicated_bytes = self._counter("replicated_bytes", "Bytes of hot bundles that other nodes took")
        for reason in ("stored", "already_there", "failed"):
            self.replicated.labels(reason)
        for reason in ("torn", "altered", "unreadable", "memory", "draft"):
            self.refused_files.labels(reason)
        for reason in ("full", "failed"):
            self.disk_errors.labels(reason)
        for outcome in OUTCOMES:
            self.published.labels(outcome)
        for outcome in DRAFT_OUTCOMES:
            self.published_drafts.labels(outcome)

    def watch(self, stats: Callable[[], NodeStats]) -> None:
        """Show the core's books at every scrape."""
        self.registry.register(_Books(stats))

    def watch_disk(self, disk: Callable[[], tuple[str, ScanCounts]]) -> None:
        """Show the disk tier's state and what its start found."""
        self.registry.register(_Disk(disk))

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"moonrelay_cache_{name}", help_text, registry=self.registry)

    def _seconds(self, name: str, help_text: str) -> Histogram:
        return Histogram(f"moonrelay_cache_{name}", help_text, buckets=SECONDS, registry=self.registry)

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
        yield from _tiers(now)


def _tiers(now: NodeStats) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    disk = now.disk
    gauges = {
        "tier_capacity_bytes": ("Room of a tier", now.capacity_bytes, disk.capacity_bytes),
        "tier_used_bytes": ("Of a tier, by whatever", now.capacity_bytes - now.free_bytes, disk.used_bytes),
        "tier_blocks": ("Blocks in a tier; one may be in both", now.host_blocks, disk.num_blocks),
        "tier_snapshots": ("Snapshots in a tier; one may be in both", now.host_snapshots, disk.num_snapshots),
    }
    for name, (about, host_value, disk_value) in gauges.items():
        family = GaugeMetricFamily(f"moonrelay_cache_{name}", about, labels=["tier"])
        family.add_metric(["host"], host_value)
        family.add_metric(["disk"], disk_value)
        yield family
    for name, value, about in (
        ("disk_deleting_bytes", disk.deleting_bytes, "Files on their way out"),
        ("disk_waiting_entries", disk.num_waiting, "Entries that are to be written"),
        ("disk_writing_entries", disk.num_writing, "Entries that are being written"),
    ):
        yield GaugeMetricFamily(f"moonrelay_cache_{name}", about, value=value)
    for name, value, about in (
        ("promotions", disk.promoted, "Entries brought from disk into memory"),
        ("demotions", disk.demoted, "Entries that left memory and stayed on disk"),
        ("disk_too_late", disk.unwritten, "Entries that left memory before they were written: writing falls behind"),
        ("disk_evictions", disk.evicted, "Files deleted to make room, or since they were bad"),
    ):
        yield CounterMetricFamily(f"moonrelay_cache_{name}", about, value=value)


class _Disk(Collector):
    def __init__(self, disk: Callable[[], tuple[str, ScanCounts]]) -> None:
        self._disk = disk

    def collect(self) -> Iterator[GaugeMetricFamily]:
        state, counts = self._disk()
        family = GaugeMetricFamily("moonrelay_cache_disk_state", "1 for the disk tier's state", labels=["state"])
        for each in DISK_STATES:
            family.add_metric([each], each == state)
        yield family
        for name, value, about in (
            ("files", counts.files, "Files that were there at the start"),
            ("seen", counts.seen, "Of these, looked at so far"),
            ("kept", counts.kept, "Entries from before"),
            ("refused", counts.refused, "Torn or altered files, deleted at the start"),
            ("unfinished", counts.unfinished, "Files that a crash left unfinished, deleted at the start"),
            ("foreign", counts.foreign, "Files in the directory that are not of our making"),
        ):
            yield GaugeMetricFamily(f"moonrelay_cache_disk_recovery_{name}", about, value=value)
