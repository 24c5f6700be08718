"""The floating-point mode that steps run in on a CPU: every thread rounds to nearest and keeps subnormals.

A mode is a thread's own. ``torch.set_flush_denormal(True)`` sets the caller's, and a worker of OpenMP has the one of
the thread that started it, as it was then: an element's bits would follow the thread that computes it.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from detcompile.errors import InvalidInput
from detcompile.templates.cpu import library as cpu_library

__all__ = ["float_mode", "in_float_mode"]

TORCH = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


def float_mode(device: torch.device, num_threads: int = 1) -> AbstractContextManager[None]:
    """While entered, the calling thread and its OpenMP workers have the standard mode; then each has its own again.

    Any thread may enter it, again and within itself. On other devices than a CPU it does nothing.

    Args:
        num_threads: threads that the kernels inside may ask for, beside torch.get_num_threads() when it is entered.
    """
    return _Standard(num_threads) if device.type == "cpu" else contextlib.nullcontext()


def in_float_mode(run: Callable[..., Any], device: torch.device, num_threads: int = 1) -> Callable[..., Any]:
    """``run``, in the standard mode."""
    if device.type != "cpu":
        return run
    mode = float_mode(device, num_threads)

    @functools.wraps(run, updated=())
    def ran(*given: Any, **named: Any) -> Any:
        with mode:
            return run(*given, **named)

    return ran


class _Standard:
    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def __enter__(self) -> None:
        num_threads = max(self._num_threads, torch.get_num_threads())
        cpu_library.library().detcompile_enter_floats(num_threads, _parallel_of_torch() if num_threads > 1 else None)

    def __exit__(self, *_: object) -> None:
        cpu_library.library().detcompile_leave_floats()


@functools.cache
def _parallel_of_torch() -> int:
    """Where the OpenMP of torch's own operations starts a region; it may be another one than our kernels'.

    Raises:
        InvalidInput: torch has none.
    """
    try:
        found = ctypes.CDLL(str(TORCH), mode=os.RTLD_NOLOAD | os.RTLD_LAZY).GOMP_parallel
    except (OSError, AttributeError) as error:
        raise InvalidInput(
            f"torch {torch.__version__} does not run its operations in threads of GNU OpenMP, whose floating-point mode"
            " has to be set: call torch.set_num_threads(1)"
        ) from error
    return ctypes.cast(found, ctypes.c_void_p).value or 0
