"""Options of vLLM's LLM: those of compile() and EngineConfig, and those that are taken only where they ask for nothing.

What would change an answer, or is a promise that nothing here keeps, is refused by name.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from detcompile.errors import InvalidInput
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.plain_values import flag, shown, whole_number

__all__ = ["LLMOptions", "read_options"]

DTYPES = {
    "auto": None,
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
# Options that nothing is done about, with the values that ask for nothing here, beside None; ANY: of speed or of logs.
ANY = object()
QUANTIZED = "a checkpoint's own quantisation is read (docs/quantization.md)"
ONE_ENGINE = "one engine serves one model, over tensor_parallel_size ranks"
LOCAL = "a checkpoint is read as transformers reads it"
NEUTRAL: Mapping[str, tuple[Any, str]] = {
    "allowed_local_media_path": ("", "prompts are text or tokens"),
    "async_scheduling": (ANY, ""),
    "compilation_config": (ANY, ""),
    "config_format": ("auto", LOCAL),
    "convert": ("auto", "the model is a causal LM"),
    "cpu_offload_gb": (0, "weights and KV cache stay where the model is"),
    "data_parallel_size": (1, ONE_ENGINE),
    "disable_cascade_attn": (ANY, ""),
    "disable_custom_all_reduce": (ANY, ""),
    "disable_log_stats": (ANY, ""),
    "distributed_executor_backend": ("mp", "worker processes run the ranks"),
    "enable_expert_parallel": (False, ONE_ENGINE),
    "enable_lora": (False, "merge the adapter into the weights"),
    "hf_overrides": ({}, "change the folder's config, or compile() a module"),
    "kv_cache_dtype": ("auto", "the KV cache has the model's dtype"),
    "kv_cache_memory_bytes": (None, "gpu_memory_utilization or num_gpu_blocks_override size the KV cache"),
    "limit_mm_per_prompt": ({}, "prompts are text or tokens"),
    "load_format": ("auto", LOCAL),
    "logits_processors": (None, "SamplingParams has what changes logits"),
    "max_logprobs": (ANY, ""),
    "max_seq_len_to_capture": (ANY, ""),
    "mm_processor_kwargs": ({}, "prompts are text or tokens"),
    "model_impl": ("auto", "transformers' code of the model is compiled"),
    "pooler_config": (None, "the model is a causal LM"),
    "quantization": (None, QUANTIZED),
    "runner": ("auto", "the model is a causal LM"),
    "scheduling_policy": (ANY, ""),  # by priority, then arrival: of equal priorities it is first come, first served
    "served_model_name": (ANY, ""),
    "skip_tokenizer_init": (False, "pass prompts as token ids; nothing reads text then"),
    "speculative_config": (None, "model.engine(speculation=SpeculationConfig()) drafts"),
    "swap_space": (ANY, ""),
    "task": ("generate", "the model is a causal LM"),
    "tokenizer_mode": ("auto", "pass a tokenizer of transformers"),
    "tokenizer_revision": (None, "the tokenizer is of the model's revision; or pass one of transformers"),
}


class LLMOptions(NamedTuple):
    """What the options of an LLM come to.

    Attributes:
        tp: tensor-parallel size.
        pp: stages of the layers.
        dtype: dtype of the weights; None is the checkpoint's own.
        max_context: tokens a sequence may hold; None is the model's.
        engine: settings of the engine.
        config_defaults: whether the model's generation_config gives the default SamplingParams.
        hub: ``revision``, ``token`` and ``trust_remote_code`` of compile(), those that are given.
    """

    tp: int
    pp: int
    dtype: torch.dtype | None
    max_context: int | None
    engine: EngineConfig
    config_defaults: bool
    hub: Mapping[str, Any]


def read_options(given: Mapping[str, Any]) -> LLMOptions:
    """Options by vLLM's names.

    Raises:
        InvalidInput: an option that is unknown, not served, or has a value that cannot be.
    """
    rest = dict(given)
    dtype = rest.pop("dtype", "auto")
    context = rest.pop("max_model_len", None)
    defaults = rest.pop("generation_config", "auto")
    tp = whole_number(rest.pop("tensor_parallel_size", 1), "tensor_parallel_size")
    pp = whole_number(rest.pop("pipeline_parallel_size", 1), "pipeline_parallel_size")
    if not isinstance(dtype, torch.dtype) and not (isinstance(dtype, str) and dtype in DTYPES):
        raise InvalidInput(f"dtype={shown(dtype)} must be a torch.dtype or one of {', '.join(DTYPES)}")
    if defaults not in ("auto", "vllm"):
        raise InvalidInput(f'generation_config={shown(defaults)} must be "auto" (the model\'s own) or "vllm" (none)')
    engine = _engine_config(rest)
    hub = {"revision": rest.pop("revision", None), "token": rest.pop("hf_token", None)}
    hub |= {"trust_remote_code": flag(rest.pop("trust_remote_code", False), "trust_remote_code") or None}
    for name, value in rest.items():
        if name not in NEUTRAL:
            raise InvalidInput(f"LLM has no option {name!r}; docs/engine.md has those that it takes")
        neutral, advice = NEUTRAL[name]
        if value is not None and neutral is not ANY and value != neutral:
            raise InvalidInput(f"LLM({name}={shown(value)}) is not served: {advice}")
    return LLMOptions(
        tp,
        pp,
        dtype if isinstance(dtype, torch.dtype) else DTYPES[dtype],
        None if context is None else whole_number(context, "max_model_len"),
        engine,
        defaults == "auto",
        {name: value for name, value in hub.items() if value is not None},
    )


def _engine_config(rest: dict[str, Any]) -> EngineConfig:
    """Takes the options of the engine out of ``rest``."""
    names = {
        "gpu_memory_utilization": "memory_fraction",
        "max_num_seqs": "max_num_seqs",
        "max_num_batched_tokens": "max_num_batched_tokens",
        "block_size": "block_size",
        "num_gpu_blocks_override": "num_blocks",
    }
    settings = {ours: rest.pop(theirs) for theirs, ours in names.items() if rest.get(theirs) is not None}
    flags = {
        name: flag(rest.pop(name), name)
        for name in ("enable_prefix_caching", "enforce_eager", "enable_chunked_prefill")
        if rest.get(name) is not None
    }
    return EngineConfig(
        prefix_caching=flags.get("enable_prefix_caching", True),
        cuda_graphs=False if flags.get("enforce_eager") else None,
        scheduler="stall_free" if flags.get("enable_chunked_prefill", True) else "prefill_first",
        **settings,
    )
