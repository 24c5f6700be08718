"""read_extents: the last pass before Inductor lowers a graph."""

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from detcompile.passes.pipeline import read_extents

aten = torch.ops.aten


def test_every_symbol_of_inputs_is_defined_once() -> None:
    """An input number defines its symbol; another symbol is read from the first input that has it."""
    shapes = ShapeEnv()
    given, shared, alone, pitch = (shapes.create_unbacked_symint() for _ in range(4))
    with FakeTensorMode(shape_env=shapes):
        values = {
            "first": torch.empty(1, shared, 4),
            "second": torch.empty(shared, alone),
            "third": torch.empty(given, 2, 3),
            "number": given,
            "fourth": torch.empty_strided((2, 8), (pitch, 1)),
            "fifth": torch.empty(2 * shared),  # an expression in a symbol that another input defines
            "weight": torch.empty(4, 4),
        }
    graph = fx.Graph()
    for name, value in values.items():
        graph.placeholder(name).meta["val"] = value
    graph.output(())
    gm = read_extents(fx.GraphModule({}, graph))
    reads = {
        (node.target, node.args[0].name, node.args[1]): node.meta["val"].node.expr
        for node in gm.graph.nodes
        if node.op == "call_function"
    }
    assert reads == {
        (aten.sym_size.int, "first", 1): shared.node.expr,
        (aten.sym_size.int, "second", 1): alone.node.expr,
        (aten.sym_stride.int, "fourth", 0): pitch.node.expr,
    }
    assert [node.op for node in gm.graph.nodes][: len(values)] == ["placeholder"] * len(values)
