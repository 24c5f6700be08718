"""AOTInductor, which compiles a graph into a shared library."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from torch._inductor import cpp_builder
from torch._inductor.compile_fx import get_cpp_wrapper_config
from torch._inductor.virtualized import V

from detcompile.torch_internals.inductor_settings import inductor_config

__all__ = ["ahead_of_time"]

READ_IN = "2.11.0, 2.13.0, 2.14.1, 2.15.0"


@contextlib.contextmanager
def ahead_of_time() -> Iterator[None]:
    """Have ``compile_fx_inner`` make a shared library while entered, which rounds as the JIT's code does.

    Without it: no archive can be written.
    """
    settings = {
        **get_cpp_wrapper_config(),
        "cpp_wrapper": True,
        "aot_inductor.package": True,
        # As the JIT keeps them: a constant of few elements would be written into scalar code, whose libm is another.
        "always_keep_tensor_constants": True,
    }
    linking = mock.patch.object(cpp_builder.BuildOptionsBase, "get_ldflags", _link_flags)
    with V.set_aot_compilation(True), inductor_config.patch(settings), linking:
        yield


def _link_flags(options: cpp_builder.BuildOptionsBase) -> list[str]:
    """torch's own; and what a static library brings is for this library alone.

    Some compilers link libstdc++ statically. Some of its symbols would then be bound to the process's own copy, and
    AOTInductor's runtime, which parses a device's name with std::regex, crashes over a locale of two halves.
    """
    flags: list[str] = options._ldflags
    return [*flags, "Wl,--exclude-libs,ALL"] if "shared" in options.get_cflags() else flags
