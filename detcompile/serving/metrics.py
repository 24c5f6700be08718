"""Prometheus metrics: our names, and vLLM's names for dashboards made for vLLM."""

import asyncio
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from detcompile.serving.engines.answers import Answer
from detcompile.serving.engines.fleet import Fleet
from detcompile.serving.engines.protocol import Delta

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


class Metrics:
    """Metrics of this server, for GET /metrics.

    Args:
        fleet: engines whose counts are included.
        max_queue: limit of open samples.
        max_queued_tokens: limit of waiting prompt tokens.
    """

    def __init__(self, fleet: Fleet, max_queue: int, max_queued_tokens: int) -> None:
        self.registry = CollectorRegistry()
        self._fleet = fleet
        reg = self.registry
        self.refused = Counter("detcompile:requests_refused", "Requests refused with 429.", registry=reg)
        self._cancelled = Counter("detcompile:requests_cancelled", "Requests canceled: nobody waits.", registry=reg)
        Gauge("detcompile:max_queue", "Samples that may be open.", registry=reg).set(max_queue)
        Gauge("detcompile:max_queued_tokens", "Prompt tokens that may wait.", registry=reg).set(max_queued_tokens)
        self._prompt = Counter("vllm:prompt_tokens", "Prompt tokens of requests that ended.", registry=reg)
        self._generated = Counter("vllm:generation_tokens", "Tokens generated.", registry=reg)
        self._ended = Counter("vllm:request_success", "Samples that ended.", ["finished_reason"], registry=reg)
        self._first = Histogram("vllm:time_to_first_token_seconds", "First token.", buckets=SECONDS, registry=reg)
        self._between = Histogram("vllm:inter_token_latency_seconds", "Between tokens.", buckets=SECONDS, registry=reg)
        self._whole = Histogram("vllm:e2e_request_latency_seconds", "Whole requests.", buckets=SECONDS, registry=reg)
        self._queued = Histogram("vllm:request_queue_time_seconds", "In the queue.", buckets=SECONDS, registry=reg)
        self.add_gauge("tasks", "Tasks of the front's event loop.", _num_tasks)
        self.registry.register(_EngineCounts(fleet))
        self._newest: dict[str, float] = {}  # time of each answer's last tokens

    def add_gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is read at each scrape."""
        Gauge(f"detcompile:{name}", text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def latencies(self) -> dict[str, list[int]]:
        """Return counts of the time to first token and between tokens, per bucket of SECONDS and above the last."""
        return {"first": _counts(self._first), "between": _counts(self._between)}

    def prefill_rate(self) -> float:
        """Return prompt tokens per second of the engines' steps so far; 1000 before the first."""
        counted = self._fleet.statistics
        return counted.num_prefill_tokens / max(1e-3, counted.busy_seconds) if counted.num_prefill_tokens else 1000.0

    def progressed(self, answer: Answer, delta: Delta) -> None:
        """Record new tokens of an answer."""
        now, num_new = time.monotonic(), sum(len(sample.token_ids) for sample in delta.samples)
        self._generated.inc(num_new)
        if answer.first_token is None and num_new:
            answer.first_token = now
            self._first.observe(now - answer.arrival)
        elif num_new:
            self._between.observe((now - self._newest.get(answer.request_id, now)) * len(delta.samples) / num_new)
        self._newest[answer.request_id] = now
        for sample in delta.samples:
            if sample.finish_reason is not None:
                self._ended.labels(sample.finish_reason).inc()

    def ended(self, answer: Answer, *, cancelled: bool) -> None:
        """Record the release of an answer; ``cancelled``: before its end."""
        self._newest.pop(answer.request_id, None)
        self._prompt.inc(len(answer.prompt_ids))
        if cancelled:
            self._cancelled.inc()
        if answer.error is not None:
            return
        self._whole.observe(time.monotonic() - answer.arrival)
        if answer.queued_seconds is not None:
            self._queued.observe(answer.queued_seconds)


def _num_tasks() -> float:
    try:
        return float(len(asyncio.all_tasks()))
    except RuntimeError:  # no running event loop
        return 0.0


def _counts(histogram: Histogram) -> list[int]:
    samples = next(iter(histogram.collect())).samples
    sums = [int(sample.value) for sample in samples if sample.name.endswith("_bucket")]
    return [total - before for total, before in zip(sums, [0, *sums])]


class _EngineCounts(Collector):
    """The engines' latest counts, read at each scrape."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> list[Metric]:
        """Return nothing, because registering must not read the counts."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        statistics, hello = self._fleet.statistics, self._fleet.hello
        used = 1 - statistics.num_free_blocks / statistics.num_blocks if statistics.num_blocks else 0.0
        yield GaugeMetricFamily("detcompile:engine_ready", "Whether the engine serves.", value=float(self._fleet.ready))
        yield CounterMetricFamily(
            "detcompile:engine_restarts", "Engines started again.", value=self._fleet.num_restarts
        )
        yield CounterMetricFamily(
            "detcompile:answers_resumed", "Answers that went on on another engine.", value=self._fleet.num_resumed
        )
        yield CounterMetricFamily("detcompile:engine_steps", "Steps of the engine.", value=statistics.num_steps)
        bound, late, error = statistics.token_bound, statistics.num_late_steps, statistics.cost_error_seconds
        yield GaugeMetricFamily("detcompile:token_bound", "Tokens of a step, for --tbt-slo.", value=bound)
        yield CounterMetricFamily("detcompile:late_steps", "Steps that took longer than --tbt-slo.", value=late)
        yield CounterMetricFamily("detcompile:step_seconds", "Time spent in steps.", value=statistics.busy_seconds)
        yield CounterMetricFamily("detcompile:step_error_seconds", "What predictions of it were off.", value=error)
        yield GaugeMetricFamily("vllm:num_requests_running", "Sequences that run.", value=statistics.num_running)
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Sequences that wait.", value=statistics.num_waiting)
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV blocks in use.", value=used)
        yield CounterMetricFamily("vllm:num_preemptions", "Preemptions.", value=statistics.num_preemptions)
        queried, cached = statistics.num_queried_tokens, statistics.num_cached_tokens
        yield CounterMetricFamily("vllm:prefix_cache_queries", "Tokens looked up.", value=queried)
        yield CounterMetricFamily("vllm:prefix_cache_hits", "Tokens found.", value=cached)
        if hello is not None:
            info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=["block_size", "num_gpu_blocks"])
            info.add_metric([str(hello.block_size), str(hello.num_blocks)], 1)
            yield info
            model = GaugeMetricFamily("detcompile:model_info", "The model.", labels=["fingerprint"])
            model.add_metric([hello.fingerprint], 1)
            yield model
