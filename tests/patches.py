"""Detect patches of the package by a test.

The key of a kept program covers the package's sources, not a test's patches. While anything is patched, programs are
neither read from the cache nor written to it, so a patched program never replaces a real one.
"""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

__all__ = ["Patches"]

PACKAGE = "detcompile"
# As in the digest of the sources: nothing in these packages decides a program.
OUTSIDE = ("detcompile.commands", "detcompile.experimental", "detcompile.serving")


class Patches:
    """The attributes of the package's modules and classes, as they were when each module was first seen."""

    def __init__(self) -> None:
        self._recorded: dict[str, dict[str, Any]] = {}
        self._num_modules = 0

    def record(self) -> None:
        """Record the modules that were imported since the last call."""
        if len(sys.modules) != self._num_modules:
            for module in _modules():
                if module.__name__ not in self._recorded:
                    self._recorded[module.__name__] = dict(_attributes(module))
            self._num_modules = len(sys.modules)

    def changed(self) -> list[str]:
        """Return the names of recorded attributes that are now other objects."""
        names = []
        for module in _modules():
            recorded = self._recorded.get(module.__name__, {})
            now = dict(_attributes(module))
            names += [name for name in recorded.keys() & now.keys() if _differ(recorded[name], now[name])]
        return sorted(names)


def _modules() -> list[ModuleType]:
    return [
        module
        for name, module in sys.modules.copy().items()  # copied at once: threads may import
        if name.partition(".")[0] == PACKAGE and not name.startswith(OUTSIDE)
    ]


def _attributes(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the functions, classes and constants of a module, and the attributes of the classes that it defines."""
    for name, value in vars(module).items():
        if callable(value) or isinstance(value, ModuleType) or name.isupper():
            yield f"{module.__name__}.{name}", _copied(value)
        if isinstance(value, type) and value.__module__ == module.__name__:
            for attribute, member in list(vars(value).items()):
                if not attribute.startswith("__") or callable(member):
                    yield f"{module.__name__}.{name}.{attribute}", _copied(member)


def _copied(value: Any) -> Any:
    """Return a shallow copy of a table, which may be changed in place, or the value itself."""
    return value.copy() if type(value) in (dict, list, set) else value


def _differ(recorded: Any, now: Any) -> bool:
    if type(recorded) is not type(now):
        return True
    if type(now) is dict:
        return recorded.keys() != now.keys() or any(recorded[key] is not now[key] for key in now)
    if type(now) is list:
        return [*map(id, recorded)] != [*map(id, now)]
    if type(now) is set:
        return recorded != now
    return recorded is not now
