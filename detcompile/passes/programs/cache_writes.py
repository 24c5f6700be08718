"""Does a program keep the keys and values of every layer, where layers of several KV groups share their memory?

Layer i of every group has one cache (runtime.kv.kv_cache), so a program has to write it in place. Compilers make graphs
functional: each layer would write a copy, and the copies go back when all are done, where the last one undoes the
writes of the others. Inductor takes the copies out again where it can. Whether it did is seen on the program itself,
which holds for one out of a cache of compiled graphs, for AOTInductor's and for a plain graph alike.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from detcompile.errors import UnsupportedModel
from detcompile.passes.programs.example_step import BLOCK_SIZE, ExampleStep
from detcompile.passes.programs.travelling_weights import wait_for_weights
from detcompile.step import KVGroup

__all__ = ["require_kept"]

UNWRITTEN = -4096.0  # in every dtype; a head whose every value is this one would have to be made on purpose


@torch.no_grad()
def require_kept(forward: Callable[..., Any], groups: Sequence[KVGroup], example: ExampleStep) -> None:
    """Run a step over caches that groups share, where there are several; each group has a block of its own.

    Args:
        forward: the compiled forward of Lowered. Ranks that share a model have to call this together.

    Raises:
        UnsupportedModel: what some layer wrote is not there after the step; the message names its caches.
    """
    if len(groups) < 2:
        return
    wait_for_weights()
    input_ids, position_ids, step, logits_to_keep = example
    k_caches, v_caches = (_shared(caches, groups) for caches in (step.k_caches, step.v_caches))
    shared = step._replace(
        slot_mappings=tuple(slots + block * BLOCK_SIZE for block, slots in enumerate(step.slot_mappings)),
        block_tables=tuple(torch.full_like(table, block) for block, table in enumerate(step.block_tables)),
        k_caches=k_caches,
        v_caches=v_caches,
    )
    forward(input_ids, position_ids, shared, logits_to_keep)
    lost = list(_unwritten("k_caches", k_caches, groups, input_ids.shape[1]))
    lost += _unwritten("v_caches", v_caches, groups, input_ids.shape[1])
    if lost:
        raise UnsupportedModel(
            f"the compiled graph does not write its KV caches in place: after a step {', '.join(lost)} lack its"
            f" tokens, as layers of {len(groups)} KV groups share them. The compiler copied them: use the torch that"
            " constraints.txt names, and report the model if it is refused there too"
        )


def _shared(caches: Sequence[Tensor], groups: Sequence[KVGroup]) -> tuple[Tensor, ...]:
    """A cache a layer: layer i of every group has one tensor, of a block for each group."""
    place = {layer: index for group in groups for index, layer in enumerate(group.layers)}
    tensors: dict[int, Tensor] = {}
    for layer, cache in enumerate(caches):
        if place[layer] not in tensors:
            tensors[place[layer]] = cache.new_full((len(groups), *cache.shape[1:]), UNWRITTEN)
    return tuple(tensors[place[layer]] for layer in range(len(caches)))


def _unwritten(name: str, caches: Sequence[Tensor], groups: Sequence[KVGroup], num_tokens: int) -> Iterator[str]:
    for block, group in enumerate(groups):
        for layer in group.layers:
            written = (caches[layer][block, :num_tokens] != UNWRITTEN).any(-1)
            if not bool(written.all()):
                yield f"{name}[{layer}]"
