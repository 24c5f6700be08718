"""Kept programs: a compiled program as bytes without its weights, and loaded again over a model's weights."""

import copy
import pickle
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from detcompile.errors import DetcompileError
from detcompile.parallel import TensorParallel
from detcompile.passes.layers.program import LayeredCode, LayeredProgram, Unrolled
from detcompile.passes.programs.async_weights import wait_for_weights
from detcompile.passes.programs.binding import (
    Binding,
    bind,
    binding_of,
    example_step,
    require_cache_writes,
    some_layers,
)
from detcompile.passes.proof.certificate import Certificate
from detcompile.passes.rewrites.merged_linears import joined
from detcompile.passes.tracing import Seen, Traced
from detcompile.passes.warm import programs
from detcompile.templates.cpp_dispatch import direct_ops
from detcompile.templates.cpu.fp_mode import in_float_mode
from detcompile.torch_internals.kept_code import CompiledFxGraph, restore_code, without_code
from detcompile.weights import named_weights


class KeptProgram(NamedTuple):
    """The pickled parts of a program."""

    certificate: Certificate
    digest: str  # of the graph's canonical form
    graphs: list[CompiledFxGraph]  # without loaded code
    runs: dict[int, int]  # by region: index into ``graphs``
    shared: dict[int, tuple[int, ...]]
    unrolled: Unrolled
    weights: list[tuple[str, ...]]  # by position: names of the joined weights; none for inputs of the step
    of_step: list[tuple[int, int, int | None]]
    stage: Certificate | None  # of the layers of a stage
    rows: Tensor | None  # on the CPU: example input of a stage after the first


def kept(traced: Traced, model: nn.Module, ranks: TensorParallel | None = None) -> bytes | None:
    """Return a compiled program as bytes, or None if it holds more than code and named weights.

    The bytes of a one-graph program lack what torch does around its code. Such a program is kept if a step gives the
    same result without that. Ranks that share the model all call this, because that step communicates.
    """
    code: LayeredCode | None = traced.graph.code
    bare = code is not None and not traced.constants
    if ranks is not None:
        bare = bool(ranks.least(bare))
    if code is None or not bare:
        return None
    program, parts = code.program, code.parts
    if program.unrolled.regions == (0,) and not _is_all_of(traced, program):
        return None
    graphs = {id(run): run for run in program.runs.values()}
    if not all(isinstance(run, CompiledFxGraph) for run in graphs.values()):
        return None
    names = {id(tensor): name for name, tensor in reversed(named_weights(model, every_name=True).items())}
    fixed, of_step = binding_of(traced.graph, traced.example)
    brought = {position for position, _, _ in of_step}
    weights = []
    for position in range(len(fixed)):
        tensors = () if position in brought else parts.get(position, (traced.graph.inputs[position],))
        weights.append(tuple(names[id(part)] for part in tensors))
    place = {key: number for number, key in enumerate(graphs)}
    return pickle.dumps(
        KeptProgram(
            certificate=traced.certificate,
            digest=traced.digest,
            graphs=[without_code(graph) for graph in graphs.values()],
            runs={region: place[id(run)] for region, run in program.runs.items()},
            shared=dict(program.shared),
            unrolled=program.unrolled,
            weights=weights,
            of_step=of_step,
            stage=code.stage,
            rows=None if code.rows is None else code.rows.cpu(),
        )
    )


def _is_all_of(traced: Traced, program: LayeredProgram) -> bool:
    """Return whether the code of a graph alone gives the result of the traced forward, with its strides."""
    wait_for_weights()
    binding = binding_of(traced.graph, traced.example)
    alone = in_float_mode(program, traced.example[0].device, torch.get_num_threads())
    one, other = (bind(run, binding)(*copy.deepcopy(traced.example)) for run in (traced.graph.run, alone))
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return (one.dtype, one.stride()) == (other.dtype, other.stride()) and torch.equal(one, other)


class StagePart(NamedTuple):
    """Parts of a stage's program that the program of a whole model lacks."""

    certificate: Certificate  # proof of the layers that the stage runs
    rows: Tensor | None  # [1, 2, H]: an example of the rows that it takes; None if it takes token ids


class Program(NamedTuple):
    """A compiled program over the weights of a model, as a function of a step."""

    forward: Callable[..., Any]
    certificate: Certificate
    digest: str
    weights: list[Tensor]  # that it takes, including the parts of joined weights
    constants: Mapping[str, Tensor] = MappingProxyType({})  # other tensors that it holds, by name
    stage: StagePart | None = None


def take_program(
    key: str | None,
    model: PreTrainedModel,
    seen: Seen,
    ranks: TensorParallel | None = None,
    here: range | None = None,
) -> Program | None:
    """Load a kept program over a model's weights; None if there is none or it cannot be loaded.

    Args:
        key: None if no program may be taken.
        seen: what a run of the model shows, with the KV groups of the layers that run here.
        ranks: the ranks that share the model. All of them call this, and all compile if one of them has no program,
            because a compilation communicates.
        here: the layers of a stage; None for all.

    Raises:
        UnsupportedModel: the program copies its caches.
        StorageError: the cache cannot be used.
    """
    loaded = None if key is None else _loaded(key, model)
    if ranks is not None and not ranks.least(loaded is not None):
        return None
    if loaded is None:
        return None
    program, forward, weights = loaded
    example = example_step(seen.kv_shapes, len(seen.groups), seen.states, model.dtype, model.device)
    rows = None if program.rows is None else program.rows.to(model.device)
    if here is not None:
        example = some_layers(example, here)
    if rows is not None:
        example = (rows, *example[1:])
    try:
        require_cache_writes(forward, seen.groups, example)
    except (DetcompileError, MemoryError):
        raise
    except Exception as error:
        if ranks is not None:  # the other ranks wait for this one
            raise
        _warn(model, error)
        return None
    part = None if program.stage is None else StagePart(program.stage, rows)
    return Program(forward, program.certificate, program.digest, weights, stage=part)


_Revived = tuple[KeptProgram, Callable[..., Any], list[Tensor]]  # program, forward, and the weights that it takes


def _loaded(key: str, model: PreTrainedModel) -> _Revived | None:
    content = programs.read(key)
    if content is None:
        return None
    try:
        return _revived(content, model)
    except (DetcompileError, MemoryError):
        raise
    except Exception as error:  # from torch's loader, whose files may be gone
        _warn(model, error)
        return None


def _warn(model: PreTrainedModel, error: Exception) -> None:
    warnings.warn(f"a kept program of {type(model).__name__} is recompiled: {error!r}", stacklevel=4)


def _revived(content: bytes, model: nn.Module) -> _Revived:
    device = next(model.parameters()).device
    if device.type == "cpu":
        direct_ops()  # its code calls them by name
    program: KeptProgram = pickle.loads(content)
    for graph in program.graphs:
        restore_code(graph)
    runs = {region: program.graphs[number] for region, number in program.runs.items()}
    whole = LayeredProgram(runs, program.shared, program.unrolled, program.rows is not None)
    held = named_weights(model, every_name=True)
    fixed = [_weight([held[name] for name in names]) for names in program.weights]
    run = in_float_mode(whole, device, torch.get_num_threads())
    taken = [held[name] for names in program.weights for name in names]
    return program, bind(run, Binding(fixed, program.of_step)), taken


def _weight(parts: list[Tensor]) -> Tensor | None:
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else joined(parts)
