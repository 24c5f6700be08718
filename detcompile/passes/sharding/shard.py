"""Give each rank its share of the linears. Row-parallel sums follow the declared tree, also on one rank."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import Conv1D, PreTrainedModel

from detcompile.errors import NumericsError, UnsupportedModel
from detcompile.orders.numerics import Numerics, matmul_order
from detcompile.parallel import TensorParallel
from detcompile.passes.modules.attention import AttentionCall
from detcompile.passes.modules.exact import ExactLinear
from detcompile.passes.modules.exact_matching import has_other_forward
from detcompile.passes.modules.experts import find_experts
from detcompile.passes.modules.low_rank import AdaptedLinear
from detcompile.passes.modules.quantized_linear import QuantizedLinear, replace_module
from detcompile.passes.sharding.experts import pin_expert_trees, shard_experts
from detcompile.passes.sharding.heads import OUTPUTS, HeadShare, features_of, head_share
from detcompile.passes.sharding.modules import (
    ExactGatheredLinear,
    ExactRowShard,
    GatheredLinear,
    Linear,
    NormAcrossHeads,
    QuantizedRowShard,
    RowParallelLinear,
    RowShardLinear,
    ShardedEmbedding,
    keep_features,
    num_features,
)
from detcompile.passes.sharding.plans import ROW_STYLES, style_of, tensor_parallel_plan
from detcompile.torch_internals.modules import hooks_of, parameter_table, with_hooks_of

COMPUTED_SLOPES = {"bloom", "mpt"}  # ALiBi slopes that passes.adapters.forwards computes
KNOWN_ROPES = {"default", "linear", "llama3", "yarn"}  # transformers makes their tables when it loads the model
PER_HEAD = ("sinks", "alibi_slopes")
NORMS = {"q_norm": "q_proj", "k_norm": "k_proj", "q_layernorm": "q_proj", "k_layernorm": "k_proj"}
HALVES = ("gate_up_proj", "Wi")  # two projections in one weight
# Attributes of attention modules with the number of query heads, key heads, and query heads per key head.
NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
NUM_GROUPS = ("num_key_value_groups",)
WIDTHS = ("split_size", "embed_dim", "all_head_size")  # features of all query heads together


def pin_row_parallel(model: PreTrainedModel, numerics: Numerics) -> int:
    """Give the row-parallel linears and experts of ``model`` the tree, in place. Return their number.

    Exact sums need no tree.

    Raises:
        NumericsError: K of a linear does not split into equal leaves; the message names the module and what fits.
    """
    if numerics.is_exact:
        return 0
    linears = [(name, module) for name, module in _row_parallel(model, numerics) if _is_plain(module)]
    for name, module in linears:
        if isinstance(module, QuantizedLinear):
            module.radices = list(numerics.radices)
        else:
            replace_module(model, name, with_hooks_of(RowParallelLinear(module, numerics.radices), module))
    return len(linears) + (pin_expert_trees(model, numerics) if tensor_parallel_plan(model) else 0)


def shard(
    model: PreTrainedModel,
    attention: Sequence[AttentionCall],
    numerics: Numerics,
    ranks: TensorParallel,
    replicate_attention: bool = False,
) -> None:
    """Keep this rank's share of ``model``, in place and on the rank's device.

    Parts move to the device as they are cut, so that it never holds more than its share and one layer's attention.

    Args:
        attention: the calls of the whole model.
        replicate_attention: if heads do not divide, every rank computes all of them instead of a refusal, or, in exact
            arithmetic, of an uneven cut.

    Raises:
        UnsupportedModel: the architecture has no plan, or unknown modules; or a linear has hooks or another forward.
        NumericsError: heads or features do not divide; the message names the module.
    """
    plan = tensor_parallel_plan(model)
    if not plan:
        raise UnsupportedModel(
            f"{type(model).__name__} has no tensor-parallel plan, in transformers or here: compile with tp=1"
        )
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, Linear)]
    changed = [name for name, linear in linears if hooks_of(linear)]
    changed += [name for name, linear in _row_parallel(model, numerics) if not _is_plain(linear)]
    if changed:
        raise UnsupportedModel(
            f"{changed[0]} has hooks or another forward, which would see one rank's share: compile with tp=1"
        )
    attending = _shard_attention(model, attention, numerics, ranks, replicate_attention)
    for name, linear in _row_parallel(model, numerics):
        heads = attending.get(name.rpartition(".")[0])
        replace_module(model, name, _row_shard(name, linear, heads, numerics, ranks).to(ranks.device))
    mixtures = find_experts(model)
    for name, module in mixtures:
        shard_experts(name, module, numerics, ranks)
        module.to(ranks.device)
    styles = [
        (name, module, style_of(name, plan))
        for name, module in model.named_modules()
        if name.rpartition(".")[0] not in {*attending, *(mixture for mixture, _ in mixtures)}
    ]
    for name, module, style in styles:
        if style == "column":
            _shard_columns(model, name, module, ranks)
        elif style == "experts" and (name, module) not in mixtures:
            raise UnsupportedModel(
                f"{name}: the experts of a {type(module).__name__} over several ranks; compile with tp=1"
            )
    _shard_vocabulary(model, ranks)
    model.to(ranks.device)


def moves_after_sharding(model: PreTrainedModel) -> bool:
    """Return whether ``shard`` may run before the model moves to the device that serves it.

    It may not if compile() computes constants first: pow() rounds differently between devices.
    """
    config = model.config.get_text_config()
    kinds = [getattr(module, "rope_type", "default") for module in model.modules()]
    ropes = {name for kind in kinds for name in (kind.values() if isinstance(kind, dict) else [kind])}
    return config.model_type not in COMPUTED_SLOPES and ropes <= KNOWN_ROPES


def _row_parallel(model: PreTrainedModel, numerics: Numerics) -> list[tuple[str, Any]]:
    """Return the row-parallel linears. Unless arithmetic is exact, K must split into equal leaves."""
    plan = {pattern: style for pattern, style in tensor_parallel_plan(model).items() if style in ROW_STYLES}
    result = []
    planned = [(name, module) for name, module in model.named_modules() if style_of(name, plan) == "row"]
    for name, module in [part for place in planned for part in _linears(*place)]:
        if not isinstance(module, Linear):
            continue
        if not numerics.is_exact:
            k = module.weight.shape[0] if isinstance(module, Conv1D) else module.in_features
            try:
                matmul_order(k, model.dtype, numerics.radices)
            except NumericsError as error:
                raise NumericsError(f"{name}: {error}") from error
        result.append((name, module))
    return result


def _is_plain(linear: nn.Module) -> bool:
    """Return whether a linear computes only a product and a bias, like the subclasses in transformers."""
    known = type(linear).__module__.startswith(("torch.", "transformers.", "detcompile."))
    return known and not has_other_forward(linear)


def _row_shard(
    name: str, linear: Linear, heads: HeadShare | None, numerics: Numerics, ranks: TensorParallel
) -> nn.Module:
    """Return this rank's share of a row-parallel linear; in attention, the features of the rank's heads."""
    if not numerics.is_exact:
        radices = numerics.split_radices(ranks.size)
        if isinstance(linear, QuantizedLinear):
            return QuantizedRowShard(linear, radices, ranks)
        return RowShardLinear(linear, radices, ranks)
    if not isinstance(linear, ExactLinear):
        raise UnsupportedModel(f"{name}: a {type(linear).__name__} in exact arithmetic over ranks; compile with tp=1")
    if heads is None:
        return ExactRowShard(linear, ranks.share(linear.in_features), True, ranks.group)
    return ExactRowShard(linear, heads.outputs, heads.counts, ranks.group)


def _linears(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a linear with its name; for an adapted linear, the linears that read its rows."""
    if not isinstance(module, AdaptedLinear):
        return [(name, module)]
    return [(f"{name}.{part}", linear) for part, linear in module.takes.items()]


def _shard_attention(
    model: PreTrainedModel,
    attention: Sequence[AttentionCall],
    numerics: Numerics,
    ranks: TensorParallel,
    replicate: bool,
) -> dict[str, HeadShare | None]:
    """Keep this rank's heads of attention modules. Return the heads by module name; None means all heads.

    The names are those of attention modules, and of modules beside them that hold the output projection.
    """
    plan, shares = tensor_parallel_plan(model), dict[str, HeadShare | None]()
    names = {module: name for name, module in model.named_modules()}
    for call in attention:
        if call.module not in names:
            raise UnsupportedModel(f"{type(model).__name__}: a layer that runs several times, over several ranks")
        name = names[call.module]
        outputs = [leaf for leaf, _ in call.module.named_children() if leaf in OUTPUTS]
        beside = None if outputs else _projection_beside(model, name, call)
        # An unknown output projection is cut into equal ranges, so heads must be, too.
        uneven = numerics.is_exact and bool(outputs or beside)
        share = shares[name] = head_share(call, ranks, name, replicate, uneven)
        if beside is not None:
            shares[beside] = share
        if share is not None:
            for leaf in outputs:
                if style_of(f"{name}.{leaf}", plan) != "row":
                    raise UnsupportedModel(
                        f"{name}.{leaf}: the tensor-parallel plan does not split the projection of the heads' outputs; "
                        "compile with tp=1"
                    )
            _shard_heads(call.module, share, name, model.config.get_text_config().model_type, ranks)
            call.module.to(ranks.device)
    return shares


def _projection_beside(model: PreTrainedModel, name: str, call: AttentionCall) -> str | None:
    """Return the name of the module beside an attention module that holds its output projection, as in BERT."""
    plan, parent = tensor_parallel_plan(model), name.rpartition(".")[0]
    width = call.num_heads * call.head_dims[1]
    holders = [
        place.rpartition(".")[0]
        for place, module in model.get_submodule(parent).named_modules(prefix=parent)
        if isinstance(module, ExactLinear) and module.in_features == width and style_of(place, plan) == "row"
    ]
    return holders[0] if len(holders) == 1 else None


def _shard_heads(attention: Any, share: HeadShare, name: str, model_type: str, ranks: TensorParallel) -> None:
    """Keep this rank's heads of an attention module: projections, norms, per-head values and head counts."""
    norms = {NORMS[leaf]: leaf for leaf, norm in attention.named_children() if leaf in NORMS and share.spans(norm)}
    for leaf, linear in list(attention.named_children()):
        linears = linear.gives if isinstance(linear, AdaptedLinear) else [linear]
        if isinstance(linears[0], Linear):
            features = features_of(leaf, linears[0], share, model_type, name)
            if features is None:
                continue
            if leaf in norms:
                norm = getattr(attention, norms[leaf])
                setattr(attention, norms[leaf], NormAcrossHeads(norm, features, ranks))
            # If several ranks hold a head, a gather would repeat it, so the projection stays whole.
            if leaf not in norms or share.is_partition(leaf):
                for part in linears:
                    keep_features(part, features)
        elif leaf in NORMS:
            _keep_norms(linear, share.heads(NORMS[leaf]))
    for leaf in PER_HEAD:
        values = getattr(attention, leaf, None)
        if values is not None:
            kept = values[share.heads("q_proj")].detach().clone()
            is_parameter = leaf in parameter_table(attention)
            setattr(attention, leaf, nn.Parameter(kept, requires_grad=False) if is_parameter else kept)
    _count_heads(attention, share)


def _keep_norms(norm: Any, heads: list[int]) -> None:
    """Keep per-head weights of ``heads``: rows of one tensor, or one module per head (stablelm)."""
    weight = getattr(norm, "weight", None)  # nanochat's has none
    if isinstance(getattr(norm, "norms", None), nn.ModuleList):
        norm.norms = nn.ModuleList(norm.norms[head] for head in heads)
    elif weight is not None and weight.dim() == 2:
        norm.weight = nn.Parameter(weight[heads].clone(), requires_grad=False)


def _count_heads(attention: Any, share: HeadShare) -> None:
    counts = [(NUM_HEADS, len(share.q)), (NUM_KV_HEADS, len(share.kv)), (NUM_GROUPS, len(share.q) // len(share.kv))]
    for spellings, count in counts:
        for attribute in spellings:
            if hasattr(attention, attribute):
                setattr(attention, attribute, count)
    for attribute in WIDTHS:
        if hasattr(attention, attribute):
            setattr(attention, attribute, len(share.q) * share.head_dim)
    if hasattr(attention, "mp_num"):  # CodeGen's, of the parts of its fused projection
        attention.mp_num = math.gcd(attention.mp_num, len(share.q))
    if hasattr(attention, "config"):
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads = len(share.q)
        if hasattr(attention.config, "num_key_value_heads"):
            attention.config.num_key_value_heads = len(share.kv)


def _shard_columns(model: nn.Module, name: str, linear: nn.Module, ranks: TensorParallel) -> None:
    """Keep this rank's output features of a column-parallel linear."""
    if getattr(model.get_submodule(name.rpartition(".")[0]), "activation_sparsity", 0):
        raise UnsupportedModel(f"{name}: which of its features are kept depends on all of them; compile with tp=1")
    if isinstance(linear, AdaptedLinear):
        for part in linear.gives:
            _shard_columns(model, name, part, ranks)
        return
    if not isinstance(linear, Linear):
        raise UnsupportedModel(f"{name}: a {type(linear).__name__} cannot be cut into columns; compile with tp=1")
    width = num_features(linear)
    parts = 2 if name.rpartition(".")[2] in HALVES else 1
    if width % parts or (width % (parts * ranks.size) and not isinstance(linear, ExactLinear)):
        what = f"two projections of {width // 2}" if parts == 2 else str(width)
        raise NumericsError(f"{name}: {what} features over tp={ranks.size} ranks; choose a tp that divides them")
    keep_features(linear, torch.arange(width, device="cpu").view(parts, -1)[:, ranks.share(width // parts)].flatten())
    linear.to(ranks.device)


def _shard_vocabulary(model: PreTrainedModel, ranks: TensorParallel) -> None:
    """Shard the rows of the embedding and of the head. An embedding with a custom forward stays whole."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    tied = isinstance(head, nn.Linear) and head.weight is embedding.weight
    known = type(embedding) is nn.Embedding or type(embedding).__name__.endswith("TextScaledWordEmbedding")
    rows = ShardedEmbedding(embedding, ranks) if known and embedding.max_norm is None else None
    if rows is not None:
        replace_module(model, names[embedding], rows)
    if isinstance(head, ExactLinear):
        replace_module(model, names[head], ExactGatheredLinear(head, ranks))
    if isinstance(head, nn.Linear):
        gathered = GatheredLinear(head, ranks)
        if rows is not None and tied:
            gathered.weight = rows.weight
        replace_module(model, names[head], gathered)
