"""StageClock: how long the stages of a pipeline are busy and idle."""

import math
import time
from collections.abc import Callable, Sequence

__all__ = ["StageClock"]


class StageClock:
    """Measures from the start of steps to their ends; time without any step in flight does not count.

    Args:
        num_stages: stages of the pipeline.
        clock: returns seconds.

    Attributes:
        shortest: the slowest stage's seconds for the shortest step; infinity before the first step.
    """

    def __init__(self, num_stages: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_stages = num_stages
        self._clock = clock
        self.shortest = math.inf
        self._num_steps = 0  # in flight
        self._since = self._seconds = self._busy_seconds = 0.0

    @property
    def idle_share(self) -> float:
        """Fraction of all stages' time, up to the last end of a step, without a step; 0 before the first."""
        return max(0.0, 1 - self._busy_seconds / (self._num_stages * self._seconds)) if self._seconds else 0.0

    def started(self) -> None:
        """Count a launched step."""
        if not self._num_steps:
            self._since = self._clock()
        self._num_steps += 1

    def interrupted(self) -> None:
        """Drop the steps in flight, which will never end."""
        self._num_steps = 0

    def ended(self, busy_seconds: Sequence[float]) -> None:
        """Count the end of a step, given the busy seconds of each stage."""
        now = self._clock()
        self._seconds, self._since = self._seconds + now - self._since, now
        self._busy_seconds += sum(busy_seconds)
        self.shortest = min(self.shortest, max(busy_seconds))
        self._num_steps -= 1
