"""Launches of Triton kernels that take less of the host's time.

A prompt's step is launched kernel by kernel, and waits for the host where that takes longer than the kernels. Triton
binds, specialises and looks up a kernel anew at each launch. Here a launch of a kind that was seen before goes to what
Triton compiled for it then. A kind is all that Triton specialises on: dtypes and whether pointers, and integers, are
multiples of 16, integers of 1 and those past 32 bits, descriptors' blocks, and every compile-time value.
"""

from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["launcher"]

_DESCRIPTORS = (TensorDescriptor, GluonDescriptor)


def launcher(kernel: Any) -> Any:
    """``launcher(kernel)[grid](...)`` launches as ``kernel[grid](...)`` does, of which every parameter is given.

    The interpreter's kernels are handed back as they are.
    """
    if not isinstance(kernel, JITFunction):
        return kernel
    found = kernel.__dict__.get("_detcompile_launcher")
    if found is None:
        found = _Launcher(kernel)
        kernel._detcompile_launcher = found
    return found


class _Launcher:
    def __init__(self, kernel: JITFunction) -> None:
        self._kernel = kernel
        self._params = [param.name for param in kernel.params]
        self._runtime = {param.name for param in kernel.params if not param.is_constexpr}
        self._calls: dict[tuple[object, ...], tuple[int, list[bool], list[str]]] = {}
        self._known: dict[tuple[object, ...], tuple[Any, list[object]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **named: self._launch(grid, args, named)

    def _launch(self, grid: tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        call, at_runtime, rest = self._calls.get((len(args), *named)) or self._new_call(len(args), named)
        values = (*args, *named.values())
        kind = (
            call,
            driver.active.get_current_device(),
            *map(type, values),
            *[_kind(value) if runtime else value for value, runtime in zip(values, at_runtime)],
        )
        known = self._known.get(kind)
        if known is None or self._kernel.pre_run_hooks:
            compiled = self._kernel[grid](*args, **named)
            layouts = [getattr(value, "layout", None) for value in values]
            self._known[kind] = compiled, layouts  # whose id is part of the kind, and must stay theirs
        else:
            known[0][(*grid, 1, 1)](*args, *[named[name] for name in rest])

    def _new_call(self, count: int, named: dict[str, Any]) -> tuple[int, list[bool], list[str]]:
        """A number for calls with so many positional arguments, and these names in this order; which of their values
        count at run time; and the parameters that follow the positional ones."""
        names = (*self._params[:count], *named)
        call = len(self._calls), [name in self._runtime for name in names], self._params[count:]
        self._calls[count, *named] = call
        return call


def _kind(arg: Any) -> object:
    if type(arg) is int:
        if -(2**31) <= arg < 2**31:
            return "one" if arg == 1 else arg & 15 == 0
        return arg & 15 == 0, arg < 2**63
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() & 15 == 0
    if isinstance(arg, _DESCRIPTORS):
        return arg.base.dtype, *arg.block_shape, id(getattr(arg, "layout", None)), arg.padding
    return None  # the type of any other number says all
