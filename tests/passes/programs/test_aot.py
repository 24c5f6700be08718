"""AOTInductor's libraries export no symbols of static libraries, and take the right arguments."""

import operator
import warnings

import pytest
import torch
from torch import fx
from torch._inductor import cpp_builder
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from detcompile.passes.programs import aot as packaging
from detcompile.torch_internals.aotinductor import ahead_of_time

FLAG = "Wl,--exclude-libs,ALL"


@pytest.mark.parametrize(("options", "linked"), [({}, True), ({"compile_only": True}, False)])
def test_static_libraries_stay_private_where_something_is_linked(options: dict[str, bool], linked: bool) -> None:
    """A compiler that links libstdc++ statically would else make a library that crashes when it is loaded."""
    settings = cpp_builder.CppTorchDeviceOptions(device_type="cpu", aot_mode=True, **options)
    assert FLAG not in settings.get_ldflags()
    with ahead_of_time():
        assert (FLAG in settings.get_ldflags()) == linked
        command = cpp_builder.CppBuilder(name="x", sources="x.cpp", BuildOption=settings).get_command_line()
        assert (f" -{FLAG} " in command) == linked


def test_a_size_of_an_input_that_nobody_reads_is_only_checked() -> None:
    """As in models without positions and without keys (mamba2, rwkv)."""
    shapes = ShapeEnv()
    size, other = shapes.create_unbacked_symint(), shapes.create_unbacked_symint()
    graph = fx.Graph()
    tokens, x = graph.placeholder("tokens"), graph.placeholder("x")
    tokens.meta["val"] = size
    with FakeTensorMode(shape_env=shapes):
        x.meta["val"] = torch.empty(other, 4)
    more = graph.call_function(operator.add, (tokens, 1))
    enough = graph.call_function(operator.ge, (more, tokens))  # reached twice
    graph.call_function(torch.ops.aten._assert_scalar.default, (enough, "no tokens"))
    graph.output((x,))
    gm = fx.GraphModule({}, graph)
    with warnings.catch_warnings(action="error"):
        assert packaging._without_sizes(gm) == (1,)
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "output"]


def test_a_size_that_a_value_is_made_of_is_not_dropped() -> None:
    shapes = ShapeEnv()
    graph = fx.Graph()
    tokens = graph.placeholder("tokens")
    tokens.meta["val"] = shapes.create_unbacked_symint()
    graph.output((graph.call_function(operator.add, (tokens, 1)),))
    with pytest.raises(AssertionError, match="a size of no input"):
        packaging._without_sizes(fx.GraphModule({}, graph))
