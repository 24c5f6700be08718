"""Lanes: how many steps are under way at a time in a pipeline of stages, each of other sequences.

No choice made here can change a bit. Between a step's end in the last stage and the next step of its sequences in the
first one the host settles, plans, builds and launches. With one step a stage, all stages are idle in a part of that
time. One step more hides it, and costs a round of the steps one more reading of each stage's weights.
"""

import math

__all__ = ["Lanes", "most_lanes"]

NEWEST = 8  # steps: the newest has the eighth part of the average of what the host took


def most_lanes(num_stages: int) -> int:
    """Steps that can be under way at a time."""
    return num_stages if num_stages == 1 else num_stages + 1


class Lanes:
    """Chooses how many steps run at a time: one a stage, and one more where the host takes longer for a step than the
    slowest stage for reading its weights.

    Attributes:
        num_stages: stages of the pipeline. Of a single one no more than one step is under way.
    """

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self._host_seconds = 0.0
        self._shortest = math.inf

    @property
    def count(self) -> int:
        """Steps that should be under way."""
        more = self._host_seconds > self._shortest
        return most_lanes(self.num_stages) if more else self.num_stages

    def observe(self, host_seconds: float, shortest_step: float) -> None:
        """A step has ended, which took the host so long.

        Args:
            shortest_step: seconds of the slowest stage for the shortest step so far, which is the reading of its
                weights; infinity before the first.
        """
        self._host_seconds += (host_seconds - self._host_seconds) / NEWEST
        self._shortest = shortest_step
