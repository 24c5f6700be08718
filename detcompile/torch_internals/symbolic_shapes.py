"""Graphs with symbolic extents."""

from torch._dynamo.source import LocalSource
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)

NAMES = {
    "ConstraintViolationError": "Raised when a trace fixes an extent that was marked as unknown. Without it: a user is "
    "not told that the model computes a Python number from it.",
    "DimDynamic": "The kinds of extents of StatelessSymbolicContext. Without it: see there.",
    "GuardOnDataDependentSymNode": "Raised when code asks for the value of an unknown extent. Without it: Inductor's "
    "folding of constants fails for a view of zeros.",
    "LocalSource": "Names an input of a trace. Without it: an extent of a fake tensor cannot be a symbol.",
    "ShapeEnv": "The symbols of a trace, and the conditions on them. Without it: a branch on the number of rows is not "
    "seen without Dynamo.",
    "StatelessSymbolicContext": "Says which extents of a fake tensor are symbols. Without it: a batch is certified for "
    "one extent only.",
    "make_fx": "The graph of the operations that a function calls. Without it: Dynamo traces a batch, in five "
    "times the time.",
}
