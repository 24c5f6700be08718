"""GradAccumulator adds all gradients of a parameter exactly, or rejects them; ``.grad`` stays float32."""

import itertools
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from detcompile.errors import InvalidInput, NumericsError
from detcompile.templates.training.exactness import ExactnessGuard, limit_of
from detcompile.training.blocks import weights_of
from detcompile.training.grad_accumulator import GradAccumulator, grad_handle

GRID = -40
MOST = limit_of(GRID)  # 2048


class Held:
    """A parameter that losses reach through its gradient handles."""

    def __init__(self, size: int = 3) -> None:
        self.guard = ExactnessGuard(("weight",), GRID)
        self.parameter = nn.Parameter(torch.ones(size))
        self.accumulator = GradAccumulator(self.parameter, "weight", self.guard)

    def loss(self, slope: float) -> Tensor:
        return (grad_handle(self.parameter, self.accumulator) * slope).sum()

    def penalty(self, slope: float) -> Tensor:
        return (self.parameter * slope).sum()

    @property
    def bound(self) -> float:
        actual = self.guard.bound_of("weight")
        assert actual is not None
        return float(actual)


def test_new_gradient_resets_bound():
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


def test_first_gradient_is_kept_as_sum_without_copy():
    held, addresses = Held(), []
    for slopes in ([0.5], [0.25, 1 / 3], [0.125]):
        held.parameter.grad = None
        for slope in slopes:
            handle = grad_handle(held.parameter, held.accumulator)
            handle.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
            (handle * slope).sum().backward()
            assert held.accumulator._exact.data_ptr() == addresses[-1 if slope == slopes[0] else -2]
        assert held.parameter.grad.tolist() == torch.tensor([sum(slopes)] * 3).tolist()


@pytest.mark.parametrize("split", [lambda rows: (rows, rows), lambda rows: (rows[:3], rows[:1])], ids=["one", "views"])
def test_shared_gradient_tensor_gives_separate_sums(split: Callable[[Tensor], tuple[Tensor, ...]]):
    helds = Held(), Held(len(split(torch.ones(3))[1]))
    for slope in (1 + 2**-24, 2**-24, 2**-30):
        slopes = torch.full((3,), slope, dtype=torch.float64)
        handles = [grad_handle(held.parameter, held.accumulator) for held in helds]
        torch.autograd.backward(handles, split(slopes))
    for held in helds:
        assert held.accumulator._exact.tolist() == [1 + 2**-23 + 2**-30] * len(held.parameter)


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
def test_next_addition_uses_changed_grad(change: Callable[[Tensor], object], whole: bool):
    """Even if torch's version counter misses the change. Unchanged elements keep their exact sum."""
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


def test_gradient_beyond_limit_is_refused_until_reset():
    held = Held()
    held.loss(0.6 * MOST).backward()
    with pytest.raises(NumericsError, match=r"set \.grad to None at each step"):
        held.loss(0.6 * MOST).backward()
    assert held.parameter.grad.dtype is torch.float32
    held.parameter.grad = None
    held.loss(0.6 * MOST).backward()
    assert held.bound == 0.6 * MOST


def test_handles_of_one_backward_share_a_bound():
    held = Held()
    (held.loss(3.0) + held.loss(-4.0)).backward()
    assert held.bound == 7.0 and held.parameter.grad.tolist() == [-1.0] * 3
    held.parameter.grad = None
    with pytest.raises(NumericsError):
        (held.loss(0.6 * MOST) + held.loss(-0.6 * MOST)).backward()


def test_autograd_grad_does_not_change_the_sum():
    held = Held()
    third = 1 / 3
    held.loss(third).backward()
    kept = held.parameter.grad
    for _ in range(4):
        (requests,) = torch.autograd.grad(held.loss(0.6 * MOST), [held.parameter])
        assert requests.tolist() == [0.6 * MOST] * 3
        assert held.parameter.grad is kept and kept.dtype is torch.float32
    loss = held.loss(third)
    torch.autograd.grad(loss, [held.parameter], retain_graph=True)
    loss.backward()
    assert held.bound == 2 * third
    assert held.parameter.grad.tolist() == torch.tensor([2 * third] * 3).tolist()  # rounded once


def test_foreign_parameters_are_refused_by_name():
    held = Held()
    other = nn.Parameter(torch.ones(3))
    with pytest.raises(InvalidInput, match=r"weight is not the parameter .* without assign=True"):
        grad_handle(other, held.accumulator)
    with pytest.raises(InvalidInput, match="late was frozen when the trainer was created"):
        weights_of({"late": other}, {}, {"late": torch.bfloat16})
    assert weights_of({"late": other.requires_grad_(False)}, {}, {"late": torch.bfloat16})["late"].handle is None


# Float32 sums of these depend on the order. All but the last two cancel.
SLOPES = (1.0, 2.0**-26, -1.0, -(2.0**-26), 0.1, -0.1, 3 * 2.0**GRID, 0.75 * 2.0**GRID)


@pytest.mark.filterwarnings("ignore:the gradient of weight is below:RuntimeWarning")
def test_penalty_gradients_are_added_exactly_in_any_order():
    """The trainer's losses are multiples of the grid. A penalty is any float32 and has its own backward."""
    actual = set()
    for order in itertools.islice(itertools.permutations(range(len(SLOPES))), 0, None, 331):
        held = Held()
        for place in order:
            of_trainer = SLOPES[place] % 2.0**GRID == 0
            (held.loss if of_trainer else held.penalty)(SLOPES[place]).backward()
        assert held.parameter.grad.dtype is torch.float32
        actual.add(tuple(held.parameter.grad.tolist()))
    assert len(actual) == 1


def test_assigned_grad_starts_an_exact_sum():
    actual = set()
    for order in itertools.permutations([1.0, 2.0**-40, -1.0]):
        held = Held()
        held.parameter.grad = torch.full((3,), 1e-9)
        for slope in order:
            held.loss(slope).backward()
        actual.add(tuple(held.parameter.grad.tolist()))
    assert len(actual) == 1


@pytest.mark.parametrize("penalty_first", [True, False])
def test_second_loss_in_same_backward_is_refused(penalty_first: bool):
    """Autograd would add both gradients in the dtype of the first."""
    held = Held()
    losses = [lambda: held.penalty(1e-9), lambda: held.loss(0.5)]
    one, two = (make() for make in (losses if penalty_first else reversed(losses)))
    with pytest.raises(
        InvalidInput, match=r"in one backward weight received gradients .* backward\(\) separately for each loss"
    ):
        (one + two).backward()
    assert held.parameter.grad is None
    held.loss(0.5).backward()
    assert held.parameter.grad.tolist() == [0.5] * 3


def test_hooks_may_read_but_not_change_gradients():
    def in_place(grad: Tensor) -> None:
        grad.data.mul_(1 / 3)  # torch's version counter does not see it

    held, seen = Held(), []
    reader = held.parameter.register_hook(lambda grad: seen.append(grad.clone()))
    held.loss(0.5).backward()
    reader.remove()
    assert [grad.tolist() for grad in seen] == [[0.5] * 3] and held.parameter.grad.tolist() == [0.5] * 3
    for change in (lambda grad: grad / 3, in_place):
        hook = held.parameter.register_hook(change)
        with pytest.raises(InvalidInput, match="a hook of weight changes individual gradients"):
            held.loss(0.5).backward()
        hook.remove()
    held.parameter.register_hook(lambda grad: grad * 2.0**20)
    with pytest.raises(NumericsError):
        held.loss(0.5).backward()


def test_post_accumulate_hook_sees_rounded_sum():
    held, seen = Held(), []
    held.parameter.register_post_accumulate_grad_hook(lambda item: seen.append(item.grad.clone()))
    held.loss(0.5).backward()
    held.loss(0.25).backward()
    assert [grad.tolist() for grad in seen] == [[0.5] * 3, [0.75] * 3]
    assert {grad.dtype for grad in seen} == {torch.float32}


def test_concurrent_backwards_add_exactly():
    held, slopes = Held(1 << 18), [1.0, 2.0**-26, 0.5, 3 * 2.0**-40] * 4
    losses = [held.loss(slope) for slope in slopes]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = torch.tensor(slopes, dtype=torch.float64).sum().float()
    assert bool((held.parameter.grad == total).all())
    assert held.bound == sum(slopes)
    assert not held.accumulator._arrivals


def test_accumulator_does_not_keep_parameter_alive():
    held = Held()
    held.loss(0.5).backward()
    torch.autograd.grad(held.loss(0.5), [held.parameter])
    assert not held.accumulator._arrivals
    freed = weakref.ref(held.parameter)
    del held
    assert freed() is None


def test_tied_parameter_has_one_handle():
    held = Held()
    accumulators, dtypes = dict.fromkeys("ab", held.accumulator), dict.fromkeys("ab", torch.bfloat16)
    weights = weights_of(dict.fromkeys("ab", held.parameter), accumulators, dtypes)
    assert weights["a"].handle is weights["b"].handle is not None


def test_converted_parameter_is_refused_by_name():
    held = Held()
    held.parameter.data = held.parameter.data.double()
    with pytest.raises(InvalidInput, match=r"weight was converted to torch\.float64"):
        held.loss(0.5)
