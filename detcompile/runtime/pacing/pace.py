"""Pace: limits the prompt tokens of steps with decodes, so that the time between two tokens meets its target.

No choice made here can change a bit. Step costs are measured (CostModel). Steps without decodes are not limited: they
take the whole token budget.
"""

import math
from typing import Any

import numpy as np

from detcompile.runtime.pacing.cost_model import CostModel, StepShape

LEAST_CHUNK = 64  # least tokens of a prompt chunk; chunks are multiples of it, or reach the prompt's end
FIRST_TOKENS = 256  # limit of a step until larger ones were measured
NEWEST = 8  # weight of the newest step in the average of host times: 1 / NEWEST


class Pace:
    """Limits the prompt tokens of steps that decode.

    Args:
        seconds: target for the time between two tokens.

    Attributes:
        num_lanes: steps in flight, each with different sequences: this many steps lie between two tokens.
        model: predicts step costs.
        num_late: steps with decodes that missed the target.
        error_seconds: sum of absolute differences between predicted and measured durations.
        bound: token limit of the last limited step.
    """

    def __init__(self, seconds: float) -> None:
        self.num_lanes = 1
        self.model = CostModel()
        self.num_late = 0
        self.error_seconds = 0.0
        self.bound = 0
        self._seconds = seconds

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Record a step that ended ``seconds`` after the previous one."""
        self.error_seconds += abs(self.model.observe(shape, seconds))
        self.num_late += shape.decode_keys > 0 and self.num_lanes * seconds > self._seconds

    def full(self, shape: StepShape) -> bool:
        """Return True if the decodes alone use up the time, so that no prompt should start."""
        return shape.decode_keys > 0 and self.model.known and self._late(self.model.seconds(shape))

    def chunk(self, shape: StepShape, start: int, wanted: int) -> int:
        """Return how many tokens of a prompt a step may take.

        Args:
            shape: the step so far, above all its decodes.
            start: number of prompt tokens already computed.
            wanted: most tokens to compute in this step.
        """
        if shape.decode_keys == 0:
            return wanted
        alone = shape.prefill_pairs == 0  # no other prompt in this step
        fits = self._fitting(shape, start, wanted)
        fits = fits if fits == wanted else fits // LEAST_CHUNK * LEAST_CHUNK
        return max(fits, min(wanted, LEAST_CHUNK)) if alone else fits

    def _fitting(self, shape: StepShape, start: int, wanted: int) -> int:
        most = min(wanted, max(0, max(FIRST_TOKENS, 2 * self.model.most_tokens) - shape.num_tokens))
        if not self.model.known or most == 0:
            self.bound = shape.num_tokens + most
            return most
        counts = np.append(np.arange(LEAST_CHUNK, most, LEAST_CHUNK), most)
        late = self._late(self.model.seconds_with(shape, start, counts))
        first = int(np.argmax(late)) if late.any() else len(counts)
        fits = 0 if first == 0 else int(counts[first - 1])
        self.bound = shape.num_tokens + fits
        return fits

    def _late(self, seconds: Any) -> Any:
        return self.num_lanes * seconds * (1 + self.model.margin) > self._seconds


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
