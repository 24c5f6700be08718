"""A Hugging Face causal LM as a callable over packed tokens, with checks of its meaning.

The model runs once, eagerly, on two tokens, with an attention function that only records its arguments. The records
(layers, heads, windows, mask kinds) size the caches. Later, the compiled graph must hold the same calls.
"""

import contextlib
import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedModel

from detcompile.errors import UnsupportedModel
from detcompile.passes.adapters.attention_classes import replace_attention
from detcompile.passes.adapters.forwards import adapt
from detcompile.passes.adapters.modules import replace_modules
from detcompile.passes.modules.attention import (
    IMPLEMENTATION,
    STEP_KWARG,
    AttentionCall,
    StepDropped,
    carry_step,
    check_call,
    layer_of,
    register_attention,
    require_plain,
    rule_of,
)
from detcompile.passes.modules.exact import give_kv_digits
from detcompile.passes.modules.pooling_heads import attends_both_ways
from detcompile.passes.modules.recurrences import Recurrences
from detcompile.passes.release_probe import require_release
from detcompile.step import KVGroup, StepInputs, kv_groups
from detcompile.torch_internals.dynamo import compile_lock
from detcompile.transformers_internals.attention import mask_functions

P = ParamSpec("P")
R = TypeVar("R")
CAUSAL_MASK, SLIDING_MASK = "create_causal_mask", "create_sliding_window_causal_mask"
PADDING_MASK = "create_recurrent_attention_mask"  # for layers with a state; of a packed step it is None
CHUNKED_MASK = "create_chunked_causal_mask"
MASK_KINDS = (CAUSAL_MASK, SLIDING_MASK, PADDING_MASK, CHUNKED_MASK)
BOTH_WAYS_MASK = "create_bidirectional_mask"
KIND_OF_LAYER = {
    "full_attention": CAUSAL_MASK,
    "sliding_attention": SLIDING_MASK,
    "linear_attention": PADDING_MASK,
    "conv": PADDING_MASK,
    "chunked_attention": CHUNKED_MASK,
}
MASK_SHAPING = ("or_mask_function", "and_mask_function", "block_sequence_ids")  # arguments that change the mask


def isolated(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function``, which captures a model, outside torch.autocast and with a lock, under releases that pass.

    Capture patches torch and transformers, so only one thread captures at a time. The lock is Dynamo's: torch.compile
    in another thread takes it too. Every way to a program of a Hugging Face model goes through here, so the check of
    the releases is here: a refused model is unchanged.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        require_release()
        with compile_lock, torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return run


class PackedForward(nn.Module):
    """Logits of chosen rows of a packed step. Serving compiles this.

    forward(input_ids [1, T] int64, position_ids [1, T] int64, step, logits_to_keep [R] int64) -> [R, V]
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.chooses_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, input_ids: Tensor, position_ids: Tensor, step: StepInputs, logits_to_keep: Tensor) -> Tensor:
        torch._check(input_ids.shape[1] > 0)  # a reshape that infers an extent needs this
        kwargs: dict[str, Any] = {"logits_to_keep": logits_to_keep} if self.chooses_rows else {}
        logits = self.model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **{STEP_KWARG: step}, **kwargs
        ).logits.squeeze(0)
        return logits if self.chooses_rows else logits[logits_to_keep]


class StatesForward(PackedForward):
    """PackedForward that also returns the hidden states that the language-model head reads.

    forward(…) -> ([R, V], [R, H])
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._read: Tensor | None = None  # within one forward

    def forward(self, input_ids: Tensor, position_ids: Tensor, step: StepInputs, logits_to_keep: Tensor) -> Any:
        logits = PackedForward.forward(self, input_ids, position_ids, step, logits_to_keep)
        assert self._read is not None, "the head did not run, or is not watched"
        hidden, self._read = self._read.squeeze(0), None
        return logits, hidden if self.chooses_rows else hidden[logits_to_keep]

    def watch(self) -> RemovableHandle:
        """Record the head's input until the handle is removed."""
        return self.model.get_output_embeddings().register_forward_pre_hook(self._note)

    def _note(self, head: nn.Module, given: tuple[Tensor, ...]) -> None:
        self._read = given[0]


class DenseForward(nn.Module):
    """Logits of a padless batch [B, T]: traced because packing hides the batch dimension, never served."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits


def freeze_rope(model: PreTrainedModel, max_context: int) -> None:
    """Freeze rotary tables that depend on the longest position of the batch (dynamic, longrope) at ``max_context``.

    The module updates itself once, as for a sequence of that length, and never again.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in by_layer.items():
            if not isinstance(kind, str) or not ("dynamic" in kind or kind == "longrope"):
                continue
            device = next(model.parameters()).device
            last = torch.tensor([[max_context - 1]], device=device)
            kwargs = {} if layer_type is None else {"layer_type": layer_type}
            with torch.no_grad():
                module(torch.zeros(1, 1, 1, device=device), last, **kwargs)
            if layer_type is None:
                module.rope_type = "default"
            else:
                by_layer[layer_type] = "default"


def probe_attention(
    model: PreTrainedModel, kv_chunk: int, recurrences: Recurrences | None = None
) -> tuple[tuple[AttentionCall, ...], tuple[KVGroup, ...]]:
    """Make the model call our attention, then observe it as ``observe_attention`` does.

    Raises:
        UnsupportedModel: the model takes no attention function, or a call means something unknown.
    """
    require_ready(model)
    replace_modules(model)
    register_attention(kv_chunk, ())  # before the model's config names it
    ours = adapt(model) or replace_attention(model)
    if not ours:
        _use_attention(model)
    try:
        calls, groups, masks = _observe(model, kv_chunk, recurrences)
    except StepDropped:
        carry_step(model)
        calls, groups, masks = _observe(model, kv_chunk, recurrences)
    if calls and not ours and not masks:
        raise UnsupportedModel(f"{type(model).__name__} makes no causal mask by itself: its attention is bidirectional")
    return calls, groups


def require_ready(model: PreTrainedModel) -> None:
    """Fail unless a model can be run and traced.

    Raises:
        UnsupportedModel: it is in training mode, or has an encoder.
    """
    if model.training:
        raise UnsupportedModel(f"{type(model).__name__} is in training mode: call model.eval() before compiling it")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{type(model).__name__} has an encoder; only decoder-only causal LMs are compiled")


def observe_attention(
    model: PreTrainedModel, kv_chunk: int, recurrences: Recurrences | None = None
) -> tuple[tuple[AttentionCall, ...], tuple[KVGroup, ...]]:
    """Return the attention calls of one forward in layer order, and the groups of layers that share a block table.

    If other layers carry a state, attention calls are numbered in call order.

    Raises:
        UnsupportedModel: a call means something unknown.
    """
    calls, groups, _ = _observe(model, kv_chunk, recurrences)
    return calls, groups


def _observe(
    model: PreTrainedModel, kv_chunk: int, recurrences: Recurrences | None
) -> tuple[tuple[AttentionCall, ...], tuple[KVGroup, ...], set[str]]:
    """Like ``observe_attention``; also return the masks that the model asks transformers for."""
    calls: list[AttentionCall] = []
    place = layer_of if recurrences is None else recurrences.attention_place
    both_ways = attends_both_ways(model)

    def record(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any):
        check_call(module, query, key, value, attention_mask, kwargs, both_ways)
        rule = rule_of(query, kv_chunk, kwargs)
        give_kv_digits(model, module)
        require_plain(module, key, value, rule)
        calls.append(AttentionCall(module, query, key, value, rule, place(module)))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(IMPLEMENTATION, record)
    try:
        masks = _run_once(model)
    finally:
        register_attention(kv_chunk, ())
    _check_calls(model, calls, masks, recurrences)
    calls.sort(key=lambda call: call.layer)
    groups = kv_groups([call.window for call in calls], [call.shape for call in calls])
    register_attention(kv_chunk, groups, place)
    return tuple(calls), groups, masks


def _use_attention(model: PreTrainedModel) -> None:
    try:
        model.set_attn_implementation(IMPLEMENTATION)
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"{type(model).__name__} takes no attention function from outside: {error}") from error


def _run_once(model: PreTrainedModel) -> set[str]:
    device = next(model.parameters()).device
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    step = StepInputs((empty,), empty, empty, (empty,), (), (), empty)
    with _recorded_masks(model) as masks, torch.no_grad():
        try:
            model(
                input_ids=ids, position_ids=torch.arange(2, device=device)[None], use_cache=False, **{STEP_KWARG: step}
            )
        except (AttributeError, TypeError) as error:
            raise UnsupportedModel(_obstacle(model, error)) from error
    return masks


def _obstacle(model: nn.Module, error: Exception) -> str:
    """Return why a model's code cannot run on a packed step."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = (frame.line or "").rstrip(",")
    if "attention_mask" not in line:
        return f"{type(model).__name__}.forward cannot take the step inputs: {error}"
    place = f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
    return f"{line} at {place}: the model's code reads its attention mask, and a packed step has none"


@contextlib.contextmanager
def _recorded_masks(model: nn.Module) -> Iterator[set[str]]:
    """Record the masks that the model's modules ask transformers for."""
    seen: set[str] = set()

    def watched(name: str, make: Any):
        def make_mask(*args: Any, **kwargs: Any):
            # a decoder asks for a mask over its encoder's states; without an encoder, nothing uses it
            idle = name == "create_bidirectional_mask" and kwargs.get("encoder_hidden_states", seen) is None
            kinds = set() if idle else _kinds(model, name)
            unknown = sorted(kinds - ({BOTH_WAYS_MASK} if attends_both_ways(model) else set(MASK_KINDS)))
            if unknown:
                raise UnsupportedModel(
                    f"{type(model).__name__} asks for {unknown[0]}, a mask the attention template does not have"
                )
            shaped = [argument for argument in MASK_SHAPING if _shapes(kwargs.get(argument))]
            if shaped:
                raise UnsupportedModel(f"{type(model).__name__} changes {name} by {', '.join(shaped)}")
            seen.update(kinds)
            return make(*args, **kwargs)

        return make_mask

    with contextlib.ExitStack() as stack:
        for source in {type(module).__module__ for module in model.modules()}:
            namespace = sys.modules[source]
            for name, make in mask_functions(namespace).items():
                stack.enter_context(mock.patch.object(namespace, name, watched(make.__name__, make)))
        yield seen


def _shapes(argument: Any) -> bool:
    """Return whether an argument changes a mask. Block ids below 0 mean tokens in no block (git without an image)."""
    return argument is not None and not (isinstance(argument, Tensor) and bool((argument < 0).all()))


def _kinds(model: nn.Module, name: str) -> set[str]:
    """Return the masks that a function of transformers makes: one, or one per kind of layer."""
    if name != "create_masks_for_generate":
        return {name}
    config: Any = model.config
    types = getattr(config.get_text_config(), "layer_types", None)
    return {KIND_OF_LAYER.get(kind, f"the mask of {kind}") for kind in types} if types else {name}


def _check_calls(
    model: PreTrainedModel, calls: list[AttentionCall], masks: set[str], recurrences: Recurrences | None
) -> None:
    name = type(model).__name__
    layers = model.config.get_text_config().num_hidden_layers
    called = sorted(call.layer for call in calls)
    if recurrences is None and called != list(range(layers)):
        raise UnsupportedModel(
            f"{name} has {layers} layers but called the attention interface for layers {called}: "
            "attention that does not pass through the interface cannot be pinned"
        )
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    uses_sliding = kinds is None or "sliding_attention" in kinds  # names the mask of each layer
    tells_window = any(call.window and not call.chunk for call in calls) or not calls
    if "create_sliding_window_causal_mask" in masks and uses_sliding and not tells_window:
        raise UnsupportedModel(f"{name} builds a sliding-window mask but tells no attention layer its window")
    chunked = sorted(call.layer for call in calls if call.chunk)
    expected = called if kinds is None else [i for i, kind in enumerate(kinds) if kind == "chunked_attention"]
    if CHUNKED_MASK in masks and (chunked != expected or not chunked):
        raise UnsupportedModel(
            f"{name} asks for {CHUNKED_MASK} for layers {expected} but tells layers {chunked} their chunks"
        )
