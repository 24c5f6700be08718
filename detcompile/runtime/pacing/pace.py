"""Pace: limits the prompt tokens of steps with decodes, so that the time between two tokens meets its target.

No choice made here can change a bit. Step costs are measured (CostModel). Steps without decodes are not limited: they
take the whole token budget.
"""

from typing import Any

import numpy as np

from detcompile.runtime.pacing.cost_model import CostModel, StepShape

LEAST_CHUNK = 64  # least tokens of a prompt chunk; chunks are multiples of it, or reach the prompt's end
FIRST_TOKENS = 256  # limit of a step until larger ones were measured


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
