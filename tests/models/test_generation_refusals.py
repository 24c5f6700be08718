"""generate() rejects unsupported arguments by name, and accepts those without an effect."""

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import StopStringCriteria

import detcompile
from detcompile import InvalidInput
from detcompile.errors import EngineError
from tests.model_cases import VOCAB_SIZE
from tests.models.generation_cases import Recorder, model_of, padded_batch


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beams": 4}, "num_beams = 4 is not supported"),
        ({"assistant_model": SimpleNamespace()}, "assistant_model = .* is not supported.*SpeculationConfig"),
        ({"output_attentions": True}, "output_attentions = True is not supported"),
        ({"past_key_values": DynamicCache()}, "past_key_values = DynamicCache.*give the whole prompt"),
        ({"cache": DynamicCache()}, "cache = DynamicCache.*give the whole prompt"),
        ({"logits_processor": [lambda ids, scores: scores]}, "logits_processor = .* is not supported"),
        ({"max_new_token": 3}, r"not used by the model: \['max_new_token'\]"),
        ({"stop_strings": "a"}, "this model has none: pass tokenizer="),
        ({"stop_strings": "a", "tokenizer": object()}, "stop_strings with a object"),
        ({"do_sample": True, "temperature": -1.0}, "temperature -1.0 must be"),
        ({"eos_token_id": VOCAB_SIZE}, "eos_token_id holds token"),
        ({"bad_words_ids": [[VOCAB_SIZE]]}, "bad_words_ids holds token"),
        ({"do_sample": True, "seed": -1}, "seed -1 must be in"),
        ({"do_sample": True, "seed": [1, 2]}, "2 different seeds for 3 rows"),
        ({"do_sample": True, "seed": 1.0}, "seed 1.0 is a float"),
        ({"suppress_tokens": [VOCAB_SIZE]}, "suppress_tokens holds token"),
        ({"max_new_tokens": 5000}, "was compiled for"),
        ({"max_new_tokens": 10**30}, "was compiled for"),
        ({"generation_config": {"max_new_tokens": 3}}, "generation_config .* is a dict: pass a GenerationConfig"),
        ({"generation_config": "greedy"}, "generation_config 'greedy' is a str: pass a GenerationConfig"),
        ({"pad_token_id": 10**30}, "pad_token_id 10* does not fit"),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)),  # the same in every worker
)
def test_what_cannot_be_served_is_refused_by_name(given: dict, message: str) -> None:
    ids, mask = padded_batch()
    with pytest.raises(InvalidInput, match=message):
        model_of("qwen3").generate(ids, mask, **given)


def test_arguments_that_ask_for_nothing_are_taken() -> None:
    ids, mask = padded_batch()
    model = model_of("qwen3")
    nothing = dict.fromkeys(
        ["assistant_model", "assistant_tokenizer", "streamer", "stopping_criteria", "prefix_allowed_tokens_fn"]
        + ["past_key_values", "cache", "token_type_ids", "unknown", "generation_config", "tokenizer", "position_ids"]
    )
    nothing |= {"logits_processor": logits_process.LogitsProcessorList(), "num_beams": 1, "synced_gpus": False}
    nothing |= {"cache_implementation": "static", "output_attentions": False, "trust_remote_code": False}
    assert torch.equal(model.generate(ids, mask, max_new_tokens=4, **nothing), model.generate(ids, mask, max_length=16))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, ids, mask: m.generate(), "needs input_ids"),
        (lambda m, ids, mask: m.generate(ids, inputs=ids), "needs input_ids"),
        (lambda m, ids, mask: m.generate(ids.tolist()), "input_ids is a list"),
        (lambda m, ids, mask: m.generate(ids.to("meta"), mask), "meta device"),
        (lambda m, ids, mask: m.generate(ids, GenerationConfig()), "attention_mask is a GenerationConfig"),
        (lambda m, ids, mask: m.generate(ids[0]), r"input_ids must be integers \[batch, length\]"),
        (lambda m, ids, mask: m.generate(ids > 1), "input_ids must be integers .* got torch.bool"),
        (lambda m, ids, mask: m.generate(ids.to_sparse()), "input_ids: it is of layout torch.sparse_coo"),
        (lambda m, ids, mask: m.generate(ids, mask.to_sparse()), "attention_mask: it is of layout torch.sparse_coo"),
    ],
    ids=["nothing", "twice", "a list", "no values", "a config by place"]
    + ["a row", "truth values", "sparse", "sparse mask"],
)
def test_inputs_that_are_none_are_refused(call: Callable, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        call(model_of("qwen3"), *padded_batch())


def test_two_lengths_of_one_call_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """As transformers does; a length that only a config has is no contradiction."""
    model, (ids, mask) = model_of("qwen3"), padded_batch()
    with caplog.at_level("WARNING", "detcompile"):
        model.generate(ids, mask, max_new_tokens=2, generation_config=GenerationConfig(max_length=20))
        assert "max_new_tokens takes precedence" not in caplog.text
        model.generate(ids, mask, max_new_tokens=2, max_length=20)
        assert "max_new_tokens takes precedence" in caplog.text


@pytest.mark.parametrize("watched", [{}, {"streamer": Recorder()}])
def test_rows_without_a_token_to_draw_are_an_error(watched: dict) -> None:
    with pytest.raises(EngineError, match="no token left to draw"):
        model_of("qwen3").generate(*padded_batch(), suppress_tokens=list(range(VOCAB_SIZE)), **watched)


def test_the_model_s_own_tokenizer_reads_stop_strings() -> None:
    model = detcompile.compile("tiny")
    ids = torch.tensor([model.tokenizer("def mean(values):")["input_ids"]])
    free = model.generate(ids, max_new_tokens=30)
    text = model.tokenizer.decode(free[0, ids.shape[1] :])
    stop = text[len(text) // 2 :][:3]
    actual = model.generate(ids, max_new_tokens=30, stop_strings=[stop])
    assert torch.equal(actual, model.generate(ids, max_new_tokens=30, stop_strings=[stop], tokenizer=model.tokenizer))
    ended = StopStringCriteria(model.tokenizer, [stop])
    assert ended(actual, None).all() and not ended(actual[:, :-1], None).any()
    assert torch.equal(free[:, : actual.shape[1]], actual)
