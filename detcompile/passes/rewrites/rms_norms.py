"""The operations that an RMSNorm is written in become one template."""

import torch
from torch import fx

from detcompile.passes.graphs import insert, replace, shape_of
from detcompile.passes.rewrites.reductions import keeps_dims, reduced_dims
from detcompile.templates.ops import ours
from detcompile.torch_internals.operators import OpOverload

__all__ = ["pin_rms_norms"]

aten, prims = torch.ops.aten, torch.ops.prims


def pin_rms_norms(gm: fx.GraphModule) -> fx.GraphModule:
    """The eight operations of an RMSNorm  ->  rms_norm(x, weight, eps, round_before_weight)

        h = x.float(); n = h * rsqrt(mean(h * h, -1) + eps)
        n.to(x.dtype) * weight                               round_before_weight = True   (Llama, Qwen)
        (n * weight_fp32).to(x.dtype)                        round_before_weight = False  (Gemma)

    Runs before pin_reductions; a norm of another shape keeps its operations and gets only its mean pinned.
    """
    for mean in gm.graph.find_nodes(op="call_function", target=aten.mean.dim):
        found = _match_rms_norm(mean)
        if found:
            last, args = found
            replace(last, insert(gm.graph, ours.rms_norm.default, args, last))
    gm.graph.eliminate_dead_code()
    return gm


def _only_user(node: fx.Node, *targets: OpOverload) -> fx.Node | None:
    """What alone reads the node, if it is one of these operations; an addition that scales an operand is none."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target in targets and not users[0].kwargs else None


def _match_rms_norm(mean: fx.Node) -> tuple[fx.Node, tuple] | None:
    """The last operation of the norm and the template's arguments."""
    square = mean.args[0]
    h = square.args[0] if square.args else None
    squared = square.target is aten.pow.Tensor_Scalar and square.args[1] == 2
    squared = squared or (square.target is aten.mul.Tensor and square.args[0] is square.args[1])
    if (
        not squared
        or not isinstance(h, fx.Node)
        or h.meta["val"].dtype != torch.float32
        or reduced_dims(mean) != [len(shape_of(h)) - 1]
    ):
        return None
    shifted = _only_user(mean, aten.add.Tensor)
    if shifted is None or not isinstance(shifted.args[1], float):
        return None
    root = _only_user(shifted, aten.rsqrt.default)
    normed = root and _only_user(root, aten.mul.Tensor)
    if normed is None or not keeps_dims(mean) or {normed.args[0], normed.args[1]} != {h, root}:
        return None
    return _match_weight(normed, h, float(shifted.args[1]))


def _match_weight(normed: fx.Node, h: fx.Node, eps: float) -> tuple[fx.Node, tuple] | None:
    widened = h.target is prims.convert_element_type.default
    x = h.args[0] if widened else h
    dtype, length = x.meta["val"].dtype, shape_of(h)[-1]
    rounded = _only_user(normed, prims.convert_element_type.default) if widened else normed
    if rounded is not None and rounded.meta["val"].dtype == dtype:
        scaled = _only_user(rounded, aten.mul.Tensor)
        weight = scaled and _vector(scaled, rounded, length, dtype)
        return (scaled, (x, weight, eps, True)) if weight else (rounded, (x, None, eps, True))
    scaled = _only_user(normed, aten.mul.Tensor)
    weight = scaled and _vector(scaled, normed, length, None)
    narrowed = weight and _only_user(scaled, prims.convert_element_type.default)
    if narrowed and narrowed.meta["val"].dtype == dtype:
        return narrowed, (x, weight, eps, False)
    return None


def _vector(product: fx.Node, other: fx.Node, length: object, dtype: torch.dtype | None) -> fx.Node | None:
    """The factor of ``product`` that is a weight of [R] in ``dtype`` (None: in any)."""
    factors = [arg for arg in product.args if arg is not other]
    if len(factors) != 1 or not isinstance(factors[0], fx.Node):
        return None
    value = factors[0].meta["val"]
    return factors[0] if shape_of(factors[0]) == (length,) and dtype in (None, value.dtype) else None
