"""Fast launches of Triton kernels on NVIDIA GPUs.

During prefill the host launches kernel by kernel, and its launch time can exceed the kernels' time. Triton binds,
specializes and looks up a kernel on every launch. Here, a launch whose specialization was seen before calls the
compiled kernel directly. The specialization covers everything that Triton's depends on, and more: dtypes; whether
pointers and integers are multiples of 16; integers equal to 1 and those beyond 32 bits; dtypes, blocks and layouts of
descriptors; the same for each element of a tuple; and every constexpr. Triton's settings (debugging, compilation hooks)
apply as they are at the first launch.

While an engine warms up, Inductor's worker processes compile its kernels: a compilation holds the GIL for about 40 % of
its time, so threads of one process would take turns.
"""

import contextlib
import importlib
import logging
import sys
import threading
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.runtime.jit import DependenciesFinder, JITCallable, JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from detcompile.templates.device.cuda_graphs import is_alone
from detcompile.torch_internals.compile_workers import dismiss_workers, ready_workers

logger = logging.getLogger(__name__)
_WORKER_SECONDS = 120.0  # for one kernel; the slowest take about five


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context that makes ``device`` the current GPU, where kernels launch; for a CPU it does nothing."""
    in_use = device.type == "cuda" and device.index is not None and torch.cuda.is_initialized()
    return torch.cuda.device(device) if in_use else contextlib.nullcontext()


def _hash_callees_first() -> None:
    """Make Triton's keys of compiled kernels independent of the order of their first launches.

    A kernel's key covers the constants that its callees read. Triton 3.6 and 3.7 collect these before they visit the
    callee, so constants of a callee that no earlier kernel called are missing. Threads hash kernels in any order, so
    each process computed different keys and compiled again.
    """
    merge = DependenciesFinder._update_hash

    def merge_hashed(finder: DependenciesFinder, callee: JITCallable) -> None:
        callee.cache_key  # noqa: B018 - collects the callee's constants
        merge(finder, callee)

    DependenciesFinder._update_hash = merge_hashed


_hash_callees_first()


# Triton's functions of these names also serve kernels, and take the host some microseconds.
def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up; b > 0."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n; n > 0."""
    assert n > 0
    return 1 << (n - 1).bit_length()


def launcher(kernel: Any) -> Any:
    """Return an object such that ``launcher(kernel)[grid](...)`` launches as ``kernel[grid](...)`` does.

    The grid is a tuple, and every parameter must be passed. Kernels of the interpreter are returned unchanged.
    """
    if not isinstance(kernel, JITFunction):
        return kernel
    known = kernel.__dict__.get("_detcompile_launcher")  # a dictionary keyed by kernels would hash their sources
    if known is None:
        known = kernel.__dict__.setdefault("_detcompile_launcher", _Launcher(kernel))
    return known


class _Call(NamedTuple):
    """Calls with the same number of positional arguments and the same keywords in the same order."""

    at_runtime: list[bool]  # for each value: True if it is not a constexpr
    rest: list[str]  # parameters after the positional ones
    compiled: dict[
        tuple[object, ...], tuple[Any, list[object]]
    ]  # by specialization; layouts of descriptors are kept so that their ids stay valid


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
        with self._compiling.setdefault(specialization, threading.Lock()):  # one thread compiles, others wait
            if is_alone():
                self._kernel.device_caches[specialization[0]]  # its first access sets the attribute
                self._kernel.compile = _compile
            compiled = self._kernel[grid](*args, **named)
            if compiled is not None:  # None if a hook prevented compilation
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
    return None  # its type is part of the specialization


def _compile(source: Any, target: GPUTarget, options: dict[str, Any], **named: Any) -> Any:
    """Compile like ``triton.compile``. If an engine warms up, a worker process fills Triton's cache first."""
    module, name = source.fn.__module__, source.fn.__name__
    workers = ready_workers() if is_alone() else None
    if workers is not None and getattr(sys.modules[module], name, None) is source.fn:
        values = source.signature, source.constants, source.attrs
        job = module, name, triton.knobs.cache.dir, type(source), values, target, options
        try:
            workers.submit(_fill_cache, *job).result(_WORKER_SECONDS)
        except Exception as error:  # the worker crashed or hangs
            dismiss_workers()
            logger.warning(
                "no worker process compiled %s (%r): kernels are compiled in the engine's process, which takes longer",
                name,
                error,
            )
    return triton.compile(source, target=target, options=options, **named)


def _fill_cache(
    module: str, name: str, folder: str, kind: type, values: tuple[Any, ...], target: GPUTarget, options: dict[str, Any]
) -> None:
    """Compile a kernel in a worker process. Errors are ignored: the process that launches the kernel gets them, too."""
    with triton.knobs.cache.scope(), contextlib.suppress(Exception):
        triton.knobs.cache.dir = folder
        triton.compile(kind(getattr(importlib.import_module(module), name), *values), target=target, options=options)
