"""TrainingCertificate: the proofs of a trainer's forward, which equals serving's, and of its backward."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from detcompile.orders.numerics import Numerics
from detcompile.passes.proof.certificate import Certificate


@dataclass(frozen=True)
class TrainingCertificate:
    """The certificates of a trainer; prints as two tables.

    Attributes:
        forward: each row of logits depends only on its own sequence, in the orders of serving.
        backward: gradients of rows keep sequences apart, and gradients of weights are exact sums over tokens.
    """

    forward: Certificate
    backward: Certificate

    def to_json(self) -> str:
        """Return one JSON object with both."""
        return json.dumps({way: json.loads(getattr(self, way).to_json()) for way in ("forward", "backward")})

    def summary(self) -> str:
        """Return two lines: the number of certified operations of each class."""
        return f"forward: {self.forward.summary()}\nbackward: {self.backward.summary()}"

    def __str__(self) -> str:
        return f"forward\n{self.forward}\n\nbackward\n{self.backward}"


def backward_of(regions: Iterable[tuple[Certificate | None, int | None]], numerics: Numerics) -> Certificate:
    """Merge the proofs of all regions' backwards; layers of one structure share a proof, which names all of them.

    Args:
        regions: for each region, in running order, the proof of its backward (None without one), and its layer number
            (None if it is not a layer).
    """
    layers: dict[int, list[int]] = {}
    proofs: dict[int, Certificate] = {}
    for proof, layer in regions:
        if proof is None:
            continue
        proofs[id(proof)] = proof
        layers.setdefault(id(proof), []).extend([] if layer is None else [layer])
    entries = tuple(
        replace(entry, holds_for=tuple(layers[key]))
        for key, proof in reversed(proofs.items())
        for entry in proof.entries
    )
    sums = dict.fromkeys(order for proof in proofs.values() for order in proof.sums)
    return Certificate(entries, numerics, tuple(sums))
