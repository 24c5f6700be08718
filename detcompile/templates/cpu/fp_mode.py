"""The floating-point mode of CPU steps: every thread rounds to nearest and keeps subnormals.

The mode belongs to a thread. ``torch.set_flush_denormal(True)`` sets the caller's, and an OpenMP worker inherits the
mode that its creator had at that time. Without this module, bits would depend on which thread computes an element.
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

TORCH = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


def float_mode(device: torch.device, num_threads: int = 1) -> AbstractContextManager[None]:
    """Return a context manager that gives the calling thread and its OpenMP workers the standard mode.

    On exit each thread gets its previous mode back. Reentrant and usable from any thread. Does nothing on devices other
    than a CPU.

    Args:
        num_threads: threads that kernels inside may use, besides torch.get_num_threads() on entry.
    """
    return _Standard(num_threads) if device.type == "cpu" else contextlib.nullcontext()


def in_float_mode(run: Callable[..., Any], device: torch.device, num_threads: int = 1) -> Callable[..., Any]:
    """Wrap ``run`` so that it runs in the standard mode."""
    if device.type != "cpu":
        return run
    mode = float_mode(device, num_threads)

    @functools.wraps(run, updated=())
    def ran(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

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
    """Return the address at which torch's OpenMP starts a parallel region; our kernels may use another OpenMP."""
    try:
        parallel = ctypes.CDLL(str(TORCH), mode=os.RTLD_NOLOAD | os.RTLD_LAZY).GOMP_parallel
    except (OSError, AttributeError) as error:
        raise InvalidInput(
            f"torch {torch.__version__} does not use GNU OpenMP, so the floating-point mode of its threads cannot be"
            " set: call torch.set_num_threads(1)"
        ) from error
    return ctypes.cast(parallel, ctypes.c_void_p).value or 0
