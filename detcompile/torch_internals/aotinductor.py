"""AOTInductor, which compiles a graph into a shared library."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from torch._inductor import cpp_builder
from torch._inductor.compile_fx import get_cpp_wrapper_config
from torch._inductor.virtualized import V

from detcompile.torch_internals.inductor_settings import inductor_config


@contextlib.contextmanager
def ahead_of_time() -> Iterator[None]:
    """Make ``compile_fx_inner`` write a shared library inside the block, which rounds as the JIT's code does.

    Without it: no archive can be written.
    """
    settings = {
        **get_cpp_wrapper_config(),
        "cpp_wrapper": True,
        "aot_inductor.package": True,
        # As in the JIT: constants of few elements would become scalar code, which uses another libm.
        "always_keep_tensor_constants": True,
    }
    linking = mock.patch.object(cpp_builder.BuildOptionsBase, "get_ldflags", _link_flags)
    with V.set_aot_compilation(True), inductor_config.patch(settings), linking:
        yield


def _link_flags(options: cpp_builder.BuildOptionsBase) -> list[str]:
    """Return torch's flags, plus one that keeps symbols of static libraries inside this library.

    Some compilers link libstdc++ statically. Some of its symbols would then be bound to the process's copy, and
    AOTInductor's runtime, which parses a device's name with std::regex, crashes because its locale mixes both copies.
    """
    flags: list[str] = options._ldflags
    return [*flags, "Wl,--exclude-libs,ALL"] if "shared" in options.get_cflags() else flags
