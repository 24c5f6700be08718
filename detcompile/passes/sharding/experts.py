"""Shard experts: every rank holds a range of each expert's inner features, and the tree adds the down products.

The ranks add the product of one token with one expert before it is rounded, weighted and added to the token's other
experts. So the sum over K is rounded once, for any number of ranks. Every rank holds whole routers.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from detcompile.errors import NumericsError, UnsupportedModel
from detcompile.orders.numerics import Numerics, matmul_order
from detcompile.parallel import TensorParallel
from detcompile.passes.modules.exact import ExactStack
from detcompile.passes.modules.experts import ExpertTree, find_experts
from detcompile.passes.modules.quantized_linear import QuantizedStack
from detcompile.transformers_internals.experts import gated


def pin_expert_trees(model: PreTrainedModel, numerics: Numerics) -> int:
    """Give the experts of ``model`` the declared tree, on one rank. Return the number of modules.

    Raises:
        NumericsError: their inner features do not split into equal leaves; the message names the module.
    """
    modules = find_experts(model)
    for name, module in modules:
        _require_leaves(name, module, numerics)
        module.tree = ExpertTree(numerics.radices)
    return len(modules)


def shard_experts(name: str, module: Any, numerics: Numerics, ranks: TensorParallel) -> None:
    """Keep this rank's range of the inner features of the experts in ``module``, in place.

    Raises:
        NumericsError: as in `pin_expert_trees`.
        UnsupportedModel: the gate's features have another layout than the module declares.
    """
    features = _require_leaves(name, module, numerics)
    share = ranks.share(features)
    into, out_of = _projections(module)
    columns = torch.arange(share.start, share.stop, device="cpu")
    if module.has_gate:
        columns = (
            torch.cat([columns, features + columns])
            if module.is_concatenated
            else torch.arange(2 * share.start, 2 * share.stop, device="cpu")
        )
        _require_local_gate(name, module, columns, share, features)
    if isinstance(getattr(module, into), (QuantizedStack, ExactStack)):
        getattr(module, into).keep_features(columns)
        getattr(module, out_of).keep_inputs(share)
    else:
        _keep(module, into, columns, 2 if module.is_transposed else 1)
        _keep(module, out_of, torch.arange(share.start, share.stop, device="cpu"), 1 if module.is_transposed else 2)
    if module.has_bias:
        _keep(module, f"{into}_bias", columns, 1)
    above, below = ((), ()) if numerics.is_exact else numerics.split_radices(ranks.size)
    module.tree = ExpertTree(below, above, ranks.size, ranks.group)


def _require_leaves(name: str, module: Any, numerics: Numerics) -> int:
    """Return the number of inner features of each expert. Unless arithmetic is exact, require equal leaves."""
    _, out_of = _projections(module)
    weight = getattr(module, out_of)
    if isinstance(weight, ExactStack):
        return weight.in_features
    if isinstance(weight, QuantizedStack):
        features, dtype = weight.in_features, module.config.dtype
    else:
        features, dtype = weight.shape[1 if module.is_transposed else 2], weight.dtype
    try:
        matmul_order(features, dtype, numerics.radices)
    except NumericsError as error:
        raise NumericsError(f"{name}.{out_of}: {error}") from error
    return features


def _require_local_gate(name: str, module: Any, columns: Tensor, share: slice, features: int) -> None:
    """Require that the gate of this rank's features reads only these columns: NaN elsewhere must not reach it."""
    given = torch.full((1, 2 * features), torch.nan, device="cpu")
    given[:, columns] = 0.5
    expected = torch.ones(features, dtype=torch.bool, device="cpu")
    expected[share] = False
    with torch.no_grad():
        whole, kept = gated(module, given), gated(module, given[:, columns])
    apart = whole.shape == (1, features) and torch.equal(whole[0].isnan(), expected)
    if not apart or kept.shape[1] != len(columns) // 2:
        raise UnsupportedModel(
            f"{name}: {type(module).__name__} gates features that a rank does not have; compile with tp=1"
        )


def _projections(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def _keep(module: nn.Module, name: str, indices: Tensor, dim: int) -> None:
    weight = getattr(module, name)
    kept = weight.detach().index_select(dim, indices.to(weight.device))
    setattr(module, name, nn.Parameter(kept, requires_grad=False))
