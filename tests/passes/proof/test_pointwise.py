"""The table of pointwise operations covers torch's own list; unlisted operations are rejected."""

import pytest
import torch
import torch._prims
from torch import Tensor
from torch._inductor.codegen.cpp import CppVecOverrides

from detcompile.errors import UncertifiedOp
from detcompile.passes.programs.lanes import EXACT, SAME_LANES, lane_by_lane
from detcompile.passes.proof.pointwise import ADMITTED, OTHERWISE_SPELLED, UNPROVEN, is_pointwise
from detcompile.passes.tracing import cause

CLASSES = (ADMITTED, OTHERWISE_SPELLED, UNPROVEN)


def tagged() -> list[torch._ops.OpOverload]:
    """Every overload of aten and prims that torch calls pointwise."""
    actual = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace in ("aten", "prims"):
            packet, _, overload = rest.partition(".")
            actual.append(getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default"))
    return [op for op in actual if torch.Tag.pointwise in op.tags]


def test_every_operation_that_torch_calls_pointwise_is_in_one_class() -> None:
    """A torch that has others has to be looked at: until then they are refused."""
    pure = {str(op) for op in tagged() if not op._schema.is_mutable}
    assert len(pure) > 200, "torch's list was not found"
    assert pure <= frozenset.union(*CLASSES), sorted(pure - frozenset.union(*CLASSES))
    assert sum(map(len, CLASSES)) == len(frozenset.union(*CLASSES)), "an operation is in two classes"


def test_what_writes_into_its_operand_is_not_pointwise() -> None:
    assert not [op for op in tagged() if op._schema.is_mutable and is_pointwise(op)]


@pytest.mark.parametrize("name", ["digamma", "polygamma", "igamma", "special_i1e", "special_zeta", "_conj_physical"])
def test_what_torch_computes_itself_is_refused_by_name(name: str) -> None:
    """In torch's kernels, vectors and the remaining elements round differently."""
    op = getattr(torch.ops.aten, name).default
    wanted = [str(argument.type) for argument in op._schema.arguments]

    def forward(x: Tensor) -> Tensor:
        return op(*(2 if kind == "int" else x for kind in wanted))

    torch._dynamo.reset()
    with pytest.raises(Exception, match=name) as raised:
        torch.compile(forward, backend="detcompile", fullgraph=True)(torch.rand(4, 8))
    assert isinstance(cause(raised.value), UncertifiedOp)


def test_an_operation_of_nobodys_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detcompile.passes.proof.pointwise.ADMITTED", ADMITTED - {"aten.atan.default"})
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"aten.atan.default.*only according to torch") as raised:
        torch.compile(lambda x: torch.atan(x), backend="detcompile", fullgraph=True)(torch.rand(4, 8))
    assert isinstance(cause(raised.value), UncertifiedOp)


def test_every_vector_function_of_inductor_has_a_class() -> None:
    """While a graph is compiled, a function in vectors is EXACT, of SAME_LANES, or the scalar function of each lane."""
    before = {name: method for name, method in vars(CppVecOverrides).items() if isinstance(method, staticmethod)}
    with lane_by_lane():
        kept = {name for name, method in before.items() if vars(CppVecOverrides)[name] is method}
    of_inductor = {name for name in kept if before[name].__func__.__qualname__.startswith("CppVecOverrides._scalarize")}
    assert kept - of_inductor - {"__new__"} <= EXACT
    assert not EXACT & SAME_LANES
    assert {"tan", "sin", "cos", "fmod", "pow", "lgamma", "log1p"} <= before.keys() - kept
