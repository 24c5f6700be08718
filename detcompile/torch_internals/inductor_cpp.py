"""The C++ that Inductor writes for a CPU."""

import contextlib
import ctypes
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen import cpp
from torch._inductor.codegen.common import OpOverrides
from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides

NAMES = {
    "CppOverrides": "Inductor's scalar C++ of each operation. Without it: an element's bits depend on the lane it is "
    "computed in.",
    "CppVecOverrides": "Inductor's C++ of vectors of each operation. Without it: see CppOverrides.",
    "OpOverrides": "Inductor's operations made of others, such as the remainder by the C library's fmod. Without it: a "
    "remainder's bits depend on the other lanes.",
}

KERNEL = "kernel"  # the function of a generated library, and of its Python module

CODEGEN_GROUP = cpp.KernelGroup.codegen_group


def each_lane(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a generator of vector C++ that calls a scalar function for each lane.

    Without it: a vector function may inspect all lanes before it chooses how to compute each.
    """
    return CppVecOverrides._scalarize(function)


@contextlib.contextmanager
def commented(comment: Callable[[], object]) -> Iterator[None]:
    """Begin generated C++ with a comment inside the block; it becomes part of the key of Inductor's cache.

    Without it: another compiler's result for the same C++ is reused.
    """

    def codegen_group(group: cpp.KernelGroup, name: str | None = None) -> str:
        code = CODEGEN_GROUP(group, name)
        return code and f"// {comment()}\n{code}"

    with mock.patch.object(cpp.KernelGroup, "codegen_group", codegen_group):
        yield


def generated_kernels() -> set[Any]:
    """Return the kernels in C++ that generated modules of this process call.

    Without it: their calls cannot be recorded, and each step goes through Python.
    """
    return {value for module in PyCodeCache.modules for value in vars(module).values() if _is_kernel(value)}


def kernel_address(kernel: Any) -> int:
    """Return the address of a generated kernel's function, which takes data pointers and numbers.

    Without it: see ``generated_kernels``.
    """
    function = getattr(ctypes.CDLL(kernel.__self__.__file__), KERNEL)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@contextlib.contextmanager
def kernels_replaced(others: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Make generated modules call other functions instead of their kernels inside the block.

    Without it: see ``generated_kernels``.
    """
    with contextlib.ExitStack() as stack:
        for module in PyCodeCache.modules:
            for name, value in list(vars(module).items()):
                if _is_kernel(value) and value in others:
                    stack.enter_context(mock.patch.object(module, name, others[value]))
        yield


@contextlib.contextmanager
def keeping_casts() -> Iterator[None]:
    """Prevent generated C++ from using the unrounded value before a cast, inside the block.

    torch before 2.13 does so although ``emulate_precision_casts`` is set. Without it: an element's rounding depends
    on fusion.
    """
    with mock.patch.object(cpp.CppKernel, "cache_dtype_convert", lambda *_: None):
        yield


@contextlib.contextmanager
def vectorized_tails() -> Iterator[None]:
    """Make generated C++ mask the tail of every loop inside the block.

    Inductor leaves a tail to scalar code when masking it looks expensive for the token count it was traced with. torch
    2.11 has no such heuristic. Without it: whether an element is computed in a vector depends on the token count.
    """
    with contextlib.ExitStack() as stack:
        if hasattr(cpp, "KernelOpStats"):
            stack.enter_context(mock.patch.object(cpp.KernelOpStats, "OVERHEAD_RATIO_THRESHOLD", float("inf")))
        yield


def _is_kernel(value: Any) -> bool:
    module = getattr(value, "__self__", None)
    return (
        isinstance(value, types.BuiltinFunctionType)
        and value.__name__ == KERNEL
        and isinstance(module, types.ModuleType)
    )
