"""torch.set_default_dtype changes neither the memory that templates write nor their bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import detcompile.templates.training.attention
import detcompile.templates.training.logprobs
import detcompile.templates.training.token_sums  # noqa: F401 - they register what is called here
from detcompile.templates.attention.scores import AttentionRule
from tests.bits import assert_bitwise_equal
from tests.templates.cases import normal
from tests.templates.training.cases import cu_seqlens_of

OURS = torch.ops.detcompile


def attention(rows: Tensor, cu_seqlens: Tensor, rule: AttentionRule) -> Any:
    out, lse = OURS.packed_attention(rows, rows, rows, cu_seqlens, *rule)
    return out, lse, *OURS.packed_attention_backward(rows, rows, rows, rows, out, lse, cu_seqlens, *rule)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "logprobs": (OURS.token_logprobs, (normal((400, 30), torch.float32, 1), torch.arange(400) % 30)),
    "attention": (
        attention,
        (normal((100, 4, 16), torch.float32, 2), cu_seqlens_of([100]), AttentionRule(0.25, 0, 64, sinks=torch.ones(4))),
    ),
    "product": (
        lambda *given: [OURS.token_matmul(*given)],
        (normal((64, 5), torch.float32, 3), normal((64, 7), torch.float32, 4), cu_seqlens_of([64])),
    ),
}


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_values_do_not_follow_the_default_dtype(name: str, default: torch.dtype) -> None:
    call, given = CASES[name]
    expected = call(*given)
    torch.set_default_dtype(default)
    try:
        actual = call(*given)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(actual, expected, strict=True):
        assert_bitwise_equal(one, other, name)
