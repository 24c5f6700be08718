"""TrainingCertificate: the proofs of a trainer's forward, which is the one that serves, and of its backward."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from detcompile.orders.numerics import Numerics
from detcompile.passes.proof.certificate import Certificate

__all__ = ["TrainingCertificate", "backward_of"]


@dataclass(frozen=True)
class TrainingCertificate:
    """What is proved of a trainer; prints as two tables.

    Attributes:
        forward: each row of logits reads its own sequence, in the orders of serving.
        backward: gradients of rows keep sequences apart, and those of weights are exact sums over tokens.
    """

    forward: Certificate
    backward: Certificate

    def to_json(self) -> str:
        """One JSON object with both."""
        return json.dumps({way: json.loads(getattr(self, way).to_json()) for way in ("forward", "backward")})

    def summary(self) -> str:
        """Two lines: how many operations of each class were certified."""
        return f"forward: {self.forward.summary()}\nbackward: {self.backward.summary()}"

    def __str__(self) -> str:
        return f"forward\n{self.forward}\n\nbackward\n{self.backward}"


def backward_of(regions: Iterable[tuple[Certificate | None, int | None]], numerics: Numerics) -> Certificate:
    """One proof of the backward of all regions; those of layers with one structure are one, for all of these layers.

    Args:
        regions: the proof of each region in the order in which they run, None of one without a backward; and the number
            of its layer, if it is one.
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
