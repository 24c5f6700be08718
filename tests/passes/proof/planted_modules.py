"""Modules for torch.compile(module, backend=Backend(...)): some must be refused, the others certified."""

import functools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["CERTIFIED", "REFUSED", "Held", "rows"]

D = 8
SCALE = torch.linspace(0.5, 1.5, D)
SEEN: list[Tensor] = []
CALLS = 0


class Noted(list[Tensor]):
    """A list with an attribute. Dynamo records changes of the two separately."""

    note = 0


class NotedTable(dict[str, Tensor]):
    note = 0


class Held(nn.Module):
    """A module with attributes of any kind and a forward that is passed in."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.emb, self.lstm = nn.Linear(D, D), nn.Embedding(10, D), nn.LSTM(D, D)
        self.register_buffer("last", torch.zeros(4, D))
        self.register_buffer("offset", torch.ones(D), persistent=False)
        self.scale, self.table = torch.ones(D), {"a": torch.ones(D), "b": [torch.ones(D)]}
        self.calls = 0
        self.seen: list[Tensor] = []
        self.cache: dict[str, Tensor] = {}
        self.noted = Noted()
        self.noted_table = NotedTable()
        self.noted.note = self.noted_table.note = 1
        self.own_forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own_forward(self, *args, **kwargs)


# -- refused


def reassigned_buffer(m, x):
    y = x - m.last.mean(0)
    m.last = x
    return y


def reassigned_attribute(m, x):
    y = x * m.scale
    m.scale = x.detach()[0]
    return y


def new_attribute(m, x):
    m.newest = x
    return x * 2


def counted(m, x):
    m.calls += 1
    return x * m.calls


def counted_globally(m, x):
    global CALLS
    CALLS += 1
    return x * CALLS


def appended(m, x):
    m.seen.append(x)
    return x * 2


def noted_and_appended(m, x):
    m.noted.note = 1  # as before: only the content changes
    m.noted.append(x)
    return x * 2


def noted_and_cached(m, x):
    m.noted_table.note = 1
    m.noted_table["x"] = x
    return x * 2


def appended_globally(m, x):
    SEEN.append(x)
    return x * 2


def cached(m, x):
    m.cache["x"] = x
    return x * 2


def cached_keys(m, x):
    keys = m.cache.get("keys", x)
    m.cache["keys"] = torch.cat([keys, x], 1)
    return x + keys.sum(-1, keepdim=True)


def buffer_in_place(m, x):
    m.last.add_(1)
    return x * 2


def attribute_in_place(m, x):
    m.scale.mul_(2)
    return x * m.scale


def global_in_place(m, x):
    SCALE.mul_(2)
    return x * SCALE


def data_in_place(m, x):
    m.scale.data.mul_(2)
    return x * m.scale


def input_in_place(m, x):
    x.add_(1)
    return x * 2


def input_transposed_in_place(m, x):
    x.t_()
    return x * 2


def argument_changed(m, x, kept):
    kept.append(x)
    return x * 2


def drawn_in_python(m, x):
    return x * random.random()


def drawn_integer(m, x):
    return x * random.randint(1, 1000)


def drawn_by_numpy(m, x):
    return x * np.random.rand()


def drawn_by_torch(m, x):
    return x + torch.rand(D)


def timed(m, x):
    return x * time.time()


def timed_counter(m, x):
    return x * time.perf_counter()


def more_than_four(m, x):
    return x * 2.1 if x.shape[0] > 4 else x * 2.2


def just_one(m, x):
    return x * 2.1 if len(x) == 1 else x * 2.2


def many_elements(m, x):
    return x * 2.1 if x.numel() > 4 * D else x * 2.2


def even(m, x):
    return x * 2.1 if x.size(0) % 2 else x * 2.2


def scaled_by_count(m, x):
    return x * x.shape[0]


def divided_by_length(m, x):
    return x / len(x)


def scaled_by_unused(m, x, y):
    return x * 2.1 if y.shape[0] > 4 else x * 2.2


def for_each_row(m, x):
    return torch.stack([row * i for i, row in enumerate(x)])


def batch_mean(m, in_parameters_x):
    return in_parameters_x - in_parameters_x.mean(0)


def mean_of_buffers(m, in_buffers_x):
    return in_buffers_x - in_buffers_x.mean(0)


def mean_of_listed(m, given):
    return given[0] - given[0].mean(0)


def mean_of_nested(m, given):
    return given["a"]["b"][0] - given["a"]["b"][0].mean(0)


def transposed(m, x):
    return x.t()


def read_as_columns(m, x):
    return x.t().reshape(x.shape)


def without_first(m, x):
    return x[1:]


def reversed_rows(m, x):
    return x.flip(0)


def rolled_rows(m, x):
    return x.roll(1, 0)


def repeated_rows(m, x):
    return x.repeat(2, 1)


def interleaved_rows(m, x):
    return x.repeat_interleave(2, 0)


def summed_rows(m, x):
    return x * 2, x.sum(0)


def largest_of_rows(m, x):
    return {"y": x * 2, "largest": x.amax(0)}


def whole_mean(m, x):
    return x * 2, x.mean()


def stacked_first(m, x):
    return torch.stack([x, x * 2])


def batch_behind(m, x):
    return x[None] * 2


def tokens_first(m, x):
    return x.transpose(0, 1)


def one_transposed(m, x):
    return {"y": x * 2, "z": (x, [x.t()])}


def of_rows_in_an_object(m, box):
    return box.x - box.x.mean(0)


def of_given_module(m, x, given):
    return x - read(given).mean(0)


def read(given):
    """Return the tensor that a module holds, or the first one in a list, a dict or an object."""
    if isinstance(given, (list, tuple, nn.ParameterList, nn.ModuleList)):
        return read(given[0])
    if isinstance(given, (dict, nn.ParameterDict)):
        return read(given["x"])
    if isinstance(given, nn.Linear):
        return given.weight
    return given if isinstance(given, Tensor) else read(given.x)


def by_identity(m, x):
    return x * (id(x) % 7)


def disabled(m, x):
    return outside(x) * 2


@torch._dynamo.disable
def outside(x):
    return x - x.mean(0)


def broken(m, x):
    torch._dynamo.graph_break()
    return x * 2


@dataclass
class Box:
    x: Any


class Cache(nn.Module):
    """A module that holds a batch: as a buffer, or as a plain attribute."""

    def __init__(self, x: Tensor, *, buffer: bool) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("x", x)
        else:
            self.x = x

    def read(self, x: Tensor) -> Tensor:
        return self.x.mean(0)

    forward = read


class Named(nn.Module):
    """A module that looks up a number by name in a dict, with a default."""

    def forward(self, x: Tensor, options: dict[str, Any], scale: float = 2.0, *, shift: int = 1) -> Tensor:
        return x * scale + options.get("n", shift)


class Pair(NamedTuple):
    y: Tensor
    z: Any


def rows(*shape: int) -> Tensor:
    """Four rows."""
    return torch.randn(4, *(shape or (D,)), generator=torch.Generator().manual_seed(0))


def called(function: Callable[..., Any], *args: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    return Held(function).eval(), args


def hooked(hook: Callable[..., Any]) -> nn.Module:
    module = Held(lambda m, x: m.lin(x)).eval()
    module.register_forward_hook(hook)
    return module


def hooked_within(hook: Callable[..., Any]) -> nn.Module:
    module = nn.Sequential(nn.Linear(D, D), nn.ReLU())
    module[0].register_forward_hook(hook)
    return module


def counting() -> Callable[[Tensor], Tensor]:
    calls = 0

    def count(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * calls

    return count


x, x3 = rows(), rows(4, D)
# -- By name: a text of the refusal, a module or function, and the arguments of its call.
STATE, COUNT, WRITES, NO_GRAPH = "keeps state", "number of rows", "writes rows into", "does not make one graph"
REFUSED: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    function.__name__: (message, *called(function, *args))
    for message, args, functions in [
        (STATE, (x,), [reassigned_buffer, reassigned_attribute, new_attribute, counted, counted_globally, appended]),
        (STATE, (x,), [noted_and_appended, noted_and_cached, appended_globally, cached, cached_keys, drawn_integer]),
        (STATE, (x, []), [argument_changed]),
        (WRITES, (x,), [buffer_in_place, attribute_in_place, global_in_place, data_in_place, input_in_place]),
        (NO_GRAPH, (x,), [input_transposed_in_place, drawn_in_python, drawn_by_numpy, timed, timed_counter]),
        (NO_GRAPH, (x,), [disabled, broken]),
        ("random numbers", (x,), [drawn_by_torch]),
        (COUNT, (x,), [more_than_four, just_one, many_elements, even, for_each_row, read_as_columns]),
        (COUNT, (x, x), [scaled_by_unused]),
        (COUNT, (Box(x),), [of_rows_in_an_object]),
        ("token or batch count", (x,), [scaled_by_count, divided_by_length, rolled_rows]),
        ("no rule", (x,), [batch_mean, mean_of_buffers, whole_mean]),
        ("no rule", ([x],), [mean_of_listed]),
        ("no rule", ({"a": {"b": [x]}},), [mean_of_nested]),
        ("over [batch]", (x,), [without_first, reversed_rows, repeated_rows, largest_of_rows]),
        ("not pinned", (x,), [summed_rows]),
        ("not the batch", (x,), [transposed, interleaved_rows, stacked_first, batch_behind, one_transposed]),
        ("not the batch", (x3,), [tokens_first]),
        ("which object it is", (x,), [by_identity]),
    ]
    for function in functions
} | {
    "a parameter given": ("no rule", *called(lambda m, w: w - w.mean(0), nn.Parameter(rows()))),
    "parameters given in a list": ("no rule", *called(lambda m, w: w[0] - w[0].mean(0), [nn.Parameter(rows())])),
    "a count returned": ("token or batch count", *called(lambda m, x: (x * 2, x.shape[0]), x)),
    "a table of the batch": (COUNT, *called(lambda m, x: x + m.last, x)),
    "a table of this batch": (COUNT, *called(lambda m, x: x + m.last[: x.shape[0]], x)),
    "rows meet another batch": ("second matrix", *called(lambda m, x, y: (x @ y.t()).softmax(-1) @ y, x, rows()[:3])),
    "a closure that counts": (STATE, counting(), (x,)),
    "a hook outside": ("from outside it", hooked(lambda m, i, o: o * 2), (x,)),
    "a hook outside in numpy": ("from outside it", hooked(lambda m, i, o: o.numpy().mean(0)), (x,)),
    "a hook within": ("no rule", hooked_within(lambda m, i, o: o - o.mean(0)), (x,)),
    "batch norm in training": (COUNT, nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)), (x,)),
    "dropout in training": ("random numbers", nn.Sequential(nn.Linear(D, D), nn.Dropout()), (x,)),
    "lstm": (NO_GRAPH, nn.LSTM(D, D), (x3,)),
    "lstm and a mean": (NO_GRAPH, *called(lambda m, x: m.lstm(x)[0] + x.mean(0), x3)),
}

cache, parameter, linear = Cache(x, buffer=False), nn.Parameter(rows(), requires_grad=False), nn.Linear(D, 4)
linear.weight = parameter
MODULES = {
    "a module with a tensor": cache,
    "a module with a buffer": Cache(x, buffer=True),
    "a linear": linear,
    "a list of parameters": nn.ParameterList([parameter]),
    "a dict of parameters": nn.ParameterDict({"x": parameter}),
    "a list of modules": nn.ModuleList([linear]),
    "a module in a list": [cache],
    "a module in a tuple": (cache,),
    "a module in a dict": {"x": cache},
    "a module in an object": Box(cache),
}
for name, given in MODULES.items():
    REFUSED[f"{name} given"] = ("held by a module among the arguments", *called(of_given_module, x, given))
for name, function in {
    "the method of a module": cache.read,
    "a partial of a module": functools.partial(cache),
    "a function around a module": functools.partial(lambda held: lambda x: held(x), cache)(),
}.items():
    REFUSED[f"{name} given"] = ("held by a module among the", *called(lambda m, x, given: x - given(x), x, function))

NUMBERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "an integer": (4, lambda n: n),
    "a number": (0.5, lambda n: n),
    "numpy's number": (np.int64(4), lambda n: n),
    "a shape": (x.shape, lambda n: n[0]),
    "a list of numbers": ([0.5, 2], sum),
    "a list of flags": ([True, False], sum),
    "a number beside a tensor": ((x, 4), lambda n: n[1]),
    "a number in a dict": ({"a": {"b": 4}}, lambda n: n["a"]["b"]),
    "a number in a named tuple": (Pair(x, 4), lambda n: n.z),
    "a number in a dataclass": (Box(4), lambda n: n.x),
    "a number in an object": (SimpleNamespace(x=4), lambda n: n.x),
    "a set of numbers": ({3, 4}, sum),
    "a range": (range(4), len),
    "a slice": (slice(0, 4), lambda n: n.stop),
    "a partial of a number": (functools.partial(max, 4), lambda n: n(1)),
    "a number in a closure": (functools.partial(lambda n: lambda: n, 4)(), lambda n: n()),
}
for name, (given, take) in NUMBERS.items():
    REFUSED[f"{name} given"] = ("numbers among the arg", *called(lambda m, x, n, take=take: x * take(n), x, given))
REFUSED["a number given by name"] = ("numbers among the arguments", Named(), (x, {"n": 4}))


class Plain:
    """An object that is not a module and holds a tensor."""

    def __init__(self) -> None:
        self.w, self.lin = torch.full((D,), 0.5), nn.Linear(D, D)

    def __call__(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.w


class WithoutGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class TakesOptions(nn.Module):
    """A module that pops options from its keywords, as transformers' decorators do."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        options["scale"] = options.pop("scale", 2)
        return x * options["scale"]


def set_features(m: Held, x: Tensor) -> Tensor:
    y, z = x.clone(), x > 0
    y[:, 0], y[:, 2:4], z[..., 1] = 5.0, -0.0, True
    y[:, 5].fill_(2).mul_(3)
    return torch.cat([y, z], 1)


def attend(m: Held, x: Tensor) -> Tensor:
    heads = m.lin(x).view(x.shape[0], -1, 2, D // 2).transpose(1, 2)
    y = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return y.transpose(1, 2).reshape(x.shape[0], -1, D)


FLAGS = {"flag": True, "mode": "sum", "nothing": None}
CERTIFIED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "attributes": called(lambda m, x: x * m.scale + m.offset + m.table["a"] * m.table["b"][0], x),
    "a global": called(lambda m, x: x * SCALE, x),
    "a closure": (functools.partial(lambda w: lambda x: x * w, SCALE.clone())(), (x,)),
    "a module in a closure": (functools.partial(lambda m: lambda x: m(x), nn.Linear(D, D))(), (x,)),
    "a partial": (functools.partial(torch.mul, SCALE.clone()), (x,)),
    "an object": (Plain(), (x,)),
    "a method": (Plain().__call__, (x,)),
    "nested arguments": called(lambda m, d: d["a"]["b"][0] * 2 + d["c"][1], {"a": {"b": [x]}, "c": (x, x)}),
    "flags": called(lambda m, x, flag, d: x * 2 if flag and d["flag"] and d["mode"] == "sum" else x, x, True, FLAGS),
    "numbers by default": (Named(), (x, {})),
    "a number written into features": called(set_features, x),
    "a parameter": called(lambda m, w: m.lin(w), nn.Parameter(rows())),
    "a temperature": called(lambda m, x, t: x / t, x, torch.tensor(2.0)),
    "nested outputs": called(lambda m, x: Pair(x * 2, (x + 1, None, {"k": x, "w": m.lin.bias * 2})), x),
    "two batches": called(lambda m, x, y: (x * 2, y * 2), x, rows()[:3]),
    "rows beside rows": called(lambda m, x, y: x * y.sum(-1, keepdim=True) + y.softmax(-1), x, rows()),
    "ids and a mask": called(lambda m, i, k: m.emb(i) * k[..., None], torch.zeros(4, 5, dtype=torch.int64), rows(5)),
    "a mask of rows": called(lambda m, i, k: k[:, None] & (i[..., None] > 2), torch.full((4, 5), 3), rows(5) > 0),
    "attention": called(attend, x3),
    "a leading token": called(lambda m, x: torch.cat([m.lin.bias.expand(x.shape[0], 1, -1), m.lin(x)], 1), x3),
    "tokens flattened and back": called(lambda m, x: m.lin(x.view(-1, D)).view(x.shape), x3),
    "a hook that scales": (hooked_within(lambda m, i, o: o * 2), (x,)),
    "options taken out": (TakesOptions(), (x,)),
    "no gradient": (WithoutGradient(), (x,)),
    "batch norm": (nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)).eval(), (x,)),
    "dropout": (nn.Sequential(nn.Linear(D, D), nn.Dropout()).eval(), (x,)),
    "a flag set to what it is": called(lambda m, x: (setattr(m, "calls", 0), x * 2)[1], x),
}
