"""Trace a model over a packed step into one graph with Dynamo."""

import contextlib
import itertools
import logging
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from detcompile.config import inductor_folder, sizes_asserted
from detcompile.errors import DetcompileError, StorageError, UnsupportedModel
from detcompile.orders.numerics import Numerics
from detcompile.passes.backend import Backend, Expected
from detcompile.passes.capture import DenseForward, PackedForward
from detcompile.passes.layers.program import LayerInputs
from detcompile.passes.layers.regions import NotCut, mark_layers
from detcompile.passes.layers.structure import Repeats, Shown, layer_list, layers_of, repeats_of
from detcompile.passes.modules.attention import AttentionCall
from detcompile.passes.modules.recurrences import Recurrences
from detcompile.passes.programs.binding import CompiledGraph, ExampleStep, example_step, some_layers
from detcompile.passes.programs.canonical_form import NotRun, constants_of, input_names
from detcompile.passes.proof.certificate import Certificate
from detcompile.passes.roles import packed_roles
from detcompile.step import KVGroup, KVShape, StateShape, step_leaves
from detcompile.storage import INDUCTOR_ADVICE, disk_failure
from detcompile.torch_internals.dynamo import TorchDynamoException, dynamo_config
from detcompile.torch_internals.graph_nodes import innermost_model_frame
from detcompile.torch_internals.inductor import damaged_code
from detcompile.torch_internals.inductor_settings import inductor_config
from detcompile.torch_internals.symbolic_shapes import ConstraintViolationError

logger = logging.getLogger(__name__)
_CODE_NUMBERS = itertools.count()


class Seen(NamedTuple):
    """Observations of one eager run of a model."""

    attention: tuple[AttentionCall, ...]  # in the order of layers
    groups: tuple[KVGroup, ...]
    states: tuple[StateShape, ...] = ()  # one per call that carries a state from token to token

    @classmethod
    def of(
        cls, observed: tuple[tuple[AttentionCall, ...], tuple[KVGroup, ...]], recurrences: Recurrences | None = None
    ) -> "Seen":
        """Combine the result of observe_attention with the states that ``recurrences`` recorded."""
        return cls(*observed, () if recurrences is None else tuple(recurrences.shapes))

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """Extents of a cached key and value, one per layer."""
        return tuple(KVShape(*call.shape) for call in self.attention)

    @property
    def expected(self) -> Expected:
        """Calls that a graph of the model must hold."""
        return Expected(len(self.attention), len(self.states))


class Traced(NamedTuple):
    """The one graph of a packed forward, compiled."""

    graph: CompiledGraph
    certificate: Certificate
    digest: str  # digest of the graph's canonical form
    example: ExampleStep  # the step that it was traced with
    constants: dict[str, Tensor]  # other tensors than parameters and buffers, by name


def trace_packed(
    module: PackedForward,
    numerics: Numerics,
    seen: Seen,
    compile_graph: Callable[..., Any],
    join_weights: bool = True,
    repeats: Repeats | None = None,
    here: range | None = None,
) -> Traced:
    """Trace a packed forward over an example step.

    Args:
        module: the forward of the whole model.
        seen: what a run of the model shows, in its present state.
        compile_graph: compiles the rewritten graph; see `Backend`.
        join_weights: whether matrices of equal width share a product; see `Backend`.
        repeats: layers by their structure. If given, only the first layers are traced, unless layers read more of
            each other than their rows.
        here: the layers of a stage, for the program to run; None for all. The example step then has their caches, and
            rows in place of token ids after the first stage.

    Raises:
        UnsupportedModel: layers of a stage read more of other layers than their rows.
    """
    if repeats is not None:
        try:
            return _trace_packed(module, numerics, seen, compile_graph, join_weights, repeats, here)
        except NotCut as error:
            if here is not None:
                raise UnsupportedModel(
                    f"{type(module.model).__name__} cannot be cut into stages: its layers pass each other more than"
                    f" their rows: {error}. Compile it with pp=1"
                ) from error
            logger.debug("the layers of %s are compiled one by one: %s", type(module.model).__name__, error)
    return _trace_packed(module, numerics, seen, compile_graph, join_weights, None)


def _trace_packed(
    module: PackedForward,
    numerics: Numerics,
    seen: Seen,
    compile_graph: Callable[..., Any],
    join_weights: bool,
    repeats: Repeats | None,
    here: range | None = None,
) -> Traced:
    model = module.model
    parameter = next(model.parameters())
    example = example_step(seen.kv_shapes, len(seen.groups), seen.states, model.dtype, parameter.device)
    leaves = step_leaves(*example)
    every = list(layer_list(model) or ())
    layers = None if repeats is None else LayerInputs(every, repeats, example, seen.groups, here)
    traced = module if repeats is None else PackedForward(marked_layers(model, repeats.prefix))
    backend = Backend(
        numerics,
        packed_roles(seen.groups),
        expects=seen.expected if repeats is None else Expected(repeats.prefix),
        compile_graph=compile_graph,
        join_weights=join_weights,
        name_inputs=partial(input_names, model, leaves),
        layers=layers,
    )
    # For a few layers with unknown extents, computing fake results is faster than looking them up.
    caching = dynamo_config.patch(fake_tensor_cache_enabled=repeats is None)
    with caching, inductor_config.patch(size_asserts=sizes_asserted()), contextlib.suppress(NotRun):
        trace_once(traced, backend, example if repeats is None else some_layers(example, range(repeats.prefix)))
    (graph,), (certificate,), (digest,) = backend.programs, backend.certificates, backend.digests
    if here is not None:
        input_ids, position_ids, step, logits_to_keep = some_layers(example, here)
        rows = input_ids if graph.code.rows is None else graph.code.rows
        example = rows, position_ids, step, logits_to_keep
    return Traced(graph, certificate, digest, example, constants_of(model, step_leaves(*example), graph.inputs))


def find_repeats(model: PreTrainedModel, whole: Shown | None = None) -> Repeats | None:
    """Group a model's layers by structure, from runs on two tokens that compute nothing; None if that fails.

    Args:
        whole: what `run_on_two_tokens` shows of the model, if it was run.
    """
    try:
        with torch.no_grad():
            return repeats_of(model, run_on_two_tokens, whole)
    except (RuntimeError, TypeError) as error:  # code that reads values, or modules that cannot be copied
        logger.debug("the layers of %s are compiled one by one: %s", type(model).__name__, error)
        return None


def run_on_two_tokens(model: PreTrainedModel) -> None:
    """Call a model once, on two tokens."""
    device = next(model.parameters()).device
    DenseForward(model)(torch.zeros(1, 2, dtype=torch.int64, device=device), torch.arange(2, device=device)[None])


def marked_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """Return a view of the model with only its first layers, whose boundaries a trace will show."""
    view = layers_of(model, range(count))
    layers = layer_list(view)
    assert layers is not None
    mark_layers(list(layers))
    return view


def with_fresh_code(module: nn.Module) -> Callable[..., Tensor]:
    """Return ``module.forward`` with a new code object. Dynamo caches graphs by code object, a few for each.

    Its name is unique in this process: Dynamo makes symbols of numbers that differ from those of earlier code with the
    same name.
    """
    function = type(module).forward
    code = function.__code__.replace(co_name=f"forward_{next(_CODE_NUMBERS):x}")
    return types.MethodType(types.FunctionType(code, function.__globals__), module)


def trace_once(module: DenseForward | PackedForward, backend: Backend, arguments: Sequence[Any]) -> None:
    """Make the first call, which compiles. Unwrap our errors and explain those of Dynamo and of the disk.

    ``automatic_dynamic_shapes`` is off; the symbolic extents are marked explicitly.
    """
    try:
        with torch.no_grad(), dynamo_config.patch(automatic_dynamic_shapes=False):
            torch.compile(with_fresh_code(module), backend=backend, fullgraph=True, dynamic=None)(*arguments)
    except DetcompileError:
        raise
    except TorchDynamoException as error:
        ours = cause(error) or disk_failure(error, inductor_folder(), INDUCTOR_ADVICE)
        if ours is not None:
            raise ours from None
        damaged = damaged_code(error)
        if damaged is not None:
            raise StorageError(
                f"{damaged} is damaged, and torch does not rewrite it: remove the cache folder {damaged.parent.parent}"
            ) from error
        raise UnsupportedModel(
            f"{type(module.model).__name__} is not one graph over any number of tokens: {compiler_message(error)}\n"
            "Write that as operations on tensors, for any number of tokens; the cause has torch's message."
        ) from error
    except ConstraintViolationError as error:
        raise UnsupportedModel(
            f"{type(module.model).__name__} is not one graph over any number of tokens: its code computes a"
            " Python number from it, such as math.log(x.shape[1]). Compute that from position_ids instead"
        ) from error
    except OSError as error:
        raise disk_failure(error, inductor_folder(), INDUCTOR_ADVICE) or error from None


def cause(error: BaseException) -> DetcompileError | None:
    """Return the detcompile error inside the exceptions that Dynamo and Inductor wrap around it, or None."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, DetcompileError):
            return current
        current = getattr(current, "inner_exception", None) or current.__cause__ or current.__context__
    return None


def compiler_message(error: Exception) -> str:
    """Return the first line of an error of Dynamo or Inductor, and the line of the model that was being traced."""
    inner = getattr(error, "inner_exception", None) or error
    message = (str(inner).strip().splitlines() or [type(inner).__name__])[0]
    place = innermost_model_frame(getattr(error, "real_stack", None) or ())
    return f"{message} at {place}" if place else message
