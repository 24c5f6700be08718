"""A sequence counts its tokens, keeps its seed and knows when it has finished."""

import pytest

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.sampling.sampler import SamplingParams


def test_it_stops_at_max_tokens():
    sequence = Sequence([5, 6], SamplingParams(max_tokens=2))
    sequence.append(7)
    assert sequence.finish_reason is None
    sequence.append(8)
    assert sequence.finish_reason == "length"
    assert sequence.generated_ids == [7, 8]
    with pytest.raises(AssertionError, match="finished"):
        sequence.append(9)


def test_it_stops_at_a_stop_token_and_keeps_it():
    sequence = Sequence([5, 6], SamplingParams(max_tokens=1, stop_token_ids=(3, 9)))
    sequence.append(9)
    assert sequence.finish_reason == "stop"
    assert sequence.token_ids == [5, 6, 9]


def test_many_stop_tokens_are_one_set_of_all_samples():
    """Each token of every sample is looked for among them, in the thread that steps everybody's answers."""
    params = SamplingParams(seed=1, stop_token_ids=tuple(range(100_000)))
    one, other = Sequence([5], params), Sequence([5], params, sample_index=1)
    assert isinstance(one.ends, frozenset) and one.ends is other.ends and 7 in one.ends


def test_a_stop_token_in_the_prompt_stops_nothing():
    assert Sequence([9, 9], SamplingParams(stop_token_ids=(9,))).finish_reason is None


def test_requests_that_share_params_without_a_seed_get_seeds_of_their_own():
    params = SamplingParams()
    seeds = {Sequence([1], params).seed for _ in range(20)}
    assert len(seeds) == 20
    assert params.seed is None
    assert Sequence([1], SamplingParams(seed=4)).seed == 4


def test_sequence_needs_a_token():
    with pytest.raises(InvalidInput, match="at least one token"):
        Sequence([])
