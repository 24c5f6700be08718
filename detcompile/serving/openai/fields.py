"""Request fields that would change an answer: each route supports them or rejects them by name.

They are the fields documented by OpenAI, vLLM, SGLang, llama.cpp and text-generation-inference (openai 3.57, anthropic
2.14, vllm 0.33, sglang 0.5.23, llama.cpp's server). Undocumented fields are ignored, because clients send fields that
are newer than their server.
"""

import functools
import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import msgspec

from detcompile.serving.http_errors import HTTPError

Idle = dict[str, tuple[Any, ...]]  # values without effect, by name; null always is one
PROMPT: Idle = {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "enable_thinking": (),
    "input_ids": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "multi_modal_data": ({},),
    "task": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
}
TEXT: Idle = PROMPT | {
    "adapter_id": (),
    "adaptive_target": (-1,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "context_length_exceeded_behavior": ("error",),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "decoder_input_details": (False,),
    "do_sample": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": (),
    "echo": (False,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "grammar": (),
    "grammar_lazy": (False,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_json_object": (False,),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_bias": ({}, []),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "logprobs": (False,),
    "lora": ([],),
    "lora_path": (),
    "lora_request": (),
    "max_completion_tokens": (),
    "max_length": (),
    "max_new_tokens": (),
    "max_output_tokens": (),
    "max_tokens": (),
    "min_keep": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "min_p": (0,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "multimodal_data": ([],),
    "n": (1,),
    "n_cmpl": (1,),
    "n_indent": (0,),
    "n_predict": (),
    "n_probs": (0,),
    "no_repeat_ngram_size": (0,),
    "no_stop_trim": (False,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "parse_tool_calls": (True,),
    "penalty_alpha": (0,),
    "post_sampling_probs": (False,),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "prompt_truncate_len": (),
    "reasoning": ({}, {"effort": "none"}),
    "reasoning_budget_tokens": (-1,),
    "reasoning_effort": ("none",),
    "reasoning_format": ("none",),
    "receipt": (False,),
    "regex": (),
    "repeat_penalty": (1,),
    "repetition_detection": (),
    "repetition_penalty": (1,),
    "response_fields": ([],),
    "response_format": ({"type": "text"},),
    "return_flat_raw_output_top_logprobs": (False,),
    "return_hidden_states": (False,),
    "return_input_ids_in_sglext": (False,),
    "return_meta_info": (False,),
    "return_output_ids_in_sglext": (False,),
    "return_prompt_text": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_sampling_logprobs": (False,),
    "return_sampling_mask": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_weight_versions": (False,),
    "samplers": (),
    "sampling_logprobs_mode": (),
    "session_params": (),
    "skip_special_tokens": (True,),
    "smoothing_factor": (0,),
    "spaces_between_special_tokens": (True,),
    "stop": ([],),
    "stop_regex": ([],),
    "stop_token_ids": ([],),
    "store": (False,),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": ("",),
    "t_max_predict_ms": (0, -1),
    "tfs": (1,),
    "tfs_z": (1,),
    "thinking": ({"type": "disabled"},),
    "thinking_budget_tokens": (),
    "thinking_token_budget": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_a": (0,),
    "top_logprobs": (0,),
    "top_n_sigma": (-1,),
    "typical": (1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermark": (False,),
    "watermarking": (False,),
    "web_search_options": (),
    "xtc_probability": (0,),
}
RESPONSE: Idle = TEXT | {
    "context_management": ([],),
    "conversation": (),
    "enable_response_messages": (False,),
    "max_tool_calls": (),
    "previous_input_messages": (),
    "prompt": (),
    "truncation": ("disabled",),
}
MESSAGE: Idle = TEXT | {
    "compaction": (),
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "thread": (),
}
GENERATE: Idle = {  # of vLLM's /inference/v1/generate
    "content_parts": ([],),
    "features": (),
    "kv_transfer_params": (),
    "lora_request": (),
    "prompt_embeds": (),
    "return_routed_experts": (False,),
}
GENERATE_SAMPLING: Idle = {  # of its sampling_params
    "bad_words": ([],),
    "best_of": (1,),
    "early_stopping": (False,),
    "guided_decoding": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
SGLANG: Idle = {  # of SGLang's /generate
    "audio_data": ([],),
    "custom_logit_processor": (),
    "image_data": ([],),
    "input_embeds": (),
    "priority": (0,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "session_params": (),
    "stream": (False,),
    "token_ids_logprob": ([],),
    "video_data": ([],),
}
SGLANG_SAMPLING: Idle = {  # of its sampling_params
    "custom_params": ({},),
    "no_stop_trim": (False,),
    "stop_regex": ([],),
    "structural_tag": (),
}
COUNTED = PROMPT.keys() | {  # fields that change the number of prompt tokens
    "container", "context_management", "functions", "mcp_servers", "thinking", "thread",
}  # fmt: skip
POOLING: Idle = PROMPT | {
    "activation": (True,),
    "add_special_tokens": (True,),
    "embed_dtype": ("float32",),
    "embed_override_token_id": (),
    "embed_overrides": ([],),
    "endianness": ("native", "little"),
    "input_type": (),
    "instruction": ("",),
    "late_chunking_params": (),
    "lora_path": (),
    "max_tokens_per_doc": (),
    "max_tokens_per_query": (0,),
    "messages": (),
    "padding": ("do_not_pad",),
    "softmax": (True,),
    "use_activation": (True,),
}
TOKENIZE: Idle = PROMPT | {"reasoning_effort": ("none",), "tool_choice": ("auto",)}
DETOKENIZE: Idle = {"skip_special_tokens": (False,)}
_TABLES: dict[type, Idle] = {}  # rejected fields, by base class of the requests

if TYPE_CHECKING:  # mypy needs static base classes

    class TextFields(msgspec.Struct, kw_only=True):
        """Base of requests for text."""

    class ResponseFields(msgspec.Struct, kw_only=True):
        """Base of requests for responses."""

    class MessageFields(msgspec.Struct, kw_only=True):
        """Base of requests of Anthropic's form."""

    class TokenizeFields(msgspec.Struct, kw_only=True):
        """Base of requests to tokenize."""

    class DetokenizeFields(msgspec.Struct, kw_only=True):
        """Base of requests to detokenize."""

    class PoolingFields(msgspec.Struct, kw_only=True):
        """Base of requests for embeddings, classes and scores."""

    class GenerateFields(msgspec.Struct, kw_only=True):
        """Base of vLLM's requests by token ids."""

    class GenerateSamplingFields(msgspec.Struct, kw_only=True):
        """Base of the sampling parameters in vLLM's requests by token ids."""

    class SGLangFields(msgspec.Struct, kw_only=True):
        """Base of SGLang's requests."""

    class SGLangSamplingFields(msgspec.Struct, kw_only=True):
        """Base of the sampling parameters in SGLang's requests."""

else:

    def _base(name: str, idle: Idle) -> type[msgspec.Struct]:
        base = msgspec.defstruct(name, [(field, Any, None) for field in idle], kw_only=True)
        _TABLES[base] = idle
        return base

    TextFields = _base("TextFields", TEXT)
    ResponseFields = _base("ResponseFields", RESPONSE)
    MessageFields = _base("MessageFields", MESSAGE)
    TokenizeFields = _base("TokenizeFields", TOKENIZE)
    DetokenizeFields = _base("DetokenizeFields", DETOKENIZE)
    PoolingFields = _base("PoolingFields", POOLING)
    GenerateFields = _base("GenerateFields", GENERATE)
    GenerateSamplingFields = _base("GenerateSamplingFields", GENERATE_SAMPLING)
    SGLangFields = _base("SGLangFields", SGLANG)
    SGLangSamplingFields = _base("SGLangSamplingFields", SGLANG_SAMPLING)


def require_served(request: msgspec.Struct, names: Collection[str] | None = None, inside: str = "") -> None:
    """Reject a request with a field that its route does not support.

    Args:
        names: check only these fields; None for all.
        inside: path of the object with the fields, ending with a dot.

    Raises:
        HTTPError: names the field.
    """
    for name, idle in _refused(type(request)).items():
        value = getattr(request, name)
        if value is not None and value not in idle and (names is None or name in names):
            place = inside + name
            raise HTTPError(400, f"{place} is not supported: omit it", param=place, code="unsupported_parameter")


@functools.cache
def _refused(kind: type) -> Idle:
    """Return the fields of a request's base class that the request does not redeclare."""
    served: set[str] = set()
    for base in kind.__mro__:
        if base in _TABLES:
            return {name: idle for name, idle in _TABLES[base].items() if name not in served}
        served |= inspect.get_annotations(base).keys()
    raise AssertionError(f"{kind} has no base with fields")
