"""Metrics in Prometheus' form, under names of ours and, for boards made for it, under vLLM's."""

import asyncio
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from detcompile.serving.engines.answers import Answer
from detcompile.serving.engines.fleet import Fleet
from detcompile.serving.engines.protocol import Delta

__all__ = ["Metrics", "SECONDS"]

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


class Metrics:
    """What this server has done, for GET /metrics.

    Args:
        fleet: the engines whose counts are told, too.
        max_queue: bound on open samples.
        max_queued_tokens: bound on prompt tokens that wait.
    """

    def __init__(self, fleet: Fleet, max_queue: int, max_queued_tokens: int) -> None:
        self.registry = CollectorRegistry()
        self._fleet = fleet
        own = self.registry
        self.refused = Counter("detcompile:requests_refused", "Requests refused with 429.", registry=own)
        self._cancelled = Counter("detcompile:requests_cancelled", "Requests cancelled, as nobody waits.", registry=own)
        Gauge("detcompile:max_queue", "Samples that may be open.", registry=own).set(max_queue)
        Gauge("detcompile:max_queued_tokens", "Prompt tokens that may wait.", registry=own).set(max_queued_tokens)
        self._prompt = Counter("vllm:prompt_tokens", "Prompt tokens of requests that ended.", registry=own)
        self._generated = Counter("vllm:generation_tokens", "Tokens generated.", registry=own)
        self._ended = Counter("vllm:request_success", "Samples that ended.", ["finished_reason"], registry=own)
        self._first = Histogram("vllm:time_to_first_token_seconds", "First token.", buckets=SECONDS, registry=own)
        self._between = Histogram("vllm:inter_token_latency_seconds", "Between tokens.", buckets=SECONDS, registry=own)
        self._whole = Histogram("vllm:e2e_request_latency_seconds", "Whole requests.", buckets=SECONDS, registry=own)
        self._queued = Histogram("vllm:request_queue_time_seconds", "In the queue.", buckets=SECONDS, registry=own)
        self.show("tasks", "Tasks of the front's event loop.", _num_tasks)
        self.registry.register(_EngineCounts(fleet))
        self._newest: dict[str, float] = {}  # when an answer's last tokens came

    def show(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is read when somebody asks."""
        Gauge(f"detcompile:{name}", text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """All of it, in Prometheus' text form."""
        return generate_latest(self.registry)

    def latencies(self) -> dict[str, list[int]]:
        """Counts of seconds to the first token and between tokens, for each bucket of SECONDS and above the last."""
        return {"first": _counts(self._first), "between": _counts(self._between)}

    def prefill_rate(self) -> float:
        """Prompt tokens a second of the engine's steps so far, or 1000 where none were computed."""
        counted = self._fleet.statistics
        return counted.num_prefill_tokens / max(1e-3, counted.busy_seconds) if counted.num_prefill_tokens else 1000.0

    def progressed(self, answer: Answer, delta: Delta) -> None:
        """An answer has new tokens."""
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
        """An answer is released; ``cancelled``: before its end."""
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
    except RuntimeError:  # asked outside of the loop
        return 0.0


def _counts(histogram: Histogram) -> list[int]:
    samples = next(iter(histogram.collect())).samples
    sums = [int(sample.value) for sample in samples if sample.name.endswith("_bucket")]
    return [own - before for own, before in zip(sums, [0, *sums])]


class _EngineCounts(Collector):
    """The engine's newest counts, read when somebody asks."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> list[Metric]:
        """Nothing is read while the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        found, hello = self._fleet.statistics, self._fleet.hello
        used = 1 - found.num_free_blocks / found.num_blocks if found.num_blocks else 0.0
        yield GaugeMetricFamily("detcompile:engine_ready", "Whether the engine serves.", value=float(self._fleet.ready))
        yield CounterMetricFamily(
            "detcompile:engine_restarts", "Engines started again.", value=self._fleet.num_restarts
        )
        yield CounterMetricFamily(
            "detcompile:answers_resumed", "Answers that went on on another engine.", value=self._fleet.num_resumed
        )
        yield CounterMetricFamily("detcompile:engine_steps", "Steps of the engine.", value=found.num_steps)
        late, error = found.num_late_steps, found.cost_error_seconds
        yield GaugeMetricFamily("detcompile:token_bound", "Tokens of a step, for --tbt-slo.", value=found.token_bound)
        yield CounterMetricFamily("detcompile:late_steps", "Steps that took longer than --tbt-slo.", value=late)
        yield CounterMetricFamily("detcompile:step_seconds", "Time spent in steps.", value=found.busy_seconds)
        yield CounterMetricFamily("detcompile:step_error_seconds", "What predictions of it were off.", value=error)
        yield GaugeMetricFamily("vllm:num_requests_running", "Sequences that run.", value=found.num_running)
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Sequences that wait.", value=found.num_waiting)
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV blocks in use.", value=used)
        yield CounterMetricFamily("vllm:num_preemptions", "Preemptions.", value=found.num_preemptions)
        yield CounterMetricFamily("vllm:prefix_cache_queries", "Tokens looked up.", value=found.num_queried_tokens)
        yield CounterMetricFamily("vllm:prefix_cache_hits", "Tokens found.", value=found.num_cached_tokens)
        if hello is not None:
            info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=["block_size", "num_gpu_blocks"])
            info.add_metric([str(hello.block_size), str(hello.num_blocks)], 1)
            yield info
            own = GaugeMetricFamily("detcompile:model_info", "The model.", labels=["fingerprint"])
            own.add_metric([hello.fingerprint], 1)
            yield own
