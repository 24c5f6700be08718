"""Layers of a model that compute the same with different weights: observed in a run of the model, never assumed.

Two layers have one structure if a run of the model shows the same operations for both, on the same values (the rows
of the layer before, values that all layers read, and the layer's weights at the same places), and their modules agree
in every class and attribute. Nothing else that the model's code reads can tell the two layers apart.
"""

import copy
import functools
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from detcompile.errors import InvalidInput, UnsupportedModel
from detcompile.torch_internals.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    tree_flatten,
    without_modes,
)
from detcompile.torch_internals.modules import attributes_of, buffer_table, parameter_table
from detcompile.weights import tensor_digest

PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
NO_INDICES = (-1, -1)  # equals no pair of integers: none may differ
NAMESPACES = ("aten", "prims", "detcompile")  # of operators whose Python code is torch's or this package's


class Repeats(NamedTuple):
    """Layers by their structure: ``first[k]`` is the first layer that has the structure of layer k."""

    first: tuple[int, ...]

    @property
    def prefix(self) -> int:
        """Number of first layers that include every structure."""
        return max(self.first) + 1

    def alike(self, layer: int) -> tuple[int, ...]:
        """Return the layers with the structure of this one."""
        return tuple(other for other, first in enumerate(self.first) if first == self.first[layer])


class Shown(NamedTuple):
    """The operations of one run of a model, in order, by place. Values are named by the operation that made them.

    A tensor that comes from outside, such as one made from Python numbers, is named by its contents.

    Attributes:
        in_turn: whether the layers run one after the other, each on the output of the one before.
    """

    before: list[Any]
    layers: list[list[Any]]
    after: list[Any]
    in_turn: bool


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def shown_by(model: PreTrainedModel, run: Callable[[PreTrainedModel], None], call: Callable[..., Any] = _call) -> Shown:
    """Observe a run over fake tensors. The layers keep hooks, so pass a view that is dropped afterwards.

    Args:
        run: calls a model once, on the same few tokens.
        call: calls its first argument with the others: a function that calls only code of torch and of this package.
    """
    layers = list(layer_list(model) or ())
    recorder = _Recorder(model, layers, call)
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(functools.partial(recorder.enter, index), with_kwargs=True)
        layer.register_forward_hook(functools.partial(recorder.leave, index))
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        run(model)
    return recorder.shown()


def repeats_of(
    model: PreTrainedModel, run: Callable[[PreTrainedModel], None], whole: Shown | None = None
) -> Repeats | None:
    """Group a model's layers by structure; None if a model of only the first layers would compute something else.

    Args:
        run: as in `shown_by`.
        whole: what a run of the model shows, if there was one.
    """
    layers = layer_list(model)
    if layers is None or len(layers) < 2:
        return None
    if whole is None:
        whole = shown_by(view_of(model), run)  # a view: a run may leave state in modules
    if not whole.in_turn:
        return None
    first: list[int] = []
    for index, layer in enumerate(layers):
        same = (
            other
            for other in sorted(set(first))
            if whole.layers[other] == whole.layers[index] and _alike(layers[other], layer, (other, index))
        )
        first.append(next(same, index))
    repeats = Repeats(tuple(first))
    if repeats.prefix == len(layers):
        return None
    shown = shown_by(layers_of(model, range(repeats.prefix)), run)
    expected = whole._replace(layers=whole.layers[: repeats.prefix])
    return repeats if shown == expected else None


class _Recorder(TorchDispatchMode):
    """Records every operation as (name, arguments), with each tensor named by its origin.

    Origins: ``("weight", name)``, ``("own", name in the layer)``, ``("rows",)`` for the output of the layer before,
    ``(part, place, index)`` for the result of an operation, and ``("given", number)`` for a tensor from outside.
    A layer's part begins where the layer before it ends. The first layer's part begins where it is called.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call
        self._names: dict[int, tuple[int | None, str]] = {}  # of parameters and buffers: layer and name
        for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
            self._names.setdefault(id(tensor), (None, name))
        for index, layer in enumerate(layers):
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
                if self._names[id(tensor)][0] is None:
                    self._names[id(tensor)] = (index, name)
        self._parts: list[list[Any]] = [[] for _ in range(len(layers) + 2)]  # before, one per layer, after
        self._part = 0
        self._origins: dict[int, tuple[Any, ...]] = {}
        self._objects: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps the objects alive, because Python reuses ids
        self._rows: Tensor | None = None  # output of the layer before
        self._broken = False

    def shown(self) -> Shown:
        in_turn = not self._broken and self._part == len(self._parts) - 1
        return Shown(self._parts[0], self._parts[1:-1], self._parts[-1], in_turn)

    def enter(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("hidden_states")
        if index == 0 and self._part == 0 and isinstance(given, Tensor):
            self._rows, self._part = given, 1
        if self._part != index + 1 or given is not self._rows:
            self._broken = True  # out of order, or its input is not the output of the layer before
            return
        self._parts[self._part].append(("call", self._encoded((args, kwargs))))

    def leave(self, index: int, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        given = output[0] if isinstance(output, tuple) and output else output
        if self._part != index + 1 or not isinstance(given, Tensor):
            self._broken = True
            return
        self._parts[self._part].append(("return", self._encoded(output)))
        self._rows, self._part = given, index + 2
        self._kept.append(given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_known = func.namespace in NAMESPACES and all(kind is FakeTensor for kind in types)
        return (self._call if is_known else _call)(self._record, func, args, kwargs or {})

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        part = self._parts[self._part]
        place = len(part)
        part.append((str(func), self._encoded((args, kwargs))))
        output = func(*args, **kwargs)
        leaves, _ = tree_flatten(output)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._origins[id(leaf)] = (self._part, place, index)
                self._kept.append(leaf)
        return output

    def _encoded(self, given: Any) -> Any:
        kind = type(given)
        if kind is tuple or kind is list:
            return (kind.__name__, *map(self._encoded, given))
        if kind is dict:
            return ("dict", *((key, self._encoded(value)) for key, value in given.items()))
        if isinstance(given, (Tensor, *PLAIN)):
            return self._leaf(given)
        leaves, spec = tree_flatten(given)
        return (str(spec), *map(self._leaf, leaves))

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return (*self._origin(leaf), str(leaf.dtype), tuple(leaf.shape), leaf.stride())
        if isinstance(leaf, PLAIN):
            return type(leaf).__name__, str(leaf)
        self._kept.append(leaf)
        return "object", type(leaf).__qualname__, self._objects.setdefault(id(leaf), len(self._objects))

    def _origin(self, tensor: Tensor) -> tuple[Any, ...]:
        if tensor is self._rows:
            return ("rows",)
        if id(tensor) in self._names:
            layer, name = self._names[id(tensor)]
            return ("own", name) if layer is not None and layer == self._part - 1 else ("weight", layer, name)
        if id(tensor) in self._origins:
            part, place, index = self._origins[id(tensor)]
            return ("made here" if part == self._part else part, place, index)
        self._kept.append(tensor)
        number = self._objects.setdefault(id(tensor), len(self._objects))
        if isinstance(tensor, FakeTensor):
            return "given", number
        with without_modes():  # fake tensors have no contents to read
            return "given", number, tensor_digest(tensor)


def _alike(one: nn.Module, other: nn.Module, indices: tuple[int, int]) -> bool:
    """Return whether two layers' modules agree in class, attributes and the form of their weights.

    An integer that is its layer's index (layer_idx) may differ: the run shows what it is used for.
    """
    ours, theirs = dict(one.named_modules()), dict(other.named_modules())
    if ours.keys() != theirs.keys():
        return False
    for name, module in ours.items():
        match = theirs[name]
        if type(module) is not type(match):
            return False
        for table_of in (parameter_table, buffer_table):
            a, b = table_of(module), table_of(match)
            if a.keys() != b.keys() or not all(_same_form(a[key], b[key]) for key in a):
                return False
        a, b = attributes_of(module), attributes_of(match)
        if a.keys() != b.keys() or not all(_same(a[key], b[key], indices) for key in a):
            return False
    return True


def _same_form(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.dtype, one.shape, one.stride(), one.device) == (other.dtype, other.shape, other.stride(), other.device)


def _same(one: Any, other: Any, indices: tuple[int, int]) -> bool:
    """Return whether two attributes are equal, by value if they have one, else by identity."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) is int and (one, other) == indices:
        return True
    if isinstance(one, Tensor):
        return _same_form(one, other) and torch.equal(one, other)
    if isinstance(one, PLAIN):
        return bool(one == other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b, indices) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key], indices) for key in one)
    if isinstance(one, (set, frozenset, slice)):
        return one == other
    if isinstance(one, PreTrainedConfig):  # each sharded layer has a copy with this rank's head count
        return _same(vars(one), vars(other), NO_INDICES)
    if isinstance(one, functools.partial):
        return _same((one.func, one.args, one.keywords), (other.func, other.args, other.keywords), indices)
    if isinstance(one, types.MethodType):  # the modules are compared elsewhere
        return one.__func__ is other.__func__ and isinstance(one.__self__, nn.Module)
    return False


def view_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model's modules that shares every weight with it."""
    shared = itertools.chain(model.parameters(), model.buffers())
    view: PreTrainedModel = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    return view


def layer_list(model: PreTrainedModel) -> nn.ModuleList | None:
    """Return the list of a model's layers; None if there is not exactly one."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    return lists[0] if len(lists) == 1 else None


def layers_of(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return a view of the model with only these layers between its embedding and its final norm and head.

    Args:
        layers: ascending indices without repetition.

    Raises:
        InvalidInput: invalid indices.
        UnsupportedModel: the model does not keep its layers in a single list.
    """
    count = model.config.get_text_config().num_hidden_layers
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < count:
        raise InvalidInput(f"layers {tuple(layers)}: give some of 0 to {count - 1}, each once, in their order")
    view = view_of(model)
    all_layers = layer_list(view)
    if all_layers is None:
        raise UnsupportedModel(f"{type(model).__name__} does not keep its {count} layers in a single list")
    for index in reversed(range(count)):
        if index not in layers:
            del all_layers[index]
    for index, layer in enumerate(all_layers):
        attention: Any
        for attention in layer.modules():
            if isinstance(getattr(attention, "layer_idx", None), int):
                attention.layer_idx = index
    config = view.config.get_text_config()
    config.num_hidden_layers = len(all_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in layers]
    return view
