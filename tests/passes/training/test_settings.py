"""Inductor's settings for the graphs of a training step."""

import inspect

from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.triton import TritonKernel

from detcompile.torch_internals.inductor import wide_loads


def test_a_thread_of_a_kernel_loads_sixteen_bytes() -> None:
    choices, given = InductorChoices(), {"optimize_mask": True}
    before = choices.triton_kernel_kwargs(TritonKernel, None, [], given)
    with wide_loads():
        inside = choices.triton_kernel_kwargs(TritonKernel, None, [], given)
    assert before == given and inside == given | {"min_elem_per_thread": 8}
    assert inside.keys() <= inspect.signature(TritonKernel).parameters.keys()
