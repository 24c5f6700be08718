"""Attention over chunks of tokens (llama4), with biases by distance (inkling): meaning, axes and engine, by bytes."""

import functools

import pytest
import torch
from torch import Tensor

import detcompile
from detcompile.models.compiled import CompiledModel
from detcompile.passes.adapters.scans import pin_recurrences
from detcompile.passes.capture import probe_attention
from tests.exhaustive import exhaustive_unless
from tests.invariance.axis import assert_every_axis_holds
from tests.model_cases import VOCAB_SIZE, random_model
from tests.runtime.engine_cases import (
    GREEDY,
    assert_as_alone,
    assert_serves_as_alone,
    config_of,
    engine_configs,
    engine_of,
    prompt_of,
    run,
)

# Both scale queries by their positions; what they bound is shorter than the sequences.
CHANGES = {
    "inkling_text": {"head_dim": 20, "swa_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 1}
    | {"layer_types": ["hybrid_sliding", "hybrid"], "sliding_window_size": 35, "d_rel": 8, "rel_extent": 50}
    | {"log_scaling_n_floor": 16, "mlp_layer_types": ["dense", "sparse"], "n_routed_experts": 4}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "llama4_text": {"head_dim": 20, "intermediate_size_mlp": 96, "no_rope_layers": [1, 0], "attention_chunk_size": 35}
    | {"floor_scale": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}
ON_GPU = torch.cuda.is_available()
NAMES = pytest.mark.parametrize("name", exhaustive_unless(lambda name: ON_GPU or name == "llama4_text", CHANGES))


@functools.cache
def model_of(name: str, device: str) -> CompiledModel:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return detcompile.compile(random_model(name, dtype, device, **CHANGES[name]), max_context=768)


@torch.no_grad()
def plain_logits(name: str, dtype: torch.dtype, ids: Tensor) -> Tensor:
    """Hugging Face's eager ones, in float32."""
    plain = random_model(name, dtype, ids.device.type, **CHANGES[name])
    plain.set_attn_implementation("eager")
    return plain(ids, use_cache=False).logits.float()


@NAMES
def test_logits_are_those_of_hugging_face(name: str, device: str) -> None:
    model = model_of(name, device)
    ids = torch.randint(0, VOCAB_SIZE, (2, 577), generator=torch.Generator().manual_seed(5)).to(device)
    expected = plain_logits(name, torch.float32, ids)
    error = (model(ids).logits.float() - expected).norm() / expected.norm()
    if model.dtype is torch.float32:
        assert error < 1e-5
    else:  # a router that rounds may choose another expert
        assert error < 1.3 * (plain_logits(name, model.dtype, ids) - expected).norm() / expected.norm()
    windows = [group.window for group in model.facts.kv_groups]
    assert windows == ([35, 0] if name == "llama4_text" else [0])  # unequal shapes


@NAMES
@pytest.mark.parametrize(("length", "seed"), [(577, 1), (71, 2)])
def test_every_axis_holds(name: str, length: int, seed: int, device: str) -> None:
    assert_every_axis_holds(model_of(name, device), length, seed)


@NAMES
def test_the_engine_gives_each_request_what_it_gives_alone(name: str, device: str) -> None:
    """Prompts in pieces; few blocks, so that sequences lose theirs; blocks freed behind the chunks."""
    assert_serves_as_alone(model_of(name, device), engine_configs(16, 161), prompt_lengths=(1, 34, 36, 90, 17))


def test_convolutions_in_float32_keep_their_state_in_float32() -> None:
    """As inkling's checkpoints have them, whatever the dtype of the rest."""
    model = random_model("inkling_text", torch.bfloat16, **CHANGES["inkling_text"])
    for name, module in model.named_modules():
        if name.endswith("sconv"):
            module.float()
    recurrences = pin_recurrences(model)
    assert recurrences is not None
    probe_attention(model, 64, recurrences)
    assert [shape.float32 for shape in recurrences.shapes] == [True] * 8


@pytest.mark.parametrize("length", [50, 80, 110])
def test_a_prefix_is_found_again(length: int, device: str) -> None:
    """With chunks of 35 tokens over blocks of 16, so that a prefix ends within a chunk."""
    model = model_of("llama4_text", device)
    engine = engine_of(model, config_of(prefix_caching=True))
    cached = []
    for _ in range(2):
        engine.add_request(prompt_of(length), GREEDY)
        (output,) = run(engine)
        assert_as_alone(model, output, GREEDY)
        cached.append(output.metrics.num_cached_tokens)
    assert cached == [0, (length - 1) // 16 * 16]
