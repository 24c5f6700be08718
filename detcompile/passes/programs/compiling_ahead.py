"""What the C++ compiler makes for any program on a CPU, made while Python captures the first one.

To see which vectors the compiler and the machine have, Inductor compiles programs for all that the machine might have,
and then takes the widest; here the narrower ones go untried, since a compiler that has wider ones has these. Later it
precompiles a header that all kernels share. Neither depends on the program, and both take seconds of a core.
"""

import functools
import logging
import threading
from collections.abc import Callable

from detcompile.config import inductor_folder
from detcompile.storage import INDUCTOR_ADVICE, naming
from detcompile.templates.cpp_dispatch import build_direct_ops
from detcompile.templates.cpu.library import library
from detcompile.torch_internals.vector_instructions import VecISA, list_vector_isas, pick_vec_isa, precompile_cpp_header

__all__ = ["precompile_header", "prepare_compiler", "vector_isa"]

logger = logging.getLogger(__name__)
THREAD = "detcompile compiling ahead"


def vector_isa() -> VecISA:
    """Return the vectors of Inductor's C++ on this machine; the first call in a process may compile a program to see.

    Raises:
        StorageError: Inductor's cache cannot be written.
    """
    with naming(inductor_folder(), INDUCTOR_ADVICE):
        list_vector_isas()
    return pick_vec_isa()


@functools.cache
def prepare_compiler() -> None:
    """Start, once a process, what the first program needs whether it was kept or not. Whoever needs it finds it there
    or makes it, and hears of what fails."""
    _start(list_vector_isas, library, build_direct_ops)


@functools.cache
def precompile_header() -> None:
    """Start, once a process, to precompile the header of Inductor's kernels."""
    _start(precompile_cpp_header)


def _start(*tasks: Callable[[], object]) -> None:
    def run() -> None:
        for task in tasks:
            try:
                task()
            except Exception as error:  # whoever needs it does it again, and raises
                logger.debug("%s: %s", task, error)

    threading.Thread(target=run, name=THREAD, daemon=True).start()
