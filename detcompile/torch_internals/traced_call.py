"""Dynamo's data about the call it traces: origins of inputs, side effects of the call, and guards."""

import inspect
import numbers
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import nn
from torch._dynamo import guards, side_effects, variables
from torch._dynamo.source import (
    GetItemSource,
    GlobalSource,
    LocalSource,
    NNModuleSource,
    NumpyTensorSource,
    Source,
    TensorProperty,
    TensorPropertySource,
)
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from detcompile.errors import UnsupportedModel
from detcompile.torch_internals.graph_nodes import innermost_model_frame

# Shape functions of torch whose guards decide only strides of a fake result, or an error, never a value.
OF_STRIDES = (
    ("_subclasses/fake_impls.py", "conv"),
    ("_meta_registrations.py", "meta_copy_"),
    ("nn/functional.py", "_in_projection_packed"),
)


class TracedCall:
    """The frame that Dynamo is compiling in this thread.

    Without it: the backend cannot distinguish a caller's tensors from those of the compiled callable, nor see a call's
    side effects or the numbers of rows that its code treats differently.

    Args:
        owner: the object whose method was compiled, or None: its tensors are not arguments.
        given: the arguments of the call.
    """

    def __init__(self, owner: object, given: Sequence[object] = ()) -> None:
        try:
            translator = InstructionTranslator.current_tx()
        except AttributeError:
            raise UnsupportedModel("this backend only accepts graphs that torch.compile is tracing") from None
        self._graph: Any = translator.output
        self._code = translator.f_code
        self._owner, self._given = owner, given
        code = self._code
        num_named = code.co_argcount + code.co_kwonlyargcount
        num_packed = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
        self._packed = code.co_varnames[num_named : num_named + num_packed]  # *args and **kwargs

    def is_argument(self, source: Source) -> bool | None:
        """Return whether a caller passed it (True) or the compiled callable holds it (False); None if neither."""
        root = list(_path(source))[-1]
        if isinstance(root, GlobalSource):
            return False
        if not isinstance(root, LocalSource):
            return None
        code, name = self._code, root.local_name
        if name in code.co_freevars:
            return False
        if name not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] + self._packed:
            return None
        value = self._graph.local_scope.get(name)
        if value is None or value is self._owner:
            return value is None
        return not isinstance(value, nn.Module) or any(value is one for one in self._given)

    def is_of_given_module(self, source: Source) -> bool:
        """Return whether a module that the caller passed holds it, directly or in a container or object."""
        return self.is_argument(source) is True and any(isinstance(part, NNModuleSource) for part in _path(source))

    def left_behind(self) -> list[str]:
        """Return side effects that the next call would see, and random numbers drawn in each call: one line each."""
        effects = self._graph.side_effects
        kept = [var for var in effects.id_to_variable.values() if not self._is_of_this_call(var.source)]
        lines = [line for var in kept for line in _changes(var, effects, self._graph)]
        if self._graph.random_calls:
            lines.append("Python's random numbers are drawn again in each call: draw them before it, and pass them")
        if effects.tensor_hooks:
            lines.append("hooks are put on tensors")
        return lines

    def splits(self) -> list[str]:
        """Return one line for each guard on the number of rows: another number would be traced as different code."""
        shape_env = self._graph.shape_env
        counts = {symbol for symbol, sources in shape_env.var_to_sources.items() if any(map(self._is_count, sources))}
        counts |= {symbol for name in counts for symbol in shape_env.replace(name).free_symbols}
        lines: dict[str, None] = {}
        for guard in shape_env.guards:
            expr = guard.expr
            if not expr.free_symbols & counts or _of_equal_counts(expr, counts) or _holds(expr, counts):
                continue
            if not _of_strides(guard.sloc):
                lines[f"{_readable(expr, shape_env)} at {_line_of(guard.sloc)}: of some numbers of rows alone"] = None
        return list(lines)

    def identified(self) -> list[str]:
        """Return one line for each tensor argument whose identity the traced code checks."""
        guards = [guard for guard in self._graph.guards if guard.create_fn_name() == "ID_MATCH"]
        sources = {guard.originating_source for guard in guards if self.is_argument(guard.originating_source)}
        given = {arg.source for arg in self._graph.graphargs if isinstance(arg.example, torch.Tensor)}
        return [f"{source.name}: which object it is" for source in sources & given]

    def numbers(self) -> list[str]:
        """Return one line for each number among the arguments that the traced code reads."""
        scope = {"L": self._graph.local_scope, "G": self._graph.global_scope}
        lines, values = dict[str, None](), dict[Source, Any]()
        for guard in self._graph.guards:
            source = guard.originating_source
            if guard.create_fn_name() in ("CONSTANT_MATCH", "EQUALS_MATCH") and self._is_given(source):
                value = source.get_value(scope, dict(guards._get_closure_vars()), values)
                if _holds_number(value) or (isinstance(value, bool) and self._is_entry(source)):
                    lines[f"{source.name} is {value!r}"] = None
        for arg in self._graph.graphargs:
            if isinstance(arg.source, NumpyTensorSource) and not arg.example.dim() and self._is_given(arg.source):
                lines[f"{arg.source.base.name} is {arg.example.item()}"] = None
        return list(lines)

    def _is_given(self, source: Source) -> bool:
        """Return whether the caller passed it. An argument's default value belongs to the compiled callable."""
        if self.is_argument(source) is not True:
            return False
        root: Any = list(_path(source))[-1]
        value = self._graph.local_scope.get(root.local_name)
        return root.local_name in self._packed or any(value is one for one in self._given)

    def _is_entry(self, source: Source) -> bool:
        """Return whether it is an entry of a list or tuple, and not of the frame's *args."""
        return isinstance(source, GetItemSource) and not self._is_of_this_call(source.base)

    def _is_of_this_call(self, source: Source | None) -> bool:
        """Return whether it is the frame's *args or **kwargs, which Python creates for each call."""
        return isinstance(source, LocalSource) and source.local_name in self._packed

    def _is_count(self, source: Source) -> bool:
        is_extent = isinstance(source, TensorPropertySource) and source.prop is TensorProperty.SIZE and source.idx == 0
        return is_extent and self.is_argument(source) is True


def _holds_number(value: object) -> bool:
    """Return whether a value is a number or a container of numbers. True and False alone are flags, not numbers."""
    if isinstance(value, (tuple, list, set, frozenset, range, bytes)):
        return any(isinstance(entry, bool) or _holds_number(entry) for entry in value)
    return isinstance(value, numbers.Number) and not isinstance(value, bool)


def _path(source: Source) -> Iterator[Source]:
    """Yield a source and everything that contains it, up to the variable."""
    part: Source | None = source
    while part is not None:
        yield part
        part = getattr(part, "base", None)


def _changes(var: Any, effects: side_effects.SideEffects, graph: Any) -> Iterator[str]:
    existing = isinstance(var.mutation_type, (AttributeMutationExisting, ValueMutationExisting))
    if not existing or var in effects.ignore_mutation_on_these_variables or not effects.is_modified(var):
        return
    name = getattr(var, "local_name", None) or _name_of(var.source)
    assigned = effects.store_attr_mutations.get(var, {})
    for attribute, value in assigned.items():
        if not _is_as_before(var, attribute, value, graph):
            of = "" if isinstance(var, variables.NewGlobalVariable) else f"{name}."
            yield f"{of}{attribute} is assigned{_at(effects, var)}"
    if not assigned:
        is_changed = getattr(var, "has_new_items", lambda: True)()  # of a dict
    elif hasattr(var, "is_base_vt_modified"):  # an object that is a list or dict too, before torch 2.15
        is_changed = var.is_base_vt_modified(effects)
    else:
        is_changed = isinstance(var.mutation_type, ValueMutationExisting) and var.mutation_type.is_modified
    if is_changed:
        yield f"{name} is changed{_at(effects, var)}"


def _name_of(source: Source | None) -> str:
    try:
        return "a value of the caller's" if source is None else source.name
    except NotImplementedError:  # a cell that two functions share has no name in the frame
        return "a variable of the enclosing function"


def _is_as_before(var: Any, attribute: str, value: Any, graph: Any) -> bool:
    """Return whether a constant is stored over an equal one."""
    if not value.is_python_constant():
        return False
    missing = object()
    if isinstance(var, variables.NewGlobalVariable):
        present = graph.global_scope.get(attribute, missing)
    else:
        present = getattr(getattr(var, "value", missing), attribute, missing)
    constant = value.as_python_constant()
    plain = (bool, int, float, str, type(None))
    return isinstance(constant, plain) and type(present) is type(constant) and present == constant


def _at(effects: Any, var: Any) -> str:
    """Return where the model's source changes the value, if this release of torch records it."""
    stacks = getattr(effects, "mutation_user_stacks", {}).get(var) or [[]]
    place = innermost_model_frame(stacks[-1])
    return f" at {place}" if place else ""


def _of_equal_counts(expr: sympy.Basic, counts: Iterable[sympy.Symbol]) -> bool:
    """Return whether a guard only says that two arguments have equally many rows, as parts of one batch."""
    return isinstance(expr, sympy.Eq) and all(side in counts for side in expr.args)


def _holds(expr: sympy.Basic, counts: Iterable[sympy.Symbol]) -> bool:
    """Return whether a guard holds for every number of rows from one up."""
    bound = bound_sympy(expr, {symbol: ValueRanges(1, int_oo) for symbol in counts})
    return bound.is_singleton() and bound.lower is sympy.true


def _of_strides(where: Any) -> bool:
    frame = getattr(where, "framework_loc", None)
    file, name = getattr(frame, "filename", ""), getattr(frame, "name", "")
    return any(file.endswith(f"torch/{path}") and name == function for path, function in OF_STRIDES)


def _line_of(where: Any) -> str:
    """Return the model's line that created a guard, from torch's text of both locations."""
    user = str(getattr(where, "maybe_user_loc", None) or "")
    match = re.search(r"([^/\s]+:\d+) in (\S+)$", user.rsplit("#", 1)[-1].strip())
    return f"{match[1]} {match[2]}" if match else str(where)


def _readable(expr: sympy.Basic, shape_env: Any) -> str:
    """Return a guard with the inputs' names instead of symbols."""
    named = {}
    for symbol in expr.free_symbols:
        sources = shape_env.var_to_sources.get(symbol)
        if sources:
            named[symbol] = sympy.Symbol(sources[0].name)
    return str(expr.xreplace(named))
