"""Each argument that this transformers' generate has is served, changes nothing here, or is refused by name."""

import inspect
import re
from types import SimpleNamespace

import pytest
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

from detcompile import InvalidInput
from detcompile.runtime.dense.generation_arguments import (
    CALL_ONLY,
    DEFAULTS,
    INERT,
    NEW_TOKENS,
    UNSERVED,
    read_arguments,
)


def model_of(**settings: object) -> SimpleNamespace:
    return SimpleNamespace(generation_config=GenerationConfig(**settings))


def test_every_argument_is_decided_on() -> None:
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    known |= set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "inputs", "kwargs"}
    decided = [*DEFAULTS, *CALL_ONLY, *INERT, *UNSERVED, "generation_config"]
    assert len(set(decided)) == len(decided)
    assert known <= set(decided), f"what does generate() do with {sorted(known - set(decided))}?"


def test_defaults_are_those_of_transformers() -> None:
    theirs = GenerationConfig()._get_default_generation_params()
    named = {name: theirs[name] for name in DEFAULTS.keys() & theirs.keys() - {"max_length"}}
    assert named == {name: DEFAULTS[name] for name in named} and theirs["max_length"] == NEW_TOKENS
    assert {"top_k", "temperature", "do_sample"} <= named.keys()


@pytest.mark.parametrize("name", UNSERVED)
def test_unsupported_argument_is_rejected_by_name(name: str) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(**{name: [7]}))
    with pytest.raises(InvalidInput, match=rf"generation_config\.{name} = \[7\] is not supported.*{name}=None"):
        read_arguments(model, {}, 3)
    with pytest.raises(InvalidInput, match=rf"^{name} = \[7\] is not supported"):
        read_arguments(model_of(), {name: [7]}, 3)
    with pytest.raises(InvalidInput, match=rf"generation_config\.{name} = \[7\] is not supported"):
        read_arguments(model_of(), {"generation_config": model.generation_config}, 3)
    assert read_arguments(model, {name: None}, 3).max_new_tokens == NEW_TOKENS  # the call goes before the configuration
    for harmless in (None, [], *UNSERVED[name].harmless):
        setattr(model.generation_config, name, harmless)
        assert read_arguments(model, {}, 3).max_new_tokens == NEW_TOKENS
        assert read_arguments(model_of(), {name: harmless}, 3).max_new_tokens == NEW_TOKENS


def test_a_call_goes_before_its_configuration_and_that_before_the_model_s() -> None:
    model = model_of(do_sample=True, temperature=2.0, top_k=3, eos_token_id=[5, 200])
    drawn = read_arguments(model, {}, 3, num_logits=100)
    assert drawn.sampling == {"temperature": 2.0, "top_k": 3, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert drawn.eos_token_id == (5,) and drawn.padding == 5
    config = GenerationConfig(temperature=0.5, eos_token_id=6)
    drawn = read_arguments(model, {"generation_config": config, "top_k": None, "top_p": 0.9}, 3)
    assert (drawn.sampling["temperature"], drawn.sampling["top_k"], drawn.sampling["top_p"]) == (0.5, 0, 0.9)
    assert drawn.eos_token_id == (6,)
    assert read_arguments(model, {"eos_token_id": None}, 3).eos_token_id == ()
    assert read_arguments(model, {"do_sample": False}, 3).sampling["temperature"] == 0.0
    assert read_arguments(model_of(), {"do_sample": True}, 3).sampling["top_k"] == 50


def test_max_length_counts_prompt_like_hugging_face(caplog) -> None:
    assert read_arguments(model_of(max_length=23), {}, 10).max_new_tokens == 13
    assert read_arguments(model_of(max_length=23), {"max_length": None}, 10).max_new_tokens == 13
    assert read_arguments(model_of(max_length=23, max_new_tokens=4), {}, 10).max_new_tokens == 4
    assert not caplog.records or "takes precedence" in caplog.text
    assert read_arguments(model_of(max_new_tokens=4), {"max_length": 50}, 10).max_new_tokens == 4
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=16))
    assert read_arguments(model, {}, 10).max_new_tokens == 6
    for given in ({"max_length": 10}, {"max_length": 3}):
        with pytest.raises(InvalidInput, match=f"max_length = {given['max_length']} .* leaves no new token"):
            read_arguments(model_of(), given, 10)
    assert read_arguments(model_of(), {"min_length": 14}, 10).min_new_tokens == 4
    assert read_arguments(model_of(), {"min_length": 14, "min_new_tokens": 6}, 10).min_new_tokens == 6
    with pytest.warns(UserWarning, match="`min_new_tokens` asks for 9 new tokens"):
        assert read_arguments(model_of(), {"min_new_tokens": 9, "max_new_tokens": 5}, 10).min_new_tokens == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temprature": 0.5, "max_tokens": None}, r"`model_kwargs` are not used by the model: \['temprature'\]"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1 must be at least 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens 2.0 is a float"),
        ({"do_sample": "yes"}, "do_sample 'yes' is a str"),
        ({"num_return_sequences": 2}, "num_return_sequences=2 of a greedy call"),
        ({"num_return_sequences": 0}, "num_return_sequences=0 must be at least 1"),
        ({"eos_token_id": -1}, "eos_token_id holds token -1"),
        ({"eos_token_id": {5: 6}}, r"eos_token_id {5: 6} is a dict"),
        ({"suppress_tokens": [-5]}, "suppress_tokens holds token -5"),
        ({"suppress_tokens": b"a"}, "suppress_tokens b'a' is a bytes"),
        ({"pad_token_id": 10**30}, "pad_token_id 10* does not fit"),
        ({"output_scores": "no"}, "output_scores 'no' is a str"),
        ({"return_dict_in_generate": 1}, "return_dict_in_generate 1 is an int"),
        ({"do_sample": 0}, "do_sample 0 is an int"),
        ({"stop_strings": 0}, "stop_strings 0: give a string"),
        ({"bad_words_ids": [3]}, "bad_words_ids: entry 0 is an int"),
        ({"bad_words_ids": 3}, "bad_words_ids 3 is an int"),
        ({"suppress_tokens": [1.5]}, "suppress_tokens: entry 0, 1.5 is a float"),
        ({"stop_strings": [""]}, "stop_strings"),
        ({"stopping_criteria": len}, "stopping_criteria"),
        ({"stopping_criteria": [3]}, "stopping_criteria"),
        ({"streamer": object()}, "streamer"),
        ({"cuda_graphs": 1}, "cuda_graphs 1 is an int"),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)),  # the same in every worker
)
def test_values_that_cannot_be_are_refused_by_name(given: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_arguments(model_of(), given, 3)


def test_end_tokens_are_no_bad_words() -> None:
    given = {"bad_words_ids": [[5], [7], [5, 7]], "eos_token_id": [5, 6]}
    assert read_arguments(model_of(), given, 3).bad_words_ids == ((7,), (5, 7))
