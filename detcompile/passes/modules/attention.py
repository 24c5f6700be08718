"""Route attention to our template through transformers' AttentionInterface, and step inputs to attention."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from detcompile.errors import UnsupportedModel
from detcompile.passes.modules.exact import cached_shape, kv_digits
from detcompile.step import KVGroup, StepInputs
from detcompile.templates.attention.scores import AttentionRule
from detcompile.templates.exact.attention import WIDEST_HEAD

IMPLEMENTATION = "detcompile"  # the model's attn_implementation
STEP_KWARG = "detcompile_step"  # forward kwarg that carries the StepInputs down to attention

# Keywords that models pass to every attention function and that do not change its result.
HARMLESS = frozenset(
    [
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "position_embeddings",
        "logits_to_keep",
        "num_items_in_batch",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    ]
)
# Keywords that the template implements: visibility, soft cap of the scores, one sink logit per head, ALiBi, and biases
# of a query by distance.
UNDERSTOOD = ("scaling", "sliding_window", "attention_chunk", "softcap", "s_aux", "alibi_slopes", "relative_bias")
PER_HEAD = ("s_aux", "alibi_slopes")


class StepDropped(UnsupportedModel):
    """A module between the model and its attention drops the step."""


class AttentionCall:
    """One call of attention, observed while the model runs once.

    Attributes:
        module: the calling module.
        layer: index into the step's caches.
        num_heads: heads of the queries.
        shape: extents of a cached key and value (KV heads, width of a key, width of a value).
        head_dims: features of a query or key, and of a value.
        chunk: tokens of a chunk; a query sees no key before its chunk. 0 for no chunks.
        window: a query sees at most this many last tokens, by its window or chunk; 0 for no limit.
    """

    def __init__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, layer: int) -> None:
        self.module = module
        self.layer = layer
        self.num_heads = query.shape[1]
        self.shape = cached_shape(module, key, value)
        self.head_dims = (key.shape[3], value.shape[3])
        self.chunk = rule.attention_chunk
        self.window = rule.window


def layer_of(module: Any) -> int:
    """Return the layer of an attention module. It is the index of its cache if every layer attends."""
    return int(module.layer_idx)


def rule_of(query: Tensor, kv_chunk: int, kwargs: Mapping[str, Any]) -> AttentionRule:
    """Return the rule that the keywords of a call through the AttentionInterface describe."""
    scaling = kwargs.get("scaling")
    return AttentionRule(
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        sliding_window=int(kwargs.get("sliding_window") or 0),
        kv_chunk=kv_chunk,
        softcap=float(kwargs.get("softcap") or 0),
        sinks=kwargs.get("s_aux"),
        alibi_slopes=kwargs.get("alibi_slopes"),
        attention_chunk=int(kwargs.get("attention_chunk") or 0),
        relative_bias=kwargs.get("relative_bias"),
    )


def register_attention(kv_chunk: int, groups: Sequence[KVGroup], place: Callable[[Any], int] = layer_of) -> None:
    """Register ``attn_implementation="detcompile"`` with transformers, with chunks of ``kv_chunk`` keys.

    A layer reads the block table of its group.

    Args:
        place: returns the index of a module's caches; called once per call.
    """
    group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}

    def pinned(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        rule = rule_of(query, kv_chunk, kwargs)
        step: StepInputs | None = kwargs.get(STEP_KWARG)
        digits = kv_digits(module)
        if step is None:
            if digits:
                out = torch.ops.detcompile.exact_dense_attention(query, key, value, digits, *_exact_rule(query, rule))
            else:
                out = torch.ops.detcompile.dense_attention(query, key, value, *rule)
            return out.transpose(1, 2).contiguous(), None  # contiguous as in transformers: models view it
        layer = place(module)
        q, k, v = (states.transpose(1, 2).squeeze(0) for states in (query, key, value))
        if rule.relative_bias is not None:
            rule = rule._replace(relative_bias=rule.relative_bias.transpose(1, 2).squeeze(0))
        if not step.k_caches:  # a trainer's step holds whole sequences
            return torch.ops.detcompile.packed_attention(q, k, v, step.cu_seqlens, *rule)[0].unsqueeze(0), None
        group = group_of[layer]
        metadata = step.slot_mappings[group], step.cu_seqlens, step.seq_lens, step.block_tables[group]
        operands = q, k, v, step.k_caches[layer], step.v_caches[layer], *metadata
        if digits:
            out = torch.ops.detcompile.exact_paged_attention(*operands, *_exact_rule(query, rule))
        else:
            out = torch.ops.detcompile.paged_attention(*operands, *rule)
        return out.unsqueeze(0), None

    AttentionInterface.register(IMPLEMENTATION, pinned)


def require_plain(module: nn.Module, key: Tensor, value: Tensor, rule: AttentionRule) -> None:
    """Raise UnsupportedModel if exact attention does not support this rule or these sizes; else do nothing."""
    if not kv_digits(module):
        return
    sizes, fault = {key.shape[3], value.shape[3]}, ""
    if rule.relative_bias is not None:
        fault = "attention with biases by distance"
    elif any(size % 4 or size > WIDEST_HEAD for size in sizes):
        shown = " and ".join(map(str, sorted(sizes)))
        fault = f"heads of {shown} features; it takes multiples of 4 up to {WIDEST_HEAD}"
    if fault:
        raise UnsupportedModel(
            f"{type(module).__name__}: exact arithmetic defines no {fault}. Compile the model without"
            " Numerics.arithmetic"
        )


def _exact_rule(query: Tensor, rule: AttentionRule) -> tuple[Any, ...]:
    """Return the last arguments of exact attention; a scale of 0 is 1 / sqrt(head_dim)."""
    scale = 0.0 if rule.scale == query.shape[-1] ** -0.5 else rule.scale
    per_head = [None if given is None else given.float() for given in (rule.sinks, rule.alibi_slopes)]
    return scale, rule.sliding_window, rule.softcap, *per_head, rule.attention_chunk


def check_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
    both_ways: bool,
) -> None:
    """Refuse an attention call that the template does not implement.

    Args:
        both_ways: whether tokens also see later tokens, as in an encoder.
    """
    where = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    if not isinstance(getattr(module, "layer_idx", None), int):
        raise UnsupportedModel(f"{where} has no layer_idx: its keys cannot be distinguished from other layers'")
    if mask is not None:
        raise UnsupportedModel(f"{where} passes an attention mask of its own; only causal and sliding masks are known")
    if kwargs.get(STEP_KWARG) is None:
        raise StepDropped(f"{where} drops the model's keyword arguments, so that the step inputs do not reach it")
    if kwargs.get("dropout"):
        raise UnsupportedModel(f"{where} asks for dropout {kwargs['dropout']}: call model.eval()")
    causal_flags = {kwargs.get("is_causal"), getattr(module, "is_causal", None)} - {None}
    if both_ways in causal_flags:
        raise UnsupportedModel(f"{where} is {'causal in an encoder' if both_ways else 'not causal'}")
    known = HARMLESS | {STEP_KWARG, "dropout", "is_causal", *UNDERSTOOD}
    for name, given in kwargs.items():
        if name not in known and given is not None and given is not False:
            raise UnsupportedModel(
                f"{where} passes {name}={type(given).__name__}, which the attention template does not know"
            )
    _check_shapes(where, query, kwargs)
    if kwargs.get("sliding_window") and kwargs.get("attention_chunk"):
        raise UnsupportedModel(f"{where} passes a sliding window and chunks of attention: only one of them is known")
    if query.shape[1] % key.shape[1]:
        raise UnsupportedModel(f"{where}: {query.shape[1]} query heads over {key.shape[1]} key heads")


def _check_shapes(where: str, query: Tensor, kwargs: dict[str, Any]) -> None:
    """Refuse values that are not one per head, and biases that are not one row per query."""
    for name in PER_HEAD:
        if kwargs.get(name) is not None and tuple(kwargs[name].shape) != (query.shape[1],):
            raise UnsupportedModel(
                f"{where} passes {name} {tuple(kwargs[name].shape)}, which is not one value for each of its "
                f"{query.shape[1]} query heads"
            )
    bias = kwargs.get("relative_bias")
    if bias is not None and bias.shape[:-1] != query.shape[:-1]:
        raise UnsupportedModel(
            f"{where} passes relative_bias {tuple(bias.shape)}, which is not one row of biases for each of its queries "
            f"{tuple(query.shape[:-1])}"
        )


class Carrier:
    """Holds one keyword argument of the model during a forward, for its attention."""

    carried: Any = None


def carry_step(model: PreTrainedModel) -> None:
    """Pass the step that the model is called with to every attention of ``model`` that takes keywords."""
    taking = []
    for module in model.modules():
        parameters = inspect.signature(module.forward).parameters.values()
        takes_keywords = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        if isinstance(getattr(module, "layer_idx", None), int) and takes_keywords:
            taking.append(module)
    _carry(model, STEP_KWARG, taking)


def carry_positions(model: PreTrainedModel, modules: Iterable[nn.Module]) -> None:
    """Pass the ``position_ids`` that the model is called with to ``modules``."""
    _carry(model, "position_ids", modules)


def _carry(model: PreTrainedModel, name: str, modules: Iterable[nn.Module]) -> None:
    carrier = Carrier()

    def take(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        carrier.carried = kwargs.get(name)

    def give(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {name: carrier.carried, **kwargs}

    def forget(*_: Any) -> None:
        carrier.carried = None

    model.register_forward_pre_hook(take, with_kwargs=True)
    model.register_forward_hook(forget)
    for module in modules:
        module.register_forward_pre_hook(give, with_kwargs=True)
