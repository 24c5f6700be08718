"""A ledger's bound begins with its parameter's .grad, and .grad is float32 whatever calls autograd."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from detcompile.errors import InvalidInput, NumericsError
from detcompile.templates.training.exactness import ExactnessGuard, limit_of
from detcompile.training.blocks import weights_of
from detcompile.training.doors import Ledger, door

GRID = -40
MOST = limit_of(GRID)  # 2048


class Held:
    """A parameter behind its doors."""

    def __init__(self) -> None:
        self.guard = ExactnessGuard(("weight",), GRID)
        self.parameter = nn.Parameter(torch.ones(3))
        self.ledger = Ledger(self.parameter, "weight", self.guard)

    def loss(self, slope: float) -> Tensor:
        return (door(self.parameter, self.ledger) * slope).sum()

    @property
    def bound(self) -> float:
        found = self.guard.bound_of("weight")
        assert found is not None
        return float(found)


def test_a_bound_begins_anew_with_its_gradient():
    held = Held()
    for _ in range(4):  # torch's order: the forward sees the gradient of the step before
        loss = held.loss(0.6 * MOST)
        held.parameter.grad = None
        loss.backward()
    assert held.bound == 0.6 * MOST
    for _ in range(4):
        held.parameter.grad.zero_()
        held.loss(0.6 * MOST).backward()
    assert held.bound == 0.6 * MOST
    held.parameter.grad.mul_(0.5)
    held.loss(0.6 * MOST).backward()
    assert held.bound == pytest.approx(0.9 * MOST)
    assert held.parameter.grad.tolist() == pytest.approx([0.9 * MOST] * 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad.mul_(0.5),
        lambda grad: torch._foreach_mul_([grad], 0.5),
        lambda grad: grad.data.mul_(0.5),
        lambda grad: np.multiply(grad.numpy(), np.float32(0.5), out=grad.numpy()),
        lambda grad: grad.data.copy_(grad.clone() * 0.5),
    ],
    ids=["in place", "foreach", "data", "numpy", "data copied"],
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_gradient_that_was_changed_is_added_to_as_it_is_now(change: Callable[[Tensor], object], whole: bool):
    """Whatever torch counts of the change; elements beside it keep their exact sum."""
    held, third = Held(), 1 / 3
    held.loss(third).backward()
    changed = held.parameter.grad if whole else held.parameter.grad[:1]
    change(changed)
    half = float(torch.tensor(third)) / 2
    held.loss(third).backward()
    now = [third + half if whole or not place else 2 * third for place in range(3)]
    assert held.parameter.grad.tolist() == torch.tensor(now, dtype=torch.float64).float().tolist()
    assert held.bound == pytest.approx(max(now))
    held.parameter.grad.data.zero_()
    held.loss(third).backward()
    assert held.parameter.grad.tolist() == torch.tensor([third] * 3).tolist() and held.bound == third


def test_a_gradient_that_grows_is_refused_and_the_next_is_not():
    held = Held()
    held.loss(0.6 * MOST).backward()
    with pytest.raises(NumericsError, match=r"set \.grad to None at each step"):
        held.loss(0.6 * MOST).backward()
    assert held.parameter.grad.dtype is torch.float32
    held.parameter.grad = None
    held.loss(0.6 * MOST).backward()
    assert held.bound == 0.6 * MOST


def test_doors_of_one_backward_share_a_bound():
    held = Held()
    (held.loss(3.0) + held.loss(-4.0)).backward()
    assert held.bound == 7.0 and held.parameter.grad.tolist() == [-1.0] * 3
    held.parameter.grad = None
    with pytest.raises(NumericsError):
        (held.loss(0.6 * MOST) + held.loss(-0.6 * MOST)).backward()


def test_a_gradient_that_is_only_asked_for_leaves_the_sum_as_it_is():
    held = Held()
    third = 1 / 3
    held.loss(third).backward()
    kept = held.parameter.grad
    for _ in range(4):
        (asked,) = torch.autograd.grad(held.loss(0.6 * MOST), [held.parameter])
        assert asked.tolist() == [0.6 * MOST] * 3
        assert held.parameter.grad is kept and kept.dtype is torch.float32
    loss = held.loss(third)
    torch.autograd.grad(loss, [held.parameter], retain_graph=True)
    loss.backward()
    assert held.bound == 2 * third
    assert held.parameter.grad.tolist() == torch.tensor([2 * third] * 3).tolist()  # rounded once


def test_other_parameters_than_those_of_the_trainer_are_refused_by_name():
    held = Held()
    other = nn.Parameter(torch.ones(3))
    with pytest.raises(InvalidInput, match=r"weight is another parameter .* without assign=True"):
        door(other, held.ledger)
    with pytest.raises(InvalidInput, match="late was frozen when the trainer was made"):
        weights_of({"late": other}, {}, {"late": torch.bfloat16})
    assert weights_of({"late": other.requires_grad_(False)}, {}, {"late": torch.bfloat16})["late"].port is None
