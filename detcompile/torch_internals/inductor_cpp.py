"""The C++ that Inductor writes for a CPU, and the vector instructions in it."""

import contextlib
import ctypes
import platform
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from torch._inductor import cpu_vec_isa
from torch._inductor.codecache import CppPythonBindingsCodeCache, PyCodeCache
from torch._inductor.codegen import cpp
from torch._inductor.codegen.common import OpOverrides
from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides
from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa

NAMES = {
    "CppOverrides": "Inductor's scalar C++ of each operation. Without it: an element's bits depend on the lane it is "
    "computed in.",
    "CppVecOverrides": "Inductor's C++ of vectors of each operation. Without it: see CppOverrides.",
    "OpOverrides": "Inductor's operations made of others, such as the remainder by the C library's fmod. Without it: a "
    "remainder's bits depend on the other lanes.",
    "VecISA": "The type of a set of vector instructions; as a bool, whether a program of it compiles and runs. Without "
    "it: see pick_vec_isa.",
    "pick_vec_isa": "The vector instructions that Inductor takes. Without it: machines that round alike and machines "
    "that do not would have one fingerprint.",
}

_TRYING = threading.Lock()
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


def list_vector_isas() -> None:
    """Set Inductor's list of this machine's vector instructions, unless it has one.

    Inductor compiles a program for each candidate. Here only the widest is tried, because a compiler that supports it
    supports the narrower ones. Without it: the first start takes seconds more.
    """
    with _TRYING:
        if platform.machine() not in ("x86_64", "AMD64") or cpu_vec_isa.valid_vec_isa_list.cache_info().currsize:
            return
        known = set(cpu_vec_isa.x86_isa_checker())
        possible = [isa for isa in cpu_vec_isa.supported_vec_isa_list if known.issuperset(str(isa).split())]
        while possible and not possible[0]:
            del possible[0]
        with mock.patch.object(cpu_vec_isa, "supported_vec_isa_list", possible[:1]):
            cpu_vec_isa.valid_vec_isa_list().extend(possible[1:])


def precompile_cpp_header() -> None:
    """Make Inductor precompile the header that all of its C++ kernels share.

    Without it: the first program waits seconds for it.
    """
    CppPythonBindingsCodeCache.load_async("", submit_fn=lambda task: None)
