"""CostModel: seconds of a step by what is in it, fitted to the steps that an engine has run.

A step reads the weights once, multiplies its tokens, reads the keys of its decodes, and pairs its prompt tokens with
the keys that they see. Seconds are a constant and a multiple of each: found by least squares of the relative error,
over the newest steps of every size, so that what is seen often does not drown what is seen rarely.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from detcompile.runtime.step.builder import StepEntry

__all__ = ["CostModel", "StepShape"]

LEAST_SECONDS = 1e-6  # of a step, taken or predicted
KEPT_STEPS = 64  # of each size: powers of two of tokens
FEW_TOKENS = 64  # whose products may cost no more than the weights that they read
FIT_STEPS = 16  # after which the model is fitted anew
LEAST_STEPS = 8  # without which nothing is known
OUTLIER = 5.0  # of the median error: a step that compiled something, or was interrupted, says nothing of the next
MARGIN_STEPS = 512  # the newest, over which the margin is taken


class StepShape(NamedTuple):
    """What a step computes."""

    num_tokens: int = 0
    decode_keys: int = 0  # that the decodes read, together
    prefill_pairs: float = 0.0  # of a prompt token and a key that it sees

    @staticmethod
    def of(entries: Iterable[StepEntry]) -> "StepShape":
        """The shape of a step with these parts."""
        shape = StepShape()
        for entry in entries:
            shape = shape.with_part(entry)
        return shape

    def with_part(self, entry: StepEntry) -> "StepShape":
        """The shape with one more part."""
        start, count = entry.start, entry.num_tokens
        if count == 1 and start >= entry.sequence.num_prompt_tokens:
            return StepShape(self.num_tokens + count, self.decode_keys + start + count, self.prefill_pairs)
        pairs = count * (start + (count + 1) / 2)
        return StepShape(self.num_tokens + count, self.decode_keys, self.prefill_pairs + pairs)


class CostModel:
    """Predicts seconds of steps.

    Attributes:
        margin: share by which one step in a hundred has taken longer than predicted, among the newest.
        most_tokens: tokens of the largest step seen.
    """

    def __init__(self) -> None:
        self.margin = 0.0
        self.most_tokens = 0
        self._steps: dict[int, deque[tuple[np.ndarray, float]]] = {}
        self._errors: deque[float] = deque(maxlen=MARGIN_STEPS)
        self._weights = np.zeros(0)
        self._num_observed = 0

    @property
    def known(self) -> bool:
        """Whether enough steps were seen to predict any."""
        return self._weights.size > 0

    def observe(self, shape: StepShape, seconds: float) -> float:
        """A step has taken so long; returns how much longer than was predicted, 0 where nothing was."""
        features = _features(shape.num_tokens, shape.decode_keys, shape.prefill_pairs)
        seconds = max(LEAST_SECONDS, seconds)
        predicted = max(LEAST_SECONDS, self.seconds(shape)) if self.known else seconds
        if self.known and predicted > LEAST_SECONDS:  # of nothing there is no share
            self._errors.append(seconds / predicted - 1)
        self.most_tokens = max(self.most_tokens, shape.num_tokens)
        kept = self._steps.setdefault(shape.num_tokens.bit_length(), deque(maxlen=KEPT_STEPS))
        kept.append((features, seconds))
        self._num_observed += 1
        if self._num_observed % FIT_STEPS == 0 or self._num_observed == LEAST_STEPS:
            self._fit()
        return seconds - predicted

    def seconds(self, shape: StepShape) -> float:
        """Predicted seconds of a step of this shape."""
        return float(_features(shape.num_tokens, shape.decode_keys, shape.prefill_pairs) @ self._weights)

    def seconds_with(self, shape: StepShape, start: int, counts: np.ndarray) -> np.ndarray:
        """Predicted seconds of steps of this shape with a chunk more: so many tokens behind ``start`` of one prompt."""
        pairs = shape.prefill_pairs + counts * (start + (counts + 1) / 2)
        found: np.ndarray = _features(shape.num_tokens + counts, shape.decode_keys, pairs) @ self._weights
        return found

    def _fit(self) -> None:
        rows = [step for kept in self._steps.values() for step in kept]
        seconds = np.array([row[1] for row in rows])
        features = np.array([row[0] for row in rows]) / seconds[:, None]  # of the relative error
        weights = _positive_least_squares(features)
        error = np.abs(features @ weights - 1)
        fine = error <= max(0.02, OUTLIER * float(np.median(error)))
        self._weights = _positive_least_squares(features[fine])
        if self._errors:
            self.margin = max(0.0, float(np.percentile(self._errors, 99)))


def _features(num_tokens: "int | np.ndarray", decode_keys: int, pairs: "float | np.ndarray") -> np.ndarray:
    """[..., 5] float64."""
    tokens = np.asarray(num_tokens, float)
    beyond = np.maximum(0.0, tokens - FEW_TOKENS)
    columns = np.broadcast_arrays(np.ones_like(tokens), tokens, beyond, float(decode_keys), np.asarray(pairs, float))
    return np.stack(columns, -1)


def _positive_least_squares(features: np.ndarray) -> np.ndarray:
    """Weights [5], none below 0, with which the features come nearest to 1: no part of a step takes negative time."""
    scale = np.maximum(np.abs(features).max(0), 1e-30)
    active = features.any(0)
    weights = np.zeros(features.shape[1])
    while active.any():
        found = np.linalg.lstsq(features[:, active] / scale[active], np.ones(len(features)), rcond=1e-6)[0]
        weights[:] = 0.0
        weights[active] = found / scale[active]
        if (found >= 0).all():
            break
        active &= weights > 0
    return weights
