"""Our rotary positions have the bytes of transformers'."""

import subprocess
import sys

import pytest
import torch
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb as falcon
from transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese import apply_rotary_pos_emb as japanese
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj

from detcompile.passes.adapters.forwards import rotate_halves, rotate_pairs
from tests.bits import assert_bitwise_equal

NO_MODEL_CODE = """
import sys, detcompile

detcompile.compile
own = [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]
assert own == ["transformers.models.auto.modeling_auto"], own
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("theirs", [falcon, japanese])
def test_halves(theirs, dtype):
    torch.manual_seed(0)
    query, key = torch.randn(2, 5, 4, 6).to(dtype), torch.randn(2, 5, 2, 6).to(dtype)
    cos, sin = torch.randn(2, 5, 6).to(dtype), torch.randn(2, 5, 6).to(dtype)
    for ours, other in zip(rotate_halves(query, key, cos, sin), theirs(query, key, cos, sin, unsqueeze_dim=2)):
        assert_bitwise_equal(ours, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs(dtype):
    torch.manual_seed(0)
    states, sin, cos = (torch.randn(shape).to(dtype) for shape in ((2, 5, 4, 6), (2, 5, 3), (2, 5, 3)))
    assert_bitwise_equal(rotate_pairs(states, sin, cos), gptj(states, sin, cos))


def test_importing_detcompile_imports_no_models_code():
    done = subprocess.run([sys.executable, "-c", NO_MODEL_CODE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
