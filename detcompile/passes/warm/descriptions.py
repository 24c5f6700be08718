"""Descriptions of values and called code as JSON. Values of equal descriptions lead to equal traces."""

import dataclasses
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from detcompile.torch_internals.modules import attributes_of, buffer_table, child_table, parameter_table
from detcompile.torch_internals.operators import OpOverload, OpOverloadPacket
from detcompile.weights import tensor_digest

BUILTIN = (bool, int, float, complex, str, bytes, type(None), type(...), slice, range)
PLAIN = (*BUILTIN, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
FUNCTIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, OpOverload, OpOverloadPacket)
# Attributes of a config or a model that say how it was saved, or hold a hash of strings, which differs by process.
WRITTEN = ("transformers_version", "_auto_class", "_original_object_hash", "_weight_conversions")
VOLATILE = ("_name_or_path", "name_or_path", "_commit_hash", *WRITTEN)
# Packages whose code is determined by the versions of torch and Python, and by the digest of our sources.
PINNED = {"torch", "detcompile", "sympy", "mpmath", "typing_extensions", *sys.stdlib_module_names} - {"__main__"}


class Undescribed(Exception):
    """A value has state that cannot be described."""


class Descriptions:
    """Describes values of one model.

    Args:
        model: its modules, parameters and buffers are described by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
        self._names |= {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        self._seen: dict[int, int] = {}
        self._classes: set[type] = set()
        self._kept: list[Any] = []  # keeps objects alive, so that ids stay unique

    def module(self, module: nn.Module) -> Any:
        """Describe class, children, attributes, and the form of each parameter and buffer, without their values.

        Raises:
            Undescribed: an attribute has state that cannot be described.
        """
        tensors = {
            name: None if tensor is None else [self._names.get(id(tensor)), *_form(tensor)]
            for held in (parameter_table(module), buffer_table(module))
            for name, tensor in held.items()
        }
        attributes = {name: value for name, value in attributes_of(module).items() if name not in VOLATILE}
        table = child_table(module)
        children = {name: None if child is None else self._names[id(child)] for name, child in table.items()}
        return [_class(type(module)), self._held_by(type(module)), tensors, children, self.of(attributes)]

    def of(self, value: Any) -> Any:
        """Describe an attribute.

        Raises:
            Undescribed: it has state that cannot be described.
        """
        if isinstance(value, enum.Enum):
            return ["enum", _class(type(value)), value.name]
        if isinstance(value, PLAIN) and type(value).__module__ in ("builtins", "torch", "types"):
            return [type(value).__name__, repr(value)]
        if isinstance(value, type):
            return ["class", _class(value)]
        if isinstance(value, (*FUNCTIONS, types.ModuleType)):
            return ["builtin", str(getattr(value, "__module__", "")), str(getattr(value, "__name__", value))]
        if id(value) in self._names and isinstance(value, (nn.Module, Tensor)):
            return ["of the model", self._names[id(value)]]
        if id(value) in self._seen:
            return ["seen", self._seen[id(value)]]
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return self._object(value)

    def _held_by(self, kind: type) -> Any:
        """Describe the attributes of a class and its bases, with the defaults of functions, once per class."""
        new = [base for base in kind.__mro__ if base not in self._classes and not _is_pinned(base)]
        self._classes.update(new)
        return [
            [
                _class(base),
                [[name, self._held(value)] for name, value in sorted(vars(base).items()) if name[:2] != "__"],
            ]
            for base in new
        ]

    def _held(self, value: Any) -> Any:
        """Describe an attribute of a class; only by its class if it has hidden state."""
        if isinstance(value, property):
            return [self._held(part) for part in (value.fget, value.fset)]
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, types.FunctionType):  # CalledCode covers its code
            value = [value.__defaults__, value.__kwdefaults__]
        try:
            return self.of(value)
        except Undescribed:
            return ["object", _class(type(value))]

    def _object(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return ["tensor", *_form(value), tensor_digest(value)]
        if isinstance(value, (np.ndarray, np.generic)):
            array = np.asarray(value)
            return ["array", str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()]
        if isinstance(value, (list, tuple)):
            return [_class(type(value)), *map(self.of, value)]
        if isinstance(value, (set, frozenset)):
            return [_class(type(value)), *sorted((self.of(part) for part in value), key=str)]
        if isinstance(value, Mapping):
            return [_class(type(value)), *([self.of(key), self.of(part)] for key, part in value.items())]
        if isinstance(value, functools.partial):
            return ["partial", self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if isinstance(value, types.MethodType):
            return ["method", self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, types.FunctionType):
            free = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            held = [[name, self.of(cell.cell_contents)] for name, cell in free]
            defaults = self.of([value.__defaults__, value.__kwdefaults__])
            return ["function", *code_lines(value.__code__), held, defaults]
        if hasattr(value, "__dict__") and type(value).__flags__ & (1 << 9):  # of a Python class
            attributes = {name: part for name, part in vars(value).items() if name not in VOLATILE}
            return [_class(type(value)), self.of(attributes)]
        if dataclasses.is_dataclass(value):  # with slots
            attributes = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return [_class(type(value)), self.of(attributes)]
        raise Undescribed(f"a {type(value).__module__}.{type(value).__qualname__}")


def code_lines(code: types.CodeType) -> list[Any]:
    """Return a function's code without its file and line."""
    constants = [
        code_lines(part)
        if isinstance(part, types.CodeType)
        else repr(sorted(part, key=repr))
        if isinstance(part, frozenset)
        else repr(part)
        for part in code.co_consts
    ]
    names = [code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars]
    return [
        code.co_qualname,
        code.co_code.hex(),
        constants,
        names,
        code.co_argcount,
        code.co_kwonlyargcount,
        code.co_flags,
    ]


def _is_pinned(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in PINNED


def _class(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _form(tensor: Tensor) -> list[Any]:
    device = str(tensor.device)
    return [str(tensor.dtype), list(tensor.shape), list(tensor.stride()), device, tensor.requires_grad]


class CalledCode:
    """Context around a run. ``lines`` then describes every function that was called, in no order.

    Code of torch, the standard library and this package is left out, and so is what import hooks call: they run only at
    a process's first import of a module. Turn off garbage collection around it: it calls unrelated finalizers.
    """

    def __init__(self) -> None:
        self.lines: set[str] = set()
        self._pinned: dict[types.CodeType, bool] = {}
        hooks: Iterator[Any] = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        self._hooks = {hook.__code__ for hook in hooks if hasattr(hook, "__code__")}
        self._read: set[tuple[Any, ...]] = set()

    def __enter__(self) -> "CalledCode":
        self._before = sys.getprofile()
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def unobserved(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that calls only code of torch and of this package."""
        sys.setprofile(None)
        try:
            return function(*args)
        finally:
            sys.setprofile(self._called)

    def _called(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        pinned = self._pinned.get(code)
        if pinned is None and self._is_of_hook(frame):
            return
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

    def _is_of_hook(self, frame: types.FrameType | None) -> bool:
        while frame is not None and frame.f_code not in self._hooks:
            frame = frame.f_back
        return frame is not None


def _globals_of(code: types.CodeType, read: dict[str, Any]) -> list[str]:
    return [f"{name}={_shallow(read[name])}" for name in code.co_names if name in read]


def _shallow(value: Any) -> str:
    """Describe a plain value or container. Other objects are described by class and name, since registries grow."""
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
