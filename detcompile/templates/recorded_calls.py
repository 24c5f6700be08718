"""Recorded calls of a CPU's program: its kernels repeated from a list in C++, without Python or torch's dispatcher.

Between the kernels of one token, Python and the dispatcher take as long as many of the kernels. A recording holds the
memory of every tensor that its calls read or write, as a CUDA graph does: a step writes its arrays into the tensors
that the recorded step was given, and repeats the calls.
"""

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from detcompile.templates.cpp_dispatch import OPS, direct_library, direct_ops
from detcompile.torch_internals.fake_tensors import TorchDispatchMode
from detcompile.torch_internals.inductor_cpp import generated_kernels, kernel_address, kernels_replaced

_ONE_AT_A_TIME = threading.Lock()  # a recording changes what generated modules call
MOST_ARGUMENTS = 64  # kMostArguments of cpu/direct/ops.cpp


class RecordedCalls:
    """The calls of a function, and its output, whose memory each repetition overwrites.

    Attributes:
        output: what the function returned.
        num_bytes: size of its calls' results.
    """

    def __init__(self, address: int) -> None:
        self.output: Any = None
        self.num_bytes = 0
        self._address = address
        weakref.finalize(self, _library().detcompile_drop_recording, address).atexit = False

    def repeat(self) -> bool:
        """Make the calls again. Return False if a tensor's memory has moved or a call failed."""
        repeated: bool = _library().detcompile_repeat(self._address)
        return repeated

    def give_the_same(self) -> bool:
        """Return whether the calls give the output again after all of their results were overwritten."""
        outputs = _as_tuple(self.output)
        expected = [output.clone() for output in outputs]
        for output in outputs:
            output.fill_(torch.nan)
        _library().detcompile_spoil_results(self._address)
        repeated = self.repeat()
        same = repeated and all(map(_same_bytes, outputs, expected))
        for output, value in zip(outputs, expected, strict=True):
            output.copy_(value)
        return same


def record(function: Callable[[], Any]) -> tuple[Any, RecordedCalls | None]:
    """Call a function of tensors. Return its output, and its calls if they can be repeated.

    To check them, all results are overwritten and the calls repeated: a call that was not recorded shows in the output.
    """
    is_used = direct_ops.cache_info().currsize > 0 and direct_ops()
    if not is_used or not _ONE_AT_A_TIME.acquire(blocking=False):  # a rank may wait in the function for another's
        return function(), None
    library, thread, watch = _library(), threading.get_ident(), _Watch()

    def recorded(kernel: Any) -> Callable[..., Any]:
        function = kernel_address(kernel)

        def call(*arguments: Any) -> Any:
            if threading.get_ident() == thread:
                watch.record_kernel(function, arguments)
            return kernel(*arguments)

        return call

    calls = RecordedCalls(library.detcompile_begin_recording())
    try:
        with kernels_replaced({kernel: recorded(kernel) for kernel in generated_kernels()}), watch:
            calls.output = function()
    finally:
        calls.num_bytes = library.detcompile_end_recording()
        _ONE_AT_A_TIME.release()
    if not watch.complete or calls.num_bytes <= 0 or not calls.give_the_same():
        return calls.output, None
    return calls.output, calls


class _Watch(TorchDispatchMode):
    """Sees every operation that torch dispatches; ``complete`` if all of them were recorded."""

    complete = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.complete &= func in _recorded_operations()
        return func(*args, **(kwargs or {}))

    def record_kernel(self, function: int, arguments: tuple[Any, ...]) -> None:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        numbers = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
        if not tensors or len(numbers) > MOST_ARGUMENTS or not all(type(number) is int for number in numbers):
            self.complete = False
            return
        torch.ops.detcompile_direct.record_kernel(function, tensors, numbers)


def _as_tuple(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@functools.cache
def _recorded_operations() -> frozenset[Any]:
    names = (*OPS, "record_kernel")
    return frozenset(getattr(torch.ops.detcompile_direct, name).default for name in names)


@functools.cache
def _library() -> ctypes.CDLL:
    library = direct_library()
    assert library is not None
    library.detcompile_begin_recording.restype = ctypes.c_void_p
    library.detcompile_end_recording.restype = ctypes.c_int64
    library.detcompile_repeat.restype = ctypes.c_bool
    library.detcompile_repeat.argtypes = library.detcompile_drop_recording.argtypes = [ctypes.c_void_p]
    library.detcompile_spoil_results.argtypes = [ctypes.c_void_p]
    return library
