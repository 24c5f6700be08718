"""Pace: how many prompt tokens a step may take, so that nobody waits longer for a next token than was asked for.

No choice made here can change a bit. What a step costs is measured (CostModel). Nothing is bounded where nobody waits:
steps without a decode take the whole token budget.
"""

from typing import Any

import numpy as np

from detcompile.runtime.pacing.cost_model import CostModel, StepShape

__all__ = ["LEAST_CHUNK", "Pace"]

LEAST_CHUNK = 64  # tokens of a prompt that a step takes in any case; chunks are multiples, or reach the prompt's end
FIRST_TOKENS = 256  # of a step, until larger ones were measured


class Pace:
    """Bounds the prompt tokens of steps that decode.

    Args:
        seconds: longest time that should pass between two tokens.

    Attributes:
        num_lanes: steps that run at a time, each of other sequences: so many are between two tokens.
        model: what steps cost.
        num_late: steps with decodes that took longer than that.
        error_seconds: absolute differences of what steps took and what was predicted, added up.
        bound: tokens that the last step which was bounded could have had.
    """

    def __init__(self, seconds: float) -> None:
        self.num_lanes = 1
        self.model = CostModel()
        self.num_late = 0
        self.error_seconds = 0.0
        self.bound = 0
        self._seconds = seconds

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step has ended, so long after the one before it."""
        self.error_seconds += abs(self.model.observe(shape, seconds))
        self.num_late += shape.decode_keys > 0 and self.num_lanes * seconds > self._seconds

    def full(self, shape: StepShape) -> bool:
        """Whether a step of decodes has no room for a prompt: none should start."""
        return shape.decode_keys > 0 and self.model.known and self._late(self.model.seconds(shape))

    def chunk(self, shape: StepShape, start: int, wanted: int) -> int:
        """Tokens of a prompt that a step may take.

        Args:
            shape: what it has already, its decodes above all.
            start: the prompt's tokens that are computed.
            wanted: tokens of it that could be computed in this step.
        """
        if shape.decode_keys == 0:
            return wanted
        alone = shape.prefill_pairs == 0  # no other prompt has a part in it
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
        found = 0 if first == 0 else int(counts[first - 1])
        self.bound = shape.num_tokens + found
        return found

    def _late(self, seconds: Any) -> Any:
        return self.num_lanes * seconds * (1 + self.model.margin) > self._seconds
