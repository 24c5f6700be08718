"""What a compiled model on a CPU runs: its operations without Python, by whatever way it was compiled."""

from functools import partial

import pytest
import torch

import detcompile
from detcompile.templates.direct_ops import OPS
from docs.model_configs import tiny_model
from tests.bits import assert_bitwise_equal
from tests.python_frames import functions_entered

THROUGH_PYTHON = {f"{name}_cpu" for name in OPS}


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_model_calls_them_directly(name):
    model = detcompile.compile(tiny_model(name))
    ids = torch.arange(6).view(2, 3)
    logits = model(ids).logits
    assert functions_entered(lambda: model(ids)).isdisjoint(THROUGH_PYTHON)
    assert "detcompile.matmul.default" in {entry.op for entry in model.certificate.entries}
    assert_bitwise_equal(model(ids[:1]).logits, logits[:1])


def test_a_function_from_inductor_s_cache_calls_them_directly():
    def product(x, w):
        return torch.relu(x @ w.t())

    x, w = torch.randn(5, 32), torch.nn.Parameter(torch.randn(8, 32))
    results = []
    for _ in range(2):  # the second time it is found
        torch._dynamo.reset()
        call = partial(torch.compile(product, backend="detcompile", dynamic=False), x, w)
        with torch.no_grad():
            results.append(call())
            assert functions_entered(call).isdisjoint(THROUGH_PYTHON)
    assert_bitwise_equal(*results)
