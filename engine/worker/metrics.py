"""What both workers measure. `vllm:*` names where vLLM's workers have the same thing: any picker can scrape us."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.api import EngineStats
from engine.observer import SequenceReport, StepReport
from engine.worker.drafting import DraftMetrics
from moonrelay.stubs.v1 import common_pb2

Source = Literal["prefill", "decode"]
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
FINE_SECONDS: Final = (0.0001, 0.00025, 0.0005, *SECONDS[:12])
disable_created_metrics()  # type: ignore[no-untyped-call]  # a time series beside every other one that nobody reads
TIERS: Final = ("device", "host", "disk", "remote")


class WorkerMetrics:
    """Counters and histograms of one worker; also the engine's observer. Safe from any thread."""

    def __init__(self, source: Source, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.source = source
        self._model = model_name
        self.warming = False  # what runs before the worker is ready is nobody's request
        self.on_memory_freed: Callable[[], object] = lambda: None
        self.prompt_tokens = self.vllm_counter("prompt_tokens", "Prompt tokens of requests, cached ones included")
        self.generation_tokens = self.vllm_counter("generation_tokens", "Tokens drawn")
        self.prefix_queries = self.vllm_counter("prefix_cache_queries", "Prompt tokens looked up in the cache")
        self.prefix_hits = self.vllm_counter("prefix_cache_hits", "Prompt tokens restored from the cache")
        self.ttft = self.vllm_histogram("time_to_first_token_seconds", "Arrival at this worker to first token")
        self.inter_token = self.vllm_histogram(
            "inter_token_latency_seconds",
            "Between a sequence's tokens; the mean of those that leave together",
            FINE_SECONDS,
        )
        self.queue_time = self.vllm_histogram("request_queue_time_seconds", "Submitted to first planned")
        self.prefill_time = self.vllm_histogram("request_prefill_time_seconds", "First planned to first token")
        self.decode_time = self.vllm_histogram("request_decode_time_seconds", "First token to the end")
        self._success = Counter(
            "vllm:request_success",
            "Sequences that ended, by why",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self.cache_tokens = self.counter("cache_tokens", "Prompt tokens restored, by tier", ("tier",))
        self.cache_lost = self.counter("cache_lost_tokens", "Prompt tokens computed, by why", ("reason",))
        self.fetch_seconds = self.histogram(
            "cache_fetch_seconds", "Restoring a hit, failed ones included", FINE_SECONDS
        )
        self.fetch_bytes = self.counter("cache_fetch_bytes", "Bytes restored from cache nodes", ("transport",))
        self.publish_skipped = self.counter(
            "publish_skipped", "Prompts not offered to the cache, by why", ("reason",)
        )
        self.published_entries = self.counter("published_entries", "Cache entries offered, by outcome", ("outcome",))
        self.step_seconds = self.histogram("step_seconds", "One engine step", FINE_SECONDS)
        self.failed = self.counter("sequences_failed", "Sequences ended by a fault of the model")
        self.quarantined_bytes = self.gauge("quarantined_bytes", "Memory that a late read of ours may still write")
        self.drafting = DraftMetrics(self)
        self.kept_blocks = self.gauge(
            "kept_blocks", "Row blocks that finished prompts and turns keep: the device tier"
        )
        self.kept_slots = self.gauge("kept_state_slots", "State slots that their snapshots keep")
        self.leaked_blocks = self.gauge("leaked_blocks", "Row blocks that nobody holds and that are not free: a bug")
        self.leaked_slots = self.gauge(
            "leaked_state_slots", "State slots that nobody holds and that are not free: a bug"
        )

    # -- making metrics --------------------------------------------------------------------------------------------

    def counter(self, name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"moonrelay_{self.source}_{name}", about, labels, registry=self.registry)

    def gauge(self, name: str, about: str) -> Gauge:
        return Gauge(f"moonrelay_{self.source}_{name}", about, registry=self.registry)

    def histogram(
        self, name: str, about: str, buckets: tuple[float, ...] = SECONDS, labels: tuple[str, ...] = ()
    ) -> Histogram:
        return Histogram(f"moonrelay_{self.source}_{name}", about, labels, buckets=buckets, registry=self.registry)

    def vllm_counter(self, name: str, about: str) -> Counter:
        made = Counter(f"vllm:{name}", about, ("model_name",), registry=self.registry)
        return made.labels(self._model)

    def vllm_histogram(self, name: str, about: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        made = Histogram(f"vllm:{name}", about, ("model_name",), buckets=buckets, registry=self.registry)
        return made.labels(self._model)

    # -- the engine's observer -------------------------------------------------------------------------------------

    def step_done(self, report: StepReport) -> None:
        if self.warming:
            return
        self.step_seconds.observe(report.total_s)
        self.generation_tokens.inc(report.num_tokens_drawn)
        self.drafting.step_done(report)

    def sequence_done(self, report: SequenceReport) -> None:
        if self.warming:
            return
        if report.reason is None:
            self.failed.inc()
        else:
            self._success.labels(self._model, report.reason).inc()
        for histogram, seconds in (
            (self.queue_time, report.queue_s),
            (self.prefill_time, report.prefill_s),
            (self.decode_time, report.decode_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def memory_freed(self) -> None:
        self.on_memory_freed()

    # -- the rest --------------------------------------------------------------------------------------------------

    def prompt_done(self, prompt_tokens: int, usage: common_pb2.CacheUsage) -> None:
        """Account for a prompt's tokens: restored ones by tier, the others by why."""
        self.prompt_tokens.inc(prompt_tokens)
        self.prefix_queries.inc(prompt_tokens)
        self.prefix_hits.inc(usage.cached_tokens)
        for tier in TIERS:
            self.cache_tokens.labels(tier).inc(getattr(usage, f"cached_{tier}"))
        self.drafting.cold(usage.drafter_cold)
        lost = prompt_tokens - usage.cached_tokens
        if lost:
            name = common_pb2.MissReason.Name(usage.miss_reason).removeprefix("MISS_REASON_").lower()
            self.cache_lost.labels(name).inc(lost)

    def fetched(self, transport: str, nbytes: int) -> None:
        self.fetch_bytes.labels(transport).inc(nbytes)

    def published(self, outcome: str, entries: int) -> None:
        self.published_entries.labels(outcome).inc(entries)

    def watch(self, stats: Callable[[], EngineStats], extra_waiting: Callable[[], int], block_tokens: int) -> None:
        """Read the engine's budgets whenever somebody scrapes."""
        self.registry.register(_Budgets(self.source, self._model, stats, extra_waiting, block_tokens))


class _Budgets(Collector):
    def __init__(
        self,
        source: str,
        model_name: str,
        stats: Callable[[], EngineStats],
        extra_waiting: Callable[[], int],
        block_tokens: int,
    ) -> None:
        self._source, self._model = source, model_name
        self._stats, self._extra_waiting, self._block_tokens = stats, extra_waiting, block_tokens

    def collect(self) -> Iterator[GaugeMetricFamily]:
        stats = self._stats()
        used_blocks = stats.num_blocks - stats.free_blocks
        yield self._vllm("num_requests_running", "Sequences in the batch", stats.num_running)
        waiting = stats.num_waiting + self._extra_waiting()
        yield self._vllm("num_requests_waiting", "Sequences waiting for memory or a place", waiting)
        yield self._vllm("kv_cache_usage_perc", "Share of row blocks taken; 1 is all", used_blocks / stats.num_blocks)
        info = {"block_size": str(self._block_tokens), "num_gpu_blocks": str(stats.num_blocks)}
        yield self._vllm("cache_config_info", "Sizes of the row pool", 1, info)
        prefix = f"moonrelay_{self._source}_"
        yield GaugeMetricFamily(prefix + "row_blocks", "Row blocks in all", stats.num_blocks)
        yield GaugeMetricFamily(prefix + "row_blocks_used", "Row blocks taken", used_blocks)
        yield GaugeMetricFamily(prefix + "state_slots", "State slots in all", stats.num_slots)
        used_slots = stats.num_slots - stats.free_slots
        yield GaugeMetricFamily(prefix + "state_slots_used", "State slots taken, snapshots too", used_slots)
        yield GaugeMetricFamily(
            prefix + "snapshots_skipped",
            "Snapshots not taken for want of a slot, since start",
            stats.snapshots_skipped,
        )

    def _vllm(
        self, name: str, about: str, value: float, labels: Mapping[str, str] | None = None
    ) -> GaugeMetricFamily:
        labels = {"model_name": self._model, **(labels or {})}
        family = GaugeMetricFamily(f"vllm:{name}", about, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family
