"""A compiled model on a CPU calls its operations without Python, however it was compiled."""

from functools import partial

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import detcompile
from detcompile.templates.cpp_dispatch import OPS
from tests.bits import assert_bitwise_equal
from tests.python_frames import functions_entered
from tools.model_configs import tiny_model

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
    """The function closes over its weight: any tensor that a call is given holds rows, a Parameter too."""
    x, w = torch.randn(5, 32), torch.nn.Parameter(torch.randn(8, 32))

    def product(x):
        return torch.relu(x @ w.t())

    results = []
    for _ in range(2):  # the second time it is found
        torch._dynamo.reset()
        call = partial(torch.compile(product, backend="detcompile"), x)
        with torch.no_grad():
            results.append(call())
            assert functions_entered(call).isdisjoint(THROUGH_PYTHON)
    assert_bitwise_equal(*results)


def test_environment_variable_enables_layout_assertions(monkeypatch):
    ids, logits = torch.arange(6).view(2, 3), []
    monkeypatch.setenv("DETCOMPILE_KEEP_PROGRAMS", "0")
    for requests in ("0", "1"):
        monkeypatch.setenv("TORCHINDUCTOR_SIZE_ASSERTS", requests)
        torch.manual_seed(0)
        model, codes = run_and_get_code(lambda: detcompile.compile(tiny_model("qwen3")))
        asserts = [line for line in "".join(codes).splitlines() if line.strip().startswith("assert_size_stride(")]
        assert bool(asserts) == (requests == "1")
        logits.append(model(ids).logits)
    assert_bitwise_equal(*logits)
