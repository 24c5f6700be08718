"""What a generation_config asks for is served or refused by name: every setting that this transformers has."""

from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from detcompile import InvalidInput
from detcompile.runtime.dense.generation_defaults import NEW_TOKENS, SERVED, UNSERVED, generation_settings

# Ends, padding and lengths that ``generate`` reads itself; what other settings mean that are refused or unset; speed,
# memory and the form of the answer. None of them chooses other tokens here.
BESIDE = """
    eos_token_id pad_token_id bos_token_id decoder_start_token_id max_length length_penalty early_stopping
    remove_invalid_values renormalize_logits assistant_confidence_threshold assistant_early_exit
    assistant_ensemble_weight assistant_lookbehind is_assistant max_matching_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule prompt_lookup_num_tokens speculation_type target_lookbehind use_mtp cache_config
    cache_implementation compile_config continuous_batching_config disable_compile low_memory max_cache_len
    prefill_chunk_size use_cache output_attentions output_hidden_states output_logits output_scores
    return_dict_in_generate transformers_version
"""


def model_of(**settings: object) -> SimpleNamespace:
    return SimpleNamespace(generation_config=GenerationConfig(**settings))


def test_every_setting_is_decided_on() -> None:
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    decided = [*SERVED, *UNSERVED, *BESIDE.split()]
    assert len(set(decided)) == len(decided)
    assert known <= set(decided), f"what does generate() do with {sorted(known - set(decided))}?"


@pytest.mark.parametrize("name", UNSERVED)
def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(**{name: [7]}))
    with pytest.raises(InvalidInput, match=rf"generation_config\.{name} = \[7\] is not served"):
        generation_settings(model, {}, 3)
    for harmless in (None, [], *UNSERVED[name]):
        setattr(model.generation_config, name, harmless)
        assert generation_settings(model, {}, 3)["max_new_tokens"] == NEW_TOKENS


@pytest.mark.parametrize("name", SERVED)
def test_a_call_goes_before_the_configuration(name: str) -> None:
    theirs, ours = (True, False) if name == "do_sample" else (2, 3)
    assert generation_settings(model_of(**{name: theirs}), {}, 3)[name] == theirs
    assert generation_settings(model_of(**{name: theirs}), {name: ours}, 3)[name] == ours


def test_lengths_count_the_prompt_where_hugging_face_s_do() -> None:
    assert generation_settings(model_of(max_length=23), {}, 10)["max_new_tokens"] == 13
    assert generation_settings(model_of(max_length=23, max_new_tokens=4), {}, 10)["max_new_tokens"] == 4
    with pytest.raises(InvalidInput, match="max_length = 10 leaves no new token"):
        generation_settings(model_of(max_length=10), {}, 10)
