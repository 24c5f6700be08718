"""How AOTInductor's libraries are linked: nothing that a static library brings is seen outside."""

import pytest
from torch._inductor import cpp_builder

from detcompile.passes import packaging

FLAG = "Wl,--exclude-libs,ALL"


@pytest.mark.parametrize(("options", "linked"), [({}, True), ({"compile_only": True}, False)])
def test_static_libraries_stay_private_where_something_is_linked(options: dict[str, bool], linked: bool) -> None:
    """A compiler that links libstdc++ statically would else make a library that crashes when it is loaded."""
    settings = cpp_builder.CppTorchDeviceOptions(device_type="cpu", aot_mode=True, **options)
    assert FLAG not in settings.get_ldflags()
    with packaging._ahead_of_time():
        assert (FLAG in settings.get_ldflags()) == linked
        command = cpp_builder.CppBuilder(name="x", sources="x.cpp", BuildOption=settings).get_command_line()
        assert (f" -{FLAG} " in command) == linked
