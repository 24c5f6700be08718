"""What the source of one causal-LM architecture says about attention, masks, positions, experts and scans."""

import ast
import re
from typing import NamedTuple

from tools.census_source import (
    Definition,
    config_definition,
    field_default,
    find,
    inherited,
    mapping,
    methods,
    reach,
    walk,
)

__all__ = ["STATE", "Facts", "read_facts"]

TOWERS = re.compile(r"Vision|Audio|Image|Speech|VQVAE|VQVae|Encodec|Siglip")
MASKS = {
    "create_causal_mask": "causal",
    "create_sliding_window_causal_mask": "sliding",
    "create_chunked_causal_mask": "chunked",
    "create_bidirectional_mask": "bidirectional",
    "create_bidirectional_sliding_window_mask": "bidirectional sliding",
    "create_recurrent_attention_mask": "recurrent",
}
CROSS_INPUTS = {"cross_attention_states", "encoder_hidden_states", "key_value_states"}
OVERLAYS = {"or_mask_function", "and_mask_function", "block_sequence_ids"}
OWN_MASK = re.compile(r"alibi|(prepare|make|update|build|create)_(?!attention_masks|masks_for|delay_pattern)\w*mask")
BY_NAME = re.compile(r"_CLASSES\[.*_attn_implementation\]")
STATE = "recurrent state"
SCANS = {
    "causal_conv1d": "short convolution",
    "chunk_gated_delta_rule": "gated delta rule",
    "kimi_delta_attention": "Kimi delta attention",
    "selective_scan": "Mamba scan",
    "mamba_chunk_scan": "Mamba-2 scan",
    "mamba2_chunk_scan": "Mamba-2 scan",
    "rwkv_linear_attention": "RWKV scan",
    "mlstm": "mLSTM scan",
    "rnn_scan": "linear recurrence",
    "recurrent_state": STATE,
    "ssm_state": STATE,
    "conv_state": "short convolution",
    "lightning": "linear attention",
}
# Arguments of the attention interface that change nothing, or that our attention takes.
KNOWN_ARGUMENTS = {"attention_mask", "dropout", "key", "output_attentions", "position_ids", "query", "scaling", "value"}
KNOWN_ARGUMENTS |= {"is_causal", "module", "sliding_window", "softcap", "s_aux", "training", "use_cache"}


class Facts(NamedTuple):
    """One architecture, as its source reads."""

    model_type: str
    class_name: str
    through_interface: tuple[str, ...]  # classes whose attention goes through AttentionInterface
    own_attention: tuple[str, ...]  # classes that compute a softmax over keys themselves
    by_name: bool  # an attention class is looked up by the implementation's name
    backend_flag: bool  # _supports_attention_backend
    sliding_is_told: bool  # sliding_window reaches the attention interface
    several_attentions: tuple[str, ...]  # classes that call the attention interface more than once
    shares_keys: bool  # some layers attend to another layer's keys
    arguments: tuple[str, ...]  # further arguments of the attention interface, not None by default
    configured_arguments: tuple[str, ...]  # the same, None unless the checkpoint's configuration sets them
    masks: tuple[str, ...]
    cross_attention: bool
    rope: str  # "", "fixed", "by config", "long or dynamic", "reads the batch"
    takes_position_ids: bool
    experts_interface: tuple[str, ...]
    own_experts: tuple[str, ...]
    scans: tuple[str, ...]
    tensor_parallel_plan: bool
    kwargs_stop_at: str  # class that does not hand **kwargs down to the attention, "" if all do
    logits_to_keep: bool
    towers: bool  # vision or audio parts, not looked into
    text_model_unknown: bool  # the configuration chooses the text model


def read_facts(model_type: str, class_name: str) -> Facts:
    """Facts of one entry of MODEL_FOR_CAUSAL_LM_MAPPING_NAMES."""
    root, config = find(class_name), config_definition(model_type)
    text_config, extra = _text_model(config)
    parents = reach(root, extra, TOWERS)
    classes = [d for d in parents if d.is_class]
    nodes = [node for definition in parents for node in walk(definition.node)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    attention = [d for d in classes if _mentions_name(d, "ALL_ATTENTION_FUNCTIONS")]
    own = [d for d in classes if d not in attention and _is_own_attention(d)]
    keywords = {k.arg: k.value for call in _interface_calls(nodes) for k in call.keywords if k.arg is not None}
    unset = {k for k, value in keywords.items() if _is_unset(value, text_config)}
    further = sorted(keywords.keys() - KNOWN_ARGUMENTS)
    experts = [d for d in classes if _is_decorated(d.node, "use_experts_implementation")]
    chain = _chain(parents, (attention + own)[:1])
    return Facts(
        model_type=model_type,
        class_name=class_name,
        through_interface=tuple(d.name for d in attention),
        own_attention=tuple(d.name for d in own),
        by_name=any(isinstance(n, ast.Subscript) and BY_NAME.search(ast.unparse(n)) for n in nodes),
        backend_flag=_class_flag(root, "_supports_attention_backend"),
        sliding_is_told="sliding_window" in keywords,
        several_attentions=tuple(d.name for d in attention if len(_interface_calls([*walk(d.node)])) > 1),
        shares_keys=any("kv_shared" in name for name in _all_names(nodes)),
        arguments=tuple(k for k in further if k not in unset),
        configured_arguments=tuple(k for k in further if k in unset),
        masks=_masks(calls, names, attention + own),
        cross_attention=any(_parameters(d) & CROSS_INPUTS for d in attention + own),
        rope=_rope(classes, text_config),
        takes_position_ids=_takes(chain, "position_ids"),
        experts_interface=tuple(d.name for d in experts),
        own_experts=tuple(d.name for d in classes if d not in experts and _is_own_experts(d)),
        scans=_scans(_all_names(nodes)),
        tensor_parallel_plan=isinstance(field_default(text_config, "base_model_tp_plan"), ast.Dict),
        kwargs_stop_at=next((d.name for d in chain if not _passes_kwargs(d)), ""),
        logits_to_keep="logits_to_keep" in _parameters(root),
        towers=_has_towers(config),
        text_model_unknown="AutoModel" in names and "AutoModel" not in extra,
    )


def _text_model(config: Definition) -> tuple[Definition, dict[str, Definition]]:
    """(configuration of the text model, what AutoModel stands for) of a possibly multimodal configuration."""
    parts = field_default(config, "sub_configs")
    if isinstance(parts, ast.Dict):
        for key, value in zip(parts.keys, parts.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "text_config" and ast.unparse(value) != "AutoConfig":
                text = find(ast.unparse(value))
                model_type = ast.literal_eval(field_default(text, "model_type") or ast.Constant(""))
                model = mapping("modeling_auto", "MODEL_MAPPING_NAMES").get(model_type)
                return text, {"AutoModel": find(model)} if model else {}
    return config, {}


def _has_towers(config: Definition) -> bool:
    parts = field_default(config, "sub_configs")
    return isinstance(parts, ast.Dict) and any(TOWERS.search(ast.unparse(value)) for value in parts.values)


def _mentions_name(definition: Definition, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name for m in methods(definition).values() for n in walk(m))


def _is_own_attention(definition: Definition) -> bool:
    if not re.search(r"Att(entio)?n", definition.name) or "forward" not in methods(definition):
        return False
    softmaxes = {"softmax", "Softmax", "scaled_dot_product_attention", "logsumexp"}
    return any(
        isinstance(node, ast.Call) and re.sub(r"\(.*", "", ast.unparse(node.func)).rpartition(".")[2] in softmaxes
        for method in methods(definition).values()
        for node in walk(method)
    )


def _is_own_experts(definition: Definition) -> bool:
    return bool(re.search(r"Experts?(Gemm|MLP|GLU)?$", definition.name)) and "forward" in methods(definition)


def _interface_calls(nodes: list[ast.AST]) -> list[ast.Call]:
    return [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "attention_interface"]


def _is_unset(value: ast.expr, config: Definition) -> bool:
    """Whether an argument is None by the configuration's default: `self.f`, `self.config.f` or None itself."""
    if isinstance(value, ast.Attribute) and ast.unparse(value.value) in {"self", "self.config"}:
        default = field_default(config, value.attr)
        return isinstance(default, ast.Constant) and default.value is None
    return isinstance(value, ast.Constant) and value.value is None


def _masks(calls: list[ast.Call], names: set[str], attention: list[Definition]) -> tuple[str, ...]:
    """Kinds of masks over a sequence's own tokens; masks over an encoder's are left out."""
    kinds = {MASKS[name] for name in names & MASKS.keys() if "bidirectional" not in name}
    for call in calls:
        name = ast.unparse(call.func)
        if "bidirectional" in name and name in MASKS and "encoder" not in ast.unparse(call):
            kinds.add(MASKS[name])
        if name in MASKS and OVERLAYS & {keyword.arg for keyword in call.keywords}:
            kinds.add("overlay")
        own = name.rpartition(".")[2]
        if own not in MASKS and (found := OWN_MASK.search(own)):
            kinds.add("alibi" if found.group() == "alibi" else "own")
    if any(isinstance(n, ast.Attribute) and n.attr in {"tril", "triu"} for d in attention for n in walk(d.node)):
        kinds.add("own")
    return tuple(sorted(kinds))


def _rope(classes: list[Definition], config: Definition) -> str:
    rotary = [d for d in classes if re.search(r"Rotary|Rope|RoPE", d.name)]
    if not rotary:
        return ""
    forwards = [method for d in rotary for name, method in methods(d).items() if name == "forward"]
    if any("max(position_ids)" in ast.unparse(forward) for forward in forwards):
        return "reads the batch"
    if not any(_is_decorated(forward, "dynamic_rope_update") for forward in forwards):
        return "fixed"
    released = any(word in ast.unparse(d.node) for d in (config, *rotary) for word in ("longrope", "'dynamic'"))
    return "long or dynamic" if released else "by config"


def _scans(names: set[str]) -> tuple[str, ...]:
    """Kinds of recurrences; a bare state is named only where nothing says what updates it."""
    found = {label for part, label in SCANS.items() if any(part in name.lower() for name in names)}
    return tuple(sorted(found - {STATE} or found))


def _is_decorated(node: ast.AST, name: str) -> bool:
    return any(name in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", []))


def _all_names(nodes: list[ast.AST]) -> set[str]:
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


def _class_flag(definition: Definition, flag: str) -> bool:
    for ancestor in inherited(definition):
        default = field_default(ancestor, flag)
        if isinstance(default, ast.Constant):
            return bool(default.value)
    return False


def _chain(parents: dict[Definition, Definition | None], attention: list[Definition]) -> list[Definition]:
    """Modules from the model down to its first attention, the ones with a forward."""
    chain: list[Definition] = []
    here = attention[0] if attention else None
    while here is not None:
        if here.is_class and "forward" in methods(here):
            chain.insert(0, here)
        here = parents[here]
    return chain


def _parameters(definition: Definition) -> set[str]:
    forward = methods(definition).get("forward")
    return {a.arg for a in (*forward.args.args, *forward.args.kwonlyargs)} if forward else set()


def _takes(chain: list[Definition], parameter: str) -> bool:
    """Whether the model takes a parameter itself or through **kwargs handed down."""
    for definition in chain[:-1]:
        if parameter in _parameters(definition):
            return True
        if not _passes_kwargs(definition):
            return False
    return False


def _passes_kwargs(definition: Definition) -> bool:
    forward = methods(definition)["forward"]
    if forward.args.kwarg is None:
        return False
    return any(
        keyword.arg is None and ast.unparse(keyword.value) == forward.args.kwarg.arg
        for node in walk(forward)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    )
