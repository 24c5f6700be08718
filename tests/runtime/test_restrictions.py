"""Requests with restricted tokens get the answers of a run alone, with any neighbors and drafts."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.speculation.speculator import SpeculationConfig
from tests.model_cases import VOCAB_SIZE
from tests.runtime.engine_cases import (
    OVERLAP,
    LetterTokenizer,
    assert_as_alone,
    config_of,
    engine_configs,
    engine_of,
    letters,
    prompt_of,
    run,
    tiny_model,
)
from tests.runtime.speculation.test_speculator import Oracle

FREE = SamplingParams(temperature=0.0, max_tokens=16)


def pairs_of(tokens: list[int]) -> list[list[int]]:
    """Every second pair of neighbors: words that a request would complete."""
    return [tokens[place : place + 2] for place in range(1, len(tokens) - 1, 2)]


@settings(max_examples=8)
@given(config=engine_configs(161), seed=st.integers(0, 10**6), temperature=st.sampled_from([0.0, 1.0]))
def test_bad_words_are_avoided_and_move_no_neighbor(config, seed, temperature) -> None:
    model = tiny_model("cpu")
    free = replace(FREE, temperature=temperature, seed=seed)
    [first] = engine_of(model, config).generate(prompt_of(9, seed), free, progress=False)
    words = [*pairs_of(first.outputs[0].token_ids), [prompt_of(9, seed)[-1], first.outputs[0].token_ids[0]]]
    requested = {9: replace(free, bad_words_ids=words), 40: free, 20: replace(free, allowed_token_ids=range(3, 90, 4))}
    engine = engine_of(model, config)
    params = {engine.add_request(prompt_of(length, seed), item): item for length, item in requested.items()}
    outputs = {output.request_id: output for output in run(engine)}
    for request_id, item in params.items():
        assert_as_alone(model, outputs[request_id], item)
    [restricted, _, allowed] = [outputs[request_id] for request_id in params]
    tokens = restricted.prompt_token_ids + restricted.outputs[0].token_ids
    actual = {tuple(tokens[place : place + 2]) for place in range(8, len(tokens) - 1)}
    assert not actual & {*map(tuple, words)}
    assert set(allowed.outputs[0].token_ids) <= {*range(3, 90, 4)}


@settings(max_examples=6)
@given(seed=st.integers(0, 10**6), accuracy=st.sampled_from([0.5, 0.9, 1.0]))
def test_drafted_tokens_count_as_tokens_before_a_bad_word(seed, accuracy) -> None:
    model = tiny_model("cpu")
    params = [
        replace(FREE, seed=seed, logprobs=-1, temperature=float(index % 2), n=1 + (index == 3)) for index in range(4)
    ]
    prompts = [prompt_of(length, seed) for length in (5, 9, 15, 17)]
    free = model.engine(config_of()).generate(prompts, params, progress=False)
    params = [
        replace(item, bad_words_ids=pairs_of(output.outputs[0].token_ids), allowed_token_ids=allowed)
        for item, output, allowed in zip(params, free, [None, None, range(1, VOCAB_SIZE, 2), None])
    ]
    expected = model.engine(config_of()).generate(prompts, params, progress=False)
    assert expected[0].outputs[0].token_ids != free[0].outputs[0].token_ids
    # half of the drafts are what would come without the words: the target has to refuse them where they stand
    for known in (expected, free):
        speculation = SpeculationConfig(drafter=Oracle(known, accuracy, seed), switch="always")
        engine = model.engine(config_of(), speculation=speculation)
        actual = engine.generate(prompts, params, progress=False)
        engine.check()
        assert engine.speculator.num_drafted > 0
        assert [output.outputs for output in actual] == [output.outputs for output in expected]


@OVERLAP
def test_bad_words_are_text_and_ignore_the_prompt(overlap) -> None:
    model = tiny_model("cpu")
    engine = engine_of(model, config_of(overlap=overlap))
    allowed = range(5)  # whose letters are their own
    [output] = engine.generate([[3, 4, 1]], replace(FREE, allowed_token_ids=allowed), progress=False)
    tokens = output.outputs[0].token_ids
    bad = letters(tokens[:3]), letters([1, tokens[0]])  # the second would be completed by the prompt's end
    [output] = engine.generate([[3, 4, 1]], replace(FREE, allowed_token_ids=allowed, bad_words=bad), progress=False)
    actual = output.outputs[0].token_ids
    assert actual[:2] == tokens[:2] and actual[2] != tokens[2]
    assert not any(word in output.outputs[0].text for word in bad)
    ids = [[ord(letter) - ord("a") for letter in word] for word in bad]
    params = replace(FREE, allowed_token_ids=allowed, bad_words_ids=ids)
    [output] = engine.generate([[3, 4, 1]], params, progress=False)
    assert output.outputs[0].token_ids[0] != tokens[0]
    assert_as_alone(model, output, params)


def test_a_prompt_is_truncated_to_its_end() -> None:
    model = tiny_model("cpu")
    engine = engine_of(model, config_of(), max_context=100)
    prompt = prompt_of(130)
    for requested, kept in ((7, 7), (200, None), (-1, 99)):
        params = replace(FREE, max_tokens=1, truncate_prompt_tokens=requested)
        [output] = engine.generate(prompt, params, progress=False)
        if kept is None:
            assert "130 tokens" in str(output.error)
        else:
            assert output.prompt_token_ids == prompt[-kept:]
            assert_as_alone(model, output, params)
    params = replace(FREE, max_tokens=30, min_tokens=20, truncate_prompt_tokens=-1)
    [output] = engine.generate(prompt, params, progress=False)
    assert len(output.prompt_token_ids) == 80 and len(output.outputs[0].token_ids) == 20


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"bad_words": ["ab"]}, "bad_words are texts, and this engine has no tokenizer"),
        ({"bad_words_ids": [[1, VOCAB_SIZE]]}, rf"bad_words_ids holds token \[{VOCAB_SIZE}\]"),
        ({"allowed_token_ids": [3, VOCAB_SIZE]}, rf"allowed_token_ids holds token \[{VOCAB_SIZE}\]"),
    ],
)
def test_unsupported_restriction_is_rejected(params, message) -> None:
    engine = engine_of(tiny_model("cpu"), config_of(), tokenizer=None)
    with pytest.raises(InvalidInput, match=message):
        engine.add_request([1, 2], SamplingParams(**params))


def test_a_request_that_may_draw_nothing_ends_with_the_reason() -> None:
    engine = engine_of(tiny_model("cpu"), config_of())
    params = replace(FREE, allowed_token_ids=[4, 5], bad_words_ids=[[4], [5]])
    [output] = engine.generate([1, 2], params, progress=False)
    assert output.outputs[0].finish_reason == "error" and "leave no token" in str(output.error)


def test_a_word_that_the_tokenizer_cannot_read_is_refused() -> None:
    engine = engine_of(tiny_model("cpu"), config_of(), tokenizer=LetterTokenizer())
    with pytest.raises(InvalidInput, match="cannot draw the tokens"):
        engine.add_request([1, 2], SamplingParams(bad_words=["ab", chr(97 + VOCAB_SIZE)]))
