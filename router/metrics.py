"""What the router shows Prometheus. Labels come from closed sets only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.core import LOST_REASONS, CacheAccount

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
        self._cache(counter)
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

    def _cache(self, counter: Callable[..., Counter]) -> None:
        """Of prompts: hit + lost = prompt; hit <= matchable <= possible. Of handoffs: their own denominator."""
        self.cache_prompt = counter("cache_prompt_tokens", "Prompt tokens that prefill was asked for.")
        hit = counter("cache_hit_tokens", "Prompt tokens that the cache saved, by where they were.", "tier")
        self.cache_hit = {tier: hit.labels(tier) for tier in TIERS}
        self.cache_matchable = counter("cache_matchable_tokens", "As deep as blocks were held, snapshot or not.")
        self.cache_possible = counter("cache_possible_tokens", "What an unlimited cache would have saved.")
        self.cache_drafter_cold = counter("cache_drafter_cold_tokens", "Of the hit, what the drafter does not see.")
        lost = counter("cache_lost_tokens", "Prompt tokens that had to be computed, by why.", "reason")
        self.cache_lost = {reason: lost.labels(reason) for reason in LOST_REASONS}
        self.handoff_tokens = counter("handoff_prompt_tokens", "Prompt tokens that decode adopted.")
        self.handoff_held_tokens = counter("handoff_held_tokens", "Of these, what decode held and did not pull.")

    def count_cache(self, account: CacheAccount) -> None:
        self.cache_prompt.inc(account.prompt_tokens)
        for tier, tokens in account.by_tier:
            self.cache_hit[tier].inc(tokens)
        self.cache_matchable.inc(account.matchable_tokens)
        self.cache_possible.inc(account.possible_tokens)
        self.cache_drafter_cold.inc(account.drafter_cold)
        for reason, tokens in account.lost:
            self.cache_lost[reason].inc(tokens)
