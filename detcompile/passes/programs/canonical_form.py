"""The canonical form of a graph, and its digest: what the graph computes from which inputs.

The form has each operation with its arguments, in graph order, constants by value, and dtype and shape of every value.
It has no names of nodes or symbols, no source locations, no strides and no device, so every trace of a model has the
same form. The graph is ATen as traced, before the first pass: the passes' sources and the numerics decide the rest.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from detcompile.errors import UnsupportedModel
from detcompile.passes.programs.async_weights import wait_for_weights
from detcompile.torch_internals.fake_tensors import FakeTensor, unset_fake_temporarily
from detcompile.torch_internals.graph_nodes import expression_of
from detcompile.torch_internals.inductor import make_boxed_func
from detcompile.torch_internals.operators import HigherOrderOperator, OpOverload, schema_of
from detcompile.weights import tensor_digest

CONSTANT = "constant."  # prefix of the names of tensors that are not parameters, buffers or parts of a step
CHECKS = ("_assert_scalar", "_assert_async", "sym_constrain_range", "_assert_tensor_metadata")  # they compute nothing
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
PLACEMENT = ("device", "pin_memory")  # arguments that place a value
BY_NAME = (bool, str, torch.dtype, torch.layout, torch.memory_format, type(None), type(...))


def program_digest(gm: fx.GraphModule, names: Sequence[str], repeats: Sequence[Any] | None = None) -> str:
    """Return the sha256 of the canonical form.

    Args:
        names: name of each of the graph's inputs, in order: a weight, a constant, or a part of a step.
        repeats: structures of all layers, if the graph holds the first layers only.

    Raises:
        UnsupportedModel: an argument has no canonical form.
    """
    digest = hashlib.sha256()
    for line in _Form(gm, names).lines:
        digest.update(json.dumps(line).encode())
    if repeats is not None:
        digest.update(json.dumps(repeats).encode())
    return digest.hexdigest()


def region_form(gm: fx.GraphModule, names: Sequence[str]) -> str:
    """Return the canonical form as text, with strides and devices of the inputs, because code depends on them.

    Args:
        names: name of each of the graph's inputs, in order; two inputs may share a name.
    """
    form = _Form(gm, names)
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    tensors = [value for value in values if isinstance(value, Tensor)]
    form.lines.append([[str(tensor.device), *map(form._number, tensor.stride())] for tensor in tensors])
    return json.dumps([names, form.lines])


def input_names(model: nn.Module, leaves: Sequence[Tensor], inputs: Sequence[Any]) -> list[str]:
    """Return a name for each input of a traced graph: a parameter or buffer of the model, or a numbered leaf of a step.

    Other tensors that the model's code holds are numbered in graph order. Numbers have an empty name.
    """
    weights = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {id(tensor): name for name, tensor in sorted(weights, key=lambda weight: weight[0], reverse=True)}
    names |= {id(leaf): f"step.{number}" for number, leaf in enumerate(leaves)}
    for given in inputs:
        if isinstance(given, Tensor) and id(given) not in names:
            names[id(given)] = f"{CONSTANT}{sum(name.startswith(CONSTANT) for name in names.values())}"
    return [names[id(given)] if isinstance(given, Tensor) else "" for given in inputs]


def constants_of(model: nn.Module, leaves: Sequence[Tensor], inputs: Sequence[Any]) -> dict[str, Tensor]:
    """Return by name the tensors of a traced graph that are not parameters, buffers or leaves of a step."""
    names = input_names(model, leaves, inputs)
    return {name: given for name, given in zip(names, inputs) if name.startswith(CONSTANT)}


class NotRun(Exception):
    """Raised when a graph that was traced only for its digest is called."""


def never_run(*_graph: Any, **_settings: Any) -> Callable[..., Any]:
    """Stand in for a compiler, for a graph that is not meant to run: a call raises NotRun."""

    def run(*_given: Any) -> Any:
        raise NotRun

    return make_boxed_func(run)


class _Form:
    """Lines of JSON, one per operation."""

    def __init__(self, gm: fx.GraphModule, names: Sequence[str], symbols: dict[Any, str] | None = None) -> None:
        self._gm = gm
        self._symbols: dict[Any, str] = {} if symbols is None else symbols
        self._known: dict[fx.Node, Any] = {}
        self.lines: list[Any] = []
        inputs = gm.graph.find_nodes(op="placeholder")
        assert len(inputs) == len(names), f"{len(names)} inputs were named, the graph has {len(inputs)}"
        for _, node in sorted(zip(names, inputs), key=lambda named: named[0]):
            self._value(node)  # symbols are numbered by the first input that has them, in order of names
        for name, node in zip(names, inputs):
            value = node.meta.get("val")
            extent = isinstance(value, SYMBOLIC)
            self._known[node] = self._number(value) if extent else ["input", name, self._value(node)]
        for node in gm.graph.nodes:
            if node.op != "placeholder" and not _checks(node):
                self._add(node)

    def _add(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, SYMBOLIC):  # a number is known by its expression, however it was computed
            self._known[node] = self._number(value)
            return
        if node.op == "get_attr":
            self._known[node] = self._constant(node)
            return
        self._known[node] = len(self.lines)
        target = "output" if node.op == "output" else _name_of(node)
        kwargs = {key: self._argument(given, node) for key, given in node.kwargs.items() if key not in PLACEMENT}
        arguments = [self._argument(given, node) for given in node.args]
        self.lines.append([target, arguments, sorted(kwargs.items()), self._value(node)])

    def _argument(self, given: Any, node: fx.Node) -> Any:
        if isinstance(given, fx.Node):
            return self._known[given]
        if isinstance(given, (list, tuple, torch.Size)):
            return ["list", *(self._argument(part, node) for part in given)]
        if isinstance(given, dict):
            return ["dict", *([str(key), self._argument(part, node)] for key, part in sorted(given.items()))]
        if isinstance(given, slice):
            return ["slice", *(self._argument(part, node) for part in (given.start, given.stop, given.step))]
        if isinstance(given, BY_NAME):
            return [type(given).__name__, str(given)]
        if isinstance(given, torch.device):
            return "device"
        if isinstance(given, SYMBOLIC):
            return self._number(given)
        if isinstance(given, (int, float, complex)):
            return _scalar(given)
        if isinstance(given, OpOverload):
            return ["operation", str(given)]
        raise UnsupportedModel(
            f"{_name_of(node)} takes a {type(given).__name__}, which no fingerprint can hold: pass numbers, strings"
            " and tensors only"
        )

    def _constant(self, node: fx.Node) -> Any:
        """Return a tensor by its bytes, or a graph by its form."""
        held: Any = self._gm
        for part in str(node.target).split("."):
            held = getattr(held, part)
        if isinstance(held, fx.GraphModule):
            inputs = held.graph.find_nodes(op="placeholder")
            return ["graph", _Form(held, [str(place) for place in range(len(inputs))], self._symbols).lines]
        if not isinstance(held, Tensor) or isinstance(held, FakeTensor):
            raise UnsupportedModel(f"the model's graph holds a {type(held).__name__}, which no fingerprint can hold")
        wait_for_weights()
        with unset_fake_temporarily():  # passes run under the mode that traced the graph
            return ["tensor", tensor_digest(held)]

    def _value(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        parts = value if isinstance(value, (list, tuple)) else [value]
        tensors = (part for part in parts if isinstance(part, Tensor))
        return [[str(part.dtype), *(self._number(size) for size in part.shape)] for part in tensors]

    def _number(self, value: Any) -> Any:
        """Return a number, or its expression in symbols that are numbered in order of appearance."""
        if not isinstance(value, SYMBOLIC):
            return _scalar(value)
        expression: Any = expression_of(value)
        for symbol in sorted(expression.free_symbols, key=lambda symbol: symbol.name):
            self._symbols.setdefault(symbol, f"n{len(self._symbols)}")
        integer = {symbol: symbol.is_integer for symbol in expression.free_symbols}
        renamed = {symbol: sympy.Symbol(self._symbols[symbol], integer=integer[symbol]) for symbol in integer}
        return [type(value).__name__, str(expression.xreplace(renamed))]


def _checks(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).name.rpartition("::")[2] in CHECKS


def _name_of(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    module, name = getattr(node.target, "__module__", ""), getattr(node.target, "__qualname__", None)
    operation = isinstance(node.target, (OpOverload, HigherOrderOperator))
    return str(node.target) if operation or name is None else f"{module}.{name}"


def _scalar(value: complex) -> Any:
    """Return a number with its type and all digits."""
    if isinstance(value, complex):
        return ["complex", value.real.hex(), value.imag.hex()]
    return ["float", value.hex()] if isinstance(value, float) else ["int", int(value)]
