"""Lanes: how many steps are in flight in a pipeline of stages, each with different sequences.

No choice made here can change a bit. Between a step's end in the last stage and the next step of its sequences in the
first stage, the host commits, plans, builds and launches. With one step per stage, all stages idle during part of that
time. One more step hides it, at the cost of reading each stage's weights once more per round.
"""

import math

NEWEST = 8  # weight of the newest step in the average of host times: 1 / NEWEST


def most_lanes(num_stages: int) -> int:
    """Return the most steps that can be in flight."""
    return num_stages if num_stages == 1 else num_stages + 1


class Lanes:
    """Chooses the number of steps in flight: one per stage, plus one if the host is slower than reading the weights.

    The host time of a step is compared with the slowest stage's time to read its weights.

    Attributes:
        num_stages: stages of the pipeline. With a single stage at most one step is in flight.
    """

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self._host_seconds = 0.0
        self._shortest = math.inf

    @property
    def count(self) -> int:
        """Number of steps that should be in flight."""
        more = self._host_seconds > self._shortest
        return most_lanes(self.num_stages) if more else self.num_stages

    def observe(self, host_seconds: float, shortest_step: float) -> None:
        """Record the host time of a step that has ended.

        Args:
            shortest_step: the slowest stage's seconds for the shortest step so far, an estimate of reading its
                weights; infinity before the first step.
        """
        self._host_seconds += (host_seconds - self._host_seconds) / NEWEST
        self._shortest = shortest_step
