"""Record the Python functions of the templates that a call enters."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["functions_entered"]


def functions_entered(call: Callable[[], Any]) -> set[str]:
    """Return the names of functions of detcompile/templates that this thread entered."""
    names: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "detcompile/templates" in frame.f_code.co_filename:
            names.add(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return names
