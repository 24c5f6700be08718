"""SamplingParams rejects unsupported values by name and keeps the others unchanged."""

import math
import pickle
from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.sampling_params import SamplingParams


@pytest.mark.parametrize(
    "values",
    [
        {"n": 0},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"min_tokens": 17},
        {"temperature": -1.0},
        {"temperature": 1e-9},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -2},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"seed": -1},
        {"seed": 2**64},
        {"stop": ""},
        {"stop": ("a", "")},
        {"stop": (3,)},
        {"stop_token_ids": (-1,)},
        {"logprobs": -2},
        {"prompt_logprobs": -2},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [-1]},
        {"bad_words": ["a", " "]},
        {"bad_words_ids": [[]]},
        {"bad_words_ids": [[1, -1]]},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"repetition_penalty": math.nan},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": math.nan},
        {"logit_bias": {-1: 0.0}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: math.inf}},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(values):
    with pytest.raises(InvalidInput, match=next(iter(values))):
        SamplingParams(**values)


NO_NUMBERS = ["1", b"1", [], {}, object(), 1j, math.nan, np.array([1]), torch.tensor([1]), np.bool_(1)]
NO_INTEGERS = [*NO_NUMBERS, True, torch.tensor(True), 1.0, np.float32(1), torch.tensor(1.0), math.inf, 10**5000]
NO_FLAGS = [0, 1, "yes", 1.0, None, [], np.int64(1)]
NO_IDS = [3, "12", b"12", [1.0], [True], [None], ["1"], np.array([1.0]), torch.tensor([True]), np.array([[1]])]
WRONG = {
    "n": [*NO_INTEGERS, None, 5000],
    "max_tokens": NO_INTEGERS,
    "min_tokens": [*NO_INTEGERS, None],
    "temperature": [*NO_NUMBERS, True, None, 1e39, 10**400],
    "top_p": [*NO_NUMBERS, True, None],
    "top_k": [*NO_INTEGERS, None, 2**63],
    "min_p": [*NO_NUMBERS, True, None],
    "seed": NO_INTEGERS,
    "stop": [3, b"a", [b"a"], [None], [["a"]], object()],
    "stop_token_ids": NO_IDS,
    "ignore_eos": NO_FLAGS,
    "reasoning_markers": [3, "a", ["a"], ["a", ""], ["a", 3], ["a", "b", "c"], object()],
    "include_stop_str_in_output": NO_FLAGS,
    "skip_special_tokens": NO_FLAGS,
    "logprobs": NO_INTEGERS,
    "prompt_logprobs": NO_INTEGERS,
    "sampling_logprobs": NO_INTEGERS,
    "repetition_penalty": [*NO_NUMBERS, True, None, 1e39, 1e-39],
    "presence_penalty": [*NO_NUMBERS, True, None],
    "frequency_penalty": [*NO_NUMBERS, True, None],
    "logit_bias": [3, "a", [1], [(1, 2.0)], {True: 1.0}, {1.0: 1.0}, {"a": 1.0}, {1: "2"}, {1: None}, {1: True}]
    + [{1: 1e39}, {1: -1e39}, {1: 1.0, "1": 2.0}],
    "allowed_token_ids": NO_IDS,
    "bad_words": [3, b"a", [b"a"], [None], [["a"]], object()],
    "bad_words_ids": [3, "12", [3], [[1.0]], [[True]], [["1"]], [None, [1]], object()],
    "truncate_prompt_tokens": NO_INTEGERS,
    "grammar": [3, "a", b"a", [], {}, object(), {"regex": 3}, {"json": object()}, {"choice": 3}, {"kind": "regex"}]
    + [{"choice": [1]}, {"kind": None, "source": "a"}, {1: 2, "a": 3}, {"regex": ["a"]}],
}


def test_values_of_other_types_are_refused_by_name():
    assert WRONG.keys() == {item.name for item in fields(SamplingParams)}, "every field has its wrong values"
    for name, values in WRONG.items():
        for value in values:
            with pytest.raises(InvalidInput, match=name):
                SamplingParams(**{name: value})


def test_numbers_of_numpy_and_torch_are_taken_as_python_numbers():
    for one in (np.int8(1), np.uint64(1), np.array(1), torch.tensor(1)):
        for name in ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"):
            assert type(getattr(SamplingParams(**{name: one}), name)) is int
    for one in (1, np.float16(1), np.int64(1), np.array(1.0), torch.tensor(1.0, dtype=torch.bfloat16), Fraction(1)):
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
            actual = getattr(SamplingParams(**{name: one}), name)
            assert type(actual) is float and actual == 1
    for ids in ([1, 2], (1, 2), range(1, 3), np.array([1, 2]), torch.tensor([1, 2]), [np.int32(1), torch.tensor(2)]):
        actual = SamplingParams(stop_token_ids=ids).stop_token_ids
        assert actual == (1, 2) and {type(token) for token in actual} == {int}
    assert SamplingParams(ignore_eos=np.bool_(True)).ignore_eos is True
    assert SamplingParams(logit_bias={np.int64(3): np.float32(2), "4": 1}).logit_bias == {3: 2.0, 4: 1.0}


def test_values_at_the_edge_are_taken():
    SamplingParams(top_k=-1, top_p=1, min_p=1, seed=2**64 - 1, presence_penalty=-2, frequency_penalty=2, logprobs=0)
    SamplingParams(max_tokens=None, min_tokens=1000, logit_bias={0: -math.inf, 1: -100}, temperature=1e-5)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stop_token_ids": (3, 10)}, "stop_token_ids.*10.*0 to 9"),
        ({"logit_bias": {10: 1.0}}, "logit_bias.*10.*0 to 9"),
        ({"allowed_token_ids": [3, 10]}, "allowed_token_ids.*10.*0 to 9"),
        ({"bad_words_ids": [[3], [3, 10]]}, "bad_words_ids.*10.*0 to 9"),
        ({"logprobs": 11}, "logprobs 11.*10 tokens"),
        ({"prompt_logprobs": 11}, "prompt_logprobs 11.*10 tokens"),
    ],
    ids=str,
)
def test_the_vocabulary_is_checked(values, words):
    params = SamplingParams(**values)
    params.check_vocabulary(11)
    with pytest.raises(InvalidInput, match=words):
        params.check_vocabulary(10)


def test_params_are_normalized():
    given = {3: 1}
    params = SamplingParams(stop="end", stop_token_ids=[1, 2], logit_bias=given)
    given[4] = 1
    assert params.stop == ("end",) and params.stop_token_ids == (1, 2) and params.logit_bias == {3: 1.0}
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(replace(params))


def test_properties_tell_greedy_filtered_and_penalized():
    assert SamplingParams(temperature=0).greedy and not SamplingParams().greedy
    assert not SamplingParams(top_k=-1).filtered
    assert all(SamplingParams(**f).filtered for f in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}))
    assert not SamplingParams(logit_bias={1: 1}).penalized
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    assert all(SamplingParams(**{name: 0.5}).penalized for name in penalties)


def test_a_fresh_seed_is_drawn_once_and_kept():
    seeds = {SamplingParams().seeded().seed for _ in range(50)}
    assert len(seeds) == 50 and None not in seeds
    seeded = SamplingParams(seed=0)
    assert seeded.seeded() is seeded
    assert replace(SamplingParams(top_k=3).seeded(), seed=None) == SamplingParams(top_k=3)
