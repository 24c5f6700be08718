"""Which memory a bound program's kernels may read before the kernels ahead of them have ended."""

import torch
from torch import Tensor

from detcompile.passes.programs.binding import Binding, bind
from detcompile.step import StepInputs
from detcompile.templates.device.cuda_graphs import for_graph, is_constant


def test_weights_are_constant_in_a_graph_and_nothing_else_is() -> None:
    weight, ids = torch.zeros(4, 4), torch.zeros(1, 4, dtype=torch.int64)
    step = StepInputs((), ids, ids, (), (), (), ids, ())

    def run(held: Tensor, given: Tensor) -> tuple[Tensor]:
        constant = [is_constant(tensor) for tensor in (held, held.t()[1:], given, held + 1)]
        return (torch.tensor(constant),)

    forward = bind(run, Binding([weight, None], [(1, 0, None)]))
    assert forward(ids, ids, step, ids).tolist() == [False] * 4
    with for_graph():
        assert forward(ids, ids, step, ids).tolist() == [True, True, False, False]
        assert not is_constant(weight)
