"""The life of a model through compile(): from a Hugging Face module to a certified callable over packed tokens."""

import contextlib
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import TorchDynamoException
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from transformers import PreTrainedModel

from detcompile.config import inductor_folder, sizes_asserted
from detcompile.errors import DetcompileError, InvalidInput, UnsupportedModel
from detcompile.orders.numerics import Numerics
from detcompile.parallel import TensorParallel
from detcompile.passes.adapters.expert_classes import replace_experts
from detcompile.passes.adapters.scans import pin_recurrences
from detcompile.passes.backend import Backend, Program, cause
from detcompile.passes.capture import (
    DenseForward,
    PackedForward,
    StatesForward,
    freeze_rope,
    observe_attention,
    probe_attention,
)
from detcompile.passes.graphs import sympy_size
from detcompile.passes.modules.attention import AttentionCall
from detcompile.passes.modules.experts import pin_experts
from detcompile.passes.modules.positions import give_positions
from detcompile.passes.modules.quantized_linear import pin_quantized
from detcompile.passes.modules.recurrences import Recurrences
from detcompile.passes.programs.aot import Packaging
from detcompile.passes.programs.cache_writes import require_kept
from detcompile.passes.programs.canonical_form import NotRun, constants_of, input_names, never_run
from detcompile.passes.programs.example_step import ExampleStep, example_step
from detcompile.passes.programs.layer_views import view_of
from detcompile.passes.proof.certificate import Certificate, Role
from detcompile.passes.proof.provenance import Layout
from detcompile.passes.sharding.shard import pin_row_parallel, shard
from detcompile.step import KVGroup, StateShape, StepInputs, step_leaves
from detcompile.storage import disk_failure
from detcompile.weights import WeightView, named_weights, views_in, weight_digests, weights_digest

__all__ = ["Lowered", "Packaged", "lower", "lower_view", "lower_with_states", "package"]

DISK_ADVICE = "Free space there or make it writable, or set TORCHINDUCTOR_CACHE_DIR, or TMPDIR, to another folder."
TAKEN = "_taken_by_detcompile"  # attribute of a model that compile() has changed, whether or not it then refused it


class Lowered(NamedTuple):
    """A compiled model.

    ``forward(input_ids [1, T], position_ids [1, T], step, logits_to_keep [R]) -> logits [R, V]``, one graph for
    every T, R and number of sequences from one up.
    """

    forward: Callable[[Tensor, Tensor, StepInputs, Tensor], Tensor]
    certificate: Certificate
    kv_shapes: tuple[tuple[int, int, int], ...]  # one a layer: kv_heads, head_dim, v_head_dim
    kv_groups: tuple[KVGroup, ...]
    num_token_ids: int  # that the embedding has rows for
    num_logits: int  # of the head, which may be wider
    program: str  # digest of the graph over the whole weights
    constants: Mapping[str, Tensor]  # that the graph takes, and that are no parameters or buffers, by name
    whole_weights: Mapping[str, str] = types.MappingProxyType({})  # digests, where this process holds a share of them
    state_shapes: tuple[StateShape, ...] = ()  # one an operation that carries a state from token to token
    recurrences: Recurrences | None = None  # those operations


class Packaged(NamedTuple):
    """A compiled model as AOTInductor's files.

    ``arguments`` says what the library takes, in order: an index into step.step_leaves, or the name of a weight.
    ``views`` says where in these the model's own parameters and buffers lie, by their names in the model.
    """

    files: tuple[Path, ...]
    arguments: tuple[int | str, ...]
    weights: dict[str, Tensor]
    views: dict[str, WeightView]


def lower(
    model: PreTrainedModel,
    numerics: Numerics,
    max_context: int,
    ranks: TensorParallel | None = None,
    replicate_attention: bool = False,
    on_read: Callable[[int, int], None] | None = None,
) -> Lowered:
    """Rewrite, capture, certify and lower ``model``, which is changed in place (its bits under eager change with it).

    Args:
        ranks: with whom this process shares the model; every one of them has to call this with the same model.
        replicate_attention: heads that do not divide among the ranks are computed by each.
        on_read: where ranks share the model, is told the bytes of weights read so far and of how many.

    Raises:
        UnsupportedModel: the model cannot be captured with its meaning intact.
        UncertifiedOp: an operation could make a row's bits depend on other rows.
        NumericsError: a row-parallel linear has no equal leaves, or what ranks share does not divide.
        InvalidInput: the model was compiled, or refused, before; or the ranks' models differ.
        StorageError: the cache, or Inductor's own, is full or cannot be written.
    """
    if getattr(model, TAKEN, False):
        raise InvalidInput(
            f"this {type(model).__name__} was given to compile() before and its linears and rotary tables changed: "
            "load it again"
        )
    setattr(model, TAKEN, True)
    num_token_ids, num_logits = _vocabulary(model)
    give_positions(model)
    freeze_rope(model, max_context)
    if pin_quantized(model) and ranks is not None:
        raise UnsupportedModel(f"{type(model).__name__}: quantised weights over several ranks; compile with tp=1")
    pin_experts(model)
    if replace_experts(model) and ranks is not None:
        raise UnsupportedModel(
            f"{type(model).__name__}: experts that take no implementation from outside, over several ranks; "
            "compile with tp=1"
        )
    recurrences = pin_recurrences(model)
    if recurrences is not None and ranks is not None:
        raise UnsupportedModel(f"{type(model).__name__}: layers with a state over several ranks; compile with tp=1")
    attention, groups = probe_attention(model, numerics.kv_chunk, recurrences)
    states = () if recurrences is None else tuple(recurrences.shapes)
    whole_weights: dict[str, str] = {}
    if ranks is None:
        pin_row_parallel(model, numerics)
    else:
        whole_weights = weight_digests(named_weights(model), on_read)
        ranks.require_equal(
            {"weights": weights_digest(whole_weights), "numerics": str(numerics), "max_context": str(max_context)}
        )  # before the first collective of the model: ranks that differ would wait for each other
        whole_program, constants = _whole_program(model, numerics, attention, groups)
        whole_weights |= weight_digests(constants)
        shard(model, attention, numerics, ranks, replicate_attention)
        attention, groups = observe_attention(model, numerics.kv_chunk)
    _certify_batches(model, numerics, len(attention), len(states))
    compiled = _compile_packed(PackedForward(model), numerics, attention, groups, states)
    shapes = tuple(call.shape for call in attention)
    program = compiled.program if ranks is None else whole_program
    facts = (shapes, groups, num_token_ids, num_logits, program, compiled.constants, whole_weights, states, recurrences)
    return Lowered(compiled.forward, compiled.certificate, *facts)


def lower_view(view: PreTrainedModel, numerics: Numerics) -> Lowered:
    """A program over a part of a model that ``lower`` has changed; it shares the weights (passes.programs.layer_views).

    Raises:
        UnsupportedModel, UncertifiedOp: as ``lower``.
    """
    attention, groups = observe_attention(view, numerics.kv_chunk)
    forward, certificate, program, constants = _compile_packed(PackedForward(view), numerics, attention, groups)
    shapes = tuple(call.shape for call in attention)
    return Lowered(forward, certificate, shapes, groups, *_vocabulary(view), program, constants)


def lower_with_states(model: PreTrainedModel, numerics: Numerics, certificate: Certificate) -> Callable[..., Any]:
    """The forward of a model that ``lower`` has changed, which also returns the states [R, H] that its head reads.

    Args:
        certificate: of the forward without them.

    Raises:
        UnsupportedModel: the logits would be computed in other orders.
    """
    attention, groups = observe_attention(model, numerics.kv_chunk)
    packed = StatesForward(model)
    watched = packed.watch()
    try:
        forward, found, *_ = _compile_packed(packed, numerics, attention, groups)
    finally:
        watched.remove()
    if found.orders != certificate.orders:
        raise UnsupportedModel(f"{type(model).__name__} sums in other orders if its hidden states are read")
    return forward


def package(
    model: PreTrainedModel,
    numerics: Numerics,
    certificate: Certificate,
    recurrences: Recurrences | None,
    program: str | None,
) -> Packaged:
    """Compile the forward of a model that ``lower`` has changed once more, ahead of time.

    Args:
        certificate, recurrences: as Lowered has them. program: too, None where the model is a rank's share.

    Raises:
        UnsupportedModel: the graph would be another one.
    """
    attention, groups = observe_attention(model, numerics.kv_chunk, recurrences)
    states = () if recurrences is None else tuple(recurrences.shapes)
    packaging = Packaging()
    backend, example = _trace_packed(PackedForward(model), numerics, attention, groups, packaging, states)
    (found,), (traced,), (digest,) = backend.certificates, backend.programs, backend.digests
    same = found.counts == certificate.counts and found.orders == certificate.orders
    if not same or digest != (program or digest):
        raise UnsupportedModel(f"{type(model).__name__} gave another graph than the compiled one: load it again")
    place = {id(leaf): index for index, leaf in enumerate(step_leaves(*example))}
    names = input_names(model, step_leaves(*example), traced.inputs)
    arguments: list[int | str] = []
    weights: dict[str, Tensor] = {}
    for position in packaging.kept:
        given = traced.inputs[position]
        if id(given) in place:
            arguments.append(place[id(given)])
            continue
        name = names[position] + (".joined" if position in traced.joined else "")
        weights[name] = traced.joined.get(position, given).detach()
        arguments.append(name)
    held = named_weights(model, every_name=True) | constants_of(model, step_leaves(*example), traced.inputs)
    return Packaged(packaging.files, tuple(arguments), weights, views_in(weights, held))


def _vocabulary(model: PreTrainedModel) -> tuple[int, int]:
    """Rows of the embedding, and of the head."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return embedding.weight.shape[0], (embedding if head is None else head).weight.shape[0]


def _certify_batches(model: PreTrainedModel, numerics: Numerics, num_attention: int, num_states: int) -> None:
    """Prove the model over a batch of several rows: what packing writes as an extent of 1 is visible here."""
    backend = Backend(numerics, _dense_role, num_attention, certify_only=True, expected_recurrences=num_states)
    dense = partial(torch.compile, _with_own_code(DenseForward(model)), backend=backend, fullgraph=True, dynamic=None)
    device = next(model.parameters()).device
    input_ids = torch.zeros(3, 5, dtype=torch.int64, device=device)  # two extents that no other dimension shares
    position_ids = torch.arange(5, device=device).repeat(3, 1)
    for tensor in (input_ids, position_ids):
        torch._dynamo.mark_dynamic(tensor, [0, 1])
    _run(dense, (input_ids, position_ids), model)


class _Compiled(NamedTuple):
    """A packed forward; what Lowered says of it."""

    forward: Callable[..., Any]
    certificate: Certificate
    program: str
    constants: dict[str, Tensor]


def _compile_packed(
    module: PackedForward,
    numerics: Numerics,
    attention: tuple[AttentionCall, ...],
    groups: tuple[KVGroup, ...],
    states: tuple[StateShape, ...] = (),
) -> _Compiled:
    backend, example = _trace_packed(module, numerics, attention, groups, compile_fx_inner, states)
    (certificate,), (program,), (digest,) = backend.certificates, backend.programs, backend.digests
    forward = _bind(program, example)
    require_kept(forward, groups, example)
    return _Compiled(forward, certificate, digest, constants_of(module.model, step_leaves(*example), program.inputs))


def _whole_program(
    model: PreTrainedModel,
    numerics: Numerics,
    attention: tuple[AttentionCall, ...],
    groups: tuple[KVGroup, ...],
) -> tuple[str, dict[str, Tensor]]:
    """The digest of the program that one rank would run, and its constants, before ranks take shares of ``model``."""
    view = view_of(model)
    pin_row_parallel(view, numerics)
    backend, example = _trace_packed(PackedForward(view), numerics, attention, groups, never_run, join_weights=False)
    (program,), (digest,) = backend.programs, backend.digests
    return digest, constants_of(view, step_leaves(*example), program.inputs)


def _trace_packed(
    module: PackedForward,
    numerics: Numerics,
    attention: tuple[AttentionCall, ...],
    groups: tuple[KVGroup, ...],
    compile_graph: Callable[..., Any],
    states: tuple[StateShape, ...] = (),
    join_weights: bool = True,
) -> tuple[Backend, ExampleStep]:
    """The backend that has compiled the one graph, and the step that it was traced with."""
    backend = Backend(numerics, _packed_roles(groups), len(attention), join_weights=join_weights, lower=compile_graph)
    backend.expected_recurrences = len(states)
    packed = partial(torch.compile, _with_own_code(module), backend=backend, fullgraph=True, dynamic=None)
    parameter = next(module.model.parameters())
    shapes = [call.shape for call in attention]
    example = example_step(shapes, len(groups), states, module.model.dtype, parameter.device)
    backend.name_inputs = partial(input_names, module.model, step_leaves(*example))
    with inductor_config.patch(size_asserts=sizes_asserted()), contextlib.suppress(NotRun):
        _run(packed, example, module.model)
    return backend, example


def _bind(program: Program, example: ExampleStep) -> Callable[..., Any]:
    """The graph as a function of a step, without Dynamo, whose guards could only cost time or trace the model again."""
    leaves = step_leaves(*example)
    place = {id(leaf): i for i, leaf in enumerate(leaves)}
    sizes: dict[Any, tuple[int, int]] = {}  # symbol -> (leaf, dimension) that has this extent
    for value, given in zip(program.values, program.inputs, strict=True):
        if id(given) in place:
            sizes |= {sympy_size(size): (place[id(given)], dim) for dim, size in enumerate(value.shape)}
    fixed: list[Any] = []  # weights, and None where a step brings something
    of_step: list[tuple[int, int, int | None]] = []  # position, leaf, and the dimension whose extent it is
    for position, (value, given, role) in enumerate(zip(program.values, program.inputs, program.roles, strict=True)):
        fixed.append(program.joined.get(position, given) if role.kind == "weight" else None)
        if isinstance(value, torch.SymInt):
            extent = sizes.get(sympy_size(value))
            if extent is None:  # of a tensor that the graph does not read: it only checks that there is something
                assert position in program.checked, f"an extent of no input of the step is read: {value}"
                extent = (0, 1)
            of_step.append((position, *extent))
        else:
            assert (role.kind == "weight") == (id(given) not in place), f"an input of the step was not found: {value}"
            if id(given) in place:
                of_step.append((position, place[id(given)], None))

    @torch.no_grad()
    def forward(input_ids: Tensor, position_ids: Tensor, step: StepInputs, logits_to_keep: Tensor) -> Any:
        given = step_leaves(input_ids, position_ids, step, logits_to_keep)
        arguments = fixed.copy()
        for position, leaf, dim in of_step:
            arguments[position] = given[leaf] if dim is None else given[leaf].shape[dim]
        outputs = program.run(*arguments)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return forward


def _with_own_code(module: nn.Module) -> Callable[..., Tensor]:
    """``module.forward`` over a code object of its own: Dynamo keeps graphs by code object, and few for each."""
    function = type(module).forward
    code = function.__code__.replace(co_name=f"forward_{id(module):x}")
    return types.MethodType(types.FunctionType(code, function.__globals__), module)


def _run(compile: Callable[[], Callable[..., Any]], arguments: Sequence[Any], model: PreTrainedModel) -> None:
    """Make the first call, which compiles; unwrap our own errors and explain Dynamo's and the disk's.

    Dynamo makes symbols of numbers that differ from those of a model which had this one's code name before it. Which
    extents are symbolic was marked.
    """
    try:
        with torch.no_grad(), dynamo_config.patch(automatic_dynamic_shapes=False):
            compile()(*arguments)
    except DetcompileError:
        raise
    except TorchDynamoException as error:
        ours = cause(error) or disk_failure(error, inductor_folder(), DISK_ADVICE)
        if ours is not None:
            raise ours from None
        raise UnsupportedModel(
            f"{type(model).__name__} is not one graph over any number of tokens: {str(error).strip().splitlines()[0]}\n"
            "The model's source line is in the cause below."
        ) from error
    except OSError as error:
        raise disk_failure(error, inductor_folder(), DISK_ADVICE) or error from None


def _packed_roles(groups: tuple[KVGroup, ...]) -> Callable[[str, Any], Role]:
    """Roles by the names of PackedForward's arguments."""
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


def _dense_role(name: str, value: Any) -> Role:
    """Roles by the names of DenseForward's arguments."""
    return Role("rows", {0: "batch", 1: "tokens"}) if name.startswith(("L_input", "L_pos")) else Role("weight")
