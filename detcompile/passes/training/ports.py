"""to_train: a certified forward graph as one that autograd can differentiate, with a port for each trained weight."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from detcompile.errors import UnsupportedModel
from detcompile.passes.graphs import VIEWS, arguments_of, operation_of, shape_of, source_of
from detcompile.passes.training.twins import TWINS, twins
from detcompile.templates.ops import ours
from detcompile.torch_internals.operators import schema_of

__all__ = ["LEAVES", "is_port", "to_train"]

aten, prims = torch.ops.aten, torch.ops.prims
LEAVES = "leaves"  # name of the input that holds the leaf table of the step
# What may stand between a weight and its template: it moves elements, or rounds them, whose derivative is 1.
MOVES = (*VIEWS, aten.permute.default, aten.t.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim)
ROUNDS = (prims.convert_element_type.default, aten._to_copy.default, aten.clone.default)
SHIFTS = (aten.add.Tensor, aten.add.Scalar)


Port = Callable[[Any], fx.Node | None]  # of what a template takes as a weight


class _Sums(NamedTuple):
    """How a step sums over its tokens."""

    leaves: fx.Node  # the leaf table
    grid: int


def to_train(gm: fx.GraphModule, trained: Sequence[int], leaves: Any, grid: int) -> fx.GraphModule:
    """A graph whose inputs are those of ``gm``, then ``leaves``, then a port for each of the ``trained`` inputs.

        matmul(x, w, bias, residual, radices)  ->  matmul twin(…, leaves, port of w, port of bias)
        prims.convert_element_type(x, dtype)   ->  aten._to_copy(x, dtype)          (prims have no gradient)

    Args:
        gm: rewritten and certified; it is not changed.
        trained: positions of the inputs that are trained weights.
        leaves: the fake value of the leaf table [L + 1] int32.
        grid: ``Numerics.token_grid``.

    Raises:
        UnsupportedModel: an operation has no gradient, or a trained weight reaches one that gives it none.
    """
    graph = fx.Graph()
    known: dict[fx.Node, Any] = {}
    result = graph.graph_copy(gm.graph, known)
    output = graph.output(result)
    output.meta = dict(next(iter(gm.graph.find_nodes(op="output"))).meta)
    inputs = [known[node] for node in gm.graph.find_nodes(op="placeholder")]
    with graph.inserting_after(inputs[-1]):
        table = graph.placeholder(LEAVES)
    table.meta["val"] = leaves
    ports = _Ports(graph, {inputs[position]: position for position in trained}, table)
    join_silus(graph)
    for node in list(graph.nodes):
        if node.op == "call_function":
            _replace(node, _Sums(table, grid), ports)
    ports.require_all_seen()
    trained_gm = fx.GraphModule(gm, graph)
    trained_gm.graph.eliminate_dead_code()
    trained_gm.recompile()
    return trained_gm


def join_silus(graph: fx.Graph) -> None:
    """div(x, add(exp(neg(x)), 1))  ->  silu twin(x)"""
    for div in graph.find_nodes(op="call_function", target=aten.div.Tensor):
        x, below = div.args
        exp = below.args[0] if isinstance(below, fx.Node) and below.target is aten.add.Tensor else None
        neg = exp.args[0] if isinstance(exp, fx.Node) and exp.target is aten.exp.default else None
        if isinstance(neg, fx.Node) and neg.target is aten.neg.default and neg.args[0] is x and below.args[1] == 1:
            div.target, div.args = twins.silu.default, (x,)


PORT = "port_of_"  # begins the names of ports


def is_port(node: fx.Node) -> bool:
    """Whether an input of a graph is the port of a weight."""
    return node.op == "placeholder" and node.name.startswith(PORT)


class _Ports:
    """The ports of a graph's weights, and what is computed of weights alone."""

    def __init__(self, graph: fx.Graph, weights: Mapping[fx.Node, int], last: fx.Node) -> None:
        self._known: dict[fx.Node, fx.Node] = {}
        self._computed = set(weights)  # of trained weights and constants alone
        self._used: set[fx.Node] = set()  # what a template takes together with its port
        for weight in weights:
            with graph.inserting_after(last):
                last = self._known[weight] = graph.placeholder(PORT + weight.name)
            value = weight.meta["val"]
            last.meta["val"] = value.new_zeros((), dtype=torch.float64).expand(value.shape)

    def of(self, weight: Any) -> fx.Node | None:
        """The port of what a template takes as a weight, moved as the weight is; None of one that is not trained."""
        if not isinstance(weight, fx.Node) or weight not in self._computed:
            return None
        self._used.add(weight)
        if weight not in self._known:
            source = next(arg for arg in weight.all_input_nodes if arg in self._computed)
            inner = self.of(source)
            if weight.target in MOVES:
                with weight.graph.inserting_before(weight):
                    inner = weight.graph.call_function(weight.target, (inner, *weight.args[1:]), dict(weight.kwargs))
            assert inner is not None
            self._known[weight] = inner
        return self._known[weight]

    def adds(self, node: fx.Node) -> bool:
        """Note a node that is made of weights alone; False for one that is made of rows or constants too.

        Raises:
            UnsupportedModel: no gradient of its weight can be had.
        """
        own = [arg for arg in node.all_input_nodes if arg in self._computed]
        if not own or not all(arg in self._computed or arg.op == "get_attr" for arg in node.all_input_nodes):
            return False
        shifts = node.target in SHIFTS and len(own) == 1 and not node.kwargs and own[0] is node.args[0]
        if node.target in MOVES or node.target in ROUNDS or (shifts and not isinstance(node.args[1], fx.Node)):
            self._computed.add(node)
            return True
        raise UnsupportedModel(f"{node.target} at {source_of(node)}: a trained weight goes through it; freeze it")

    def require_all_seen(self) -> None:
        """Fail if rows read a weight, and its port is read by no twin."""
        for weight in self._computed:
            users = [user for user in weight.users if user not in self._computed]
            readers = [user for user in users if user.target not in TWINS or weight not in self._used]
            if readers:
                where = f"{readers[0].target} at {source_of(readers[0])}"
                raise UnsupportedModel(f"{where}: rows read a trained weight here, which gets no gradient; freeze it")


def _replace(node: fx.Node, sums: _Sums, ports: _Ports) -> None:
    """Put a twin in the place of a template, and the ports behind its arguments."""
    of_weights = ports.adds(node)
    if node.target is prims.convert_element_type.default:
        node.args, node.kwargs, node.target = node.args[:1], {"dtype": node.args[1]}, aten._to_copy.default
    elif node.target in ARGUMENTS and not of_weights:
        twin, arguments = ARGUMENTS[node.target]
        named = arguments_of(node)
        given = arguments([named[argument.name] for argument in schema_of(node.target).arguments], sums, ports.of)
        node.target, node.args, node.kwargs = twin.default, tuple(given), {}
    elif getattr(operation_of(node), "namespace", "") == "detcompile":
        name = f"{operation_of(node)} at {source_of(node)}"
        raise UnsupportedModel(f"{name} has no gradient: a model that needs it is served, and not trained")


def _of_product(given: list[Any], sums: _Sums, port: Port) -> list[Any]:
    rows = shape_of(given[0])[0]
    (tokens,) = rows.free_symbols
    return [*given, sums.leaves, int(rows / tokens), sums.grid, port(given[1]), port(given[2])]


# Of each template: its twin, and that one's arguments.
ARGUMENTS: Mapping[Any, tuple[Any, Callable[[list[Any], _Sums, Port], list[Any]]]] = {
    aten.embedding.default: (
        twins.embedding, lambda given, sums, port: [*given[:3], sums.grid, port(given[0])]),
    ours.embedding.default: (twins.embedding, lambda given, sums, port: [*given, -1, sums.grid, port(given[0])]),
    ours.layer_norm.default: (
        twins.layer_norm, lambda given, sums, port: [*given, sums.grid, port(given[1]), port(given[2])]),
    ours.matmul.default: (twins.matmul, _of_product),
    ours.packed_attention.default: (
        twins.packed_attention, lambda given, sums, port: [*given, sums.grid, port(given[8])]),
    ours.rms_norm.default: (twins.rms_norm, lambda given, sums, port: [*given, sums.grid, port(given[1])]),
    ours.row_sum.default: (twins.row_sum, lambda given, *_: given),
    ours.silu_mul.default: (twins.silu_mul, lambda given, *_: given),
}
