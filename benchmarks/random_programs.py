"""Draw small random programs over a batch x [B, T, F], from a grammar of what models do and should not do.

A program depends only on its seed. It is drawn while it is traced, since what fits depends on the shapes. Dimensions
are drawn from all that a value has, so that a reduction, a flip or a product meets rows about as often as features.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import detcompile.templates.ops  # noqa: F401 (registers torch.ops.detcompile)

__all__ = ["FEATURES", "NoFit", "Program", "WEIGHTS"]

FEATURES = 16
MOST_OPERATIONS = 9
WEIGHTS = ((FEATURES, FEATURES), (FEATURES,), (32, FEATURES), (2, 2, 4), (4, 4))  # shapes of the weights at hand


class NoFit(Exception):
    """Raised if the drawn operation does not fit the shapes; another one is then drawn."""


class Program:
    """``program(x, *weights) -> y``: the same operations at every call, y [B, T, ...] or [...] if no row is left.

    Attributes:
        attends: whether a row may read the rows before it in its own sequence; known after a call.
        names: the operations drawn, after a call.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.attends = False
        self.names: list[str] = []

    def __call__(self, x: Tensor, *weights: Tensor) -> Tensor:
        rng = random.Random(self.seed)
        self.attends, self.names = False, []
        values, tries = [x], 0
        for _ in range(rng.randint(1, MOST_OPERATIONS)):
            while True:
                tries += 1
                if tries > 60:
                    raise NoFit
                name, operation = rng.choice(OPERATIONS)
                y = values[-1] if rng.random() < 0.8 else rng.choice(values)
                try:
                    result = operation(rng, y, values, weights)
                except (NoFit, RuntimeError, IndexError, TypeError, ValueError, AssertionError):
                    continue
                if isinstance(result, Tensor) and result.numel() is not None and result.dim() <= 5:
                    break
            self.names.append(name)
            self.attends |= name == "attend"
            values.append(result)
        return _rows_first(values[-1], x)


def _rows_first(y: Tensor, x: Tensor) -> Tensor:
    """Return y with the dimensions of x's rows in front, found by their symbolic extents, which are unique."""
    batch, tokens = (size.node.expr for size in x.shape[:2])
    sizes = [getattr(getattr(size, "node", None), "expr", None) for size in y.shape]
    if batch in sizes and tokens in sizes:
        return y.movedim((sizes.index(batch), sizes.index(tokens)), (0, 1))
    if batch * tokens in sizes:
        return y.movedim(sizes.index(batch * tokens), 0).unflatten(0, x.shape[:2])
    if any(expr is not None and expr.free_symbols for expr in sizes):
        try:
            return y.reshape(*x.shape[:2], -1)
        except RuntimeError as error:
            raise NoFit from error
    return y


Operation = Callable[[random.Random, Tensor, list[Tensor], tuple[Tensor, ...]], Any]


def _floating(y: Tensor) -> Tensor:
    return y if y.is_floating_point() else y.float()


def _dim(rng: random.Random, y: Tensor) -> int:
    """Return a random dimension, the last one as often as all others together."""
    if not y.dim():
        raise NoFit
    return y.dim() - 1 if rng.random() < 0.5 else rng.randrange(y.dim())


def _static(y: Tensor, dim: int, least: int = 2) -> int:
    size = y.shape[dim]
    if not isinstance(size, int) or size < least:
        raise NoFit
    return size


def _unary(rng: random.Random, y: Tensor, *_: Any) -> Tensor:
    return rng.choice(
        [torch.relu, torch.tanh, torch.sigmoid, F.silu, F.gelu, torch.neg, torch.abs, torch.square, torch.sin,
         lambda v: torch.exp(-v.abs()), lambda v: torch.sqrt(v.abs()), lambda v: torch.rsqrt(v.abs() + 1),
         lambda v: v.clamp(-1, 0.5), lambda v: torch.log1p(v.abs()), lambda v: v.round(), torch.sign]
    )(_floating(y))  # fmt: skip


def _scalar(rng: random.Random, y: Tensor, *_: Any) -> Tensor:
    y = _floating(y)
    number = rng.choice([2, 0.5, -1.25, 3])
    return rng.choice([lambda: y + number, lambda: y * number, lambda: y / number, lambda: number - y])()


def _binary(rng: random.Random, y: Tensor, values: list[Tensor], weights: tuple[Tensor, ...]) -> Tensor:
    other = rng.choice([*values, *values, *weights])
    combine = rng.choice([torch.add, torch.mul, torch.sub, torch.maximum, torch.minimum, torch.fmax])
    return combine(_floating(y), _floating(other))


def _compare(rng: random.Random, y: Tensor, values: list[Tensor], *_: Any) -> Tensor:
    other = rng.choice([*values, y * 0.5])
    return torch.where(y > other, y, other)


def _cast(rng: random.Random, y: Tensor, *_: Any) -> Tensor:
    return y.to(rng.choice([torch.bfloat16, torch.float16, torch.float32, torch.float32]))


def _reduce(rng: random.Random, y: Tensor, *_: Any) -> Tensor:
    y, dim, keep = _floating(y), _dim(rng, y), rng.random() < 0.6
    return rng.choice(
        [lambda: y.sum(dim, keep), lambda: y.mean(dim, keep), lambda: y.amax(dim, keep), lambda: y.amin(dim, keep),
         lambda: y.var(dim, keepdim=keep), lambda: y.logsumexp(dim, keep), lambda: y.argmax(dim, keep),
         lambda: (y > 0).sum(dim, keep), lambda: (y > 0).any(dim, keep), lambda: y.norm(dim=dim, keepdim=keep),
         lambda: y.max(dim, keep).values, lambda: y.max(dim, keep).indices, lambda: y.prod(dim, keep)]
    )()  # fmt: skip


def _normalize(rng: random.Random, y: Tensor, _: Any, weights: tuple[Tensor, ...]) -> Tensor:
    y, dim = _floating(y), _dim(rng, y)
    gain = weights[1]
    return rng.choice(
        [lambda: y.softmax(dim), lambda: y.log_softmax(dim), lambda: F.layer_norm(y, y.shape[-1:]),
         lambda: y - y.mean(dim, keepdim=True),
         lambda: y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * gain,
         lambda: F.layer_norm(y, (FEATURES,), gain, gain), lambda: y / (y.abs().amax(dim, keepdim=True) + 1)]
    )()  # fmt: skip


def _global(rng: random.Random, y: Tensor, *_: Any) -> Tensor:
    """Apply an operation that uses a number of the whole batch."""
    y, dim = _floating(y), _dim(rng, y)
    return rng.choice(
        [lambda: y - y.mean(), lambda: y / (y.abs().max() + 1), lambda: y * y.shape[dim],
         lambda: y + torch.full((1,), y.shape[dim], dtype=y.dtype), lambda: y.cumsum(dim),
         lambda: y + torch.arange(y.shape[dim])[:, None], lambda: F.dropout(y, 0.5)]
    )()  # fmt: skip


def _reshape(rng: random.Random, y: Tensor, *_: Any) -> Tensor:
    dim = rng.randrange(y.dim())
    kind = rng.choice(["split", "split", "join", "join", "add", "drop", "whole"])
    if kind == "split":
        size = _static(y, dim, 4)
        return y.unflatten(dim, rng.choice([(2, size // 2), (size // 2, 2), (4, size // 4)]))
    if kind == "join":
        return y.flatten(dim, dim + 1)
    if kind == "add":
        return y.unsqueeze(rng.randrange(y.dim() + 1))
    if kind == "drop":
        return y.squeeze(dim)
    return y.reshape(*y.shape[:dim][::-1], *y.shape[dim:]) if y.dim() > 1 else y


def _turn(rng: random.Random, y: Tensor, *_: Any) -> Tensor:
    order = list(range(y.dim()))
    rng.shuffle(order)
    return y.permute(order) if rng.random() < 0.5 else y.transpose(rng.randrange(y.dim()), rng.randrange(y.dim()))


def _move(rng: random.Random, y: Tensor, values: list[Tensor], *_: Any) -> Tensor:
    dim = _dim(rng, y)
    size = y.shape[dim]
    half = size // 2
    others = [value for value in values if value.dim() == y.dim()]
    return rng.choice(
        [lambda: y.flip(dim), lambda: y.roll(1, dim), lambda: torch.cat([y, rng.choice(others)], dim),
         lambda: torch.stack([y, -y], dim), lambda: y.select(dim, rng.choice([0, -1])), lambda: y.narrow(dim, 0, half),
         lambda: y.narrow(dim, half, half), lambda: F.pad(y, (1, -1)), lambda: F.pad(y, (0, 0, 1, -1)),
         lambda: y.repeat_interleave(2, dim),
         lambda: torch.cat([y.narrow(dim, half, half), y.narrow(dim, 0, half)], dim),
         lambda: y.unsqueeze(dim).expand(*y.shape[:dim], size, *y.shape[dim:]), lambda: y.unbind(dim)[0],
         lambda: y.chunk(2, dim)[1], lambda: y.diagonal(0, dim, -1)]
    )()  # fmt: skip


def _rank(rng: random.Random, y: Tensor, *_: Any) -> Tensor:
    dim = _dim(rng, y)
    largest = rng.random() < 0.5
    return rng.choice(
        [lambda: y.sort(dim, descending=largest).values, lambda: y.sort(dim).indices,
         lambda: y.argsort(dim, stable=True),
         lambda: y.topk(2, dim, largest).values, lambda: y.topk(2, dim, largest).indices,
         lambda: y.topk(1, dim, sorted=False).values]
    )()  # fmt: skip


def _look_up(rng: random.Random, y: Tensor, values: list[Tensor], weights: tuple[Tensor, ...]) -> Tensor:
    dim = _dim(rng, y)
    ids = rng.choice(values).abs().nan_to_num(0, 0, 0).clamp(max=1).long()
    return rng.choice(
        [lambda: F.embedding(ids.clamp(0, 31), weights[2]), lambda: y.gather(dim, ids), lambda: y[ids.flatten()],
         lambda: weights[2][ids], lambda: y.index_select(dim, ids.flatten()), lambda: F.one_hot(ids, 4),
         lambda: y.scatter(dim, ids, 1.0), lambda: y.scatter_add(dim, ids, y), lambda: y.masked_fill(ids > 0, 0.5),
         lambda: y.index_add(0, ids.flatten(), y), lambda: y[y > 0]]
    )()  # fmt: skip


def _multiply(rng: random.Random, y: Tensor, values: list[Tensor], weights: tuple[Tensor, ...]) -> Tensor:
    y, w = _floating(y).float(), weights[0]
    other = _floating(rng.choice(values)).float()
    return rng.choice(
        [lambda: y @ w, lambda: F.linear(y, w), lambda: F.linear(y, w, weights[1]), lambda: y + y @ w,
         lambda: F.linear(y, weights[2]), lambda: y @ weights[4], lambda: F.silu(y @ w) * (y @ w.t()),
         lambda: y @ other.transpose(-1, -2), lambda: y.transpose(-1, -2) @ other, lambda: w @ y]
    )()  # fmt: skip


def _attend(rng: random.Random, y: Tensor, *_: Any) -> Tensor:
    """Apply causal attention over [B, H, T, D], whatever these dimensions of y are."""
    heads = y if y.dim() == 4 else y.unflatten(-1, (4, 4)).transpose(1, 2)
    window = rng.choice([0, 0, 3])
    out = torch.ops.detcompile.dense_attention(heads, heads * 0.5, heads, 0.5, window, 512)
    return out if y.dim() == 4 else out.transpose(1, 2).flatten(2)


OPERATIONS: tuple[tuple[str, Operation], ...] = (
    ("unary", _unary), ("unary", _unary), ("unary", _unary), ("scalar", _scalar), ("binary", _binary),
    ("binary", _binary), ("compare", _compare), ("cast", _cast), ("reduce", _reduce), ("normalize", _normalize),
    ("normalize", _normalize), ("global", _global), ("reshape", _reshape), ("reshape", _reshape), ("turn", _turn),
    ("move", _move), ("move", _move), ("rank", _rank), ("look up", _look_up), ("multiply", _multiply),
    ("multiply", _multiply), ("attend", _attend),
)  # fmt: skip
