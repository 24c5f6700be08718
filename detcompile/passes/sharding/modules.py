"""Modules that replace linears, embeddings and norms whose features are shared by several ranks.

Each copies its rank's share of the parameters of the module that it replaces, so that the rest can be freed.
"""

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import Conv1D

from detcompile.parallel import TensorParallel
from detcompile.passes.modules.exact import ExactLinear, dequantized
from detcompile.passes.modules.quantized_linear import QuantizedLinear
from detcompile.templates.ops import ours
from detcompile.templates.quantized.weights import kept_inputs

Linear: TypeAlias = nn.Linear | Conv1D | QuantizedLinear | ExactLinear


class RowParallelLinear(nn.Module):
    """A linear with the declared sum tree over leaves of K, and one rounding after the bias.

    forward(x [..., K]) -> [..., N] in x.dtype. Shares the parameters of the linear it replaces.
    """

    def __init__(self, linear: nn.Linear | Conv1D, radices: tuple[int, ...]) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.weight_is_KN = isinstance(linear, Conv1D)
        self.radices = list(radices)

    def forward(self, x: Tensor) -> Tensor:
        w_NK = self.weight.t() if self.weight_is_KN else self.weight
        out = ours.matmul(x.flatten(0, -2), w_NK, self.bias, None, self.radices)
        return out.view(*x.shape[:-1], w_NK.shape[0])


class RowShardLinear(nn.Module):
    """One rank's share of a RowParallelLinear: a subtree over its part of K, then the tree over the ranks.

    forward(x [..., K] or this rank's [..., K / tp]) -> [..., N] in x.dtype, the same on every rank.

    Args:
        radices: fan-ins of the tree over the ranks, and of each rank's subtree.
    """

    def __init__(
        self, linear: nn.Linear | Conv1D, radices: tuple[tuple[int, ...], tuple[int, ...]], ranks: TensorParallel
    ) -> None:
        super().__init__()
        self.weight_is_KN = isinstance(linear, Conv1D)
        whole = linear.weight.shape[0 if self.weight_is_KN else 1]
        self.share = ranks.share(whole)
        share_of_weight = linear.weight[self.share] if self.weight_is_KN else linear.weight[:, self.share]
        self.weight, self.bias = _parameter(share_of_weight), linear.bias
        self.whole = whole
        self.ranks = ranks
        self.radices_above, self.radices = map(list, radices)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] == self.whole:
            x = x[..., self.share]
        w_NK = self.weight.t() if self.weight_is_KN else self.weight
        out = ours.matmul_all_reduce(
            x.flatten(0, -2), w_NK, self.bias, None, self.radices, self.radices_above, self.ranks.group, x.dtype
        )
        return out.view(*x.shape[:-1], w_NK.shape[0])


class QuantizedRowShard(nn.Module):
    """One rank's share of a row-parallel QuantizedLinear: the bits of the whole one, as RowShardLinear.

    forward(x [..., K] or this rank's [..., K / tp]) -> [..., N] in x.dtype, the same on every rank. If K is in an order
    by group (desc_act of gptq), the ranks gather x first: a share of that K reads features of all ranks.

    Args:
        radices: fan-ins of the tree over the ranks, and of each rank's subtree.
    """

    inputs: Tensor | None

    def __init__(
        self, linear: QuantizedLinear, radices: tuple[tuple[int, ...], tuple[int, ...]], ranks: TensorParallel
    ) -> None:
        super().__init__()
        self.whole, self.ranks = linear.in_features, ranks
        share = ranks.share(self.whole)
        self.linear = QuantizedLinear(kept_inputs(linear.quantized, share), linear.bias)
        self.register_buffer("inputs", None if linear.order is None else linear.order[share].clone())
        self.share = share
        self.radices_above, self.radices = map(list, radices)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if self.inputs is not None and rows.shape[1] != self.whole:
            rows = ours.all_gather_columns(rows, self.ranks.group, self.whole)
        if rows.shape[1] == self.whole:
            rows = rows[:, self.share] if self.inputs is None else rows[:, self.inputs]
        parts, linear = self.linear.quantized[:4], self.linear
        partial = ours.dequant_matmul_partial(rows, *parts, linear.group, linear.rows, self.radices, self.ranks.size)
        out = ours.tree_all_reduce(partial, linear.bias, None, self.radices_above, self.ranks.group, x.dtype)
        return out.view(*x.shape[:-1], linear.out_features)


class ExactRowShard(nn.Module):
    """One rank's share of a row-parallel ExactLinear: the bits of the whole one, however K is cut.

    forward(x [..., K] or this rank's part of it) -> [..., N], the same on every rank.

    Args:
        share: the range of K that this rank holds.
        counts: False if another rank counts this range: this one's weights are zeros.
    """

    digits: Tensor
    scales: Tensor

    def __init__(self, linear: ExactLinear, share: slice, counts: bool, group: str) -> None:
        super().__init__()
        self.whole, self.share, self.group = linear.in_features, share, group
        self.x_digits, self.bias = linear.x_digits, linear.bias
        kept = linear.digits[:, :, share].clone(memory_format=torch.contiguous_format)
        self.register_buffer("digits", kept if counts else torch.zeros_like(kept))
        self.register_buffer("scales", linear.scales)

    @property
    def weight(self) -> Tensor:
        """This rank's part of the dequantized weight, for code that reads it, as adapters do for its dtype."""
        return dequantized(self.digits, self.scales)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] == self.whole:
            x = x[..., self.share]
        weight = self.digits, self.scales, self.bias
        out = ours.exact_linear_all_reduce(x.flatten(0, -2), *weight, self.x_digits, self.group)
        return out.view(*x.shape[:-1], self.digits.shape[1])


class GatheredLinear(nn.Module):
    """A linear whose outputs are computed in parts and gathered on every rank: a language-model head.

    forward(x [..., K]) -> [..., N]. Features that do not divide are padded with zero rows, which the gather drops.
    """

    def __init__(self, linear: nn.Linear, ranks: TensorParallel) -> None:
        super().__init__()
        self.num_features = linear.weight.shape[0]
        self.weight = _parameter(_padded_share(linear.weight, ranks))
        self.bias = None if linear.bias is None else _parameter(_padded_share(linear.bias, ranks))
        self.group = ranks.group

    def forward(self, x: Tensor) -> Tensor:
        out = nn.functional.linear(x, self.weight, self.bias)
        gathered = ours.all_gather_columns(out.flatten(0, -2), self.group, self.num_features)
        return gathered.view(*x.shape[:-1], self.num_features)

    def whole_weight(self) -> Tensor:
        """Return the whole weight [N, K]. Every rank must call this."""
        columns: Tensor = ours.all_gather_columns(self.weight.detach().t(), self.group, self.num_features)
        return columns.t().contiguous()


class ExactGatheredLinear(nn.Module):
    """An ExactLinear whose outputs are computed in parts and gathered on every rank: a language-model head.

    forward(x [..., K]) -> [..., N]. Features that do not divide are padded with the last one, which the gather drops.
    """

    def __init__(self, linear: ExactLinear, ranks: TensorParallel) -> None:
        super().__init__()
        self.num_features, self.group = linear.out_features, ranks.group
        rows_a_rank = math.ceil(self.num_features / ranks.size)
        first = ranks.rank * rows_a_rank
        kept = torch.arange(first, first + rows_a_rank, device="cpu").clamp(max=self.num_features - 1)
        linear.keep_features(kept)
        self.linear = linear

    @property
    def weight(self) -> Tensor:
        """This rank's part of the dequantized weight."""
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        gathered = ours.all_gather_columns(self.linear(x).flatten(0, -2), self.group, self.num_features)
        return gathered.view(*x.shape[:-1], self.num_features)


class ShardedEmbedding(nn.Module):
    """An embedding with its rows divided equally among the ranks, and padding at the end.

    forward(ids [...]) -> [..., D], the bytes of the row, times embed_scale if the model scales its embeddings.
    """

    def __init__(self, embedding: nn.Embedding, ranks: TensorParallel) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        self.weight = _parameter(_padded_share(embedding.weight, ranks))
        self.first = ranks.rank * self.weight.shape[0]
        self.group = ranks.group
        self.register_buffer("embed_scale", getattr(embedding, "embed_scale", None), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        rows = ours.sharded_embedding(self.weight, ids, self.first, self.group)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)


class NormAcrossHeads(nn.Module):
    """A norm over the features of all heads, between a sharded projection and attention over this rank's heads.

    forward(x [..., kept features] or [..., all]) -> [..., kept features]

    Args:
        features: the features that this rank keeps.
    """

    def __init__(self, norm: Any, features: Tensor, ranks: TensorParallel) -> None:
        super().__init__()
        self.norm = norm
        self.num_features = norm.weight.shape[0]
        self.group = ranks.group
        self.register_buffer("features", features.to(norm.weight.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.num_features:
            gathered = ours.all_gather_columns(x.flatten(0, -2), self.group, self.num_features)
            x = gathered.view(*x.shape[:-1], self.num_features)
        return self.norm(x)[..., self.features]


def num_features(linear: Linear) -> int:
    """Return the number of outputs of a linear."""
    return int(linear.nf if isinstance(linear, Conv1D) else linear.out_features)


def keep_features(linear: Linear, features: Tensor) -> None:
    """Keep only these outputs of a linear, in this order."""
    if isinstance(linear, (QuantizedLinear, ExactLinear)):
        linear.keep_features(features)
        return
    features = features.to(linear.weight.device)
    linear.weight = _parameter(linear.weight.index_select(1 if isinstance(linear, Conv1D) else 0, features))
    if linear.bias is not None:
        linear.bias = _parameter(linear.bias[features])
    setattr(linear, "nf" if isinstance(linear, Conv1D) else "out_features", len(features))


def _padded_share(whole: Tensor, ranks: TensorParallel) -> Tensor:
    """Return rows [r * n, (r + 1) * n) of ``whole``, with n = ceil(len / ranks) and zeros past its end."""
    rows_a_rank = math.ceil(len(whole) / ranks.size)
    rows = whole[ranks.rank * rows_a_rank : (ranks.rank + 1) * rows_a_rank]
    return torch.cat([rows, rows.new_zeros(rows_a_rank - len(rows), *rows.shape[1:])])


def _parameter(values: Tensor) -> nn.Parameter:
    """Copy, so that the whole tensor can be freed."""
    return nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)
