"""Changes to how a real graph reads its step: each rewires attention, its caches, a collective or the output.

Each changes a copy of a captured graph, and is listed with a text of the refusal.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

__all__ = ["OF_GROUPS", "OF_RANKS", "REWIRED"]

aten, ours = torch.ops.aten, torch.ops.detcompile
Rewire = Callable[[fx.GraphModule], None]


def attentions(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.auto_functionalized_v2)


def write_backs(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=aten.copy_.default)


def output(gm: fx.GraphModule) -> fx.Node:
    return next(iter(gm.graph.find_nodes(op="output")))


def given(**changes: Any) -> Rewire:
    """Return a rewire of the last attention's arguments; a function gets the current arguments."""

    def rewire(gm: fx.GraphModule) -> None:
        last = attentions(gm)[-1]
        made = {name: change(last.kwargs) if callable(change) else change for name, change in changes.items()}
        last.kwargs = {**last.kwargs, **made}

    return rewire


def from_first(name: str) -> Rewire:
    """Return a rewire that gives the last attention an argument of the first."""

    def rewire(gm: fx.GraphModule) -> None:
        first, *_, last = attentions(gm)
        last.kwargs = {**last.kwargs, name: first.kwargs[name]}

    return rewire


def chosen_rows(gm: fx.GraphModule) -> fx.Node:
    """Return logits_to_keep, which only the final gather may read."""
    (gather,) = gm.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    return next(index for index in gather.args[1] if index is not None)


def slots_of_the_output(gm: fx.GraphModule) -> None:
    attentions(gm)[-1].update_kwarg("slot_mapping", chosen_rows(gm))


def tokens_turned(gm: fx.GraphModule) -> None:
    """Swap the dimensions of heads and tokens."""
    last = attentions(gm)[-1]
    with gm.graph.inserting_before(last):
        turned = gm.graph.call_function(aten.permute.default, (last.kwargs["q"], [1, 0, 2]))
    turned.meta = {**last.meta, "val": last.kwargs["q"].meta["val"].permute(1, 0, 2)}
    last.update_kwarg("q", turned)


def sinks_of_rows(gm: fx.GraphModule) -> None:
    last = attentions(gm)[-1]
    with gm.graph.inserting_before(last):
        sinks = gm.graph.call_function(aten.amax.default, (last.kwargs["q"], [2]))
    sinks.meta = {**last.meta, "val": last.kwargs["q"].meta["val"].amax(2)}
    last.update_kwarg("sinks", sinks)


def attention_left_out(gm: fx.GraphModule) -> None:
    last = attentions(gm)[-1]
    for copy in write_backs(gm)[-2:]:
        gm.graph.erase_node(copy)
    for part in list(last.users):
        part.replace_all_uses_with([last.kwargs["q"], *last.kwargs["_all_bases"]][part.args[1]])
        gm.graph.erase_node(part)
    gm.graph.erase_node(last)


def attention_in_place(gm: fx.GraphModule) -> None:
    """Call the operation that writes the caches in place, while others may read them."""
    last = attentions(gm)[-1]
    names = {arg.name for arg in ours.paged_attention.default._schema.arguments}
    kwargs = {name: value for name, value in last.kwargs.items() if name in names}
    kwargs |= dict(zip(("k_cache", "v_cache"), last.kwargs["_all_bases"], strict=True))
    last.target, last.args, last.kwargs = ours.paged_attention.default, (), kwargs


def keys_dropped(gm: fx.GraphModule) -> None:
    gm.graph.erase_node(write_backs(gm)[0])


def caches_swapped(gm: fx.GraphModule) -> None:
    first, *_, last = write_backs(gm)
    first.args, last.args = (first.args[0], last.args[1]), (last.args[0], first.args[1])


def cache_unwritten(gm: fx.GraphModule) -> None:
    """Overwrite a cache with its content before the step."""
    copy = write_backs(gm)[0]
    copy.args = (copy.args[0], copy.args[0])


def cache_read(gm: fx.GraphModule) -> None:
    """Read the mean of all cached keys of all sequences."""
    last = attentions(gm)[-1]
    with gm.graph.inserting_before(last):
        mean = gm.graph.call_function(aten.amax.default, (last.kwargs["_all_bases"][0],))
        mean.meta = {**last.meta, "val": last.kwargs["_all_bases"][0].meta["val"].amax()}
        total = gm.graph.call_function(aten.add.Tensor, (last.kwargs["q"], mean))
    total.meta = {**last.meta, "val": last.kwargs["q"].meta["val"]}
    last.update_kwarg("q", total)


def lengths_as_numbers(gm: fx.GraphModule) -> None:
    last = attentions(gm)[-1]
    with gm.graph.inserting_before(last):
        total = gm.graph.call_function(aten.add.Tensor, (last.kwargs["q"], last.kwargs["seq_lens"]))
    total.meta = {**last.meta, "val": last.kwargs["q"].meta["val"]}
    last.update_kwarg("q", total)


def chunk_by_count(gm: fx.GraphModule) -> None:
    last = attentions(gm)[-1]
    with gm.graph.inserting_before(last):
        count = gm.graph.call_function(aten.sym_size.int, (last.kwargs["q"], 0))
    count.meta["val"] = last.kwargs["q"].meta["val"].shape[0]
    last.update_kwarg("kv_chunk", count)


def window_by_count(gm: fx.GraphModule) -> None:
    chunk_by_count(gm)
    last = attentions(gm)[-1]
    last.kwargs = {**last.kwargs, "kv_chunk": 64, "sliding_window": last.kwargs["kv_chunk"]}


def all_rows_out(gm: fx.GraphModule) -> None:
    """Skip the final gather: return hidden states of all tokens."""
    (gather,) = gm.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    output(gm).args = ((gather.args[0],),)


def turned_out(gm: fx.GraphModule) -> None:
    last = output(gm)
    (logits,) = last.args[0]
    with gm.graph.inserting_before(last):
        turned = gm.graph.call_function(aten.permute.default, (logits, [1, 0]))
    turned.meta = {**logits.meta, "val": logits.meta["val"].permute(1, 0)}
    last.args = ((turned,),)


# For any model. If a refusal names the changed operation, its name comes first.
REWIRED: dict[str, tuple[Rewire, str]] = {
    "lengths_for_starts": (given(cu_seqlens=lambda old: old["seq_lens"]), "attention's cu_seqlens is not"),
    "starts_for_lengths": (given(seq_lens=lambda old: old["cu_seqlens"]), "attention's seq_lens is not"),
    "lengths_for_slots": (given(slot_mapping=lambda old: old["seq_lens"]), "attention's slot_mapping is not"),
    "starts_for_blocks": (given(block_table=lambda old: old["cu_seqlens"]), "attention's block_table is not"),
    "slots_of_the_output": (slots_of_the_output, "attention's slot_mapping is not"),
    "rows_for_lengths": (given(seq_lens=lambda old: old["q"]), "attention's seq_lens is not"),
    "a_cache_of_another_layer": (from_first("_all_bases"), "k_caches[0] is written twice"),
    "keys_and_values_swapped": (given(_k_cache_base_index=1, _v_cache_base_index=0), "keys are written into v_caches"),
    "one_cache_for_both": (given(_v_cache_base_index=0), "values into k_caches"),
    "a_view_of_a_cache": (given(_k_cache_storage_offset=64), "writes a view of a cache (_k_cache_storage_offset)"),
    "another_chunk": (given(kv_chunk=128), "attention in chunks of 128, declared are 64"),
    "chunk_by_count": (chunk_by_count, "takes a value computed from a token or batch count"),
    "window_by_count": (window_by_count, "takes a value computed from a token or batch count"),
    "tokens_turned": (tokens_turned, "instead of [tokens, heads, features]"),
    "sinks_of_rows": (sinks_of_rows, "attention's sinks holds rows of tokens"),
    "attention_left_out": (attention_left_out, "attention nodes"),
    "attention_in_place": (attention_in_place, "detcompile.paged_attention.default at"),
    "keys_dropped": (keys_dropped, "k_caches[0]: keys or values of attention are not saved"),
    "caches_swapped": (caches_swapped, "of the step into k_caches[0]"),
    "cache_unwritten": (cache_unwritten, "writes k_caches[0] of the step into k_caches[0]"),
    "cache_read": (cache_read, "aten.amax.default at"),
    "lengths_as_numbers": (lengths_as_numbers, "arithmetic reads step metadata"),
    "all_rows_out": (all_rows_out, "not the rows that the caller chose"),
    "logits_turned_out": (turned_out, "not the rows that the caller chose"),
}


# For a model whose layers are in two KV groups.
OF_GROUPS: dict[str, tuple[Rewire, str]] = {
    "blocks_of_another_group": (from_first("block_table"), "attention's block_table is not"),
    "slots_of_another_group": (from_first("slot_mapping"), "attention's slot_mapping is not"),
}


def products(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=ours.matmul_all_reduce.default)


def reduced_twice(gm: fx.GraphModule) -> None:
    first = products(gm)[0]
    with gm.graph.inserting_after(first):
        again = gm.graph.call_function(ours.tree_all_reduce.default, (first, None, None, *first.args[5:]))
    again.meta = dict(first.meta)
    first.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


def reduced_in_another_tree(gm: fx.GraphModule) -> None:
    first = products(gm)[0]
    first.args = (*first.args[:5], [1, 2], *first.args[6:])


def subtree_of_its_own(gm: fx.GraphModule) -> None:
    first = products(gm)[0]
    first.args = (*first.args[:4], [2], *first.args[5:])


def rows_for_the_weight(gm: fx.GraphModule) -> None:
    first = products(gm)[0]
    first.args = (first.args[0], first.args[0], *first.args[2:])


def rows_for_the_bias(gm: fx.GraphModule) -> None:
    first = products(gm)[0]
    first.args = (*first.args[:2], first.args[0], *first.args[3:])


def summed_by_torch(gm: fx.GraphModule) -> None:
    first = products(gm)[0]
    with gm.graph.inserting_before(first):
        item = gm.graph.call_function(ours.matmul.default, (*first.args[:2], None, None, []))
    item.meta = dict(first.meta)
    first.target, first.args = torch.ops._c10d_functional.all_reduce.default, (item, "sum", "0")


def gathered_by_torch(gm: fx.GraphModule) -> None:
    (gather,) = gm.graph.find_nodes(op="call_function", target=ours.all_gather_columns.default)
    gather.target = torch.ops._c10d_functional.all_gather_into_tensor.default
    gather.args = (gather.args[0], 2, "0")


# For a rank's share of a model.
OF_RANKS: dict[str, tuple[Rewire, str]] = {
    "reduced_twice": (reduced_twice, "that are not partial sums"),
    "reduced_in_another_tree": (reduced_in_another_tree, "added in the tree (1, 2)"),
    "a_subtree_of_its_own": (subtree_of_its_own, "a subtree (2,) on each of 2 ranks"),
    "rows_for_the_weight": (rows_for_the_weight, "the second matrix"),
    "rows_for_the_bias": (rows_for_the_bias, "the bias"),
    "summed_by_torch": (summed_by_torch, "_c10d_functional.all_reduce.default"),
    "gathered_by_torch": (gathered_by_torch, "_c10d_functional.all_gather_into_tensor.default at"),
}
