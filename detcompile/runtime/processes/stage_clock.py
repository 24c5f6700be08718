"""StageClock: how much of their time the stages of a pipeline had a step, while there were any."""

import math
import time
from collections.abc import Callable, Sequence

__all__ = ["StageClock"]


class StageClock:
    """Counts from the start of steps to their ends; time in which no step is under way does not count.

    Args:
        num_stages: stages of the pipeline.
        clock: returns seconds.

    Attributes:
        shortest: seconds that the slowest stage took for the shortest step; infinity before the first.
    """

    def __init__(self, num_stages: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_stages = num_stages
        self._clock = clock
        self.shortest = math.inf
        self._num_steps = 0  # under way
        self._since = self._seconds = self._busy_seconds = 0.0

    @property
    def idle_share(self) -> float:
        """Share of all stages' time, up to the last end of a step, in which they had none; 0 before the first."""
        return max(0.0, 1 - self._busy_seconds / (self._num_stages * self._seconds)) if self._seconds else 0.0

    def started(self) -> None:
        """A step was launched."""
        if not self._num_steps:
            self._since = self._clock()
        self._num_steps += 1

    def interrupted(self) -> None:
        """What was under way has no end."""
        self._num_steps = 0

    def ended(self, busy_seconds: Sequence[float]) -> None:
        """A step has ended, for which each stage was busy for so long."""
        now = self._clock()
        self._seconds, self._since = self._seconds + now - self._since, now
        self._busy_seconds += sum(busy_seconds)
        self.shortest = min(self.shortest, max(busy_seconds))
        self._num_steps -= 1
