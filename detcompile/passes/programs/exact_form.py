"""The normal form of a program in exact arithmetic, and its digest: which steps make each logit (docs/exact.md).

The graph runs over hashes: an element's hash is that of the step that makes it and of its operands' hashes, and moving
elements moves their hashes. Layouts, copies, dead code, the order of nodes, devices and releases leave no trace, so
two traces of one model have the same form. Weights and parts of a step are known by name. The graph runs twice, with
other extents for its symbols, so that a length equals no constant in both runs; conditions on extents are kept beside
the hashes.
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
        forms = [_Hashes(gm, names, run).form() for run in range(2)]  # hashes of 128 bits, as two of 64
    return _sha256([forms, None if repeats is None else list(repeats)]).hex()


class _Hashes:
    """Hashes of a graph's values, int64 tensors of the values' shapes, in one of two runs."""

    def __init__(self, gm: fx.GraphModule, names: Sequence[str], run: int) -> None:
        self._gm = gm
        self._run = run
        inputs = gm.graph.find_nodes(op="placeholder")
        assert len(inputs) == len(names), f"{len(names)} inputs were named, the graph has {len(inputs)}"
        self._names = dict(zip(inputs, names, strict=True))
        self._extents: dict[Any, int] = {}
        self._numbered: dict[Any, sympy.Symbol] = {}
        self._conditions: set[str] = set()
        self._known: dict[fx.Node, Any] = {}  # a tuple as the statements and values of its parts
        for node in sorted(inputs, key=lambda node: self._names[node]):  # symbols are numbered in order of names
            if isinstance(node.meta.get("val"), Tensor):
                self._shape(node.meta["val"])

    def form(self) -> list[str]:
        """Return the digests of what the graph returns, then the conditions on extents."""
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
        stated = [name, self._stated(given)]
        if isinstance(value, Tensor):
            return self._elements(stated, value)
        return [([*stated, number], part) for number, part in enumerate(value)]

    def _pointwise(self, name: str, value: Tensor, given: Mapping[str, Any]) -> Tensor:
        operands = [self._argument(arg) for arg in given.values() if isinstance(arg, fx.Node)]
        numbers = [[key, self._stated(arg, value.dtype)] for key, arg in given.items() if not isinstance(arg, fx.Node)]
        places = [key for key, arg in given.items() if isinstance(arg, fx.Node)]
        result = self._word([name, str(value.dtype), numbers, [] if name in _COMMUTATIVE else places])
        for operand in operands:
            operand = operand if isinstance(operand, Tensor) else self._word(["number", str(operand)])
            result = result + _mixed(operand) if name in _COMMUTATIVE else _mixed(result) + operand
        return _mixed(result).expand(self._shape(value))

    def _by_rows(self, name: str, given: Mapping[str, Any], rows: str, features: int) -> Tensor:
        """Return the hashes of an operation that computes row i of its result from row i of an argument."""
        x = self._argument(given[rows])
        row = _mixed(_mixed(x + _mixed(self._places(x.shape[-1]))).sum(-1, keepdim=True))
        word = self._word([name, self._stated({key: arg for key, arg in given.items() if key != rows})])
        return _mixed(_mixed(row + word) + self._places(features))

    def _norm(self, name: str, given: Mapping[str, Any]) -> Tensor:
        return self._by_rows(name, given, "x", self._shape(given["x"].meta["val"])[-1])

    def _linear(self, name: str, given: Mapping[str, Any]) -> Tensor:
        return self._by_rows(name, given, "x", self._shape(given["w"].meta["val"])[1])

    def _embedding(self, name: str, given: Mapping[str, Any]) -> Tensor:
        indices = self._argument(given["indices"])
        row = _mixed(indices + self._word([name, self._reference(given["weight"])]))
        return _mixed(row[..., None] + self._places(self._shape(given["weight"].meta["val"])[-1]))

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

    def _stated(self, arg: Any, dtype: torch.dtype | None = None) -> Any:
        """Return arguments as JSON. A number beside floats is a float."""
        if isinstance(arg, fx.Node):
            return self._reference(arg)
        if isinstance(arg, Mapping):
            return [[str(key), self._stated(part)] for key, part in arg.items()]
        if isinstance(arg, (list, tuple)):
            return [self._stated(part) for part in arg]
        arg = self._number(arg)
        if isinstance(arg, (int, float)) and not isinstance(arg, bool):
            floats = isinstance(arg, float) or (dtype is not None and dtype.is_floating_point)
            return float(arg).hex() if floats else arg
        return str(arg)

    def _elements(self, stated: Any, value: Tensor) -> Tensor:
        """Return a hash per element, each of the whole operation: for operations without a finer rule."""
        shape = self._shape(value)
        return _mixed(self._word(stated) + self._places(sympy.prod(shape))).view(shape)

    def _places(self, count: int) -> Tensor:
        return torch.arange(int(count), dtype=torch.int64, device="cpu")

    def _word(self, stated: Any) -> Tensor:
        word = int.from_bytes(_sha256([self._run, stated])[:8], "little", signed=True)
        return torch.tensor(word, dtype=torch.int64, device="cpu")

    def _shape(self, value: Tensor) -> list[int]:
        return [self._number(extent) for extent in value.shape]

    def _note_extents(self, value: Any) -> None:
        for part in value if isinstance(value, (list, tuple)) else (value,):
            self._shape(part)

    def _number(self, value: Any) -> Any:
        """Return a number, with this run's extents in place of symbols."""
        if not isinstance(value, _SYMBOLIC):
            return value
        expression = expression_of(value)
        for symbol in sorted(expression.free_symbols, key=lambda symbol: symbol.name):
            if symbol not in self._extents:
                i = len(self._extents)
                self._extents[symbol] = 3 + 2 * i + self._run * (1 + (i + i * i) % 61)  # no simple relation in both
                self._numbered[symbol] = sympy.Symbol(f"n{i}", integer=True, positive=True)
        is_bool = isinstance(value, torch.SymBool)
        if is_bool or not expression.is_polynomial():  # a minimum or a remainder may be alike in both runs
            self._conditions.add(str(expression.xreplace(self._numbered)))
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
    """Return the arguments of a functionalized call, with those that it writes under their names."""
    named = {key: arg for key, arg in given.items() if not key.startswith("_")}
    for key, arg in given.items():
        if key.startswith("_") and key != "_all_bases":
            is_base = key.endswith("_base_index") and arg is not None
            named[key.removesuffix("_base_index")] = given["_all_bases"][arg] if is_base else arg
    return named


def _dtype_of(node: Any) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _mixed(x: Tensor) -> Tensor:
    """Return a permutation of 64-bit integers (the finalizer of splitmix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * (factor - (1 << 64))
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _sha256(stated: Any) -> bytes:
    return hashlib.sha256(json.dumps(stated).encode()).digest()
