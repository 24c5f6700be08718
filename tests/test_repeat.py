"""A small version of the experiment with equal requests, which would detect a difference."""

import pytest
import torch

from benchmarks.repeat import Workload, agreement, repeat_ours, repeat_plain
from tests.model_cases import compiled, random_model

PROMPT = list(range(40, 60))


def test_forty_completions_under_random_load_are_equal() -> None:
    answers, sizes = repeat_ours(compiled("qwen3", torch.bfloat16), Workload(PROMPT, 40, 64, max_num_seqs=16))
    actual = agreement(answers, sizes)
    assert actual["unique"] == 1 and actual["most_common"] == 40 and actual["first_difference"] is None
    assert len(answers[0]) == 64
    assert actual["batch_sizes"]["distinct"] >= 8, "the load did not vary"


@pytest.mark.parametrize("padded", [False, True])
def test_the_plain_model_runs_in_batches_of_the_same_sizes(padded: bool) -> None:
    work = Workload(PROMPT, 12, 8, max_num_seqs=4)
    answers, sizes = repeat_plain(random_model("qwen3", torch.float32), work, [1, 3, 4, 4], padded=padded)
    assert sum(sizes) == len(answers) == 12 and set(sizes) <= {1, 2, 3, 4}
    assert {len(answer) for answer in answers} == {8}


def test_differences_are_counted_and_located() -> None:
    actual = agreement([(1, 2, 3), (1, 2, 3), (1, 5, 3), (1, 5, 4)], [2, 3])
    assert actual["unique"] == 3 and actual["most_common"] == 2 and actual["first_difference"] == 1
