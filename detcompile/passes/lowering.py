"""The life of a model through compile(): from a Hugging Face module to a certified callable over packed tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from detcompile.config import programs_kept
from detcompile.errors import UnsupportedModel
from detcompile.facts import ModelFacts
from detcompile.orders.numerics import Numerics
from detcompile.parallel import PipelineStage, TensorParallel
from detcompile.passes.batches import certify_batches
from detcompile.passes.capture import PackedForward, StatesForward, isolated, observe_attention
from detcompile.passes.layers.structure import Repeats
from detcompile.passes.modules.recurrences import Recurrences
from detcompile.passes.preparation import prepare
from detcompile.passes.programs.binding import bind, binding_of, require_kept
from detcompile.passes.programs.lanes import precompile_header, prepare_compiler
from detcompile.passes.proof.certificate import Certificate
from detcompile.passes.sharding.shard import pin_row_parallel, shard
from detcompile.passes.sharding.shares import Shares, shares_of
from detcompile.passes.stages import (
    StagePart,
    groups_of_stage,
    layers_of_stage,
    move_stage,
    release_others,
    tensors_of,
)
from detcompile.passes.tracing import Seen, Traced, find_repeats, trace_packed
from detcompile.passes.warm import programs
from detcompile.passes.warm.kept_program import kept, take_program
from detcompile.passes.warm.program_key import ProgramKey, label_of, observe_run, program_key
from detcompile.passes.whole_model import WholeModel, read_whole
from detcompile.progress import stage
from detcompile.step import StepInputs
from detcompile.torch_internals.inductor import compile_fx_inner
from detcompile.weights import copy_mapped_weights

__all__ = ["Lowered", "lower", "lower_view", "lower_with_states"]


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A compiled model.

    ``forward(input_ids [1, T], position_ids [1, T], step, logits_to_keep [R]) -> logits [R, V]``, one graph for
    every T, R and number of sequences from one up.

    Attributes:
        facts: the sizes of what runs here, which may be a rank's share.
        program: digest of the graph over the whole weights.
        constants: what the graph takes that is no parameter or buffer, by name.
        whole_weights: digests of the whole weights, where this process holds a share of them.
        recurrences: the operations that carry a state from token to token; None if there are none.
        shares: what takes this rank's share of new weights; None where there are no ranks, or none is taken.
        stage: what is known of a stage; None where one process has all layers. Its forward is given the rows of the
            stage before it in the place of token ids, and gives rows [1, T, H], but at the ends.
    """

    forward: Callable[[Tensor, Tensor, StepInputs, Tensor], Tensor]
    certificate: Certificate
    facts: ModelFacts
    program: str
    constants: Mapping[str, Tensor]
    whole_weights: Mapping[str, str] = field(default_factory=dict)
    recurrences: Recurrences | None = None
    shares: Shares | None = None
    stage: StagePart | None = None


@isolated
def lower(
    model: PreTrainedModel,
    numerics: Numerics,
    max_context: int,
    ranks: TensorParallel | None = None,
    replicate_attention: bool = False,
    on_read: Callable[[int, int], None] | None = None,
    pipeline_stage: PipelineStage | None = None,
) -> Lowered:
    """Rewrite, capture, certify and lower ``model``, which is changed in place (its bits under eager change with it).

    Args:
        ranks: the ranks that share the model, each of which has to call this with the same model.
        replicate_attention: heads that do not divide among the ranks are computed by each.
        on_read: where ranks share the model, is told the bytes of weights read so far and of how many.
        pipeline_stage: the part of the layers that is run here, whose weights alone are kept; None for all.

    Raises:
        UnsupportedModel: the model cannot be captured with its meaning intact, or not be cut into stages.
        UncertifiedOp: an operation could make a row's bits depend on other rows.
        NumericsError: a row-parallel linear has no equal leaves, or what ranks share does not divide.
        InvalidInput: the model was compiled, or refused, before; or the ranks' models differ.
        StorageError: the cache, or Inductor's own, is full or cannot be written.
    """
    if model.device.type == "cpu":
        prepare_compiler()
    vocabulary, alone = _vocabulary(model), pipeline_stage is None
    shares = shares_of(model, numerics, max_context, ranks if alone else None, replicate_attention)
    seen, recurrences = prepare(model, numerics, max_context, shared=ranks is not None)
    whole: WholeModel | None = None
    if ranks is not None or pipeline_stage is not None:
        whole = read_whole(model, numerics, max_context, seen, ranks, on_read)
    if ranks is None:
        pin_row_parallel(model, numerics)
    else:
        with stage("take this rank's share"):
            shard(model, seen.attention, numerics, ranks, replicate_attention)
        seen = Seen.of(observe_attention(model, numerics.kv_chunk))
    facts = _facts(model, seen, vocabulary, max_context)
    if pipeline_stage is None:
        copy_mapped_weights(model)
        program = _kept_or_compiled(model, numerics, max_context, seen, ranks)
    else:
        program, facts = _stage_program(model, numerics, max_context, seen, facts, pipeline_stage, ranks)
    return Lowered(
        forward=program.forward,
        certificate=program.certificate,
        facts=facts,
        program=program.digest if whole is None else whole.program,
        constants=program.constants,
        whole_weights={} if whole is None else whole.weights,
        recurrences=recurrences,
        shares=shares,
        stage=program.stage,
    )


@isolated
def lower_view(view: PreTrainedModel, numerics: Numerics, max_context: int) -> Lowered:
    """A program over a part of a model that ``lower`` has changed; it shares the weights (passes.layers.structure).

    Raises:
        UnsupportedModel, UncertifiedOp: as ``lower``.
    """
    seen = Seen.of(observe_attention(view, numerics.kv_chunk))
    forward, traced = _compile_packed(PackedForward(view), numerics, seen, find_repeats(view))
    return Lowered(
        forward=forward,
        certificate=traced.certificate,
        facts=_facts(view, seen, _vocabulary(view), max_context),
        program=traced.digest,
        constants=traced.constants,
    )


@isolated
def lower_with_states(model: PreTrainedModel, numerics: Numerics, certificate: Certificate) -> Callable[..., Any]:
    """The forward of a model that ``lower`` has changed, which also returns the states [R, H] that its head reads.

    Args:
        certificate: proof of the forward that returns logits only; its orders must not change.

    Raises:
        UnsupportedModel: the logits would be computed in other orders.
    """
    seen = Seen.of(observe_attention(model, numerics.kv_chunk))  # runs the model: before anybody watches its head
    packed = StatesForward(model)
    watched = packed.watch()
    try:
        forward, traced = _compile_packed(packed, numerics, seen)
    finally:
        watched.remove()
    if traced.certificate.orders != certificate.orders:
        raise UnsupportedModel(f"{type(model).__name__} sums in other orders if its hidden states are read")
    return forward


def _vocabulary(model: PreTrainedModel) -> tuple[int, int]:
    """Rows of the embedding, and of the head.

    Raises:
        UnsupportedModel: one of them is no table.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows = []
    for what, module in (("token embedding", embedding), ("head", embedding if head is None else head)):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            raise UnsupportedModel(
                f"{type(model).__name__}: its {what} is a {type(module).__name__} without a weight of a row a token;"
                " take one that has it (nn.Linear, nn.Embedding), and what else it computes into a module beside it"
            )
        rows.append(weight.shape[0])
    return rows[0], rows[1]


def _facts(model: PreTrainedModel, seen: Seen, vocabulary: tuple[int, int], max_context: int) -> ModelFacts:
    head = model.get_output_embeddings()
    num_token_ids, num_logits = vocabulary
    return ModelFacts(
        kv_shapes=seen.kv_shapes,
        kv_groups=seen.groups,
        state_shapes=seen.states,
        dtype=model.dtype,
        device=next(model.parameters()).device,
        max_context=max_context,
        num_token_ids=num_token_ids,
        num_logits=num_logits,
        hidden_size=0 if head is None else head.weight.shape[1],
    )


class _Program(NamedTuple):
    forward: Callable[..., Any]
    certificate: Certificate
    digest: str
    constants: Mapping[str, Tensor]
    stage: StagePart | None = None


def _kept_or_compiled(
    model: PreTrainedModel, numerics: Numerics, max_context: int, seen: Seen, ranks: TensorParallel | None
) -> _Program:
    """The program that an earlier start kept, or one that is compiled now and then kept."""
    key, observed = None, observe_run(model)
    if programs_kept() or ranks is not None:  # ranks agree, also where one may keep nothing
        with stage("look for a kept program") as looking:
            if programs_kept():
                key = program_key(model, numerics, max_context, seen, observed, use=f"a forward of {ranks}")
            found = take_program(key and key.digest, model, seen, ranks)
            looking.becomes("no program is kept" if found is None else f"take a kept program of {_layers(model)}")
        if found is not None:
            return _Program(found.forward, found.certificate, found.digest, {})
    if model.device.type == "cpu":
        precompile_header()
    repeats = None if seen.states else find_repeats(model, observed and observed.shown)
    captured = _layers(model) if repeats is None else f"{repeats.prefix} of {_layers(model)}"
    with stage(f"capture {captured} over a batch"):
        certify_batches(model, numerics, seen.expected, repeats)
    with stage(f"capture {captured} and compile") as compiling:
        forward, traced = _compile_packed(PackedForward(model), numerics, seen, repeats)
        count = sum(traced.certificate.counts.values())
        compiling.becomes(f"capture {captured}, certify {count} operations and compile")
    _keep(key, traced, model, max_context, ranks)
    return _Program(forward, traced.certificate, traced.digest, traced.constants)


def _keep(
    key: ProgramKey | None, traced: Traced, model: PreTrainedModel, max_context: int, ranks: TensorParallel | None
) -> None:
    """Keep a program, where no rank has to leave that out."""
    may_keep = key is not None if ranks is None else bool(ranks.least(key is not None))
    content = kept(traced, model, ranks) if may_keep else None
    if key is not None and content is not None:
        programs.write(key.digest, content, label_of(model, max_context, traced.digest, key))


def _stage_program(
    model: PreTrainedModel,
    numerics: Numerics,
    max_context: int,
    seen: Seen,
    facts: ModelFacts,
    own: PipelineStage,
    ranks: TensorParallel | None,
) -> tuple[_Program, ModelFacts]:
    """The program over the layers of a stage, kept or compiled, and its facts; the other weights are dropped."""
    observed = observe_run(model)
    repeats = None if seen.states else find_repeats(model, observed and observed.shown)
    here = layers_of_stage(model, own, repeats, carries_states=bool(seen.states))
    assert repeats is not None
    key = None
    if programs_kept():
        use = f"stage {own.index} of {own.size} of a forward of {ranks}"
        key = program_key(model, numerics, max_context, seen, observed, use, own.device)
    move_stage(model, own, repeats)
    copy_mapped_weights(model)
    device, groups = next(model.parameters()).device, groups_of_stage(seen.groups, here)
    facts = replace(facts, device=device, kv_shapes=facts.kv_shapes[here.start : here.stop], kv_groups=groups)
    with stage("look for a kept program") as looking:
        found = take_program(key and key.digest, model, seen._replace(groups=groups), ranks, here)
        looking.becomes("no program is kept" if found is None else f"take a kept program of {len(here)} layers")
    if found is not None:
        release_others(model, found.weights)
        part = None if found.stage is None else StagePart(found.stage, found.rows)
        return _Program(found.forward, found.certificate, found.digest, {}, part), facts
    if device.type == "cpu":
        precompile_header()
    with stage("capture over a batch"):
        certify_batches(model, numerics, seen.expected, repeats)
    with stage(f"capture and compile {len(here)} of {_layers(model)}"):
        traced = trace_packed(PackedForward(model), numerics, seen, compile_fx_inner, repeats=repeats, here=here)
        forward = bind(traced.graph.run, binding_of(traced.graph, traced.example))
        require_kept(forward, groups, traced.example)
    _keep(key, traced, model, max_context, ranks)
    release_others(model, tensors_of(traced.graph))
    part = StagePart(traced.graph.code.stage, traced.graph.code.rows)
    return _Program(forward, traced.certificate, traced.digest, traced.constants, part), facts


def _layers(model: PreTrainedModel) -> str:
    count = model.config.get_text_config().num_hidden_layers
    return "1 layer" if count == 1 else f"{count} layers"


def _compile_packed(
    module: PackedForward, numerics: Numerics, seen: Seen, repeats: Repeats | None = None
) -> tuple[Callable[..., Any], Traced]:
    traced = trace_packed(module, numerics, seen, compile_fx_inner, repeats=repeats)
    forward = bind(traced.graph.run, binding_of(traced.graph, traced.example))
    require_kept(forward, seen.groups, traced.example)
    return forward, traced
