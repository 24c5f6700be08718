"""The C++ that Inductor writes for a CPU."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch._inductor.codegen import cpp
from torch._inductor.codegen.common import OpOverrides
from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides

__all__ = [
    "CppOverrides",
    "CppVecOverrides",
    "OpOverrides",
    "commented",
    "each_lane",
    "keeping_casts",
    "vectorized_tails",
]

READ_IN = "2.11.0, 2.13.0, 2.14.1, 2.15.0"
NAMES = {
    "CppOverrides": "Inductor's scalar C++ of each operation. Without it: an element's bits follow the lane it is "
    "computed in.",
    "CppVecOverrides": "Inductor's C++ of vectors of each operation. Without it: see CppOverrides.",
    "OpOverrides": "Inductor's operations made of others, such as the remainder by the C library's fmod. Without it: a "
    "remainder's bits follow the other lanes.",
}

CODEGEN_GROUP = cpp.KernelGroup.codegen_group


def each_lane(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what writes C++ of vectors that calls a scalar function for each lane.

    Without it: a function of vectors may look at all lanes before it chooses how to compute each.
    """
    return CppVecOverrides._scalarize(function)


@contextlib.contextmanager
def commented(comment: Callable[[], object]) -> Iterator[None]:
    """Begin generated C++ with a comment while entered; it enters the key of Inductor's cache.

    Without it: what another compiler has made of the same C++ is taken for this one's.
    """

    def codegen_group(group: cpp.KernelGroup, name: str | None = None) -> str:
        code = CODEGEN_GROUP(group, name)
        return code and f"// {comment()}\n{code}"

    with mock.patch.object(cpp.KernelGroup, "codegen_group", codegen_group):
        yield


@contextlib.contextmanager
def keeping_casts() -> Iterator[None]:
    """Keep generated C++ from taking the unrounded value behind a cast while entered.

    torch before 2.13 does so although ``emulate_precision_casts`` is set. Without it: an element is rounded by what its
    operation is fused with.
    """
    with mock.patch.object(cpp.CppKernel, "cache_dtype_convert", lambda *_: None):
        yield


@contextlib.contextmanager
def vectorized_tails() -> Iterator[None]:
    """Have generated C++ mask the tail of every loop while entered.

    Inductor leaves a tail to scalar code when masking it looks expensive for the token count it was traced with. torch
    2.11 has no such heuristic. Without it: an element is computed in vectors or not by the token count.
    """
    with contextlib.ExitStack() as stack:
        if hasattr(cpp, "KernelOpStats"):
            stack.enter_context(mock.patch.object(cpp.KernelOpStats, "OVERHEAD_RATIO_THRESHOLD", float("inf")))
        yield
