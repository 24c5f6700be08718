"""Digest an exact program's normal form: which operations compute each logit (docs/exact.md).

The graph is evaluated on hashes instead of numbers. An element's hash is computed from the operation that makes the
element and from its operands' hashes; an operation that moves elements moves their hashes. So layouts, copies, dead
code, the order of nodes, devices and releases change nothing, and two traces of one model have the same form. Weights
and step inputs are identified by name. The graph is evaluated twice, with different sizes for its symbols, so that no
symbol equals a constant both times. Conditions on sizes are part of the form.
"""

import hashlib
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from detcompile.passes.graphs import VIEWS, arguments_of, operation_of
from detcompile.passes.proof.pointwise import is_pointwise
from detcompile.templates.ops import ours
from detcompile.torch_internals.fake_tensors import unset_fake_temporarily
from detcompile.torch_internals.graph_nodes import FUNCTIONALIZED, expression_of
from detcompile.torch_internals.operators import schema_of
from detcompile.weights import tensor_digest

aten, prims = torch.ops.aten, torch.ops.prims
_MOVES = frozenset(
    {
        *(
            *VIEWS,
            aten.permute.default,
            aten.t.default,
            aten.transpose.int,
            aten.expand.default,
            aten.slice.Tensor,
            aten.select.int,
            aten.unsqueeze.default,
        ),
        *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.cat.default, aten.repeat.default),
        *(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.flip.default),
    }
)
_COPIES = frozenset(
    {"aten.clone", "aten.alias", "aten.detach", "aten.lift_fresh_copy", "detcompile_graph.layer_boundary"}
)
_BY_ELEMENT = (ours.exact_function.default, ours.exact_divide.default)
_COMMUTATIVE = frozenset({"aten.add", "aten.mul"})
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def exact_program_digest(gm: fx.GraphModule, names: Sequence[str], repeats: Sequence[Any] | None = None) -> str:
    """Return the sha256 of the normal form; the arguments are those of ``canonical_form.program_digest``."""
    with unset_fake_temporarily():  # passes run under the mode that traced the graph
        forms = [_Hashes(gm, names, run).form() for run in range(2)]  # two hashes of 64 bits for each element
    return _sha256([forms, None if repeats is None else list(repeats)]).hex()


class _Hashes:
    """Hashes of a graph's values in one of two runs: int64 tensors of the values' shapes."""

    def __init__(self, gm: fx.GraphModule, names: Sequence[str], run: int) -> None:
        self._gm = gm
        self._run = run
        inputs = gm.graph.find_nodes(op="placeholder")
        assert len(inputs) == len(names), f"{len(names)} inputs were named, the graph has {len(inputs)}"
        self._names = dict(zip(inputs, names, strict=True))
        self._extents: dict[Any, int] = {}
        self._symbols: dict[Any, sympy.Symbol] = {}
        self._conditions: set[str] = set()
        self._known: dict[fx.Node, Any] = {}  # for a tuple, the description and the value of each part
        for node in sorted(inputs, key=lambda node: self._names[node]):  # numbers the symbols by name
            if isinstance(node.meta.get("val"), Tensor):
                self._shape(node.meta["val"])

    def form(self) -> list[str]:
        """Return the digests of the graph's outputs, then the conditions on sizes."""
        (output,) = self._gm.graph.find_nodes(op="output")
        needed = {output}
        for node in reversed(self._gm.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        for node in self._gm.graph.nodes:
            if node in needed and node.op not in ("placeholder", "output"):
                self._known[node] = self._value(node)
        return [*map(self._reference, output.all_input_nodes), *sorted(self._conditions)]

    def _value(self, node: fx.Node) -> Any:
        value = node.meta["val"]
        if isinstance(value, _SYMBOLIC):
            return self._number(value)
        if node.op == "get_attr":
            constant = operator.attrgetter(str(node.target))(self._gm)
            return self._elements(["constant", tensor_digest(constant)], value)
        operation = operation_of(node)
        if operation is operator.getitem:
            part = self._known[node.args[0]][node.args[1]]
            return part if isinstance(part, Tensor) else self._elements(*part)
        name = ".".join(str(operation).split(".")[:2])  # without the overload
        if operation in _MOVES:
            move = aten.reshape.default if operation in VIEWS else operation
            self._note_extents(value)
            return move(*fx.map_arg(node.args, self._argument), **fx.map_arg(node.kwargs, self._argument))
        given = {key: arg for key, arg in arguments_of(node).items() if key not in ("device", "layout", "pin_memory")}
        if name in _COPIES or (name == "prims.convert_element_type" and _dtype_of(node.args[0]) == value.dtype):
            return self._argument(node.args[0])
        if is_pointwise(operation) or operation in _BY_ELEMENT:
            return self._pointwise(name, value, given)
        by_rows = _BY_ROWS.get(operation)
        if by_rows is not None:
            return by_rows(self, name, given)
        if node.target is FUNCTIONALIZED:
            given = _bases_by_name(given)
        defaults = {arg.name: arg.default_value for arg in schema_of(operation).arguments if arg.has_default_value()}
        given = {key: arg for key, arg in given.items() if key not in defaults or arg != defaults[key]}
        description = [name, self._as_json(given)]
        if isinstance(value, Tensor):
            return self._elements(description, value)
        return [([*description, number], part) for number, part in enumerate(value)]

    def _pointwise(self, name: str, value: Tensor, given: Mapping[str, Any]) -> Tensor:
        operands = [self._argument(arg) for arg in given.values() if isinstance(arg, fx.Node)]
        numbers = [[key, self._as_json(arg, value.dtype)] for key, arg in given.items() if not isinstance(arg, fx.Node)]
        places = [key for key, arg in given.items() if isinstance(arg, fx.Node)]
        result = self._hash_of([name, str(value.dtype), numbers, [] if name in _COMMUTATIVE else places])
        for operand in operands:
            operand = operand if isinstance(operand, Tensor) else self._hash_of(["number", str(operand)])
            result = result + _mix(operand) if name in _COMMUTATIVE else _mix(result) + operand
        return _mix(result).expand(self._shape(value))

    def _by_rows(self, name: str, given: Mapping[str, Any], rows: str, features: int) -> Tensor:
        """Return hashes for an operation that computes row i of its result from row i of the argument ``rows``."""
        x = self._argument(given[rows])
        row = _mix(_mix(x + _mix(self._indices(x.shape[-1]))).sum(-1, keepdim=True))
        word = self._hash_of([name, self._as_json({key: arg for key, arg in given.items() if key != rows})])
        return _mix(_mix(row + word) + self._indices(features))

    def _norm(self, name: str, given: Mapping[str, Any]) -> Tensor:
        return self._by_rows(name, given, "x", self._shape(given["x"].meta["val"])[-1])

    def _linear(self, name: str, given: Mapping[str, Any]) -> Tensor:
        return self._by_rows(name, given, "x", self._shape(given["w"].meta["val"])[1])

    def _embedding(self, name: str, given: Mapping[str, Any]) -> Tensor:
        indices = self._argument(given["indices"])
        row = _mix(indices + self._hash_of([name, self._reference(given["weight"])]))
        return _mix(row[..., None] + self._indices(self._shape(given["weight"].meta["val"])[-1]))

    def _argument(self, arg: Any) -> Any:
        """Return the hashes of a node's value, or its number."""
        if not isinstance(arg, fx.Node):
            return self._number(arg) if isinstance(arg, _SYMBOLIC) else arg
        if arg not in self._known:
            value = arg.meta["val"]
            if isinstance(value, _SYMBOLIC):
                self._known[arg] = self._number(value)
            else:
                self._known[arg] = self._elements(["input", self._names[arg]], value)
        return self._known[arg]

    def _reference(self, arg: fx.Node) -> str:
        """Return the name of an input, or the digest of a value's hashes."""
        if arg in self._names and isinstance(arg.meta["val"], Tensor):
            return self._names[arg]
        value = self._argument(arg)
        if not isinstance(value, Tensor):
            return str(value)
        return hashlib.sha256(f"{[*value.shape]}".encode() + value.contiguous().numpy().tobytes()).hexdigest()

    def _as_json(self, arg: Any, dtype: torch.dtype | None = None) -> Any:
        """Return an argument as JSON. An integer becomes a float if ``dtype`` is floating."""
        if isinstance(arg, fx.Node):
            return self._reference(arg)
        if isinstance(arg, Mapping):
            return [[str(key), self._as_json(part)] for key, part in arg.items()]
        if isinstance(arg, (list, tuple)):
            return [self._as_json(part) for part in arg]
        arg = self._number(arg)
        if isinstance(arg, (int, float)) and not isinstance(arg, bool):
            floats = isinstance(arg, float) or (dtype is not None and dtype.is_floating_point)
            return float(arg).hex() if floats else arg
        return str(arg)

    def _elements(self, description: Any, value: Tensor) -> Tensor:
        """Return a hash for each element, computed from all operands: for operations without a finer rule."""
        shape = self._shape(value)
        return _mix(self._hash_of(description) + self._indices(sympy.prod(shape))).view(shape)

    def _indices(self, count: int) -> Tensor:
        return torch.arange(int(count), dtype=torch.int64, device="cpu")

    def _hash_of(self, description: Any) -> Tensor:
        word = int.from_bytes(_sha256([self._run, description])[:8], "little", signed=True)
        return torch.tensor(word, dtype=torch.int64, device="cpu")

    def _shape(self, value: Tensor) -> list[int]:
        return [self._number(extent) for extent in value.shape]

    def _note_extents(self, value: Any) -> None:
        for part in value if isinstance(value, (list, tuple)) else (value,):
            self._shape(part)

    def _number(self, value: Any) -> Any:
        """Return a number, with this run's sizes in place of symbols."""
        if not isinstance(value, _SYMBOLIC):
            return value
        expression = expression_of(value)
        for symbol in sorted(expression.free_symbols, key=lambda symbol: symbol.name):
            if symbol not in self._extents:
                i = len(self._extents)
                self._extents[symbol] = 3 + 2 * i + self._run * (1 + (i + i * i) % 61)  # unrelated in both runs
                self._symbols[symbol] = sympy.Symbol(f"n{i}", integer=True, positive=True)
        is_bool = isinstance(value, torch.SymBool)
        if is_bool or not expression.is_polynomial():  # a minimum or remainder may behave alike in both runs
            self._conditions.add(str(expression.xreplace(self._symbols)))
        number = expression.xreplace(self._extents)
        return bool(number) if is_bool else float(number) if isinstance(value, torch.SymFloat) else int(number)


_BY_ROWS: Mapping[Any, Callable[[_Hashes, str, Mapping[str, Any]], Tensor]] = {
    aten.embedding.default: lambda hashes, _, given: hashes._embedding("embedding", given),
    ours.embedding.default: lambda hashes, _, given: hashes._embedding("embedding", given),
    ours.exact_layer_norm.default: _Hashes._norm,
    ours.exact_linear.default: _Hashes._linear,
    ours.exact_rms_norm.default: _Hashes._norm,
}


def _bases_by_name(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a functionalized call by name, with those that it writes."""
    named = {key: arg for key, arg in given.items() if not key.startswith("_")}
    for key, arg in given.items():
        if key.startswith("_") and key != "_all_bases":
            is_base = key.endswith("_base_index") and arg is not None
            named[key.removesuffix("_base_index")] = given["_all_bases"][arg] if is_base else arg
    return named


def _dtype_of(node: Any) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _mix(x: Tensor) -> Tensor:
    """Mix the bits of 64-bit integers, one to one (the finalizer of splitmix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * (factor - (1 << 64))
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _sha256(description: Any) -> bytes:
    return hashlib.sha256(json.dumps(description).encode()).digest()
