"""Without any one of the parts that gradients rest on, the comparison of splits fails."""

import pytest
import torch
from torch import Tensor

from detcompile.training import grad_accumulator, packing
from detcompile.training.grad_accumulator import GradAccumulator
from tests.training.cases import gradients, sequences, trained

ROWS = sequences([40, 7, 130, 64, 15])


def differs() -> bool:
    """Return whether gradients depend on the micro-batches."""
    one, many = (gradients(trained("qwen3"), ROWS, groups) for groups in ([range(5)], [[3, 1], [4], [2, 0]]))
    return any(not torch.equal(one[name], many[name]) for name in one)


def test_nothing_differs_without_a_mutant():
    assert not differs()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_missing_handles_change_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    def rounded(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(dtype).double(), None

    monkeypatch.setattr(grad_accumulator._GradHandle, "backward", staticmethod(rounded))
    assert differs()


def test_missing_exact_sum_changes_gradients(monkeypatch: pytest.MonkeyPatch):
    def take_rounded(accumulator: GradAccumulator, grad: Tensor | None) -> None:
        accumulator._exact = None if grad is None else grad.double()

    monkeypatch.setattr(GradAccumulator, "_follow", take_rounded)
    assert differs()


def test_leaf_across_sequences_depends_on_packing(monkeypatch: pytest.MonkeyPatch):
    def one_leaf(lengths: list[int], token_leaf: int) -> list[int]:
        return [0, sum(lengths)]

    monkeypatch.setattr(packing, "leaf_table", one_leaf)
    assert differs()
