"""Metrics for Prometheus. A registry of its own: two servers in one process do not mix."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rewarm.cache import Stats
from rewarm.engine.engine import Engine, EngineStats
from rewarm.errors import CacheClosed, NotReady

from .work import Run

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "rewarm_requests",
            "HTTP requests by endpoint and status; 499: the client went away.",
            ("endpoint", "status"),
            registry=self.registry,
        )
        self._prompt = Counter(
            "rewarm_prompt_tokens",
            "Prompt tokens: cached (not computed), prefilled (computed), and replayed (those of "
            "the prefilled ones that the cache knew).",
            ("kind",),
            registry=self.registry,
        )
        self._generated = Counter(
            "rewarm_generated_tokens", "Tokens of answers.", registry=self.registry
        )
        self._first_token = Histogram(
            "rewarm_time_to_first_token_seconds",
            "From a request's arrival at the engine to its first token.",
            buckets=FIRST_TOKEN,
            registry=self.registry,
        )
        self.between = Histogram(
            "rewarm_inter_token_seconds",
            "Between two tokens of an answer.",
            buckets=BETWEEN_TOKENS,
            registry=self.registry,
        )
        for kind in ("cached", "replayed", "prefilled"):
            self._prompt.labels(kind)
        self.registry.register(_Now(engine))

    def responded(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()

    def ran(self, run: Run) -> None:
        tokens = sum(choice.tokens for choice in run.choices)
        self._generated.inc(tokens)
        report = run.report
        if report is None:
            return
        self._prompt.labels("cached").inc(report.match.resume)
        self._prompt.labels("prefilled").inc(report.prefilled)
        self._prompt.labels("replayed").inc(min(report.match.replay, report.prefilled))
        if tokens:
            self._first_token.observe(report.ttft_ms / 1e3)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Now(Collector):
    """What the engine and the cache say of themselves when they are asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> list[Metric]:
        return []  # so that registering does not ask an engine that is still loading

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "rewarm_ready", "1 where requests are answered.", float(self._engine.state == "ready")
        )
        try:
            yield from self._requests(self._engine.stats())
            yield from self._cache(self._engine.cache.stats())
        except (NotReady, CacheClosed):
            return

    def _requests(self, engine: EngineStats) -> Iterator[Metric]:
        requests = GaugeMetricFamily(
            "rewarm_engine_requests", "Sequences in the engine, by stage.", labels=["stage"]
        )
        for stage in ("waiting", "prefilling", "decoding"):
            requests.add_metric([stage], getattr(engine, stage))
        yield requests
        yield GaugeMetricFamily(
            "rewarm_warm_ahead_waiting", "Prompts to warm ahead.", engine.warm_waiting
        )
        yield CounterMetricFamily(
            "rewarm_warm_ahead_tokens", "Tokens prefilled ahead of requests.", engine.warm_tokens
        )

    def _cache(self, stats: Stats) -> Iterator[Metric]:
        sizes = GaugeMetricFamily(
            "rewarm_cache_bytes", "Bytes held, by tier and kind.", labels=["tier", "kind"]
        )
        for tier, kinds in stats.bytes.items():
            for kind, size in kinds.items():
                sizes.add_metric([tier, kind], size)
        yield sizes
        yield GaugeMetricFamily("rewarm_cache_budget_bytes", "The memory budget.", stats.budget)
        yield GaugeMetricFamily("rewarm_cache_entries", "Nodes of the tree.", stats.entries)
        yield GaugeMetricFamily("rewarm_cache_checkpoints", "Checkpoints held.", stats.checkpoints)
        yield GaugeMetricFamily("rewarm_cache_tokens", "Distinct tokens held.", stats.tokens)
        yield CounterMetricFamily("rewarm_cache_hits", "Prompts resumed.", stats.hits)
        yield CounterMetricFamily("rewarm_cache_misses", "Prompts begun anew.", stats.misses)
        yield CounterMetricFamily("rewarm_cache_evictions", "Payloads evicted.", stats.evictions)
