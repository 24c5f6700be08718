"""Proofs of the two graphs that autograd makes of a region: the forward is still serving's, and the backward certified.

The backward reads what the forward saved, of which the forward's proof says which rows it holds, and the gradients of
the forward's outputs, which hold the rows of these. It gives the gradient of each input with the rows of that, and a
sum over tokens for each port; what is neither is refused.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from detcompile.errors import UncertifiedOp
from detcompile.orders.numerics import Numerics
from detcompile.passes.layers.compilation import role_of
from detcompile.passes.proof.certificate import Certificate, certify
from detcompile.passes.proof.inputs import Role
from detcompile.passes.proof.provenance import Layout, Rows, TokenSum

__all__ = ["Proofs"]


@dataclass
class Proofs:
    """The proofs of one program.

    Args:
        served: the proof of the region's forward.
        roles: what the inputs of the region hold, then of the leaf table and of the ports, in order.
        with_gradient: positions of the region's outputs that have a gradient.
    """

    served: Certificate
    roles: Sequence[Role]
    with_gradient: Sequence[int]
    numerics: Numerics
    forward: Certificate | None = None
    backward: Certificate | None = None
    _given: list[Role] = field(default_factory=list)  # of the forward's inputs, as the backward has to give them back
    _made: list[Role] = field(default_factory=list)  # of the forward's outputs, those that the backward reads last

    def certify_forward(self, graph: fx.Graph) -> None:
        """Prove the forward, which has to hold the same templates with the same orders as when it serves.

        Raises:
            UncertifiedOp: it does not, or rows meet.
        """
        states: dict[fx.Node, Any] = {}
        inputs = graph.find_nodes(op="placeholder")
        roles = dict(zip((node.name for node in inputs), self.roles, strict=True))
        self.forward = certify(graph, roles, self.numerics, self.served.counts.get("attention", 0), states=states)
        served, found = _sums(self.served), _sums(self.forward)
        if served != found:
            lost, new = served - found, found - served
            raise UncertifiedOp(f"the forward that is trained sums otherwise than served: {dict(lost)} is {dict(new)}")
        (output,) = graph.find_nodes(op="output")
        self._given = [roles[node.name] if roles[node.name].kind == "port" else _role(node, states) for node in inputs]
        self._made = [_role(node, states) for node in output.args[0]]

    def certify_backward(self, graph: fx.Graph) -> None:
        """Prove the backward of the forward that was proved last.

        Raises:
            UncertifiedOp: rows meet otherwise than in a sum over all tokens, or a gradient is not what it should be.
        """
        states: dict[fx.Node, Any] = {}
        inputs = graph.find_nodes(op="placeholder")
        roles = {node.name: role for node, role in zip(inputs, self._read(inputs), strict=True)}
        self.backward = certify(graph, roles, self.numerics, None, states=states, backward=True)
        (output,) = graph.find_nodes(op="output")
        given = zip(output.args[0], self._given, strict=True)
        lost = [text for place, (node, role) in enumerate(given) if (text := _unlike(place, node, role, states))]
        if lost:
            listed = "\n  ".join(lost)
            raise UncertifiedOp(f"a backward gives what is no gradient of its input:\n  {listed}", tuple(lost))

    def _read(self, inputs: Sequence[fx.Node]) -> list[Role]:
        """What the backward reads: the numbers that the forward saved, its tensors, and gradients of its outputs."""
        num_outputs = len(inputs) - len(self.with_gradient)
        saved = self._made[-num_outputs:] if num_outputs else []
        numbers = [role for role in saved if role.kind == "weight" and role.state is None]
        tensors = [role for role in saved if role not in numbers]
        return [*numbers, *tensors, *(self._made[place] for place in self.with_gradient)]


def _sums(certificate: Certificate) -> Counter[tuple[str, str]]:
    return Counter((entry.op, entry.order) for entry in certificate.entries if entry.order)


def _role(node: Any, states: Mapping[fx.Node, Any]) -> Role:
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return Role("weight")
    state = states[node]
    return Role("layout", layout=state) if isinstance(state, Layout) else role_of(node, state)


def _unlike(place: int, node: Any, role: Role, states: Mapping[fx.Node, Any]) -> str | None:
    """What is wrong with the gradient of an input, in words."""
    state = None if node is None else states[node]
    if state is None:
        return None
    if role.kind == "port":
        return None if isinstance(state, TokenSum) else f"output {place}: {node} is no sum over tokens, for a weight"
    if not isinstance(state, Rows) or not isinstance(role.state, Rows) or state.dims != role.state.dims:
        return f"output {place}: {node} holds other rows than the input whose gradient it is"
    return None
