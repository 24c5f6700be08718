"""What the C++ compiler makes for any program on a CPU, made while Python captures the first one.

To see which vectors the compiler and the machine have, Inductor compiles programs for all that the machine might have,
and then takes the widest; here the narrower ones go untried, since a compiler that has wider ones has these. Later it
precompiles a header that all kernels share. Neither depends on the program, and both take seconds of a core.
"""

import functools
import logging
import platform
import threading
from collections.abc import Callable
from unittest import mock

from torch._inductor import cpu_vec_isa
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpu_vec_isa import VecISA

from detcompile.config import inductor_folder
from detcompile.storage import INDUCTOR_ADVICE, naming
from detcompile.templates.cpp_dispatch import build_direct_ops
from detcompile.templates.cpu.library import library

__all__ = ["precompile_header", "prepare_compiler", "vector_isa"]

logger = logging.getLogger(__name__)
THREAD = "detcompile compiling ahead"
_TRYING = threading.Lock()


def vector_isa() -> VecISA:
    """Return the vectors of Inductor's C++ on this machine; the first call in a process may compile a program to see.

    Raises:
        StorageError: Inductor's cache cannot be written.
    """
    with naming(inductor_folder(), INDUCTOR_ADVICE):
        _try_vectors()
    return cpu_vec_isa.pick_vec_isa()


@functools.cache
def prepare_compiler() -> None:
    """Start, once a process, what the first program needs whether it was kept or not. Whoever needs it finds it there
    or makes it, and hears of what fails."""
    _start(_try_vectors, library, build_direct_ops)


@functools.cache
def precompile_header() -> None:
    """Start, once a process, to precompile the header of Inductor's kernels."""
    _start(functools.partial(CppPythonBindingsCodeCache.load_async, "", submit_fn=lambda task: None))


def _try_vectors() -> None:
    """Give Inductor its list of this machine's vectors, unless it has one."""
    with _TRYING:
        if platform.machine() not in ("x86_64", "AMD64") or cpu_vec_isa.valid_vec_isa_list.cache_info().currsize:
            return
        known = set(cpu_vec_isa.x86_isa_checker())
        possible = [isa for isa in cpu_vec_isa.supported_vec_isa_list if known.issuperset(str(isa).split())]
        while possible and not possible[0]:  # as a bool it is whether a program of it compiles and runs
            del possible[0]
        with mock.patch.object(cpu_vec_isa, "supported_vec_isa_list", possible[:1]):
            cpu_vec_isa.valid_vec_isa_list().extend(possible[1:])


def _start(*tasks: Callable[[], object]) -> None:
    def run() -> None:
        for task in tasks:
            try:
                task()
            except Exception as error:  # whoever needs it does it again, and raises
                logger.debug("%s: %s", task, error)

    threading.Thread(target=run, name=THREAD, daemon=True).start()
