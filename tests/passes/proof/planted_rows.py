"""Operations to plant after a value of a graph: some mix rows, the others keep them apart.

Each takes a Planter and returns the node that is added to the value.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tests.passes.proof.planting import Planter

__all__ = ["ANYWHERE", "NEUTRAL", "REWRITTEN", "UNPINNED"]

aten, prims, ours = torch.ops.aten, torch.ops.prims, torch.ops.detcompile
Plant = Callable[[Planter], fx.Node]


def over_rows(target: Any, *rest: Any) -> Plant:
    """Reduce over the rows and keep their dimension."""
    return lambda p: p.add(target, p.x, [p.rows], *rest)


def whole(target: Any, *rest: Any) -> Plant:
    return lambda p: p.add(target, p.x, *rest)


def along_rows(target: Any, *rest: Any) -> Plant:
    return lambda p: p.add(target, p.x, p.rows, *rest)


def first(plant: Plant) -> Plant:
    """Return the first of an operation's results."""
    return lambda p: p.part(plant(p), 0)


def flat(p: Planter) -> fx.Node:
    """Return x as [rows, F]; average its heads if it has any."""
    shape = p.x.meta["val"].shape
    others = [dim for dim in range(len(shape) - 1) if dim != p.rows]
    return p.add(aten.amax.default, p.x, others) if others else p.x


def unflat(p: Planter, y: fx.Node) -> fx.Node:
    """Return [rows, F] with x's dimensions."""
    for dim in range(p.x.meta["val"].dim() - 1):
        y = y if dim == p.rows else p.add(aten.unsqueeze.default, y, dim)
    return y


def square(p: Planter) -> fx.Node:
    """Return a weight [F, F]."""
    return p.add(aten.full.default, [p.features, p.features], 0.5)


def halves(p: Planter) -> fx.Node:
    """[..., 2, F / 2]"""
    parts = [p.add(aten.slice.Tensor, p.x, -1, start, start + p.features // 2) for start in (0, p.features // 2)]
    return p.add(aten.cat.default, [p.add(aten.unsqueeze.default, part, -2) for part in parts], -2)


def row_numbers(p: Planter) -> fx.Node:
    """Return one number per row, computed from it: [rows] int64. A clamp becomes these two operations."""
    ids = p.add(prims.convert_element_type.default, p.add(aten.select.int, flat(p), 1, 0), torch.int64)
    return p.add(aten.clamp_max.default, p.add(aten.clamp_min.default, ids, 0), 0)


def shifted(p: Planter) -> fx.Node:
    first_row = p.add(aten.slice.Tensor, p.x, p.rows, 0, 1)
    return p.add(aten.cat.default, [first_row, first_row], p.rows)


def meeting(p: Planter) -> fx.Node:
    x = flat(p)
    pairs = p.add(aten.sub.Tensor, p.add(aten.unsqueeze.default, x, 0), p.add(aten.unsqueeze.default, x, 1))
    return unflat(p, p.add(aten.amax.default, pairs, [0]))


def largest(p: Planter, y: fx.Node) -> fx.Node:
    """Return one number if the planted value has other dimensions than x."""
    return p.add(aten.amax.default, y, [])


def scores(p: Planter) -> fx.Node:
    """Multiply tokens by tokens with the pinned product."""
    x = flat(p)
    return largest(p, p.add(ours.matmul.default, x, x, None, None, []))


def batched_scores(p: Planter) -> fx.Node:
    x = p.add(aten.unsqueeze.default, flat(p), 0)
    return largest(p, p.add(aten.bmm.default, x, p.add(aten.permute.default, x, [0, 2, 1])))


def product_over_rows(p: Planter) -> fx.Node:
    turned = p.add(aten.permute.default, flat(p), [1, 0])
    return largest(p, p.add(ours.matmul.default, turned, turned, None, None, []))


def cut(p: Planter) -> fx.Node:
    """Return [rows, F] viewed as [F, rows] and back."""
    turned = p.add(
        aten.clone.default, p.add(aten.permute.default, flat(p), [1, 0]), memory_format=torch.contiguous_format
    )
    return unflat(p, p.add(aten.view.default, turned, [p.count, p.features]))


def normed_over_rows(p: Planter) -> fx.Node:
    turned = p.add(aten.permute.default, flat(p), [1, 0])
    return unflat(p, p.add(aten.permute.default, p.add(ours.rms_norm.default, turned, None, 1e-5, False), [1, 0]))


def weighed_by_place(p: Planter) -> fx.Node:
    """Multiply by a weight made of several rows' features: a row's factor depends on its position."""
    weight = p.add(aten.full.default, [3 * p.features], 0.5)
    return unflat(p, p.add(ours.rms_norm.default, flat(p), weight, 1e-5, False))


def summed_over_rows(p: Planter) -> fx.Node:
    return p.add(ours.row_sum.default, p.add(aten.permute.default, flat(p), [1, 0]), torch.float32)


def summed_tokens(p: Planter) -> fx.Node:
    """Return the gradient of a bias, in a forward."""
    return largest(p, p.add(ours.token_sum.default, flat(p), -44))


def multiplied_tokens(p: Planter) -> fx.Node:
    """Return the gradient of a matrix, in a forward."""
    leaves = p.add(aten.full.default, [2], 0, dtype=torch.int32)
    return largest(p, p.add(ours.token_matmul.default, flat(p), flat(p), leaves, 1, -44))


def softmax_over_rows(p: Planter) -> fx.Node:
    turned = p.add(aten.permute.default, flat(p), [1, 0])
    return largest(p, p.add(ours.softmax.default, turned, torch.float32, []))


def batch_scale(p: Planter) -> fx.Node:
    largest = p.add(aten.amax.default, p.add(aten.abs.default, p.x), [])
    return p.add(aten.mul.Tensor, p.add(aten.round.default, p.add(aten.div.Tensor, p.x, largest)), largest)


def filled_by_statistics(p: Planter) -> fx.Node:
    above = p.add(aten.gt.Tensor, p.x, p.add(aten.mean.default, p.x))
    return p.add(aten.where.self, above, p.x, p.add(aten.full.default, [], 0.0))


def batch_norm(p: Planter) -> fx.Node:
    return unflat(p, p.part(p.add(aten._native_batch_norm_legit.no_stats, flat(p), None, None, True, 0.1, 1e-5), 0))


def chosen_by_count(p: Planter) -> fx.Node:
    """Return bfloat16 for many rows, float32 for few."""
    many = p.add(torch.ops.aten.scalar_tensor.default, p.count)
    narrow = p.add(prims.convert_element_type.default, p.x, torch.bfloat16)
    narrow = p.add(prims.convert_element_type.default, narrow, torch.float32)
    return p.add(aten.where.self, p.add(aten.gt.Scalar, many, 8), narrow, p.x)


def scale_by_branch(p: Planter) -> fx.Node:
    count = p.count.meta["val"]
    many = p.add(operator.gt, p.count, 8, value=count > 8)
    return p.add(aten.mul.Tensor, p.x, p.add(torch.sym_ite, many, 2, 1, value=torch.sym_ite(count > 8, 2, 1)))


def token_experts(p: Planter) -> fx.Node:
    """Use the rows themselves as the experts' weights."""
    w = p.add(aten.unsqueeze.default, flat(p), 0)
    ids = p.add(prims.convert_element_type.default, row_numbers(p), torch.int32)
    return largest(p, p.add(ours.expert_matmul.default, flat(p), ids, w, None))


def window(p: Planter) -> fx.Node:
    heads = p.add(aten.unsqueeze.default, p.add(aten.unsqueeze.default, flat(p), 0), 0)
    return largest(p, p.add(ours.dense_attention.default, heads, heads, heads, 1.0, 0, 64))


def counted_tree(p: Planter) -> fx.Node:
    x = flat(p)
    return unflat(p, p.add(ours.matmul.default, x, square(p), None, None, [p.count], value=x.meta["val"]))


def undeclared_tree(p: Planter) -> fx.Node:
    return unflat(p, p.add(ours.matmul.default, flat(p), square(p), None, None, [4]))


def number_read(p: Planter) -> fx.Node:
    one = p.add(aten.full.default, [], 3)
    return p.add(aten.mul.Tensor, p.x, p.add(aten._local_scalar_dense.default, one, value=p.count.meta["val"]))


def own_ids(p: Planter) -> fx.Node:
    """Return an index of x's shape, computed from x: int64 zeros."""
    ids = p.add(prims.convert_element_type.default, p.x, torch.int64)
    return p.add(aten.clamp_max.default, p.add(aten.clamp_min.default, ids, 0), 0)


def like(p: Planter, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Apply an operation whose result has x's shape."""
    return p.add(target, *args, value=p.x.meta["val"], **kwargs)


# Neither pinned by a pass nor allowed by a rule: refused before and after the passes.
ANYWHERE: dict[str, Plant] = {
    "mean_over_rows": over_rows(aten.mean.dim, True),
    "sum_over_rows": over_rows(aten.sum.dim_IntList, True),
    "largest_of_rows": over_rows(aten.amax.default, True),
    "smallest_of_rows": over_rows(aten.amin.default, True),
    "any_of_rows": lambda p: p.add(aten.any.dim, p.add(aten.gt.Scalar, p.x, 0), p.rows, True),
    "count_of_rows": lambda p: p.add(aten.sum.dim_IntList, p.add(aten.gt.Scalar, p.x, 0), [p.rows], True),
    "likeliest_row": along_rows(aten.argmax.default, True),
    "largest_with_place": first(along_rows(aten.max.dim, True)),
    "variance_over_rows": lambda p: p.add(aten.var.correction, p.x, [p.rows], correction=1, keepdim=True),
    "moments_over_rows": first(lambda p: p.add(aten.var_mean.correction, p.x, [p.rows], correction=0, keepdim=True)),
    "product_over_rows": along_rows(aten.prod.dim_int, True),
    "norm_over_rows": lambda p: p.add(aten.linalg_vector_norm.default, p.x, 2, [p.rows], True),
    "global_mean": whole(aten.mean.default),
    "global_sum": whole(aten.sum.default),
    "global_largest": whole(aten.max.default),
    "global_norm": whole(aten.linalg_vector_norm.default),
    "softmax_over_rows": along_rows(aten._softmax.default, False),
    "log_softmax_over_rows": along_rows(aten._log_softmax.default, False),
    "logsumexp_over_rows": lambda p: like(p, aten.logsumexp.default, p.x, [p.rows], True),
    "running_sum_over_rows": along_rows(aten.cumsum.default),
    "running_product_over_rows": along_rows(aten.cumprod.default),
    "running_logsumexp_of_rows": lambda p: like(p, aten.logcumsumexp.default, p.x, p.rows),
    "product_over_features": lambda p: p.add(aten.prod.dim_int, p.x, -1, True),
    "batch_norm": batch_norm,
    "moments_of_everything": first(lambda p: p.add(aten.var_mean.correction, p.x, None, correction=0)),
    "scale_by_the_batch": batch_scale,
    "filled_by_statistics": filled_by_statistics,
    "rows_sorted": first(lambda p: p.add(aten.sort.stable, p.x, stable=True, dim=p.rows)),
    "rows_ranked": lambda p: p.part(p.add(aten.sort.stable, p.x, stable=True, dim=p.rows), 1),
    "topk_of_rows": lambda p: largest(p, p.part(p.add(aten.topk.default, p.x, 1, p.rows), 0)),
    "median_of_rows": first(along_rows(aten.median.dim, True)),
    "median_of_features": first(lambda p: p.add(aten.median.dim, p.x, -1, True)),
    "rows_reversed": over_rows(aten.flip.default),
    "rows_rolled": lambda p: like(p, aten.roll.default, p.x, [1], [p.rows]),
    "last_row": lambda p: p.add(aten.unsqueeze.default, p.add(aten.select.int, p.x, p.rows, -1), p.rows),
    "first_row_broadcast": lambda p: p.add(aten.slice.Tensor, p.x, p.rows, 0, 1),
    "first_row_twice": lambda p: p.add(aten.amax.default, shifted(p), [p.rows], True),
    "first_rows": lambda p: p.add(aten.amax.default, p.add(aten.slice.Tensor, p.x, p.rows, 0, 2), [p.rows], True),
    "every_second_row": lambda p: p.add(
        aten.amax.default, p.add(aten.slice.Tensor, p.x, p.rows, 0, 2**63 - 1, 2), [p.rows], True
    ),
    "row_by_index": lambda p: p.add(aten.index_select.default, p.x, p.rows, row_numbers(p)),
    "row_by_advanced_index": lambda p: p.add(aten.index.Tensor, p.x, [None] * p.rows + [row_numbers(p)]),
    "row_by_gather": lambda p: p.add(aten.gather.default, p.x, p.rows, own_ids(p)),
    "row_by_embedding": lambda p: unflat(p, p.add(aten.embedding.default, flat(p), row_numbers(p))),
    "rows_read_as_columns": cut,
    "rows_strided": lambda p: like(p, aten.as_strided.default, p.x, [p.count, p.features], [1, 1]),
    "diagonal": lambda p: p.add(aten.diagonal.default, flat(p), value=p.mode.from_tensor(torch.zeros(p.features))),
    "rows_meet_rows": meeting,
    "scores": scores,
    "product_over_tokens": product_over_rows,
    "batched_scores": batched_scores,
    "mv": lambda p: unflat(p, p.add(aten.unsqueeze.default, p.add(
        aten.mv.default, flat(p), p.add(aten.full.default, [p.features], 1.0)), 1)),
    "convolution": lambda p: like(p, aten.convolution.default, p.x, square(p), None, [1], [1], [1], False, [0], 1),
    "pooling": lambda p: like(p, aten.avg_pool2d.default, p.x, [3, 1], [1, 1], [1, 0]),
    "fourier": lambda p: like(p, aten._fft_r2c.default, p.x, [p.rows], 0, True),
    "sdpa": lambda p: like(p, aten._scaled_dot_product_flash_attention_for_cpu.default, p.x, p.x, p.x),
    "step_as_one_sequence": window,
    "index_put_accumulates": lambda p: p.add(
        aten.index_put.default, p.x, [None] * p.rows + [row_numbers(p)], p.x, True
    ),
    "index_put_rows": lambda p: p.add(aten.index_put.default, p.x, [None] * p.rows + [row_numbers(p)], p.x),
    "index_add_rows": lambda p: p.add(aten.index_add.default, p.x, p.rows, row_numbers(p), p.x),
    "index_add_features": lambda p: p.add(
        aten.index_add.default, p.x, -1, p.add(aten.full.default, [p.features], 0, dtype=torch.int64), p.x
    ),
    "index_copy_rows": lambda p: p.add(aten.index_copy.default, p.x, p.rows, row_numbers(p), p.x),
    "scatter_add_rows": lambda p: p.add(aten.scatter_add.default, p.x, p.rows, own_ids(p), p.x),
    "scatter_add_features": lambda p: p.add(aten.scatter_add.default, p.x, -1, own_ids(p), p.x),
    "scatter_features": lambda p: p.add(aten.scatter.src, p.x, -1, own_ids(p), p.x),
    "scatter_value_rows": lambda p: p.add(aten.scatter.value, p.x, p.rows, own_ids(p), 1.0),
    "scatter_reduce": lambda p: p.add(aten.scatter_reduce.two, p.x, -1, own_ids(p), p.x, "sum"),
    "histogram": lambda p: p.add(aten.sum.default, p.add(aten.histc.default, p.x, 4)),
    "mask_chooses": lambda p: p.add(
        aten.index.Tensor, p.x, [p.add(aten.gt.Scalar, p.x, 0)], value=p.mode.from_tensor(torch.zeros(1))
    ),
    "count_as_factor": lambda p: p.add(aten.mul.Tensor, p.x, p.count),
    "count_as_power": lambda p: p.add(aten.pow.Tensor_Scalar, p.x, p.count),
    "count_as_alpha": lambda p: p.add(aten.add.Tensor, p.x, p.x, alpha=p.count),
    "count_as_bound": lambda p: p.add(aten.clamp_max.default, p.x, p.count),
    "count_as_tensor": lambda p: p.add(aten.scalar_tensor.default, p.count),
    "count_as_fill": lambda p: p.add(aten.full.default, [1], p.count),
    "count_by_ones": lambda p: p.add(aten.sum.default, p.add(aten.full.default, [p.count], 1)),
    "count_as_start": lambda p: p.add(
        aten.slice.Tensor, p.x, -1,
        p.add(operator.mod, p.count, 2, value=p.count.meta["val"] % 2), 2**63 - 1, value=p.x.meta["val"],
    ),
    "numbers_of_rows": lambda p: unflat(
        p, p.add(aten.unsqueeze.default, p.add(prims.iota.default, p.count, start=0, step=1, dtype=torch.int64,
                                                device=torch.device("cpu"), requires_grad=False), 1)
    ),
    "dtype_by_count": chosen_by_count,
    "scale_by_branch": scale_by_branch,
    "number_read_out": number_read,
    "tree_undeclared": undeclared_tree,
    "weights_of_rows": token_experts,
    "template_norm_over_rows": normed_over_rows,
    "template_norm_weighed_by_place": weighed_by_place,
    "template_sum_over_rows": summed_over_rows,
    "gradient_of_a_bias": summed_tokens,
    "gradient_of_a_matrix": multiplied_tokens,
    "template_softmax_over_rows": softmax_over_rows,
    "random_numbers": whole(aten.rand_like.default),
    "bernoulli": whole(aten.bernoulli.p, 0.5),
    "dropout": first(whole(aten.native_dropout.default, 0.5, True)),
    "memory_unwritten": whole(aten.empty_like.default),
    "written_in_place": lambda p: p.add(aten.relu_.default, p.add(aten.clone.default, p.x)),
    "all_reduce": lambda p: like(p, torch.ops._c10d_functional.all_reduce.default, p.x, "sum", "0"),
    "tree_of_no_partial": lambda p: unflat(
        p, p.add(ours.tree_all_reduce.default, flat(p), None, None, [2], "never asked", torch.float32)
    ),
}  # fmt: skip

# Pinned by the passes, in the form before them: refused if it appears after the passes.
UNPINNED: dict[str, Plant] = {
    "sum_of_features": lambda p: p.add(aten.sum.dim_IntList, p.x, [-1], True),
    "running_sum_of_features": lambda p: p.add(aten.cumsum.default, p.x, -1),
    "sum_in_two_parts": lambda p: p.add(aten.sum.dim_IntList, p.add(aten.sum.dim_IntList, halves(p), [-1]), [-1], True),
    "mean_of_features": lambda p: p.add(aten.mean.dim, p.x, [-1], True),
    "variance_of_features": lambda p: p.add(aten.var.correction, p.x, [-1], correction=1, keepdim=True),
    "softmax_of_features": lambda p: p.add(aten._softmax.default, p.x, -1, False),
    "layer_norm": first(lambda p: p.add(aten.native_layer_norm.default, p.x, [p.features], None, None, 1e-5)),
    "logsumexp_of_features": lambda p: p.add(aten.logsumexp.default, p.x, [-1], True),
    "mm": lambda p: unflat(p, p.add(aten.mm.default, flat(p), square(p))),
    "addmm": lambda p: unflat(
        p, p.add(aten.addmm.default, p.add(aten.full.default, [p.features], 1.0), flat(p), square(p))
    ),
    "bmm": lambda p: unflat(
        p,
        p.add(
            aten.squeeze.dim,
            p.add(
                aten.bmm.default, p.add(aten.unsqueeze.default, flat(p), 0), p.add(aten.unsqueeze.default, square(p), 0)
            ),
            0,
        ),
    ),
    "topk_values": first(lambda p: p.add(aten.topk.default, p.x, 1)),
    "topk_indices": lambda p: p.part(p.add(aten.topk.default, p.x, 1), 1),
    "sort_values": first(lambda p: p.add(aten.sort.default, p.x)),
    "sort_indices": lambda p: p.part(p.add(aten.sort.default, p.x), 1),
}

# Never in a trace, but a pass could produce it.
REWRITTEN: dict[str, Plant] = {"tree_by_count": counted_tree}

# Row by row: certified everywhere.
NEUTRAL: dict[str, Plant] = {
    "pointwise": lambda p: p.add(aten.tanh.default, p.add(aten.mul.Tensor, p.x, p.x)),
    "narrowed": lambda p: p.add(prims.convert_element_type.default, p.x, torch.bfloat16),
    "features_reversed": lambda p: p.add(aten.flip.default, p.x, [-1]),
    "features_halved": lambda p: p.add(aten.cat.default, [
        p.add(aten.slice.Tensor, p.x, -1, p.features // 2, 2**63 - 1),
        p.add(aten.slice.Tensor, p.x, -1, 0, p.features // 2)], -1),
    "largest_feature": lambda p: p.add(aten.amax.default, p.x, [-1], True),
    "likeliest_feature": lambda p: p.add(aten.argmax.default, p.x, -1, True),
    "features_sorted": first(lambda p: p.add(aten.sort.stable, p.x, stable=True)),
    "feature_gathered": lambda p: p.add(aten.gather.default, p.x, -1, own_ids(p)),
    "value_scattered": lambda p: p.add(aten.scatter.value, p.x, -1, own_ids(p), 1.0),
    "features_counted": lambda p: p.add(aten.sum.dim_IntList, p.add(aten.gt.Scalar, p.x, 0), [-1], True),
    "pinned_sum": lambda p: p.add(aten.unsqueeze.default, p.add(ours.row_sum.default, p.x, torch.float32), -1),
    "pinned_softmax": lambda p: p.add(ours.softmax.default, p.x, torch.float32, []),
    "pinned_norm": lambda p: p.add(ours.rms_norm.default, p.x, None, 1e-5, False),
    "pinned_product": lambda p: unflat(p, p.add(ours.matmul.default, flat(p), square(p), None, None, [])),
    "declared_tree": lambda p: unflat(p, p.add(ours.matmul.default, flat(p), square(p), None, None, [2])),
    "stacked": lambda p: p.add(aten.amax.default, p.add(aten.cat.default, [
        p.add(aten.unsqueeze.default, p.x, 0), p.add(aten.unsqueeze.default, p.x, 0)], 0), [0]),
    "turned_and_back": lambda p: unflat(p, p.add(
        aten.permute.default, p.add(aten.exp.default, p.add(aten.permute.default, flat(p), [1, 0])), [1, 0])),
    "a_table_by_content": lambda p: unflat(p, p.add(aten.embedding.default, square(p), row_numbers(p))),
    "running_statistics": lambda p: p.add(
        aten.mul.Tensor, p.add(aten.sub.Tensor, p.x, p.add(aten.full.default, [p.features], 0.5)),
        p.add(aten.rsqrt.default, p.add(aten.full.default, [p.features], 2.0))),
    "ones_a_row": lambda p: unflat(p, p.add(aten.full.default, [p.count, 1], 1.0)),
}  # fmt: skip
