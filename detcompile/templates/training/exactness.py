"""ExactnessGuard: whether the sums that made each parameter's gradient were exact; those that may not be are refused.

Gradients of weights are sums of multiples of 2^grid in float64, exact up to 2^(53 + grid). A template sees to its own
sum: an element whose terms have magnitudes of more than 2^(51 + grid) together comes back as +inf. (A term that is not
finite makes NaN of it, so that +inf says nothing else.) What is added to it afterwards, of other micro-batches and of
other ranks, is bounded by the guard: it adds up the largest magnitude of each.
"""

import math
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from detcompile.errors import NumericsError

__all__ = ["ExactnessGuard", "limit_of", "magic_of", "round_to_grid"]

FEWEST_BITS = 12  # of the largest gradient of a logit, on the grid; parameters' are smaller in deep layers


def magic_of(grid: int) -> float:
    """What is added to a float64 and taken away again, to round it to a multiple of 2^grid."""
    return 1.5 * 2.0 ** (52 + grid)


def limit_of(grid: int) -> float:
    """What the magnitudes of the terms of one sum may add up to."""
    return float(2.0 ** (51 + grid))


def round_to_grid(values: Tensor, grid: int) -> Tensor:
    """Round float64 values, of magnitudes up to ``limit_of(grid)``, to multiples of 2^grid in place."""
    return values.add_(magic_of(grid)).sub_(magic_of(grid))


class ExactnessGuard:
    """Bounds of the gradients of named parameters since the last ``clear``.

    Args:
        names: names of the parameters, the same in the same order on every rank.
        grid: ``Numerics.token_grid``.
    """

    def __init__(self, names: Sequence[str], grid: int) -> None:
        self.names, self.grid = tuple(names), grid
        self._places = {name: place for place, name in enumerate(self.names)}
        self._bounds: dict[int, Tensor] = {}
        self._loss: Tensor | None = None  # largest gradient of logits that has not been looked at
        self._warned = False

    def add(self, name: str, gradient: Tensor) -> None:
        """Count one gradient of a parameter, float64 of any shape; the host does not wait for the device."""
        place = self._places[name]
        largest = torch.linalg.vector_norm(gradient.detach(), float("inf"))
        self._bounds[place] = largest + self._bounds[place] if place in self._bounds else largest

    def bound_of(self, name: str) -> Tensor | None:
        """The bound of a parameter; None where nothing was counted."""
        return self._bounds.get(self._places[name])

    def restart(self, name: str, bound: Tensor | None) -> None:
        """Count on from ``bound``, of what a parameter's gradient is now; from nothing where it is None."""
        self._bounds.pop(self._places[name], None)
        if bound is not None:
            self._bounds[self._places[name]] = bound

    def add_loss(self, gradient: Tensor) -> None:
        """Look at a gradient of logits, of any dtype; on a GPU that is left to ``require``."""
        largest = torch.linalg.vector_norm(gradient.detach(), float("inf"), dtype=torch.float64)
        self._loss = largest if self._loss is None else torch.maximum(self._loss, largest)
        if largest.device.type == "cpu":
            self._look_at_loss()

    def clear(self) -> None:
        """Start anew, as after an optimizer's step."""
        self._bounds.clear()
        self._loss, self._warned = None, False

    def bounds(self, device: torch.device) -> Tensor:
        """The bound of each parameter [P] float64, of this rank alone; add those of all ranks before ``require``."""
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([nothing, *(self._bounds.get(place, nothing) for place in range(len(self.names)))])[1:]

    def require(self, bounds: Tensor) -> None:
        """Refuse the gradients of parameters whose bounds [P] are beyond exactness; warn of a loss that is too small.

        Raises:
            NumericsError: names the first of these parameters, and how many there are.
        """
        self._look_at_loss()
        self._require(zip(self.names, bounds.tolist(), strict=True))

    def require_one(self, name: str, ranks: int) -> None:
        """Refuse the gradient of one parameter as ``require`` does, if so many ranks had this one's bound.

        It is soon, and needs no other rank: some rank's bound is at least its share of the whole.
        """
        self._require([(name, float(self._bounds[self._places[name]]) * ranks)])

    def _require(self, bounds: Iterable[tuple[str, float]]) -> None:
        limit = limit_of(self.grid)
        beyond = [(name, bound) for name, bound in bounds if bound > limit]
        if not beyond:
            return
        (name, bound), others = beyond[0], len(beyond) - 1
        of_others = f", and so of {others} other parameters" if others else ""
        what = f"may reach {bound:.3g}" if bound != math.inf else f"exceed {limit:g}"
        raise NumericsError(
            f"the sums that make the gradient of {name} {what}; multiples of 2^{self.grid} are added exactly up to "
            f"{limit:g}{of_others}. Divide the loss by the number of its tokens, set .grad to None at each step (also "
            "of parameters that no optimizer has), or choose a coarser Numerics(token_grid=...)"
        )

    def _look_at_loss(self) -> None:
        if self._loss is not None:
            self.warn_if_small("the gradient of the logits", float(self._loss))
        self._loss = None

    def warn_if_small(self, what: str, largest: float) -> None:
        """Warn once a step where a gradient's largest magnitude is near the grid: what is below the grid is zero."""
        if self._warned or not 0 < largest < 2.0 ** (self.grid + FEWEST_BITS):
            return
        self._warned = True
        warnings.warn(
            f"{what} is below 2^{self.grid + FEWEST_BITS}: gradients are rounded to multiples of 2^{self.grid}, so "
            "that small ones lose their bits or become zero. Multiply the loss by a power of two and divide .grad by "
            "it before the optimizer's step, or choose a finer Numerics(token_grid=...).",
            RuntimeWarning,
            stacklevel=2,
        )
