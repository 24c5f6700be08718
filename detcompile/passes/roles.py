"""Roles of the inputs of a traced graph: rows of the batch, the layout of a step, or weights."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from detcompile.errors import UncertifiedOp
from detcompile.passes.calls import current_call
from detcompile.passes.graphs import sympy_size
from detcompile.passes.proof.context import Role
from detcompile.passes.proof.provenance import Layout
from detcompile.step import KVGroup
from detcompile.torch_internals.graph_nodes import first_value, traced_value
from detcompile.torch_internals.traced_call import TracedCall


def packed_roles(groups: Sequence[KVGroup]) -> Callable[[str, Any], Role]:
    """Return a function that gives roles by the names of PackedForward's arguments."""
    group_of = {layer: group for group, layers in enumerate(groups) for layer in layers.layers}

    def role(name: str, value: Any) -> Role:
        arguments = ("L_input", "L_pos", "L_step", "L_logits")
        if "_parameters_" in name or "_buffers_" in name or not name.startswith(arguments):
            return Role("weight")
        if name.startswith("L_step"):  # L_step_seq_lens, L_step_block_tables_0_, L_step_k_caches_3_
            part = name.removeprefix("L_step_").removesuffix("_")
            field, _, number = part.rpartition("_")
            if not number.isdigit():
                return Role("layout", layout=Layout(part))
            of_layer = field in ("k_caches", "v_caches")
            group = group_of[int(number)] if of_layer else int(number)
            return Role("layout", layout=Layout(field, int(number), group))
        if name.startswith("L_logits"):
            return Role("rows", {0: "logits"}, final_gather=True)
        return Role("rows", {1: "tokens"})

    return role


def dense_role(name: str, value: Any) -> Role:
    """Return a role by the names of DenseForward's arguments."""
    return Role("rows", {0: "batch", 1: "tokens"}) if name.startswith(("L_input", "L_pos")) else Role("weight")


def role_by_source(node: fx.Node, value: torch.Tensor, traced: TracedCall) -> Role:
    """Return "weight" for tensors of the compiled module. An argument holds rows in its first and symbolic dimensions.

    Raises:
        UncertifiedOp: the first dimension of an argument is a constant, so that values may depend on the row count.
    """
    given = node.meta.get("grapharg")
    source = getattr(given, "source", None)
    name = source.name if source is not None else str(node.target)
    is_argument = traced.is_argument(source) if source is not None else None
    call = current_call()
    if is_argument is None:
        refuse([f"{name}: neither an argument of the call nor held by the module"], "an input of unknown origin")
    if source is not None and traced.is_of_given_module(source):
        refuse(
            [f"{name}: held by a module among the arguments"],
            "arguments hold rows of the batch, and a module's tensors are shared by all rows: give the tensors, or "
            "have the compiled callable hold the module, as an attribute or in a closure",
        )
    if not is_argument:
        if call is not None and any(_share_memory(given.example, argument) for argument in call.arguments):
            refuse([f"{name}: held by the module, and an argument of the call"], "an input of two origins")
        return Role("weight")
    rows = {d: f"dim {d}" for d, size in enumerate(value.shape) if sympy_size(size).free_symbols}
    names = {0: "batch", 1: "tokens"}
    if value.dim() and 0 not in rows:
        if call is not None and call.graph_breaks == "warn" and value.shape[0] > 1:  # after a graph break
            return Role("rows", {0: "batch"} | {d: names.get(d, name) for d, name in rows.items()})
        refuse(
            [*traced.splits(), f"{name} has {int(value.shape[0])} rows in every call of this graph"],
            "the number of rows is fixed, so values may depend on it. If no code of the module reads it, "
            "torch._dynamo.decorators.mark_unbacked(tensor, 0) before the call makes it unknown to torch's own code "
            "too; tensors inside objects other than lists, tuples and dicts have to be marked in any case",
        )
    return Role("rows", {d: names.get(d, name) for d, name in rows.items()})


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other or one.layout is not torch.strided or other.layout is not torch.strided:
        return one is other
    storages = one.untyped_storage(), other.untyped_storage()
    return storages[0].nbytes() > 0 and storages[0].data_ptr() == storages[1].data_ptr()


def join_batches(gm: fx.GraphModule, roles: Sequence[Role]) -> None:
    """Guard that arguments with equal numbers of rows stay equal: they hold one batch, as a mask and its tokens."""
    sizes: dict[int, torch.SymInt] = {}  # by the number of rows
    for node, role in zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True):
        if (role.rows or {}).get(0) == "batch":
            size = traced_value(node).shape[0]
            count = first_value(size)
            if count is not None:
                assert sizes.setdefault(count, size) == size  # comparing symbols adds the guard


def refuse(lines: Sequence[str], why: str) -> None:
    """Raise UncertifiedOp for the reasons in ``lines``, if there are any."""
    if lines:
        listed = "\n  ".join(lines)
        raise UncertifiedOp(f"{why}:\n  {listed}\nNothing was compiled.", tuple(lines))
