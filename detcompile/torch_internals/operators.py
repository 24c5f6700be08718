"""Operations as torch's dispatcher and its graphs know them."""

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

NAMES = {
    "HigherOrderOperator": "The type of operations that take functions or operations. Without it: fingerprints cannot "
    "name them as torch does.",
    "OpOverload": "The type of one overload of an operation, the target of a call in an ATen graph. Without it: passes "
    "and proofs cannot tell operations from Python functions.",
    "OpOverloadPacket": "The type of all overloads of one name. Without it: a module that holds one is not described, "
    "and its program is not kept.",
    "c10d": "The namespace of collectives that a graph may hold. Without it: ranks cannot sum in a declared order.",
}

c10d: Any = torch.ops._c10d_functional


def schema_of(operation: Any) -> Any:
    """Return an operation's schema: its name, its arguments with their defaults, and whether it writes into them.

    Without it: proofs cannot name the arguments of a call.
    """
    return operation._schema


def operation_names() -> list[str]:
    """Return the qualified names of all registered operations.

    Without it: an operation of this package could be registered without a rule for the proof.
    """
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return names
