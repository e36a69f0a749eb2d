"""What the router shows Prometheus. Labels come from closed sets only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.core import LOST_REASONS

TIERS: Final = ("device", "host", "disk", "remote")
TRANSPORTS: Final = ("nixl", "tcp", "memory")
FINISH_REASONS: Final = ("stop", "length", "tool_calls")
STAGES: Final = ("queue", "prepare", "match", "place", "prefill", "adopt")
LOSS_PHASES: Final = ("unreachable", "before_first_token", "after_first_token")
CLIENT_GONE: Final = "499"  # no answer could be sent: the client closed the connection
_SECONDS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
    600,
)


class RouterMetrics:
    """One registry per router. Histograms and counters are in seconds and tokens."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._vllm(model)
        self._ours()

    def _vllm(self, model: str) -> None:
        """The names under which dashboards look for a frontend's figures."""

        def histogram(name: str, about: str) -> Histogram:
            made = Histogram(f"vllm:{name}", about, ["model_name"], registry=self.registry, buckets=_SECONDS)
            return made.labels(model)

        def counter(name: str, about: str) -> Counter:
            return Counter(f"vllm:{name}", about, ["model_name"], registry=self.registry).labels(model)

        self.ttft = histogram("time_to_first_token_seconds", "From the request's arrival to its first token.")
        self.itl = histogram("inter_token_latency_seconds", "Between tokens of one request, per token.")
        self.e2e = histogram("e2e_request_latency_seconds", "From the request's arrival to its end.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that reached a worker.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated for clients.")
        success = Counter(
            "vllm:request_success",
            "Requests that ended well.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.success = {reason: success.labels(model, reason) for reason in FINISH_REASONS}

    def _ours(self) -> None:
        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"moonrelay_router_{name}", about, labels, registry=self.registry)

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(f"moonrelay_router_{name}", about, labels, registry=self.registry)

        self.requests = counter("requests", "Finished requests, by the HTTP status that fits the end.", "code")
        cached = counter("cached_tokens", "Prompt tokens that the cache saved.", "tier")
        self.cached = {tier: cached.labels(tier) for tier in TIERS}
        lost = counter("lost_tokens", "Prompt tokens that had to be computed.", "reason")
        self.lost = {reason: lost.labels(reason) for reason in LOST_REASONS}
        self.recalled = counter("recalled_tokens", "Prompt tokens taken as earlier turns generated them.")
        losses = counter("workers_lost", "Workers that failed under a request.", "phase")
        self.losses = {phase: losses.labels(phase) for phase in LOSS_PHASES}
        refused = counter("refused", "Requests not admitted.", "reason")
        self.refused = {reason: refused.labels(reason) for reason in ("queue_full", "queue_timeout")}
        self.handoff_bytes = counter("handoff_bytes", "Bytes that decode workers pulled.", "transport")
        self.in_flight = gauge("in_flight_requests", "Requests being served.")
        self.queue = gauge("queue_requests", "Requests waiting for a place or for room on a worker.")
        self.workers = gauge("workers", "Workers that membership shows.", "role")
        self.ready = gauge("ready", "1 while a whole serving path exists.")
        stage = Histogram(
            "moonrelay_router_stage_seconds",
            "Time a request spends in each stage before its first token, and adopting.",
            ["stage"],
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.stage = {name: stage.labels(name) for name in STAGES}

    def count_cache(self, by_tier: Iterable[tuple[str, int]], lost: Iterable[tuple[str, int]]) -> None:
        for tier, tokens in by_tier:
            self.cached[tier].inc(tokens)
        for reason, tokens in lost:
            self.lost[reason].inc(tokens)
