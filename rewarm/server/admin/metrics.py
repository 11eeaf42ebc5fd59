"""Metrics for Prometheus. Each server has a registry, so that two in one process do not mix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import rewarm
from rewarm.cache import Stats
from rewarm.cache.find import MEMORY
from rewarm.cache.tiers.base import TierStats
from rewarm.cache.tiers.disk.tier import DiskTier
from rewarm.engine import Engine, EngineStats
from rewarm.errors import CacheClosed, NotReady
from rewarm.generate.generation import PromptRun
from rewarm.values import Reason

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
PARTS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, *FIRST_TOKEN)

COUNTERS = {
    "requests": ("HTTP requests; status 499: the client went away.", ["endpoint", "status"]),
    "prompt_tokens": (
        "Prompt tokens: cached (not computed), prefilled (computed), and replayed (those of the "
        "prefilled ones that the cache knew).",
        ["endpoint", "kind"],
    ),
    "generated_tokens": ("Tokens of answers.", ["endpoint"]),
    "resumed": (
        "Prompts that went on from what was stored, by tier and by the kind of checkpoint.",
        ["tier", "boundary"],
    ),
    "restored_bytes": ("Bytes of the prefixes that prompts went on from.", ["tier"]),
    "misses": ("Prompts of which not all was reused that could have been.", ["reason"]),
    "missed_tokens": ("Tokens that were computed for that reason.", ["reason"]),
}
"""The help texts and the labels, by name."""


class Metrics(Collector):
    def __init__(self, engine: Engine, model: str, generating: Iterable[str]) -> None:
        """`generating` has the names of the endpoints that generate."""
        self.registry = CollectorRegistry()
        gauge = partial(Gauge, namespace="rewarm", registry=self.registry)
        histogram = partial(Histogram, namespace="rewarm", registry=self.registry)
        self._counters = {
            name: Counter(name, *about, namespace="rewarm", registry=self.registry)
            for name, about in COUNTERS.items()
        }
        self._first_token = histogram(
            "time_to_first_token_seconds",
            "From a request's arrival at the engine to its first token.",
            ["endpoint"],
            buckets=FIRST_TOKEN,
        )
        self.between = histogram(
            "inter_token_seconds", "Between two tokens of an answer.", buckets=BETWEEN_TOKENS
        )
        self._part = histogram(
            "prompt_seconds",
            "Where the time to the first token went: queue, match, restore, prefill.",
            ["part"],
            buckets=PARTS,
        )
        for endpoint in generating:
            self._labelled("generated_tokens", endpoint)
            self._first_token.labels(endpoint)
            for kind in ("cached", "replayed", "prefilled"):
                self._labelled("prompt_tokens", endpoint, kind)
        for tier in (MEMORY, DiskTier.name):
            self._labelled("restored_bytes", tier)
        for reason in get_args(Reason):
            self._labelled("misses", reason)
            self._labelled("missed_tokens", reason)
        info = gauge("info", "What is served.", ["version", "model"])
        info.labels(rewarm.__version__, model).set(1)
        gauge("start_time_seconds", "When the server was started.").set_to_current_time()
        self._engine = engine
        self.registry.register(self)

    def count_response(self, endpoint: str, status: int) -> None:
        self._labelled("requests", endpoint, str(status)).inc()

    def count_run(self, run: PromptRun, endpoint: str) -> None:
        tokens = sum(choice.tokens for choice in run.choices)
        self._labelled("generated_tokens", endpoint).inc(tokens)
        cost = run.cost
        if cost is None:
            return
        match = cost.match
        self._labelled("prompt_tokens", endpoint, "cached").inc(match.resume)
        self._labelled("prompt_tokens", endpoint, "prefilled").inc(cost.prefilled)
        self._labelled("prompt_tokens", endpoint, "replayed").inc(cost.replayed)
        if match.tier is not None:
            self._labelled("resumed", match.tier, cost.resumed_at or "none").inc()
            self._labelled("restored_bytes", match.tier).inc(cost.restored_bytes)
        if run.miss is not None:
            self._labelled("misses", run.miss["reason"]).inc()
            self._labelled("missed_tokens", run.miss["reason"]).inc(run.miss.get("tokens", 0))
        if tokens:
            parts = cost.timings
            self._first_token.labels(endpoint).observe(parts.pop("ttft_ms") / 1e3)
            for name, ms in parts.items():
                self._part.labels(name.removesuffix("_ms")).observe(ms / 1e3)

    def collect(self) -> Iterator[Metric]:
        """Give the figures that the engine and the cache have at this moment."""
        yield _gauge("ready", "1 where requests are answered.", self._engine.state == "ready")
        try:
            yield from self._requests(self._engine.core.stats())
            stats = self._engine.core.cache.stats()
            yield from _cache(stats)
            for name, tier in stats.below.items():
                yield from _tier(name, tier)
        except (NotReady, CacheClosed):
            return

    def _labelled(self, name: str, *labels: str) -> Counter:
        return self._counters[name].labels(*labels)

    def _requests(self, stats: EngineStats) -> Iterator[Metric]:
        stages = {name: getattr(stats, name) for name in ("waiting", "prefilling", "decoding")}
        yield _gauge("engine_requests", "Sequences in the engine, by stage.", stages, "stage")
        options = self._engine.options
        limits = {"waiting": options.max_queue, "decoding": options.max_batch}
        yield _gauge("engine_limit", "The most sequences in a stage.", limits, "stage")
        yield _counter(
            "engine_prefilled_tokens",
            "Prompt tokens computed for requests, as they are computed.",
            stats.prefilled_tokens,
        )
        yield _counter("engine_restarts", "Turns that failed as a whole.", stats.restarts)
        yield _gauge("warm_ahead_waiting", "Prompts to warm ahead.", stats.warm_waiting)
        yield _counter(
            "warm_ahead_tokens", "Tokens prefilled ahead of requests.", stats.warm_tokens
        )


def _cache(stats: Stats) -> Iterator[Metric]:
    tiers = stats.tiers.items()
    held = {(name, kind): size for name, tier in tiers for kind, size in tier.kinds.items()}
    yield _gauge("cache_bytes", "Bytes held, by tier and kind.", held, "tier", "kind")
    budgets = {name: tier.budget for name, tier in tiers}
    yield _gauge("cache_budget_bytes", "The most bytes that a tier holds.", budgets, "tier")
    yield _gauge("cache_entries", "Nodes of the tree.", stats.entries)
    yield _gauge("cache_checkpoints", "Checkpoints held.", stats.checkpoints)
    yield _gauge("cache_tokens", "Distinct tokens held.", stats.tokens)
    yield _gauge("cache_buffers", "Buffers of the device.", stats.buffers)
    yield _gauge("cache_leases", "Paths that are in use.", stats.leases)
    yield _counter("cache_hits", "Prompts resumed.", stats.hits)
    yield _counter("cache_misses", "Prompts begun anew.", stats.misses)
    gone = {(name, what): count for name, tier in tiers for what, count in tier.evictions.items()}
    yield _counter("cache_evictions", "What had to go, by tier and kind.", gone, "tier", "what")


def _tier(name: str, tier: TierStats) -> Iterator[Metric]:
    yield _counter(f"{name}_reads", "Spans brought up to memory.", tier.reads)
    yield _counter(f"{name}_written_bytes", "Bytes written.", tier.written)
    yield _gauge(f"{name}_unwritten_bytes", "Bytes that wait to be written.", tier.unwritten)
    yield _gauge(f"{name}_paused", "1 where the tier refused a moment ago.", tier.paused)


Values = float | Mapping[str, float] | Mapping[tuple[str, str], float]
"""One value, or one for each value of the labels."""


def _gauge(name: str, help: str, values: Values, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(f"rewarm_{name}", help, labels=labels), values)


def _counter(name: str, help: str, values: Values, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(f"rewarm_{name}", help, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    each = values.items() if isinstance(values, Mapping) else [((), values)]
    for label, value in each:
        family.add_metric([label] if isinstance(label, str) else label, float(value))
    return family
