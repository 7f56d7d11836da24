"""Prometheus: counters read from the engine when scraped, histograms fed as things happen."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edgevlm.server.engine import Engine
from edgevlm.server.intake import Intake
from edgevlm.stats import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
HISTOGRAMS = {
    "queue": ("edgevlm_queue_seconds", "From submission to a slot"),
    "first_token": ("edgevlm_first_token_seconds", "From submission to the first token"),
    "inter_token": ("edgevlm_inter_token_seconds", "Between two tokens of one answer"),
}
COUNTERS = {
    "prompt_tokens": ("edgevlm_prompt_tokens", "Tokens of prompts, images among them"),
    "cached_tokens": ("edgevlm_cached_tokens", "Of those, tokens that were in a slot already"),
    "completion_tokens": ("edgevlm_completion_tokens", "Tokens that were generated"),
    "image_tokens": ("edgevlm_image_tokens", "Tokens of images in prompts"),
    "images": ("edgevlm_images", "Images in prompts"),
    "vision_cache_hits": ("edgevlm_vision_cache_hits", "Images whose features were kept"),
    "vision_cache_misses": ("edgevlm_vision_cache_misses", "Images that were encoded"),
    "vision_seconds": ("edgevlm_vision_seconds", "Time in the vision tower"),
    "prefill_seconds": ("edgevlm_prefill_seconds", "Time in prefill"),
    "decode_seconds": ("edgevlm_decode_seconds", "Time in decode steps"),
    "decode_steps": ("edgevlm_decode_steps", "Decode steps, each for all running slots"),
}
GAUGES = {
    "slots": ("edgevlm_slots", "Sequences that can be answered at once"),
    "slots_busy": ("edgevlm_slots_busy", "Sequences that are being answered"),
    "queued": ("edgevlm_queued", "Requests that wait for a slot"),
    "max_queue": ("edgevlm_queue_limit", "Requests that may wait for a slot"),
    "allocations_after_start": (
        "edgevlm_allocations_after_start",
        "Device memory asked for after start; it must stay 0",
    ),
}


class Metrics:
    """One registry of its own: two services in a process do not mix."""

    def __init__(self, engine: Engine, intake: Intake) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, intake))
        self._times = {
            name: Histogram(metric, text, buckets=BUCKETS, registry=self._registry)
            for name, (metric, text) in HISTOGRAMS.items()
        }
        self._refused = Counter(
            "edgevlm_http_errors", "Answers that were errors", ["status"], registry=self._registry
        )
        self._gone = Counter(
            "edgevlm_clients_gone",
            "Connections that closed before their answer was whole",
            registry=self._registry,
        )
        engine.observe(self.observe)

    def observe(self, name: str, seconds: float) -> None:
        """A latency; called by the scheduler's thread."""
        if name in self._times:
            self._times[name].observe(seconds)

    def refused(self, status: int) -> None:
        """An answer that was an error."""
        self._refused.labels(str(status)).inc()

    def client_gone(self) -> None:
        """A connection closed early."""
        self._gone.inc()

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine, intake: Intake) -> None:
        self._engine, self._intake = engine, intake

    def describe(self) -> Iterator[Metric]:
        """Nothing: asking the engine at registration would be too early."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Called for every scrape."""
        stats = self._engine.stats()
        for field, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(stats, field))
        for field, (name, text) in GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(stats, field))
        requests = CounterMetricFamily(
            "edgevlm_requests", "Requests by outcome", labels=["outcome"]
        )
        for outcome, count in stats.requests.items():
            requests.add_metric([outcome], count)
        yield requests
        yield from _pools(stats)
        inside = "Requests that are being read, waiting or answered"
        yield GaugeMetricFamily("edgevlm_http_requests_inside", inside, value=self._intake.requests)
        held = "Bytes of bodies that are being read or prepared"
        yield GaugeMetricFamily("edgevlm_http_body_bytes", held, value=self._intake.held)


def _pools(stats: Stats) -> Iterator[Metric]:
    planned = GaugeMetricFamily("edgevlm_pool_bytes", "Size of each memory pool", labels=["pool"])
    used = GaugeMetricFamily(
        "edgevlm_pool_used_bytes", "Of that in use, where it is counted", labels=["pool"]
    )
    for name, size, in_use in stats.pools:
        planned.add_metric([name], size)
        if in_use is not None:
            used.add_metric([name], in_use)
    yield planned
    yield used
