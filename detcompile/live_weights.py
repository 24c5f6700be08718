"""The tensors that a model's graphs read, by their names in the model, and what they hold now."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.fingerprints import fingerprint
from detcompile.weights import weight_digests, weights_digest

__all__ = ["LiveWeights", "WeightedModel"]


class LiveWeights:
    """The weights of a compiled model, or a rank's share of them.

    Args:
        held: the tensors here by name, each once.
        whole: digests of the whole weights that the tensors here do not tell; of a share, all of them.
        is_share: the tensors here are a rank's share.
    """

    def __init__(
        self, held: Callable[[], Mapping[str, Tensor]], whole: Mapping[str, str], *, is_share: bool = False
    ) -> None:
        self._held = held
        self._whole = dict(whole)
        self._share = weight_digests(held()) if is_share else None

    def digests(self) -> dict[str, str]:
        """The digest of every weight as it is now, whole. Reads all that is here.

        Raises:
            InvalidInput: a share was changed by something that did not tell what the whole is now.
        """
        found = weight_digests(self._held())
        if self._share is None:
            return self._whole | found
        changed = [name for name, digest in found.items() if self._share.get(name) != digest]
        if changed:
            raise InvalidInput(
                f"a rank's share of {changed[0]} was changed in place, which does not tell what the whole weight is"
                " now: load and compile the model again"
            )
        return dict(self._whole)


class WeightedModel(ABC):
    """What a compiled model says of its weights, and what its fingerprint makes of them."""

    _weights: LiveWeights

    @property
    def fingerprint_parts(self) -> dict[str, str]:
        """What the contract holds fixed, by name. Reads every weight, so that it follows changes in place.

        Raises:
            InvalidInput: a weight was given another storage since; or a rank's share of one was changed by something
                that did not tell what the whole is now.
        """
        return {"weights": weights_digest(self.weight_digests()), **self._fixed_parts}

    @property
    def fingerprint(self) -> str:
        """sha256 in hex: equal fingerprints give equal bits. Reads every weight, as ``fingerprint_parts``.

        It is the same at every tensor-parallel size; there the whole weights were read before the ranks took shares.
        """
        return fingerprint(self.fingerprint_parts)

    def weight_digests(self) -> dict[str, str]:
        """The digest of every parameter and buffer as it is now, whole; raises as ``fingerprint_parts``."""
        return self._weights.digests()

    @property
    @abstractmethod
    def _fixed_parts(self) -> dict[str, str]:
        """The parts besides the weights."""
