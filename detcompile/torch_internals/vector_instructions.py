"""Vector instructions for which Inductor writes C++, and the header of its kernels."""

import platform
import threading
from unittest import mock

from torch._inductor import cpu_vec_isa
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa

NAMES = {
    "VecISA": "The type of a set of vector instructions; as a bool, whether a program of it compiles and runs. Without "
    "it: see pick_vec_isa.",
    "pick_vec_isa": "The vector instructions that Inductor takes. Without it: machines that round alike and machines "
    "that do not would have one fingerprint.",
}

_TRYING = threading.Lock()


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
