"""What `detcompile verify` counts as equal."""

import torch

from detcompile.commands.axes import AxisResult


def test_one_logit_bit_is_a_difference() -> None:
    logits, result = torch.tensor([[1.0, 2.0, 3.0]]), AxisResult()
    other = logits.clone()
    other.view(torch.int32)[0, 0] += 1
    for given, holds in ((logits, True), (logits.clone(), True), (other, False), (logits, False)):
        result.add((7,), given)
        assert result.holds == holds
    assert (result.unique_logits, result.unique_outputs, result.configurations) == (2, 1, 4)
