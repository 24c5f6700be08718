"""Experts of quantized checkpoints that stay quantized: their tensors by projection, joined into a QuantizedStack."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel

from detcompile.errors import UnsupportedModel
from detcompile.passes.modules.experts import find_experts
from detcompile.passes.modules.quantized_layouts import LAYOUTS, Tensors, mxfp4_weight
from detcompile.passes.modules.quantized_linear import QuantizedStack
from detcompile.templates.quantized.weights import joined

# An expert's linear, or a projection of all experts.
EXPERT = re.compile(r"(.*\.experts)\.(?:(\d+)\.)?(\w+)")
# An expert's linears by their names in checkpoints: the model's projection that holds them, and their index in it.
PROJECTIONS = {
    **{"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)},
    **{"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0)},
}
Stacks = dict[str, dict[str, list[str]]]  # module of experts -> projection -> names in the checkpoint, in order
ADVICE = "load the model without dequantize=False, which dequantizes its experts"


def stacks_of(names: Iterable[str], model: PreTrainedModel) -> Stacks:
    """Return the quantized tensors of a checkpoint that hold experts of ``model``.

    Raises:
        UnsupportedModel: experts that cannot stay quantized.
    """
    modules = dict(find_experts(model))
    parts: dict[str, dict[str, dict[tuple[int, int], str]]] = defaultdict(lambda: defaultdict(dict))
    for name in names:
        match = EXPERT.fullmatch(name)
        if match is None:
            continue
        place, number, leaf = match.groups()
        place = place.replace(".block_sparse_moe.", ".mlp.")
        module: Any = modules.get(place)
        projection, turn = (leaf, 0) if number is None else PROJECTIONS.get(leaf, ("", 0))
        known = {"gate_up_proj" if getattr(module, "has_gate", False) else "up_proj", "down_proj"}
        one_by_one = number is not None and module is not None
        if projection not in known or (one_by_one and (module.is_transposed or not module.is_concatenated)):
            raise UnsupportedModel(f"{name}: experts of this layout cannot stay quantized: {ADVICE}")
        parts[place][projection][int(number or 0), turn] = name
    stacks: Stacks = defaultdict(dict)
    for place, projections in parts.items():
        for projection, by_turn in projections.items():
            turns = 2 if projection == "gate_up_proj" else 1
            experts = itertools.product(range(modules[place].num_experts), range(turns))
            missing = next((expert for expert, turn in experts if (expert, turn) not in by_turn), None)
            if len(by_turn) > 1 and missing is not None:
                raise UnsupportedModel(
                    f"{place}.{missing}: the checkpoint lacks a part of its {projection}: fetch it again"
                )
            stacks[place][projection] = [name for _, name in sorted(by_turn.items())]
    return stacks


def stack_of(
    name: str, parts: Mapping[str, Tensors], settings: Mapping[str, Any], shape: tuple[int, int, int]
) -> QuantizedStack:
    """Join the experts of one projection.

    Args:
        name: path of the projection.
        parts: tensors by the names of `stacks_of`, in order.
        shape: experts, output features and input features of the projection.

    Raises:
        UnsupportedModel: an expert is missing, or experts have several formats.
    """
    weights = []
    for part, tensors in parts.items():
        if "blocks" in tensors:
            weights.append(mxfp4_weight(part, tensors["blocks"], tensors["scales"]))
            continue
        weight, order = LAYOUTS[settings["quant_method"]].read(part, tensors, settings)
        if order is not None:
            raise UnsupportedModel(f"{part}: experts whose K is permuted by group cannot stay quantized: {ADVICE}")
        weights.append(weight)
    try:
        weight = joined(weights)
    except ValueError as error:
        raise UnsupportedModel(f"{name}: experts of several formats cannot stay quantized: {ADVICE}") from error
    experts, n, k = shape
    if (len(weight.w), weight.k) != (experts * n, k):
        raise UnsupportedModel(
            f"{name}: the checkpoint has {len(weight.w)} x {weight.k} weights, and the model's {experts} experts need"
            f" {experts * n} x {k}: fetch the checkpoint again, or load another one"
        )
    return QuantizedStack(weight, experts)
