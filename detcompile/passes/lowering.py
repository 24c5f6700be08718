"""lower(): a Hugging Face module becomes a certified callable over packed tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from detcompile.digests import weights_digest
from detcompile.errors import UnsupportedModel
from detcompile.orders.numerics import Numerics
from detcompile.parallel import PipelineStage, TensorParallel
from detcompile.passes.capture import PackedForward, StatesForward, isolated, observe_attention
from detcompile.passes.layers.structure import view_of
from detcompile.passes.modules.recurrences import Recurrences
from detcompile.passes.preparation import prepare
from detcompile.passes.program_source import ProgramSource, compile_packed
from detcompile.passes.programs.lanes import prepare_compiler, prepare_triton
from detcompile.passes.proof.certificate import Certificate
from detcompile.passes.sharding.shard import pin_row_parallel, shard
from detcompile.passes.sharding.shares import Shares, shares_of
from detcompile.passes.tracing import Seen, find_repeats
from detcompile.passes.warm.kept_program import StagePart
from detcompile.progress import stage
from detcompile.step import ModelFacts, StepInputs
from detcompile.weights import copy_mapped_weights, named_weights, weight_digests


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A compiled model.

    ``forward(input_ids [1, T], position_ids [1, T], step, logits_to_keep [R]) -> logits [R, V]`` is one graph for
    every T, R and number of sequences >= 1.

    Attributes:
        facts: sizes of the part that runs here, which may be a rank's share.
        program: digest of the graph over the whole weights.
        constants: tensors that the graph takes besides parameters and buffers, by name.
        whole_weights: digests of the whole weights, if this process holds a share of them.
        recurrences: the operations that carry a state from token to token; None if there are none.
        shares: takes this rank's share of new weights; None if they can be copied as they are.
        stage: proof and input rows of a pipeline stage; None if one process runs all layers. The forward of a stage
            takes the rows [1, T, H] of the stage before it instead of token ids, and returns rows except at the end.
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
    """Rewrite, capture, certify and compile ``model``, in place: its results in eager mode change too.

    Args:
        ranks: the ranks that share the model. Each of them calls this with the same model.
        replicate_attention: if heads do not divide among the ranks, every rank computes all of them.
        on_read: called with the bytes of weights read so far and in total, if ranks share the model.
        pipeline_stage: the layers to run here. The other weights are dropped. None for all layers.

    Raises:
        UnsupportedModel: the model cannot be captured with its meaning intact, or cannot be cut into stages.
        UncertifiedOp: an operation could make a row's bits depend on other rows.
        NumericsError: a row-parallel linear has no equal leaves, or heads or features do not divide among ranks.
        InvalidInput: the model was compiled or refused before, or the ranks' models differ.
        StorageError: the cache of detcompile or of Inductor is full or cannot be written.
    """
    if model.device.type == "cpu":
        prepare_compiler()
    else:
        prepare_triton()
    vocabulary, shares = _vocabulary(model), None
    if ranks is not None or pipeline_stage is not None or numerics.is_exact:
        shares = shares_of(model, numerics, max_context, ranks, replicate_attention)
    seen, recurrences = prepare(model, numerics, max_context, shared=ranks is not None)
    whole = None
    if ranks is not None or pipeline_stage is not None:
        whole = _read_whole(model, numerics, max_context, seen, ranks, on_read)
    if ranks is None:
        pin_row_parallel(model, numerics)
    else:
        with stage("take this rank's share"):
            shard(model, seen.attention, numerics, ranks, replicate_attention)
        seen = Seen.of(observe_attention(model, numerics.kv_chunk))
        ranks.require_equal({"groups of layers by the keys that they see": str(seen.groups)})
    facts = _facts(model, numerics, seen, vocabulary, max_context)
    part = "" if pipeline_stage is None else f"stage {pipeline_stage.index} of {pipeline_stage.size} of "
    source = ProgramSource(model, numerics, max_context, seen, ranks, f"{part}a forward of {ranks}", pipeline_stage)
    source.move()
    copy_mapped_weights(model)
    program = source.program()
    if source.here is not None:
        kv_shapes = facts.kv_shapes[source.here.start : source.here.stop]
        facts = replace(facts, device=source.device, kv_shapes=kv_shapes, kv_groups=source.groups)
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
    """Compile a view of a model that ``lower`` has rewritten. The view shares the model's weights.

    Raises:
        UnsupportedModel, UncertifiedOp: as ``lower``.
    """
    seen = Seen.of(observe_attention(view, numerics.kv_chunk))
    forward, traced = compile_packed(PackedForward(view), numerics, seen, seen.groups, find_repeats(view))
    return Lowered(
        forward=forward,
        certificate=traced.certificate,
        facts=_facts(view, numerics, seen, _vocabulary(view), max_context),
        program=traced.digest,
        constants=traced.constants,
    )


@isolated
def lower_with_states(model: PreTrainedModel, numerics: Numerics, certificate: Certificate) -> Callable[..., Any]:
    """Compile a forward that also returns the hidden states [R, H] that the head reads.

    Args:
        model: rewritten by ``lower``.
        certificate: proof of the forward that returns logits only; the orders must not change.

    Raises:
        UnsupportedModel: the logits would be summed in other orders.
    """
    seen = Seen.of(observe_attention(model, numerics.kv_chunk))  # runs the model, so do it before watching the head
    packed = StatesForward(model)
    watched = packed.watch()
    try:
        forward, traced = compile_packed(packed, numerics, seen, seen.groups)
    finally:
        watched.remove()
    if traced.certificate.orders != certificate.orders:
        raise UnsupportedModel(f"{type(model).__name__} sums in other orders if its hidden states are read")
    return forward


def _vocabulary(model: PreTrainedModel) -> tuple[int, int]:
    """Return the number of rows of the embedding and of the head."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows = []
    for what, module in (("token embedding", embedding), ("head", embedding if head is None else head)):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            raise UnsupportedModel(
                f"{type(model).__name__}: its {what} is a {type(module).__name__} without one weight row per token:"
                " use nn.Linear or nn.Embedding, and move other computation into a separate module"
            )
        rows.append(weight.shape[0])
    return rows[0], rows[1]


def _facts(
    model: PreTrainedModel, numerics: Numerics, seen: Seen, vocabulary: tuple[int, int], max_context: int
) -> ModelFacts:
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
        hidden_size=head.weight.shape[1] if isinstance(getattr(head, "weight", None), Tensor) else 0,
        is_exact=numerics.is_exact,
    )


class _Whole(NamedTuple):
    """A whole model before ranks take their shares, or stages their layers."""

    program: str  # digest of the program that a single rank would run
    weights: Mapping[str, str]  # digests


def _read_whole(
    model: PreTrainedModel,
    numerics: Numerics,
    max_context: int,
    seen: Seen,
    ranks: TensorParallel | None,
    on_read: Callable[[int, int], None] | None,
) -> _Whole:
    """Digest the whole model, and require that it is the same on every rank.

    The ranks compare before their first collective: ranks with different models would wait for each other forever.
    """
    with stage("read the weights" if ranks is None else "compare the ranks' weights"):
        digests = weight_digests(named_weights(model), on_read)
        if ranks is not None:
            declared = {"numerics": str(numerics), "max_context": str(max_context)}
            ranks.require_equal({"weights": weights_digest(digests), **declared})
    view = view_of(model)
    pin_row_parallel(view, numerics)
    program, constants = ProgramSource(view, numerics, max_context, seen, None, "the digest of the whole").digest()
    return _Whole(program, {**digests, **constants})
