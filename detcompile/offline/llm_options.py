"""Options of vLLM's LLM. Some map to compile() and EngineConfig; others are accepted only at a value without effect.

A value that would change an answer, or that asks for something not implemented, is rejected by name.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from detcompile.errors import InvalidInput
from detcompile.models.compiled import CompiledModel
from detcompile.reasoning.formats import PARSERS
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.plain_values import flag, shown, whole_number
from detcompile.runtime.requests.sampling_params import SamplingParams

DTYPES = {
    "auto": None,
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
ANY = object()  # every value is accepted
QUANTIZED = "a checkpoint's own quantization is used (docs/quantization.md)"
ONE_ENGINE = "one engine serves one model, over tensor_parallel_size ranks"
LOCAL = "checkpoints are read as transformers reads them"
NO_LORA = "adapters are plain LoRA of linears: enable_lora=True, max_lora_rank, and lora_request of generate()"
MAX_LORA_RANK = 16  # vLLM's default
TEXT_ALONE = "prompts are text or tokens"
AUX = "an output has tokens, text and log-probabilities"
DRAFTS = "model.engine(speculation=SpeculationConfig()) drafts"
RESTARTS = "model.engine(EngineConfig(restarts=...)) restarts lost ranks"
PLAIN = "the model's text is returned unchanged; use your own parser"
NO_ANSWER = (  # options of vLLM for kernels, memory, logs or downloads, which do not affect answers
    "_api_process_count", "_api_process_rank", "aggregate_engine_logging", "all2all_backend",
    "allow_deprecated_quantization", "async_scheduling", "attention_backend", "attention_config",
    "collect_detailed_traces", "compilation_config", "cp_kv_cache_interleave_size", "cpu_distributed_timeout_seconds",
    "cpu_offload_params", "cudagraph_capture_sizes", "cudagraph_metrics", "custom_histogram_buckets",
    "data_parallel_address", "data_parallel_backend", "data_parallel_rpc_port", "dbo_decode_token_threshold",
    "dbo_prefill_token_threshold", "dcp_comm_backend", "dcp_kv_cache_interleave_size", "dcp_q_replicate",
    "disable_cascade_attn", "disable_chunked_mm_input", "disable_custom_all_reduce", "disable_hybrid_kv_cache_manager",
    "disable_log_requests", "disable_log_stats", "disable_nccl_for_dp_synchronization", "disable_uvicorn_access_log",
    "distributed_timeout_seconds", "download_dir", "dp_sync_interval", "ec_manager_config", "elastic_ep_max_dp_size",
    "enable_batch_sharded_sampling", "enable_cumem_allocator", "enable_dbo", "enable_ep_weight_filter", "enable_eplb",
    "enable_flashinfer_autotune", "enable_hc_sp", "enable_layerwise_nvtx_tracing", "enable_log_requests",
    "enable_logging_iteration_details", "enable_mamba_shared_prefix_checkpoint", "enable_mfu_metrics",
    "enable_mm_processor_stats", "enable_nccl_comm_suspend", "enable_shm_tensor_arena", "engram_config", "eplb_config",
    "expert_placement_strategy", "fail_on_environ_validation", "gdn_prefill_backend", "ignore_patterns",
    "interleave_mm_strings", "ir_op_priority", "jit_monitor_mode", "jit_monitor_verbose", "kda_decode_backend",
    "kda_prefill_backend", "kernel_config", "kv_cache_dtype_skip_layers", "kv_cache_metrics", "kv_cache_metrics_sample",
    "kv_offloading_backend", "language_model_only", "linear_backend", "log_config_file", "log_level", "logging_config",
    "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive", "mamba_backend", "mamba_block_size",
    "mamba_cache_mode", "mamba_cache_philox_rounds", "mamba_ssu_algorithm", "master_addr", "master_port",
    "max_cudagraph_capture_size", "max_log_len", "max_logprobs", "max_long_partial_prefills", "max_num_active_seqs",
    "max_num_partial_prefills", "max_parallel_loading_workers", "max_seq_len_to_capture", "mm_device_do_normalize",
    "mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_margin",
    "mm_encoder_fp8_scale_save_path", "mm_encoder_tp_mode", "mm_hasher_algorithm", "mm_ipc_gpu_memory_gb",
    "mm_processor_cache_gb", "mm_processor_cache_type", "mm_processor_device", "mm_shm_cache_max_object_size_mb",
    "mm_tensor_ipc", "model_weights", "moe_backend", "monokernel", "numa_bind", "numa_bind_cpus", "numa_bind_nodes",
    "offload_backend", "offload_group_size", "offload_num_in_group", "offload_params", "offload_prefetch_step",
    "optimization_level", "otlp_traces_endpoint", "per_request_spec_decode_metrics", "performance_mode",
    "prefill_schedule_interval", "prefix_cache_retention_interval", "prefix_caching_hash_algo", "prefix_match_unit",
    "profiler_config", "pt_load_map_location", "ray_workers_use_nsight", "renderer_num_workers", "replayssm_buffer_len",
    "safetensors_load_strategy", "safetensors_prefetch_block_size", "safetensors_prefetch_num_threads",
    "scheduler_reserve_full_isl", "scheduling_policy", "served_model_name", "show_hidden_metrics_for_version",
    "shutdown_timeout", "skip_mm_profiling", "sleep_mode_backend", "sleep_mode_offload_cudagraph",
    "sleep_preserve_parameter_names", "sparse_indexer_topk_backend", "stream_interval", "swa_bounded_replay",
    "swap_space", "ubatch_size", "use_replayssm", "use_tqdm_on_load", "video_pruning_method", "video_pruning_rate",
    "watchdog_config", "watermark",
)  # fmt: skip
# Ignored options: the value that has no effect (as None never has), and the advice for other values.
NEUTRAL: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(NO_ANSWER, (ANY, "")),  # scheduling_policy: first come, first served among equal priorities
    "additional_config": ({}, "there is no platform plugin"),
    "allowed_local_media_path": ("", TEXT_ALONE),
    "allowed_media_domains": (None, TEXT_ALONE),
    "aux_output_config": (None, AUX),
    "calculate_kv_scales": (False, "the KV cache has the model's dtype"),
    "chat_template": (None, "pass chat_template to chat(), or set tokenizer.chat_template"),
    "code_revision": (None, "remote code comes from the model's revision"),
    "config_format": ("auto", LOCAL),
    "convert": ("auto", "the model is a causal LM"),
    "cpu_offload_gb": (0, "weights and KV cache stay where the model is"),
    "data_parallel_external_lb": (False, ONE_ENGINE),
    "data_parallel_hybrid_lb": (False, ONE_ENGINE),
    "data_parallel_multi_port_external_lb": (False, ONE_ENGINE),
    "data_parallel_rank": (None, ONE_ENGINE),
    "data_parallel_size": (1, ONE_ENGINE),
    "data_parallel_size_local": (None, ONE_ENGINE),
    "data_parallel_start_rank": (None, ONE_ENGINE),
    "decode_context_parallel_size": (1, ONE_ENGINE),
    "default_mm_loras": (None, NO_LORA),
    "device_ids": (None, "choose GPUs by CUDA_VISIBLE_DEVICES"),
    "diffusion_config": (None, "the model is a causal LM"),
    "disable_sliding_window": (False, "the windows of the model's layers are kept"),
    "distributed_executor_backend": ("mp", "worker processes run the ranks"),
    "ec_transfer_config": (None, TEXT_ALONE),
    "enable_elastic_ep": (False, ONE_ENGINE),
    "enable_expert_parallel": (False, ONE_ENGINE),
    "enable_fault_tolerance": (False, RESTARTS),
    "enable_mamba_cache_stochastic_rounding": (False, "states are rounded to the nearest value"),
    "enable_mixed_moe_lora_format": (False, NO_LORA),
    "enable_mm_embeds": (False, TEXT_ALONE),
    "enable_moe_shared_loras": (False, NO_LORA),
    "enable_prompt_embeds": (False, TEXT_ALONE),
    "enable_return_routed_experts": (False, AUX),
    "enable_sleep_mode": (False, "close() gives the memory back"),
    "enable_tower_connector_lora": (False, NO_LORA),
    "enable_trace_replay": (False, "put the tokens into the prompt and ask for prompt_logprobs"),
    "fault_tolerance_config": (None, RESTARTS),
    "fully_sharded_loras": (False, NO_LORA),
    "hf_config_path": (None, LOCAL),
    "hf_overrides": ({}, "change the folder's config, or compile() a module"),
    "io_processor_plugin": (None, "prompts are text or tokens"),
    "kv_cache_dtype": ("auto", "the KV cache has the model's dtype"),
    "kv_cache_memory_bytes": (None, "gpu_memory_utilization or num_gpu_blocks_override size the KV cache"),
    "kv_events_config": (None, "engine.prefixes has the blocks of prefixes"),
    "kv_offloading_size": (None, "weights and KV cache stay where the model is"),
    "kv_sharing_fast_prefill": (False, "every token is computed"),
    "kv_transfer_config": (None, "engine.prefixes.export moves blocks between engines"),
    "limit_mm_per_prompt": ({}, TEXT_ALONE),
    "load_format": ("auto", LOCAL),
    "logits_processors": (None, "SamplingParams has what changes logits"),
    "logprobs_mode": ("raw_logprobs", "SamplingParams(sampling_logprobs=0) reports the distribution drawn from"),
    "lora_dtype": ("auto", NO_LORA),
    "lora_target_modules": (None, NO_LORA),
    "mamba_cache_dtype": ("auto", "states have the dtypes of the model"),
    "mamba_config": (None, "states have the dtypes of the model"),
    "mamba_ssm_cache_dtype": ("auto", "states have the dtypes of the model"),
    "max_cpu_loras": (ANY, ""),
    "max_lora_cls_labels": (None, NO_LORA),
    "max_loras": (ANY, ""),
    "max_num_queued_reqs": (None, "requests wait in a queue without a limit"),
    "max_num_queued_tokens": (None, "requests wait in a queue without a limit"),
    "max_num_scheduled_tokens": (None, "max_num_batched_tokens bounds a step"),
    "media_io_kwargs": ({}, TEXT_ALONE),
    "mm_encoder_only": (False, TEXT_ALONE),
    "mm_processor_kwargs": ({}, TEXT_ALONE),
    "model_class_overrides": ({}, LOCAL),
    "model_impl": ("auto", "transformers' code of the model is compiled"),
    "model_loader_extra_config": ({}, LOCAL),
    "nnodes": (1, "detcompile serve runs engines over several machines (docs/serving.md)"),
    "node_rank": (0, "detcompile serve runs engines over several machines (docs/serving.md)"),
    "override_generation_config": ({}, "pass sampling settings in SamplingParams"),
    "pooler_config": (None, "the model is a causal LM"),
    "prefill_context_parallel_size": (1, ONE_ENGINE),
    "quantization": (None, QUANTIZED),
    "quantization_config": (None, QUANTIZED),
    "reasoning_config": (None, PLAIN),
    "reasoning_parser_plugin": (None, PLAIN),
    "return_sampling_mask": (False, "SamplingParams(sampling_logprobs=-1) reports what filters leave"),
    "runner": ("auto", "the model is a causal LM"),
    "scheduler_cls": (None, "model.engine(EngineConfig(scheduler=...)) has other schedulers"),
    "skip_tokenizer_init": (False, "pass prompts as token ids; nothing reads text then"),
    "spec_method": (None, DRAFTS),
    "spec_model": (None, DRAFTS),
    "spec_tokens": (None, DRAFTS),
    "specialize_active_lora": (False, NO_LORA),
    "speculative_config": (None, DRAFTS),
    "structured_outputs_config": (ANY, ""),
    "task": ("generate", "the model is a causal LM"),
    "tokenizer_mode": ("auto", "pass a tokenizer of transformers"),
    "tokenizer_revision": (None, "the tokenizer comes from the model's revision; or pass one of transformers"),
    "tokens_only": (False, "pass prompts as token ids; nothing reads text then"),
    "tool_call_parser": (None, PLAIN),
    "use_fp64_gumbel": (False, "noise is drawn in one way, so that a seed repeats its answer"),
    "watermark_config": (None, "SamplingParams has what changes logits"),
    "weight_transfer_config": (None, "model.update_weights() takes weights"),
    "worker_cls": ("auto", "ranks run the compiled program alone"),
    "worker_extension_cls": ("", "ranks run the compiled program alone"),
}
# generation_config fields that give vLLM's default SamplingParams, and the fields of SamplingParams.
CONFIGURED = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


class LLMOptions(NamedTuple):
    """Parsed options of an LLM.

    Attributes:
        tp: tensor-parallel size.
        pp: number of pipeline stages.
        dtype: dtype of the weights; None: the checkpoint's.
        max_context: maximum number of tokens of a sequence; None: the model's.
        engine: settings of the engine.
        config_defaults: True if the model's generation_config gives the default SamplingParams.
        compiling: compile()'s ``numerics``, ``revision``, ``token`` and ``trust_remote_code``, if they are set.
        reasoning_parser: name of the format of the reasoning, or "none"; None: as the chat template says.
        max_lora_rank: the largest rank of adapters; None: no adapters.
    """

    tp: int
    pp: int
    dtype: torch.dtype | None
    max_context: int | None
    engine: EngineConfig
    config_defaults: bool
    compiling: Mapping[str, Any]
    reasoning_parser: str | None
    max_lora_rank: int | None


def read_options(options: Mapping[str, Any]) -> LLMOptions:
    """Parse options by vLLM's names.

    Raises:
        InvalidInput: an option is unknown, not supported, or has an invalid value.
    """
    rest = dict(options)
    dtype = rest.pop("dtype", "auto")
    context = rest.pop("max_model_len", None)
    defaults = rest.pop("generation_config", "auto")
    tp = whole_number(rest.pop("tensor_parallel_size", 1), "tensor_parallel_size")
    pp = whole_number(rest.pop("pipeline_parallel_size", 1), "pipeline_parallel_size")
    if not isinstance(dtype, torch.dtype) and not (isinstance(dtype, str) and dtype in DTYPES):
        raise InvalidInput(f"dtype={shown(dtype)} must be a torch.dtype or one of {', '.join(DTYPES)}")
    if defaults not in ("auto", "vllm"):
        raise InvalidInput(f'generation_config={shown(defaults)} must be "auto" (the model\'s own) or "vllm" (none)')
    parser = rest.pop("reasoning_parser", None) or None  # vLLM's default is ""
    if parser not in (None, "none", *PARSERS):
        names = ", ".join([*PARSERS, "none"])
        raise InvalidInput(f"reasoning_parser={shown(parser)} must be one of {names}, or None to follow the template")
    engine = _engine_config(rest)
    rank = whole_number(rest.pop("max_lora_rank", None) or MAX_LORA_RANK, "max_lora_rank")
    max_lora_rank = rank if flag(rest.pop("enable_lora", None) or False, "enable_lora") else None
    given = {"numerics": rest.pop("numerics", None)}
    given |= {"revision": rest.pop("revision", None), "token": rest.pop("hf_token", None)}
    given |= {"trust_remote_code": flag(rest.pop("trust_remote_code", False), "trust_remote_code") or None}
    for name, value in rest.items():
        if value is None:
            continue
        if name not in NEUTRAL:
            raise InvalidInput(f"LLM has no option {name!r}: leave it out; docs/engine.md lists the options")
        neutral, advice = NEUTRAL[name]
        if neutral is not ANY and value != neutral:
            raise InvalidInput(f"LLM({name}={shown(value)}) is not supported: {advice}")
    return LLMOptions(
        tp,
        pp,
        dtype if isinstance(dtype, torch.dtype) else DTYPES[dtype],
        None if context is None else whole_number(context, "max_model_len"),
        engine,
        defaults == "auto",
        {name: value for name, value in given.items() if value is not None},
        parser,
        max_lora_rank,
    )


def _engine_config(rest: dict[str, Any]) -> EngineConfig:
    """Remove the engine's options from ``rest`` and return them as EngineConfig."""
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


def configured_params(model: CompiledModel) -> dict[str, Any]:
    """Return the fields of SamplingParams that the model's ``generation_config`` sets.

    Raises:
        InvalidInput: a value is not valid for SamplingParams.
    """
    config = getattr(model.model, "generation_config", None)
    named = {ours: getattr(config, theirs, None) for theirs, ours in CONFIGURED.items()}
    fields = {name: value for name, value in named.items() if value is not None}
    params = SamplingParams(**fields)
    return {name: getattr(params, name) for name in fields}
