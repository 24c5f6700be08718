"""A compiled graph as a function of a step, the step it is traced with, and the check of its cache writes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from detcompile.errors import UnsupportedModel
from detcompile.passes.graphs import sympy_size
from detcompile.passes.programs.async_weights import wait_for_weights
from detcompile.passes.proof.context import Role
from detcompile.step import KVGroup, KVShape, StateShape, StepInputs, step_leaves
from detcompile.templates.device.cuda_graphs import constants
from detcompile.torch_internals.dynamo import mark_unbacked

ExampleStep = tuple[Tensor, Tensor, StepInputs, Tensor]  # what a forward takes


class CompiledGraph(NamedTuple):
    """A compiled graph, with the fake value and the traced argument of each input."""

    run: Callable[..., Any]  # the graph's inputs in order, `joined` ones replaced -> its outputs
    values: list[Any]  # fake tensors and SymInts
    inputs: list[Any]  # the tensors of the traced call, including the model's parameters and buffers
    roles: list[Role]
    joined: Mapping[int, Tensor]  # by position: concatenated weights that replace single ones
    checked: frozenset[int] = frozenset()  # positions of extents that are only compared with numbers
    code: Any = None  # LayeredCode of a program that runs one region for many layers


class Binding(NamedTuple):
    """Sources of a graph's inputs."""

    fixed: list[Any]  # weights by position; None for inputs of the step
    of_step: list[tuple[int, int, int | None]]  # position, leaf of the step, dimension if it is an extent


def binding_of(graph: CompiledGraph, example: ExampleStep) -> Binding:
    """Return where a graph's inputs come from. ``example`` is the step that it was traced with."""
    place = {id(leaf): i for i, leaf in enumerate(step_leaves(*example))}
    sizes = _sizes(graph, place)
    fixed: list[Any] = []
    of_step: list[tuple[int, int, int | None]] = []
    for position, (value, given, role) in enumerate(zip(graph.values, graph.inputs, graph.roles, strict=True)):
        fixed.append(graph.joined.get(position, given) if role.kind == "weight" else None)
        if isinstance(value, torch.SymInt):
            extent = sizes.get(sympy_size(value))
            if extent is None:  # its tensor is not read: the graph only checks that it is not empty
                assert position in graph.checked, f"the graph reads a size that no input of the step has: {value}"
                extent = (0, 1)
            of_step.append((position, *extent))
        else:
            assert (role.kind == "weight") == (id(given) not in place), f"an input of the step was not found: {value}"
            if id(given) in place:
                of_step.append((position, place[id(given)], None))
    return Binding(fixed, of_step)


def bind(run: Callable[..., Any], binding: Binding) -> Callable[..., Any]:
    """Return a graph's code as a function of a step.

    Dynamo is bypassed at run time: its guards cost time, and could retrace the model for one token count.
    """
    fixed, of_step = binding

    @torch.no_grad()
    def forward(input_ids: Tensor, position_ids: Tensor, step: StepInputs, logits_to_keep: Tensor) -> Any:
        given = step_leaves(input_ids, position_ids, step, logits_to_keep)
        arguments = fixed.copy()
        for position, leaf, dim in of_step:
            arguments[position] = given[leaf] if dim is None else given[leaf].shape[dim]
        with constants(fixed):
            outputs = run(*arguments)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return forward


def _sizes(graph: CompiledGraph, place: Mapping[int, int]) -> dict[Any, tuple[int, int]]:
    """Return the (leaf, dimension) that has each symbol's size. ``place`` is the index of a leaf by id."""
    sizes: dict[Any, tuple[int, int]] = {}
    for value, given in zip(graph.values, graph.inputs, strict=True):
        if id(given) in place:
            sizes |= {sympy_size(size): (place[id(given)], dim) for dim, size in enumerate(value.shape)}
    return sizes


NUM_TOKENS, NUM_BLOCKS = 2, 2
BLOCK_SIZE = 16  # of the step's caches; marked unknown like the other extents


def example_step(
    shapes: Sequence[KVShape],
    num_groups: int,
    states: Sequence[StateShape],
    dtype: torch.dtype,
    device: torch.device,
) -> ExampleStep:
    """Return a step of two tokens with extents marked unknown, so that one graph serves every step.

    Args:
        shapes: extents of a cached key and value, one per layer.
        states: shape of a sequence's state, one per operation that carries a state.
    """
    step = _step(shapes, num_groups, states, dtype, device)
    input_ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device=device)
    position_ids = torch.arange(NUM_TOKENS, device=device)[None]
    logits_to_keep = torch.arange(NUM_TOKENS, device=device)
    _mark_unknown([input_ids, position_ids], [1])
    _mark_unknown([logits_to_keep, *step.slot_mappings, step.cu_seqlens, step.seq_lens, step.state_slots], [0])
    _mark_unknown([*step.block_tables, *step.k_caches, *step.v_caches], [0, 1])
    _mark_unknown(step.states, [0])
    return input_ids, position_ids, step, logits_to_keep


def some_layers(example: ExampleStep, layers: range) -> ExampleStep:
    """Return the step with only the caches of these layers."""
    input_ids, position_ids, step, logits_to_keep = example
    part = slice(layers.start, layers.stop)
    kept = step._replace(k_caches=step.k_caches[part], v_caches=step.v_caches[part])
    return input_ids, position_ids, kept, logits_to_keep


def _step(
    shapes: Sequence[KVShape],
    num_groups: int,
    states: Sequence[StateShape],
    dtype: torch.dtype,
    device: torch.device,
) -> StepInputs:
    def cache(heads: int, dim: int) -> Tensor:
        return torch.zeros(NUM_BLOCKS, BLOCK_SIZE, heads, dim, dtype=dtype, device=device)

    def metadata(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return StepInputs(
        slot_mappings=tuple(metadata([0, 1], torch.int64) for _ in range(num_groups)),
        cu_seqlens=metadata([0, NUM_TOKENS]),
        seq_lens=metadata([NUM_TOKENS]),
        block_tables=tuple(metadata([[0, 1]]) for _ in range(num_groups)),
        k_caches=tuple(cache(kv_heads, head_dim) for kv_heads, head_dim, _ in shapes),
        v_caches=tuple(cache(kv_heads, v_head_dim) for kv_heads, _, v_head_dim in shapes),
        state_slots=metadata([0]),
        states=tuple(
            torch.zeros(2, *state.shape, dtype=torch.float32 if state.float32 else dtype, device=device)
            for state in states
        ),
    )


def _mark_unknown(tensors: Iterable[Tensor], dims: list[int]) -> None:
    for tensor in tensors:
        mark_unbacked(tensor, dims)


UNWRITTEN = -4096.0  # exact in every dtype; no model computes a head with only this value


@torch.no_grad()
def require_cache_writes(forward: Callable[..., Any], groups: Sequence[KVGroup], example: ExampleStep) -> None:
    """Require that a program writes its KV caches in place, if layers of several KV groups share memory.

    Layer i of every group has one cache (runtime.kv.kv_cache). Compilers make graphs functional: each layer writes a
    copy, all copies are written back at the end, and the last one undoes the writes of the others. Inductor usually
    removes the copies. This check runs the program on one step in which each group has its block of the shared caches,
    so it also covers code from a cache, AOTInductor's code and plain graphs.

    Args:
        forward: the compiled forward of Lowered. Ranks that share a model call this together.

    Raises:
        UnsupportedModel: a layer's writes are missing after the step; the message names its caches.
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
            f"the compiled graph does not write its KV caches in place: after a step, {', '.join(lost)} lack the step's"
            f" tokens. Layers of {len(groups)} KV groups share these caches, and the compiler copied them. Use torch as"
            " pinned in constraints.txt; if it fails there too, report the model"
        )


def _shared(caches: Sequence[Tensor], groups: Sequence[KVGroup]) -> tuple[Tensor, ...]:
    """Return one cache per layer. Layer i of every group shares a tensor with one block per group."""
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
