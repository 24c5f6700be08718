"""What an engine has done, and how long its steps took."""

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["EngineStats", "StepRecord"]


class StepRecord(NamedTuple):
    """One step, in seconds of a monotonic clock."""

    launched: float
    finished: float  # its tokens were read back
    host_seconds: float  # spent on the host to plan, build and launch it, and to finish it
    num_prefill_tokens: int
    num_decodes: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine started, and its state now.

    Attributes:
        num_steps, num_prefill_tokens, num_generated_tokens, num_preemptions: counts.
        num_running, num_waiting: sequences now.
        num_blocks, num_free_blocks: of the KV cache now; free ones include cached content that nobody uses.
        num_queried_tokens, num_cached_tokens: prompt tokens looked up in the prefix cache, and those found.
        host_seconds: spent on the host in all steps together.
        recent: the last steps, oldest first.
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
    host_seconds: float
    recent: tuple[StepRecord, ...]

    @property
    def cache_hit_rate(self) -> float:
        """Share of looked-up prompt tokens that were cached."""
        return self.num_cached_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0
