"""Statistics of an engine and the durations of its steps."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from detcompile.runtime.scheduler import Scheduler

MOST_RECORDS = 4096  # number of most recent steps to keep


class StepRecord(NamedTuple):
    """One step, in seconds of a monotonic clock."""

    launched: float
    finished: float  # when its tokens were read back
    host_seconds: float  # host time to plan, build, launch and finish it
    num_prefill_tokens: int
    num_decodes: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine started, and its current state.

    Attributes:
        num_steps: steps that finished.
        num_prefill_tokens: prompt tokens computed.
        num_generated_tokens: tokens drawn and kept.
        num_preemptions: number of times that a sequence lost its blocks.
        num_running: running sequences.
        num_waiting: waiting sequences.
        num_blocks: usable blocks of the KV cache.
        num_free_blocks: free blocks, including unused ones with cached content.
        num_queried_tokens: prompt tokens looked up in the prefix cache.
        num_cached_tokens: prompt tokens found there.
        num_evicted_blocks: blocks whose cached content was evicted for lack of empty ones.
        num_held_blocks: number of blocks per request id; a shared block counts for each request.
        host_seconds: total host time of all steps.
        idle_share: fraction of the pipeline stages' time without a step while there was work.
        recent: the most recent steps, oldest first.
        token_bound: token limit of the last step with decodes and a prompt under tbt_slo; 0 without tbt_slo.
        num_late_steps: steps with decodes that took longer than tbt_slo.
        cost_error_seconds: sum of absolute differences between predicted and measured step times, with tbt_slo.
        num_restarts: number of times that lost worker processes were restarted.
    """

    num_steps: int
    num_prefill_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_queried_tokens: int
    num_cached_tokens: int
    num_evicted_blocks: int
    num_held_blocks: Mapping[str, int]
    host_seconds: float
    recent: tuple[StepRecord, ...]
    idle_share: float = 0.0
    token_bound: int = 0
    num_late_steps: int = 0
    cost_error_seconds: float = 0.0
    num_restarts: int = 0

    @property
    def cache_hit_rate(self) -> float:
        """Fraction of looked-up prompt tokens that were cached."""
        return self.num_cached_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


class Tally:
    """Running counters of an engine."""

    def __init__(self) -> None:
        self.num_preemptions = 0
        self._num_steps = self._num_prefill_tokens = self._num_generated_tokens = 0
        self._host_seconds = 0.0
        self._records: deque[StepRecord] = deque(maxlen=MOST_RECORDS)

    def add(self, record: StepRecord, num_generated_tokens: int) -> None:
        """Count a finished step."""
        self._num_steps += 1
        self._num_prefill_tokens += record.num_prefill_tokens
        self._num_generated_tokens += num_generated_tokens
        self._host_seconds += record.host_seconds
        self._records.append(record)

    def stats(
        self, scheduler: Scheduler, num_held_blocks: Mapping[str, int], idle_share: float, num_restarts: int
    ) -> EngineStats:
        """Return the counters together with the current state of the engine."""
        cache, pool, pace = scheduler.blocks.statistics, scheduler.blocks.pool, scheduler.pace
        return EngineStats(
            num_steps=self._num_steps,
            num_prefill_tokens=self._num_prefill_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_preemptions=self.num_preemptions,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_blocks=pool.num_usable,
            num_free_blocks=pool.num_free,
            num_queried_tokens=cache.num_queried_tokens,
            num_cached_tokens=cache.num_hit_tokens,
            num_evicted_blocks=cache.num_evictions,
            num_held_blocks=num_held_blocks,
            host_seconds=self._host_seconds,
            recent=tuple(self._records),
            idle_share=idle_share,
            token_bound=0 if pace is None else pace.bound,
            num_late_steps=0 if pace is None else pace.num_late,
            cost_error_seconds=0.0 if pace is None else pace.error_seconds,
            num_restarts=num_restarts,
        )
