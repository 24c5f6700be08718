"""Arguments of Hugging Face's ``generate`` that are rejected, with an alternative, and those without effect.

Every name of transformers' GenerationConfig is in one of these tables or served; a test checks this.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Unserved(NamedTuple):
    """Values that are accepted (besides None and empty ones), and what to do instead of the argument."""

    harmless: tuple[Any, ...]
    advice: str


BEAMS = "rows are sampled or greedy here; num_return_sequences with do_sample=True gives several answers to choose from"
PROCESSORS = "of what changes logits, penalty, temperature, top_k, top_p, min_p, bad_words_ids and suppress_tokens are"
FILTERS = "top_k, top_p and min_p are served"
DRAFTS = "speculation moves no token here: model.engine(speculation=SpeculationConfig())"
FORCED = "put the token into the prompts, or append it to the answers"
DECODER = "it is of encoder-decoder models"
FORWARD = "the prompts are input_ids, and attention_mask says where padding stands"
CACHED = "give the whole prompt; an engine's prefix cache finds what it has computed"
STATES = "compiled graphs give logits alone; run the model that it was made from"

UNSERVED: Mapping[str, Unserved] = {
    "assistant_early_exit": Unserved((), DRAFTS),
    "assistant_model": Unserved((), DRAFTS),
    "assistant_tokenizer": Unserved((), DRAFTS),
    "begin_suppress_tokens": Unserved((), "suppress_tokens and min_new_tokens are served"),
    "cache": Unserved((), CACHED),  # past_key_values from transformers 5.24 on
    "constraints": Unserved((), BEAMS),
    "custom_generate": Unserved((), "write the loop over model(input_ids).logits or over model.engine()"),
    "diversity_penalty": Unserved((0,), BEAMS),
    "dola_layers": Unserved((), "only the last layer's logits are computed"),
    "encoder_no_repeat_ngram_size": Unserved((0,), DECODER),
    "encoder_repetition_penalty": Unserved((1,), "repetition_penalty is served"),
    "epsilon_cutoff": Unserved((0,), FILTERS),
    "eta_cutoff": Unserved((0,), FILTERS),
    "exponential_decay_length_penalty": Unserved((), "max_new_tokens is served"),
    "force_words_ids": Unserved((), BEAMS),
    "forced_bos_token_id": Unserved((), FORCED),
    "forced_eos_token_id": Unserved((), FORCED),
    "guidance_scale": Unserved((1,), "it takes a second forward over other prompts"),
    "inputs_embeds": Unserved((), FORWARD),
    "logits_processor": Unserved((), f"{PROCESSORS} served as arguments"),
    "logits_to_keep": Unserved((0, 1), "output_logits gives those that each token was drawn from"),
    "max_time": Unserved((), "tokens may not hang on a clock; pass stopping_criteria=[MaxTimeCriteria(...)] to say so"),
    "negative_prompt_attention_mask": Unserved((), "it is of guidance_scale"),
    "negative_prompt_ids": Unserved((), "it is of guidance_scale"),
    "no_repeat_ngram_size": Unserved((0,), "repetition_penalty and bad_words_ids are served"),
    "num_beam_groups": Unserved((1,), BEAMS),
    "num_beams": Unserved((1,), BEAMS),
    "output_attentions": Unserved((False,), STATES),
    "output_hidden_states": Unserved((False,), STATES),
    "past_key_values": Unserved((), CACHED),
    "penalty_alpha": Unserved((0,), "contrastive search is not made of one row's own logits"),
    "position_ids": Unserved((), "they are counted from attention_mask; a plain call takes others"),
    "prefix_allowed_tokens_fn": Unserved((), "an engine takes SamplingParams(allowed_token_ids=...)"),
    "prompt_lookup_num_tokens": Unserved((), DRAFTS),
    "renormalize_logits": Unserved((False,), "scores are as the tokens were drawn from; take their log_softmax"),
    "sequence_bias": Unserved((), "an engine takes SamplingParams(logit_bias=...), of single tokens"),
    "synced_gpus": Unserved((False,), "ranks that share a model make the same calls"),
    "token_healing": Unserved((False,), "heal the prompts before the call"),
    "token_type_ids": Unserved((), FORWARD),
    "top_h": Unserved((), FILTERS),
    "typical_p": Unserved((1,), FILTERS),
    "use_mtp": Unserved((False,), DRAFTS),
    "watermarking_config": Unserved((), PROCESSORS + " served"),
}
# Settings of other caches' speed and memory; settings that only matter with an argument rejected above; settings that
# matter only for NaN logits, which fail here anyway; and settings that are true of every model here.
INERT = {
    "assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind", "bos_token_id",
    "cache_config", "cache_implementation", "compile_config", "continuous_batching_config",
    "decoder_start_token_id", "disable_compile", "early_stopping", "is_assistant", "length_penalty", "low_memory",
    "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "prefill_chunk_size", "remove_invalid_values", "return_dict", "speculation_type", "target_lookbehind",
    "transformers_version", "trust_remote_code", "use_cache",
}  # fmt: skip


def is_neutral(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Return True if an argument with this value has no effect."""
    if value is None or (isinstance(value, (list, tuple, dict)) and not value):
        return True
    return isinstance(value, (bool, int, float)) and value in harmless
