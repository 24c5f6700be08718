"""A layered program without its weights, as bytes, and the same over the weights of a model."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants, maybe_realign_inputs
from torch._inductor.utils import BoxedBool
from torch.utils._ordered_set import OrderedSet
from transformers import PreTrainedModel

from detcompile.errors import DetcompileError
from detcompile.parallel import TensorParallel
from detcompile.passes.layers.program import LayeredProgram, Unrolled
from detcompile.passes.programs.binding import Binding, bind, binding_of
from detcompile.passes.programs.cache_writes import require_kept
from detcompile.passes.programs.example_step import example_step
from detcompile.passes.proof.certificate import Certificate
from detcompile.passes.rewrites.merged_linears import joined
from detcompile.passes.tracing import Seen, Traced
from detcompile.passes.warm import programs
from detcompile.templates.cpp_dispatch import direct_ops
from detcompile.templates.cpu.fp_mode import in_float_mode
from detcompile.weights import named_weights

__all__ = ["KeptProgram", "TakenProgram", "kept", "take_program"]


class KeptProgram(NamedTuple):
    """What is pickled of a program."""

    certificate: Certificate
    digest: str  # of the graph's canonical form
    graphs: list[CompiledFxGraph]  # without the code that was loaded
    runs: dict[int, int]  # by region: which of ``graphs`` is its code
    shared: dict[int, tuple[int, ...]]
    unrolled: Unrolled
    weights: list[tuple[str, ...]]  # by position: names of the weights that are concatenated there; none for a step's
    of_step: list[tuple[int, int, int | None]]


def kept(traced: Traced, model: nn.Module) -> bytes | None:
    """A compiled program as bytes; None where it is not made of regions, or holds more than code and named weights."""
    code = traced.graph.code
    if code is None or traced.constants:
        return None
    program, parts = code.program, code.parts
    graphs = {id(run): run for run in program.runs.values()}
    if not all(isinstance(run, CompiledFxGraph) for run in graphs.values()):
        return None
    names = {id(tensor): name for name, tensor in reversed(named_weights(model, every_name=True).items())}
    fixed, of_step = binding_of(traced.graph, traced.example)
    brought = {position for position, _, _ in of_step}
    weights = []
    for position in range(len(fixed)):
        own = () if position in brought else parts.get(position, (traced.graph.inputs[position],))
        weights.append(tuple(names[id(part)] for part in own))
    place = {key: number for number, key in enumerate(graphs)}
    return pickle.dumps(
        KeptProgram(
            certificate=traced.certificate,
            digest=traced.digest,
            graphs=[_without_code(graph) for graph in graphs.values()],
            runs={region: place[id(run)] for region, run in program.runs.items()},
            shared=dict(program.shared),
            unrolled=program.unrolled,
            weights=weights,
            of_step=of_step,
        )
    )


def _without_code(graph: CompiledFxGraph) -> CompiledFxGraph:
    copied = copy.copy(graph)
    copied.prepare_for_serialization()
    copied.fx_kwargs = {}
    copied._triton_bundle = None
    return copied


class TakenProgram(NamedTuple):
    """A kept program over the weights of a model, as a function of a step."""

    forward: Callable[..., Any]
    certificate: Certificate
    digest: str


def take_program(
    key: str | None, model: PreTrainedModel, seen: Seen, ranks: TensorParallel | None = None
) -> TakenProgram | None:
    """The program of this key, which ran a step of this model; None if there is none, or it cannot be loaded.

    Args:
        key: None where no program may be taken.
        ranks: the ranks that share the model, all of which call this. Where one has no program all compile, since they
            meet in its sums.

    Raises:
        UnsupportedModel: it copies its caches.
        StorageError: the cache cannot be used.
    """
    found = None if key is None else _loaded(key, model)
    if ranks is not None and not ranks.least(found is not None):
        return None
    if found is None:
        return None
    program, forward = found
    example = example_step(seen.kv_shapes, len(seen.groups), seen.states, model.dtype, model.device)
    try:
        require_kept(forward, seen.groups, example)
    except (DetcompileError, MemoryError):
        raise
    except Exception as error:
        if ranks is not None:  # the others wait for this one's sums
            raise
        _warn(model, error)
        return None
    return TakenProgram(forward, program.certificate, program.digest)


def _loaded(key: str, model: PreTrainedModel) -> tuple[KeptProgram, Callable[..., Any]] | None:
    content = programs.read(key)
    if content is None:
        return None
    try:
        return _revived(content, model)
    except (DetcompileError, MemoryError):
        raise
    except Exception as error:  # torch's loader, whose files anybody may have removed
        _warn(model, error)
        return None


def _warn(model: PreTrainedModel, error: Exception) -> None:
    warnings.warn(f"a kept program of {type(model).__name__} is compiled anew: {error!r}", stacklevel=4)


def _revived(content: bytes, model: nn.Module) -> tuple[KeptProgram, Callable[..., Any]]:
    device = next(model.parameters()).device
    if device.type == "cpu":
        direct_ops()  # which its code calls by their names
    program: KeptProgram = pickle.loads(content)
    for graph in program.graphs:
        graph.after_deserialization(CompiledFxGraphConstants())
        maybe_realign_inputs(BoxedBool(False), graph, graph.inputs_to_check, OrderedSet(graph.mutated_input_idxs))
    runs = {region: program.graphs[number] for region, number in program.runs.items()}
    whole = LayeredProgram(runs, program.shared, program.unrolled)
    held = named_weights(model, every_name=True)
    fixed = [_weight([held[name] for name in names]) for names in program.weights]
    run = in_float_mode(whole, device, torch.get_num_threads())
    return program, bind(run, Binding(fixed, program.of_step))


def _weight(parts: list[Tensor]) -> Tensor | None:
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else joined(parts)
