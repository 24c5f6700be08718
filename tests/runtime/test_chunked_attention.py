"""A model whose layers see chunks of tokens (llama4): its meaning, the axes, and the engine, by bytes."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import detcompile
from detcompile.axes import AXES, Configuration, score
from detcompile.compiled import CompiledModel
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.sampling_params import SamplingParams
from tests.bits import assert_bitwise_equal
from tests.invariance.axis import configuration_for
from tests.models import VOCAB_SIZE, random_model
from tests.runtime.engine_cases import GREEDY, assert_as_alone, config_of, engine_configs, engine_of, prompt_of, run

CHANGES = {
    "head_dim": 20,
    "intermediate_size_mlp": 96,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 35,
    "floor_scale": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@functools.cache
def model_of(device: str) -> CompiledModel:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return detcompile.compile(random_model("llama4_text", dtype, device, **CHANGES), max_context=768)


def test_logits_are_those_of_hugging_face(device: str) -> None:
    """Of tokens that weigh their experts, in chunks, and whose scale follows their positions."""
    model = model_of(device)
    ids = torch.randint(0, VOCAB_SIZE, (2, 577), generator=torch.Generator().manual_seed(5)).to(device)
    plain = random_model("llama4_text", torch.float32, device, **CHANGES)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        expected = plain(ids, use_cache=False).logits
    error = (model(ids).logits.float() - expected).norm() / expected.norm()
    assert error < (1e-5 if model.dtype is torch.float32 else 3e-2)
    assert [group.window for group in model._kv_groups] == [35, 0]


@pytest.mark.parametrize(("length", "seed"), [(577, 1), (71, 2)])
def test_every_axis_holds(length: int, seed: int, device: str) -> None:
    model = model_of(device)
    axes = [axis for axis in AXES if axis != "cuda_graphs" or device == "cuda"]
    configurations = {axis: configuration_for(axis, length, seed) for axis in axes}
    (target,) = {c.rows[c.target] for c in configurations.values()}
    alone = score(model, Configuration((target,)))
    assert bool(alone.isfinite().all())
    for axis, configuration in configurations.items():
        assert_bitwise_equal(score(model, configuration), alone, f"{axis}: {configuration.describe()}")


def test_the_engine_gives_each_request_what_it_gives_alone(device: str) -> None:
    """Prompts in pieces; few blocks, so that sequences lose theirs; blocks freed behind the chunks."""
    model = model_of(device)

    @settings(max_examples=6)
    @given(config=engine_configs(16, 161), seed=st.integers(0, 10**6))
    def serves(config: EngineConfig, seed: int) -> None:
        engine = engine_of(model, config, max_context=120)
        requests = []
        for index, length in enumerate((1, 34, 36, 90, 17)):
            params = SamplingParams(temperature=float(index % 2), seed=seed + index, max_tokens=12)
            requests.append((engine.add_request(prompt_of(length, seed + index), params), params))
        outputs = {output.request_id: output for output in run(engine)}
        for request_id, params in requests:
            assert_as_alone(model, outputs[request_id], params)

    serves()


@pytest.mark.parametrize("length", [50, 80, 110])
def test_a_prefix_is_found_again(length: int, device: str) -> None:
    """With chunks of 35 tokens over blocks of 16, so that a prefix ends within a chunk."""
    model = model_of(device)
    engine = engine_of(model, config_of(prefix_caching=True))
    cached = []
    for _ in range(2):
        engine.add_request(prompt_of(length), GREEDY)
        (output,) = run(engine)
        assert_as_alone(model, output, GREEDY)
        cached.append(output.metrics.num_cached_tokens)
    assert cached == [0, (length - 1) // 16 * 16]
