"""Regions of a certified forward graph: each is differentiated, compiled and certified in both directions.

The backward reads what the forward saved, whose rows the forward's proof knows, and the gradients of the forward's
outputs, which hold the same rows. It returns the gradient of each input with that input's rows, and a sum over tokens
for each gradient handle. Everything else is refused.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from detcompile.errors import UncertifiedOp
from detcompile.orders.numerics import Numerics
from detcompile.passes.graphs import sympy_size
from detcompile.passes.layers.compilation import role_of
from detcompile.passes.layers.regions import Region
from detcompile.passes.pipeline import ROUNDING, GraphPass, decompositions, pinned_codegen, read_extents, rewrite
from detcompile.passes.programs.aot import call_directly
from detcompile.passes.proof.certificate import Certificate, certify
from detcompile.passes.proof.context import Role
from detcompile.passes.proof.provenance import Layout, Rows, TokenSum
from detcompile.passes.training.autograd_ops import LEAVES, as_templates, is_handle, to_train
from detcompile.templates.cpp_dispatch import direct_ops
from detcompile.torch_internals.dynamo import compile_lock
from detcompile.torch_internals.fake_tensors import TracingContext, detect_fake_mode, tracing
from detcompile.torch_internals.inductor import (
    compile_fx,
    compile_fx_inner,
    functorch_config,
    wide_loads,
    without_channels_last,
)
from detcompile.torch_internals.inductor_settings import inductor_config

# Inductor estimates sizes over an unknown number of tokens as 0, so it sees no gain in fusing two gradients that read
# the same data. A threshold of 0 fuses them anyway.
FUSION = {"score_fusion_memory_threshold": 0}


@dataclass
class Proofs:
    """The proofs of one program.

    Args:
        served: the proof of the region's forward, as served.
        roles: roles of the region's inputs, then of the leaf table and the gradient handles, in order.
        with_gradient: positions of the region's outputs that have a gradient.
    """

    served: Certificate
    roles: Sequence[Role]
    with_gradient: Sequence[int]
    numerics: Numerics
    forward: Certificate | None = None
    backward: Certificate | None = None
    _given: list[Role] = field(default_factory=list)  # of the forward's inputs; the backward returns their gradients
    _made: list[Role] = field(default_factory=list)  # of the forward's outputs; the saved ones come last

    def certify_forward(self, graph: fx.Graph) -> None:
        """Prove the forward, and require the templates and orders of the served forward.

        Raises:
            UncertifiedOp: they differ, or rows meet.
        """
        states: dict[fx.Node, Any] = {}
        inputs = graph.find_nodes(op="placeholder")
        roles = dict(zip((node.name for node in inputs), self.roles, strict=True))
        self.forward = certify(graph, roles, self.numerics, self.served.counts.get("attention", 0), states=states)
        served, trained = _sums(self.served), _sums(self.forward)
        if served != trained:
            lost, new = served - trained, trained - served
            raise UncertifiedOp(f"the trained forward sums differently from the served one: {dict(lost)}, {dict(new)}")
        (output,) = graph.find_nodes(op="output")
        self._given = [
            roles[node.name] if roles[node.name].kind == "handle" else _role(node, states) for node in inputs
        ]
        self._made = [_role(node, states) for node in output.args[0]]

    def certify_backward(self, graph: fx.Graph) -> None:
        """Prove the backward of the last proven forward.

        Raises:
            UncertifiedOp: rows meet outside a sum over all tokens, or a gradient does not match its input.
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
            message = f"a backward returns values that are not gradients of its inputs:\n  {listed}"
            raise UncertifiedOp(message, tuple(lost))

    def _read(self, inputs: Sequence[fx.Node]) -> list[Role]:
        """Return roles of the backward's inputs: saved numbers and tensors, then gradients of the outputs."""
        num_outputs = len(inputs) - len(self.with_gradient)
        saved = self._made[-num_outputs:] if num_outputs else []
        numbers = [role for role in saved if role.kind == "weight" and role.state is None]
        tensors = [role for role in saved if role not in numbers]
        return [*numbers, *tensors, *(self._made[place] for place in self.with_gradient)]


class TrainedRegion:
    """One region of a forward graph, for all layers of its structure.

    Args:
        region: the rewritten graph and its inputs.
        roles: roles of its inputs, by name.
        certificate: the forward's proof.
    """

    def __init__(self, region: Region, roles: Mapping[str, Role], certificate: Certificate, numerics: Numerics) -> None:
        self.region, self.roles, self.certificate, self.numerics = region, roles, certificate, numerics
        self._inputs = region.gm.graph.find_nodes(op="placeholder")
        values = [node.meta["val"] for node in self._inputs]
        self._device = next(value.device for value in values if isinstance(value, Tensor))
        mode = detect_fake_mode(values)
        assert mode is not None
        self._mode = mode
        self.backwards: dict[Any, Certificate | None] = {}  # by program; None if nothing has a gradient
        self._programs: dict[Any, Callable[..., Sequence[Tensor]]] = {}

    def sizes(self) -> dict[int, tuple[int, int]]:
        """Return, for each number among the inputs, an input and dimension with that extent."""
        extents: dict[Any, tuple[int, int]] = {}
        for place, node in enumerate(self._inputs):
            if isinstance(node.meta["val"], Tensor):
                for dim, size in enumerate(node.meta["val"].shape):
                    extents.setdefault(sympy_size(size), (place, dim))
        numbers = {
            place: sympy_size(node.meta["val"])
            for place, node in enumerate(self._inputs)
            if isinstance(node.meta["val"], torch.SymInt)
        }
        return {place: extents[size] for place, size in numbers.items() if size in extents}

    def program(self, trained: tuple[int, ...], differentiated: tuple[int, ...]) -> Callable[..., Sequence[Tensor]]:
        """Return differentiable code of the region: its inputs, the leaf table and gradient handles -> its outputs.

        Args:
            trained: positions of the inputs that are trained weights.
            differentiated: positions of the inputs that are rows with a gradient.
        """
        key = trained, differentiated
        if key not in self._programs:
            with compile_lock:  # a compilation sets process-wide state
                if key not in self._programs:
                    self._programs[key] = self._compile(trained, differentiated)
        return self._programs[key]

    def _compile(self, trained: tuple[int, ...], differentiated: tuple[int, ...]) -> Callable[..., Sequence[Tensor]]:
        gm = self._to_train(trained)
        inputs = gm.graph.find_nodes(op="placeholder")
        values, with_gradient = [], set()
        for position, node in enumerate(inputs):
            value = node.meta["val"]
            value = value.detach() if isinstance(value, Tensor) else value
            if position in differentiated or is_handle(node):
                with_gradient.add(node)
                value.requires_grad_()
            values.append(value)
        roles = [self.roles.get(node.name, Role("weight")) for node in inputs]
        roles[len(self._inputs) :] = [Role("layout", layout=Layout(LEAVES)), *[Role("handle")] * len(trained)]
        proofs = Proofs(self.certificate, roles, _reached(gm.graph, with_gradient), self.numerics)
        settings = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
        with (
            tracing(TracingContext(self._mode)),
            functorch_config.patch(settings),
            torch.enable_grad(),
            _deterministic_algorithms(),
        ):
            run: Callable[..., Sequence[Tensor]] = compile_fx(
                gm,
                values,
                inner_compile=partial(_lower, proofs),
                config_patches=ROUNDING | FUSION,
                decompositions=decompositions(),
            )
        assert proofs.forward is not None
        self.backwards[trained, differentiated] = proofs.backward
        return run

    def _to_train(self, trained: tuple[int, ...]) -> fx.GraphModule:
        assert self._mode.shape_env is not None
        with self._mode, self._mode.shape_env.ignore_fresh_unbacked_symbols():
            count = self._mode.shape_env.create_unbacked_symint()
            torch._check(count >= 2)
            leaves = torch.empty(count, dtype=torch.int32, device=self._device)
            return to_train(self.region.gm, trained, leaves, self.numerics.token_grid)


@contextlib.contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    """Set torch's flag for deterministic algorithms: a backward compiled without it fails once a caller sets it."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _lower(proofs: Proofs, gm: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
    """Put the templates back, prove the graph, and compile it. Prove it again after Inductor's rewrites."""
    backward = bool(settings.get("is_backward"))
    prove = proofs.certify_backward if backward else proofs.certify_forward
    as_templates(gm)
    if backward:
        rewrite(gm)
    prove(gm.graph)
    devices = {given.device.type for given in inputs if isinstance(given, Tensor)}
    direct = direct_ops() if devices == {"cpu"} else {}

    def finish(gm: fx.GraphModule) -> None:
        prove(gm.graph)
        read_extents(call_directly(gm, direct))

    key = f"{proofs.numerics.for_training()}, {len(direct)} direct"
    finishing = inductor_config.patch(post_grad_custom_post_pass=GraphPass(finish, key))
    with pinned_codegen(), wide_loads(), without_channels_last(), finishing:
        return compile_fx_inner(gm, inputs, **settings)


def _reached(graph: fx.Graph, sources: set[fx.Node]) -> list[int]:
    """Return positions of a graph's outputs that are computed from ``sources``."""
    reached = set(sources)
    for node in graph.nodes:
        if node.op == "call_function" and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    (output,) = graph.find_nodes(op="output")
    return [place for place, node in enumerate(output.args[0]) if node in reached]


def _sums(certificate: Certificate) -> Counter[tuple[str, str]]:
    return Counter((entry.op, entry.order) for entry in certificate.entries if entry.order)


def _role(node: Any, states: Mapping[fx.Node, Any]) -> Role:
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return Role("weight")
    state = states[node]
    return Role("layout", layout=state) if isinstance(state, Layout) else role_of(node, state)


def _unlike(place: int, node: Any, role: Role, states: Mapping[fx.Node, Any]) -> str | None:
    """Return why a value cannot be the gradient of an input, or None."""
    state = None if node is None else states[node]
    if state is None:
        return None
    if role.kind == "handle":
        problem = f"output {place}: {node} belongs to a weight and is not a sum over tokens"
        return None if isinstance(state, TokenSum) else problem
    if not isinstance(state, Rows) or not isinstance(role.state, Rows) or state.dims != role.state.dims:
        return f"output {place}: {node} holds other rows than the input that it is a gradient of"
    return None
