"""Trace a Hugging Face module over packed sequences into certified regions, ready for training."""

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from detcompile.errors import UnsupportedModel
from detcompile.orders.numerics import Numerics
from detcompile.passes.backend import Backend, Expected
from detcompile.passes.batches import certify_batches
from detcompile.passes.capture import PackedForward, isolated
from detcompile.passes.layers.program import LayeredProgram, LayerInputs
from detcompile.passes.layers.structure import Repeats, layer_list
from detcompile.passes.modules.attention import STEP_KWARG
from detcompile.passes.modules.experts import find_experts
from detcompile.passes.preparation import prepare
from detcompile.passes.programs.binding import Binding, ExampleStep, binding_of
from detcompile.passes.programs.canonical_form import NotRun, never_run
from detcompile.passes.proof.certificate import Certificate
from detcompile.passes.roles import packed_roles
from detcompile.passes.sharding.shard import pin_row_parallel
from detcompile.passes.tracing import find_repeats, marked_layers, trace_once
from detcompile.passes.training.regions import TrainedRegion
from detcompile.step import StepInputs
from detcompile.torch_internals.dynamo import mark_unbacked


class TracedRegions(NamedTuple):
    """A forward graph in regions: before the layers, one a structure, after them."""

    program: LayeredProgram  # the code of each region is a TrainedRegion
    binding: Binding  # of the inputs of all regions
    certificate: Certificate  # of the forward
    differentiated: frozenset[int]  # numbers of the shared values that depend on parameters


class WholeSequences(PackedForward):
    """Logits of all tokens of packed, whole sequences.

    forward(input_ids [1, T], position_ids [1, T], step, _) -> [T, V]
    """

    def forward(self, input_ids: Tensor, position_ids: Tensor, step: StepInputs, logits_to_keep: Tensor) -> Tensor:
        torch._check(input_ids.shape[1] > 0)
        kwargs: Any = {STEP_KWARG: step}
        logits: Tensor = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **kwargs).logits
        return logits.squeeze(0)


@isolated
def trace_regions(model: PreTrainedModel, numerics: Numerics, max_context: int) -> TracedRegions:
    """Rewrite, capture and certify a model's forward, and cut it where layers meet. The model is changed in place.

    Raises:
        UnsupportedModel: the model cannot be captured with its meaning intact, or its layers read more of each other
            than their rows, carry a state from token to token, or hold experts.
        UncertifiedOp: an operation could make a row's bits depend on other rows.
    """
    name = type(model).__name__
    if find_experts(model):
        raise UnsupportedModel(f"{name}: mixtures of experts cannot be trained, only served")
    seen, recurrences = prepare(model, numerics, max_context)
    if recurrences is not None:
        raise UnsupportedModel(f"{name}: layers that carry a state from token to token cannot be trained, only served")
    pin_row_parallel(model, numerics)
    layers = layer_list(model)
    if layers is None:
        raise UnsupportedModel(f"{name} does not keep its layers in a single list, so it cannot be trained")
    known_repeats = find_repeats(model)
    certify_batches(model, numerics, seen.expected, known_repeats)
    repeats = known_repeats or Repeats(tuple(range(len(layers))))
    example = whole_sequences(next(model.parameters()).device)
    keep: Any = partial(TrainedRegion, numerics=numerics)  # instead of code
    backend = Backend(
        numerics,
        packed_roles(()),
        expects=Expected(repeats.prefix),
        compile_graph=never_run,
        layers=LayerInputs(list(layers), repeats, example, (), trains=True),
        compile_region=keep,
    )
    with contextlib.suppress(NotRun):
        trace_once(WholeSequences(marked_layers(model, repeats.prefix)), backend, example)
    (graph,), (certificate,) = backend.programs, backend.certificates
    program = graph.code.program
    return TracedRegions(program, binding_of(graph, example), certificate, _made_of_parameters(program, graph.inputs))


def _made_of_parameters(program: LayeredProgram, inputs: Sequence[Any]) -> frozenset[int]:
    """Return numbers of the first region's shared values that depend on a parameter."""
    first: Any = program.runs[program.unrolled.regions[0]]
    graph = first.region.gm.graph
    made = {
        node
        for node, position in zip(graph.find_nodes(op="placeholder"), program.unrolled.given[0], strict=True)
        if isinstance(inputs[position], nn.Parameter)
    }
    for node in graph.nodes:
        if any(arg in made for arg in node.all_input_nodes):
            made.add(node)
    (output,) = graph.find_nodes(op="output")
    return frozenset(place for place, node in enumerate(output.args[0][1:]) if node in made)


def whole_sequences(device: torch.device) -> ExampleStep:
    """Return a step of one sequence of two tokens with extents marked unknown."""
    input_ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    position_ids = torch.arange(2, device=device)[None]
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32, device=device)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    for tensor, dim in ((input_ids, 1), (position_ids, 1), (cu_seqlens, 0)):
        mark_unbacked(tensor, dim)
    step = StepInputs((), cu_seqlens, nothing, (), (), (), nothing)
    return input_ids, position_ids, step, torch.arange(2, device=device)
