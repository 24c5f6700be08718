"""Every architecture that docs/models.md calls certified compiles as users compile it, and serves.

`tools/generate_models.py` proves the graph and compares it with Hugging Face's model without generating code. Here
Inductor compiles it, and an engine generates from it. About 6 CPU seconds a case.
"""

import json

import pytest
import torch

import detcompile
from detcompile import EngineConfig, SamplingParams
from tests.bits import assert_bitwise_equal
from tests.exhaustive import EXHAUSTIVE_BY_ITEM
from tools.generate_models import RESULTS
from tools.model_configs import MAX_CONTEXT, VOCAB_SIZE, tiny_model

ROWS = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
CERTIFIED = sorted(name for name, row in ROWS.items() if row["verdict"] == "certified")
# Rotary pairs that are interleaved, which regions of layers once could not hand to each other.
QUICK = ("glm",)
CASES = [
    pytest.param(name, dtype, marks=() if name in QUICK and dtype is torch.bfloat16 else EXHAUSTIVE_BY_ITEM)
    for name in CERTIFIED
    for dtype in (torch.bfloat16, torch.float32)
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_certified_architecture_compiles_and_serves(name: str, dtype: torch.dtype) -> None:
    model = detcompile.compile(tiny_model(name).to(dtype), max_context=MAX_CONTEXT)
    ids = (torch.arange(3 * 40) * 13 % (VOCAB_SIZE - 10) + 5).view(3, 40)
    logits = model(ids).logits
    assert bool(logits.isfinite().all()) and len(logits.unique()) > logits.numel() // 100
    for row in range(3):
        assert_bitwise_equal(model(ids[row : row + 1]).logits, logits[row : row + 1], f"row {row} alone")
    engine = model.engine(EngineConfig(num_blocks=40, max_num_batched_tokens=64))
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=6, logprobs=2, ignore_eos=True)
    prompts = [row[: 9 + 10 * number].tolist() for number, row in enumerate(ids)]
    together = engine.generate(prompts, params, progress=False)
    for prompt, crowded in zip(prompts, together, strict=True):
        (alone,) = engine.generate([prompt], params, progress=False)
        assert len(alone.outputs[0].token_ids) == 6
        assert (alone.outputs[0].token_ids, alone.outputs[0].logprobs) == (
            crowded.outputs[0].token_ids,
            crowded.outputs[0].logprobs,
        )
