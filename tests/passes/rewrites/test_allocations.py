"""Tensors written in place become concatenations and choices by a mask; gaps are rejected."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from detcompile import Numerics, UncertifiedOp
from detcompile.passes.backend import Backend
from detcompile.passes.tracing import cause


def filled(x: Tensor, *pieces: tuple[int, int]) -> Tensor:
    """x's first features copied into the given ranges of a tensor of 12 features that nothing else has written."""
    out = x.new_empty(x.shape[0], 12)
    for start, end in pieces:
        out[:, start:end].copy_(x[:, : end - start] * (start + 1))
    return out * 2


def compiled(function: Callable[[Tensor], Tensor]) -> tuple[Backend, Callable[[Tensor], Tensor]]:
    backend = Backend(Numerics())
    return backend, torch.compile(function, backend=backend, fullgraph=True)


def test_a_whole_fill_is_a_concatenation() -> None:
    x = torch.randn(5, 8)

    def whole(x: Tensor) -> Tensor:
        return filled(x, (0, 5), (5, 6), (6, 12))

    backend, run = compiled(whole)
    assert torch.equal(run(x), whole(x))
    assert "aten.cat.default" in {entry.op for entry in backend.certificates[0].entries}


def test_a_fill_of_heads_of_one_sequence_is_a_concatenation() -> None:
    """As DeepSeek's keys [1, heads, T, D] are put together, with an unknown T."""
    x = torch.randn(5, 4, 8)
    torch._dynamo.mark_dynamic(x, 0)

    def whole(x: Tensor) -> Tensor:
        heads = x.transpose(0, 1)[None]
        out = heads.new_empty(*heads.shape[:-1], 12)
        out[..., :8].copy_(heads)
        out[..., 8:].copy_(heads[..., :4])
        return out[0].transpose(0, 1) * 2

    backend, run = compiled(whole)
    assert torch.equal(run(x), whole(x))
    assert "aten.cat.default" in {entry.op for entry in backend.certificates[0].entries}


def test_one_value_where_a_mask_says_is_a_choice() -> None:
    x = torch.randn(5, 8)

    def masked(x: Tensor) -> Tensor:
        out = x.clone()
        out[x > 0.5] = -1.0
        return out

    backend, run = compiled(masked)
    assert torch.equal(run(x), masked(x))
    assert "aten.where.self" in {entry.op for entry in backend.certificates[0].entries}


@pytest.mark.parametrize("pieces", [((0, 5), (6, 12)), ((0, 5), (5, 11)), ((1, 5), (5, 12)), ((0, 6), (7, 12), (6, 7))])
def test_a_fill_that_is_not_in_order_or_has_a_gap_is_refused(pieces: tuple[tuple[int, int], ...]) -> None:
    _, run = compiled(lambda x: filled(x, *pieces))
    with pytest.raises(Exception) as refused:
        run(torch.randn(5, 8))
    actual = cause(refused.value)
    assert isinstance(actual, UncertifiedOp) and "uninitialized memory" in str(actual)
