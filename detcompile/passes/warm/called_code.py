"""The Python code that a run of a model calls: what it is, and the plain values that it reads from outside."""

import gc
import sys
import types
from typing import Any

from detcompile.passes.warm.descriptions import PINNED, PLAIN, code_lines

__all__ = ["CalledCode"]


class CalledCode:
    """Entered around a run; ``lines`` then describes every function that was called, in no order.

    Code of torch, of the standard library and of this package is left out. The garbage collector waits meanwhile: it
    calls what has nothing to do with the run.
    """

    def __init__(self) -> None:
        self.lines: set[str] = set()
        self._pinned: dict[types.CodeType, bool] = {}
        self._read: set[tuple[Any, ...]] = set()

    def __enter__(self) -> "CalledCode":
        self._collects = gc.isenabled()
        gc.disable()
        self._before = sys.getprofile()
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)
        if self._collects:
            gc.enable()

    def _called(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        pinned = self._pinned.get(code)
        if pinned is None:
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            pinned = self._pinned[code] = package in PINNED or package.startswith("namedtuple_")
            if not pinned:
                self.lines.add(repr(code_lines(code)))
                self.lines |= {f"{code.co_qualname} reads {line}" for line in _globals_of(code, frame.f_globals)}
        if not pinned and code.co_freevars:
            held = tuple(_shallow(frame.f_locals.get(name)) for name in code.co_freevars)
            if (code, held) not in self._read:
                self._read.add((code, held))
                self.lines.add(f"{code.co_qualname} holds {held}")


def _globals_of(code: types.CodeType, read: dict[str, Any]) -> list[str]:
    return [f"{name}={_shallow(read[name])}" for name in code.co_names if name in read]


def _shallow(value: Any) -> str:
    """A plain value, or a container of these; of another object its class and name, since registries grow."""
    if _is_plain(value):
        parts = sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else repr(value)
        return f"{type(value).__qualname__} {parts}"
    return f"{type(value).__qualname__} {getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(part) for key, part in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)
