"""Norms and rotations of q and k and the cache write become one operation. Attention then reads the cache."""

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from detcompile.passes.graphs import insert, replace, shape_of
from detcompile.templates.attention.operands import StepMetadata
from detcompile.templates.attention.rope_cache_gpu import MOST_FEATURES
from detcompile.templates.attention.scores import AttentionRule
from detcompile.templates.ops import ours
from detcompile.torch_internals.graph_nodes import BASES, FUNCTIONALIZED, base_index, forget_eager_inputs

aten = torch.ops.aten
SWAP = [0, 2, 1, 3]  # [1, T, H, D] <-> [1, H, T, D]
CACHES = {base_index("k_cache"), base_index("v_cache"), BASES}
DEVICES = ("cuda",)  # on a CPU, Inductor's loops are faster
LATER = (*StepMetadata._fields, *AttentionRule._fields)


class Norm(NamedTuple):
    """An RMSNorm over the features of a head."""

    weight: fx.Node | None
    eps: float
    round_before_weight: bool


class Rotated(NamedTuple):
    """x * cos + rotate_half(x) * sin, all [1, H, T, D] or broadcast to it; x is ``norm`` of ``raw``."""

    raw: fx.Node
    norm: Norm | None
    cos: fx.Node
    sin: fx.Node


def fuse_rope(gm: fx.GraphModule) -> fx.GraphModule:
    """paged_attention(rope(norm(q)), rope(norm(k)), v, caches, ...)
    ->  cached_attention(rope_cache(q, k, v, cos, sin, ..., caches), caches, ...)

    exact_paged_attention(rope(norm(q)), rope(norm(k)), v, caches, ...)
    ->  exact_rotated_attention(q, k, v, cos, sin, ..., caches, ...)

    With or without norms, over all or the first features of a head with at most MOST_FEATURES. Other rotations keep
    their operations. The bits are the same either way.
    """
    for node in gm.graph.find_nodes(op="call_function", target=FUNCTIONALIZED):
        fuse = FUSIONS.get(node.args[0])
        if fuse is not None and node.kwargs["q"].meta["val"].device.type in DEVICES:
            q, k = (_match_heads(node.kwargs[name]) for name in ("q", "k"))
            if q is not None and k is not None and _belong_together(node, q, k):
                fuse(gm.graph, node, q, k)
    gm.graph.eliminate_dead_code()
    return gm


def _belong_together(attention: fx.Node, q: Rotated, k: Rotated) -> bool:
    kinds = [None if x.norm is None else (x.norm.weight is None, *x.norm[1:]) for x in (q, k)]
    dtypes = {attention.kwargs["v"].meta["val"].dtype, *(x.meta["val"].dtype for x in (q.raw, k.raw, q.cos, q.sin))}
    whole_caches = {name for name in attention.kwargs if name.startswith("_")} == CACHES
    fits = shape_of(q.raw)[-1] <= MOST_FEATURES
    return kinds[0] == kinds[1] and q[2:] == k[2:] and len(dtypes) == 1 and whole_caches and fits


def _fuse(graph: fx.Graph, attention: fx.Node, q: Rotated, k: Rotated) -> None:
    given = attention.kwargs
    norm = q.norm or Norm(None, 0.0, False)
    kwargs = {
        **_operands(graph, attention, q, k),
        "v": given["v"],
        "eps": None if q.norm is None else norm.eps,
        "round_before_weight": norm.round_before_weight,
        "slot_mapping": given["slot_mapping"],
        **{name: given[name] for name in CACHES},
    }
    with graph.inserting_before(attention):
        rope = graph.call_function(FUNCTIONALIZED, (ours.rope_cache.default,), kwargs)
    rope.meta = dict(attention.meta)
    forget_eager_inputs(rope)
    rope.meta["val"] = (given["q"].meta["val"], *attention.meta["val"][1:])
    turned = _part(graph, attention, rope, 0)
    caches = [_part(graph, attention, rope, 1 + given[base_index(f"{name}_cache")]) for name in ("k", "v")]
    stated = {**AttentionRule._field_defaults, **given}
    later = [stated[name] for name in LATER]
    out = insert(graph, ours.cached_attention.default, (turned, *caches, *later), attention)
    forget_eager_inputs(out)
    for user in list(attention.users):
        place = user.args[1]
        replace(user, out if place == 0 else _part(graph, attention, rope, place))
    graph.erase_node(attention)


def _operands(graph: fx.Graph, attention: fx.Node, q: Rotated, k: Rotated) -> dict[str, fx.Node | None]:
    operands = {name: _tokens_first(graph, attention, x.raw) for name, x in (("q", q), ("k", k))}
    tables = {"cos": q.cos, "sin": q.sin}
    operands |= {name: insert(graph, aten.squeeze.dims, (table, [0, 1]), attention) for name, table in tables.items()}
    return operands | {f"{name}_weight": x.norm and x.norm.weight for name, x in (("q", q), ("k", k))}


def _fuse_exact(graph: fx.Graph, attention: fx.Node, q: Rotated, k: Rotated) -> None:
    eps = 0.0 if q.norm is None else q.norm.eps
    attention.args = (ours.exact_rotated_attention.default,)
    attention.kwargs = {**attention.kwargs, **_operands(graph, attention, q, k), "eps": eps}
    forget_eager_inputs(attention)


FUSIONS = {ours.paged_attention.default: _fuse, ours.exact_paged_attention.default: _fuse_exact}


def _part(graph: fx.Graph, origin: fx.Node, node: fx.Node, index: int) -> fx.Node:
    """Return the getitem of one result of ``node``, without duplicates."""
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user
    with graph.inserting_before(origin):
        part = graph.call_function(operator.getitem, (node, index))
    part.meta = {**node.meta, "val": node.meta["val"][index]}
    return part


def _tokens_first(graph: fx.Graph, origin: fx.Node, x: fx.Node) -> fx.Node:
    """[1, H, T, D] -> [T, H, D]"""
    if _is(x, aten.permute.default) and list(x.args[1]) == SWAP:
        rows = x.args[0]
    else:
        rows = insert(graph, aten.permute.default, (x, SWAP), origin)
    return insert(graph, aten.squeeze.dim, (rows, 0), origin)


def _match_heads(rows: fx.Node) -> Rotated | None:
    """Match [T, H, D] = squeeze(permute(rotated [1, H, T, D]), 0) and return the rotation."""
    if not _is(rows, aten.squeeze.dim) or rows.args[1] != 0:
        return None
    swapped: Any = rows.args[0]
    if not _is(swapped, aten.permute.default) or list(swapped.args[1]) != SWAP:
        return None
    turned = swapped.args[0]
    if _is(turned, aten.clone.default):  # from cat([rotated, empty])
        turned = turned.args[0]
    rotated = _match_rotation(turned)
    if rotated is None and _is(turned, aten.cat.default) and len(turned.args[0]) == 2 and _last(turned):
        rotated = _match_partial(*turned.args[0])
    return rotated and _with_norm(rotated)


def _match_partial(turned: fx.Node, rest: fx.Node) -> Rotated | None:
    """cat([rope(x[..., :E]), x[..., E:]])"""
    rotated = _match_rotation(turned)
    taken = rotated and _slice_of(rotated.raw)
    if rotated is None or taken is None:
        return None
    whole, start, end = taken
    return rotated._replace(raw=whole) if start == 0 and _slice_of(rest) == (whole, end, shape_of(whole)[-1]) else None


def _match_rotation(add: fx.Node) -> Rotated | None:
    """x * cos + cat([-x[..., h:], x[..., :h]]) * sin; ``raw`` is x."""
    if not _is(add, aten.add.Tensor) or add.kwargs or not all(_is(arg, aten.mul.Tensor) for arg in add.args):
        return None
    for straight, crossed in (add.args, add.args[::-1]):
        for x, cos in (straight.args, straight.args[::-1]):
            for half, sin in (crossed.args, crossed.args[::-1]):
                if _is_half_turn(half, x) and all(_is_table(table, x) for table in (cos, sin)):
                    return Rotated(x, None, cos, sin)
    return None


def _is_half_turn(node: Any, x: Any) -> bool:
    if not isinstance(x, fx.Node) or not _is(node, aten.cat.default) or len(node.args[0]) != 2 or not _last(node):
        return False
    high, low = node.args[0]
    width = shape_of(x)[-1]
    if width % 2:
        return False
    parts = (_slice_of(high.args[0]), _slice_of(low)) if _is(high, aten.neg.default) else None
    return parts == ((x, width // 2, width), (x, 0, width // 2))


def _is_table(table: Any, x: fx.Node) -> bool:
    """[1, 1, T, E] for x [1, H, T, E]"""
    if not isinstance(table, fx.Node) or not isinstance(table.meta.get("val"), torch.Tensor):
        return False
    sizes, wanted = shape_of(table), shape_of(x)
    return len(wanted) == 4 and sizes == (1, 1, *wanted[2:]) and table.meta["val"].dtype == x.meta["val"].dtype


def _slice_of(node: Any) -> tuple[fx.Node, int, int] | None:
    """(x, start, end) of x[..., start:end]"""
    if not _is(node, aten.slice.Tensor) or node.kwargs or len(node.args) == 5:  # a step
        return None
    x, dim, start = (*node.args, 0, None)[:3]
    rank, first = len(shape_of(x)), start or 0
    if dim % rank != rank - 1 or not isinstance(first, int):
        return None
    return x, first, first + int(shape_of(node)[-1])


def _with_norm(rotated: Rotated) -> Rotated:
    """Move ``raw`` before its norm, which may come before or after the swap of heads and tokens."""
    x = rotated.raw
    norm = _norm_of(x)
    if norm is not None:
        return rotated._replace(raw=x.args[0], norm=norm)
    swapped = _is(x, aten.permute.default) and list(x.args[1]) == SWAP
    norm = _norm_of(x.args[0]) if swapped else None
    if norm is not None:
        permuted = insert(x.graph, aten.permute.default, (x.args[0].args[0], SWAP), x)
        return rotated._replace(raw=permuted, norm=norm)
    return rotated


def _norm_of(node: Any) -> Norm | None:
    if _is(node, ours.rms_norm.default):
        return Norm(*node.args[1:4])
    return Norm(node.args[1], node.args[2], False) if _is(node, ours.exact_rms_norm.default) else None


def _last(cat: fx.Node) -> bool:
    dim = cat.args[1] if len(cat.args) > 1 else 0
    rank = len(shape_of(cat))
    return dim % rank == rank - 1


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target
