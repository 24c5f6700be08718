"""ExactnessGuard: rejects parameters' gradients whose sums may not have been exact.

Gradients of weights are sums of multiples of 2^grid in float64, which are exact up to 2^(53 + grid). A template checks
its own sum: an element whose terms' magnitudes add up to more than 2^(51 + grid) becomes +inf. (A nonfinite term gives
NaN, so +inf is unambiguous.) The guard bounds what is added afterwards, from other micro-batches and ranks: it adds up
the largest magnitude of each gradient.
"""

import math
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from detcompile.errors import NumericsError

FEWEST_BITS = 12  # bits on the grid of the largest logit gradient; deep layers' parameters have smaller gradients


def magic_of(grid: int) -> float:
    """Return the number that, added to a float64 and subtracted again, rounds it to a multiple of 2^grid."""
    return 1.5 * 2.0 ** (52 + grid)


def limit_of(grid: int) -> float:
    """Return the limit for the sum of magnitudes of one sum's terms."""
    return float(2.0 ** (51 + grid))


def round_to_grid(values: Tensor, grid: int) -> Tensor:
    """Round float64 values, of magnitudes up to ``limit_of(grid)``, to multiples of 2^grid in place."""
    return values.add_(magic_of(grid)).sub_(magic_of(grid))


def largest_magnitude(values: Tensor) -> Tensor:
    """Return the largest magnitude, a float64 scalar; NaN if there is a NaN."""
    # vector_norm's dtype argument would copy the values.
    return torch.linalg.vector_norm(values.detach(), float("inf")).double()


class ExactnessGuard:
    """Bounds of named parameters' gradients since the last ``clear``.

    Args:
        names: names of the parameters, in the same order on every rank.
        grid: ``Numerics.token_grid``.
    """

    def __init__(self, names: Sequence[str], grid: int) -> None:
        self.names, self.grid = tuple(names), grid
        self._places = {name: place for place, name in enumerate(self.names)}
        self._bounds: dict[int, Tensor] = {}
        self._loss: Tensor | None = None  # largest logit gradient not checked yet
        self._warned = False

    def add(self, name: str, gradient: Tensor) -> None:
        """Add one gradient of a parameter to its bound, float64 of any shape; does not wait for the device."""
        place = self._places[name]
        largest = largest_magnitude(gradient)
        self._bounds[place] = largest + self._bounds[place] if place in self._bounds else largest

    def bound_of(self, name: str) -> Tensor | None:
        """Return a parameter's bound, or None if nothing was added."""
        return self._bounds.get(self._places[name])

    def restart(self, name: str, bound: Tensor | None) -> None:
        """Set a parameter's bound to ``bound``; None clears it."""
        self._bounds.pop(self._places[name], None)
        if bound is not None:
            self._bounds[self._places[name]] = bound

    def add_loss(self, gradient: Tensor) -> None:
        """Record a logit gradient of any dtype; on a GPU ``require`` checks it later."""
        largest = largest_magnitude(gradient)
        self._loss = largest if self._loss is None else torch.maximum(self._loss, largest)
        if largest.device.type == "cpu":
            self._look_at_loss()

    def clear(self) -> None:
        """Clear all bounds, as after an optimizer step."""
        self._bounds.clear()
        self._loss, self._warned = None, False

    def bounds(self, device: torch.device) -> Tensor:
        """Return each parameter's bound [P] float64 on this rank; add those of all ranks before ``require``."""
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([nothing, *(self._bounds.get(place, nothing) for place in range(len(self.names)))])[1:]

    def require(self, bounds: Tensor) -> None:
        """Reject gradients of parameters whose bounds [P] exceed exactness; warn if the loss is too small.

        Raises:
            NumericsError: names the first such parameter and the number of others.
        """
        self._look_at_loss()
        self._require(zip(self.names, bounds.tolist(), strict=True))

    def require_one(self, name: str, ranks: int) -> None:
        """Reject one parameter's gradient as ``require`` does, assuming that ``ranks`` ranks have this rank's bound.

        This works early and without other ranks: some rank's bound is at least its share of the total.
        """
        self._require([(name, float(self._bounds[self._places[name]]) * ranks)])

    def _require(self, bounds: Iterable[tuple[str, float]]) -> None:
        limit = limit_of(self.grid)
        beyond = [(name, bound) for name, bound in bounds if bound > limit]
        if not beyond:
            return
        (name, bound), others = beyond[0], len(beyond) - 1
        of_others = f" (also exceeded by {others} other parameters)" if others else ""
        what = f"may reach {bound:.3g}" if bound != math.inf else f"exceed {limit:g}"
        raise NumericsError(
            f"the sums of the gradient of {name} {what}; multiples of 2^{self.grid} are added exactly only up to "
            f"{limit:g}{of_others}. Divide the loss by the number of its tokens, set .grad to None at each step (also "
            "for parameters without an optimizer), or choose a coarser Numerics(token_grid=...)"
        )

    def _look_at_loss(self) -> None:
        if self._loss is not None:
            self.warn_if_small("the gradient of the logits", float(self._loss))
        self._loss = None

    def warn_if_small(self, what: str, largest: float) -> None:
        """Warn once per step if a gradient's largest magnitude is near the grid: values below the grid become zero."""
        if self._warned or not 0 < largest < 2.0 ** (self.grid + FEWEST_BITS):
            return
        self._warned = True
        warnings.warn(
            f"{what} is below 2^{self.grid + FEWEST_BITS}: gradients are rounded to multiples of 2^{self.grid}, so "
            "small ones lose bits or become zero. Multiply the loss by a power of two and divide .grad by "
            "it before the optimizer's step, or choose a finer Numerics(token_grid=...).",
            RuntimeWarning,
            stacklevel=2,
        )
