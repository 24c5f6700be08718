"""Launches of Triton kernels that take less of the host's time, on NVIDIA GPUs.

A prompt's step is launched kernel by kernel, and waits for the host where that takes longer than the kernels. Triton
binds, specialises and looks up a kernel anew at each launch. Here a launch whose specialisation was seen before goes to
what Triton compiled for it then. A specialisation is all that Triton's depends on, and more: dtypes; whether pointers
and integers are multiples of 16; integers of 1 and those past 32 bits; descriptors' dtypes, blocks and layouts; all of
these of each element of a tuple; every compile-time value. Triton's settings (debugging, hooks into compilation) count
as they are at the first launch.
"""

import threading
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.runtime.jit import DependenciesFinder, JITCallable, JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["launcher"]


def _hash_callees_first() -> None:
    """Make Triton's keys of compiled kernels independent of the order in which kernels are first launched.

    A kernel's key covers the constants that its callees read, but Triton 3.6 and 3.7 collect these before they look
    through a callee: those of a callee that no earlier kernel called are left out. Threads that compile kernels hash
    them in any order, so that each process looked for other keys and compiled again.
    """
    merge = DependenciesFinder._update_hash

    def merge_hashed(finder: DependenciesFinder, callee: JITCallable) -> None:
        callee.cache_key  # noqa: B018 - collects the callee's constants
        merge(finder, callee)

    DependenciesFinder._update_hash = merge_hashed


_hash_callees_first()


def launcher(kernel: Any) -> Any:
    """``launcher(kernel)[grid](...)`` launches as ``kernel[grid](...)`` does.

    The grid is a tuple, and every parameter is given. The interpreter's kernels are handed back as they are.
    """
    if not isinstance(kernel, JITFunction):
        return kernel
    found = kernel.__dict__.get("_detcompile_launcher")  # a dictionary of kernels would hash their sources
    if found is None:
        found = kernel.__dict__.setdefault("_detcompile_launcher", _Launcher(kernel))
    return found


class _Call(NamedTuple):
    """Calls with as many positional arguments, and the same names in the same order."""

    at_runtime: list[bool]  # of the values: whether they reach the kernel at run time
    rest: list[str]  # parameters that follow the positional ones
    compiled: dict[
        tuple[object, ...], tuple[Any, list[object]]
    ]  # and the layouts of descriptors, so that ids stay theirs


class _Launcher:
    def __init__(self, kernel: JITFunction) -> None:
        self._kernel = kernel
        self._calls: dict[tuple[object, ...], _Call] = {}
        self._compiling: dict[tuple[object, ...], threading.Lock] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **named: self._launch(grid, args, named)

    def _launch(self, grid: tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        call = self._calls.get((len(args), *named)) or self._new_call(len(args), named)
        values = (*args, *named.values())
        specialization = (
            driver.active.get_current_device(),
            *map(type, values),
            *[_specialization(value) if runtime else value for value, runtime in zip(values, call.at_runtime)],
        )
        known = call.compiled.get(specialization)
        if known is not None and not self._kernel.pre_run_hooks:
            known[0][(*grid, 1, 1)](*args, *[named[name] for name in call.rest])
            return
        with self._compiling.setdefault(specialization, threading.Lock()):  # one thread compiles it, others wait
            compiled = self._kernel[grid](*args, **named)
            if compiled is not None:  # as it is where a hook forbids to compile
                call.compiled[specialization] = compiled, [v.layout for v in values if isinstance(v, GluonDescriptor)]

    def _new_call(self, count: int, named: dict[str, Any]) -> _Call:
        params = self._kernel.params
        runtime = {param.name for param in params if not param.is_constexpr}
        names, rest = [param.name for param in params[:count]], [param.name for param in params[count:]]
        assert set(rest) <= named.keys(), f"{self._kernel}: {sorted(set(rest) - named.keys())} are not given"
        call = _Call([name in runtime for name in (*names, *named)], rest, {})
        return self._calls.setdefault((count, *named), call)


def _specialization(arg: Any) -> object:
    if type(arg) is int:
        if -(2**31) <= arg < 2**31:
            return "one" if arg == 1 else arg & 15 == 0
        return arg & 15 == 0, arg < 2**63
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() & 15 == 0
    if isinstance(arg, GluonDescriptor):
        return arg.base.dtype, *arg.block_shape, id(arg.layout)
    if isinstance(arg, TensorDescriptor):
        return arg.base.dtype, *arg.block_shape
    if isinstance(arg, tuple):
        return tuple((type(value), _specialization(value)) for value in arg)
    assert arg is None or isinstance(arg, float | bool), f"a kernel was given {type(arg)}"
    return None  # the type, which is looked at beside this, says all
