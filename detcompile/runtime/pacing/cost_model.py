"""CostModel: predicts the seconds of a step from its contents, fitted to the steps that an engine has run.

A step reads the weights once, multiplies its tokens, reads the keys of its decodes, and pairs its prompt tokens with
the keys that they see. The model is linear in these, fitted by least squares of the relative error over the newest
steps of every size, so that frequent sizes do not drown rare ones. StepClock measures the steps.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from detcompile.runtime.step.builder import StepEntry

LEAST_SECONDS = 1e-6  # least duration of a step, measured or predicted
KEPT_STEPS = 64  # steps kept per size (power of two of tokens)
FEW_TOKENS = 64  # a product of at most this many tokens may cost no more than reading its weights
FIT_STEPS = 16  # steps between fits
LEAST_STEPS = 8  # steps needed for predictions
OUTLIER = 5.0  # median errors: steps that compiled something or were interrupted are ignored
MARGIN_STEPS = 512  # newest steps, from which the margin is taken


class StepShape(NamedTuple):
    """Amount of work in a step."""

    num_tokens: int = 0
    decode_keys: int = 0  # total keys read by the decodes
    prefill_pairs: float = 0.0  # pairs of a prompt token and a key that it sees

    @staticmethod
    def of(entries: Iterable[StepEntry]) -> "StepShape":
        """Return the shape of a step with these entries."""
        shape = StepShape()
        for entry in entries:
            shape = shape.with_part(entry)
        return shape

    def with_part(self, entry: StepEntry) -> "StepShape":
        """Return the shape with one more entry."""
        start, count = entry.start, entry.num_tokens
        if count == 1 and start >= entry.sequence.num_prompt_tokens:
            return StepShape(self.num_tokens + count, self.decode_keys + start + count, self.prefill_pairs)
        pairs = count * (start + (count + 1) / 2)
        return StepShape(self.num_tokens + count, self.decode_keys, self.prefill_pairs + pairs)


class CostModel:
    """Predicts the seconds of steps.

    Attributes:
        margin: relative excess over the prediction that only one in a hundred of the newest steps exceeded.
        most_tokens: tokens of the largest step so far.
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
        """True if enough steps were observed to make predictions."""
        return self._weights.size > 0

    def observe(self, shape: StepShape, seconds: float) -> float:
        """Record a step's duration. Return its excess over the prediction; 0 without a prediction."""
        features = _features(shape.num_tokens, shape.decode_keys, shape.prefill_pairs)
        seconds = max(LEAST_SECONDS, seconds)
        predicted = max(LEAST_SECONDS, self.seconds(shape)) if self.known else seconds
        if self.known and predicted > LEAST_SECONDS:  # otherwise there is no relative error
            self._errors.append(seconds / predicted - 1)
        self.most_tokens = max(self.most_tokens, shape.num_tokens)
        kept = self._steps.setdefault(shape.num_tokens.bit_length(), deque(maxlen=KEPT_STEPS))
        kept.append((features, seconds))
        self._num_observed += 1
        if self._num_observed % FIT_STEPS == 0 or self._num_observed == LEAST_STEPS:
            self._fit()
        return seconds - predicted

    def seconds(self, shape: StepShape) -> float:
        """Return the predicted seconds of a step of this shape."""
        return float(_features(shape.num_tokens, shape.decode_keys, shape.prefill_pairs) @ self._weights)

    def seconds_with(self, shape: StepShape, start: int, counts: np.ndarray) -> np.ndarray:
        """Return predicted seconds of this shape plus one prompt chunk of each of ``counts`` tokens after ``start``."""
        pairs = shape.prefill_pairs + counts * (start + (counts + 1) / 2)
        seconds: np.ndarray = _features(shape.num_tokens + counts, shape.decode_keys, pairs) @ self._weights
        return seconds

    def _fit(self) -> None:
        rows = [step for kept in self._steps.values() for step in kept]
        seconds = np.array([row[1] for row in rows])
        features = np.array([row[0] for row in rows]) / seconds[:, None]  # relative error
        weights = _positive_least_squares(features)
        error = np.abs(features @ weights - 1)
        fine = error <= max(0.02, OUTLIER * float(np.median(error)))
        self._weights = _positive_least_squares(features[fine])
        if self._errors:
            self.margin = max(0.0, float(np.percentile(self._errors, 99)))


def _features(num_tokens: "int | np.ndarray", decode_keys: int, pairs: "float | np.ndarray") -> np.ndarray:
    """Return features [..., 5] float64."""
    tokens = np.asarray(num_tokens, float)
    beyond = np.maximum(0.0, tokens - FEW_TOKENS)
    columns = np.broadcast_arrays(np.ones_like(tokens), tokens, beyond, float(decode_keys), np.asarray(pairs, float))
    return np.stack(columns, -1)


def _positive_least_squares(features: np.ndarray) -> np.ndarray:
    """Return the non-negative weights [5] that bring features @ weights closest to 1."""
    scale = np.maximum(np.abs(features).max(0), 1e-30)
    active = features.any(0)
    weights = np.zeros(features.shape[1])
    while active.any():
        solution = np.linalg.lstsq(features[:, active] / scale[active], np.ones(len(features)), rcond=1e-6)[0]
        weights[:] = 0.0
        weights[active] = solution / scale[active]
        if (solution >= 0).all():
            break
        active &= weights > 0
    return weights


class StepClock:
    """Runs during steps, and pauses while the caller processes their tokens.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.start_over()

    def start_over(self) -> None:
        """Restart the clock; the time so far belongs to no step."""
        self._ended: float | None = None  # end of the previous step, if sequences are still running
        self._resumed, self._seconds = self._clock(), 0.0

    def resume(self) -> None:
        """Resume when the caller asks for a step."""
        self._resumed = self._clock()

    def pause(self) -> None:
        """Pause when the caller gets the results."""
        self._seconds += self._clock() - self._resumed

    def lap(self, *, goes_on: bool) -> tuple[float, float]:
        """Return the seconds of a step that has ended, without and with the caller's time in between.

        Args:
            goes_on: sequences are running, so the caller's time counts toward the next step.
        """
        now = self._clock()
        seconds = self._seconds + now - self._resumed
        since = seconds if self._ended is None else now - self._ended
        self._resumed, self._seconds, self._ended = now, 0.0, now if goes_on else None
        return seconds, since
