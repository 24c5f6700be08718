"""Models whose layers carry a state from token to token: their meaning, the axes, and the engine, by bytes."""

import pytest
import torch

from detcompile import NGramDrafter, SpeculationConfig
from detcompile.errors import InvalidInput, UnsupportedModel
from detcompile.models.compiled import CompiledModel
from detcompile.orders.numerics import Numerics
from detcompile.parallel import TensorParallel
from detcompile.passes.lowering import lower
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.engine_setup import room_for_cache
from detcompile.runtime.kv.kv_cache import new_cache
from detcompile.runtime.memory_probe import affordable_states
from detcompile.runtime.requests.sampling_params import SamplingParams
from tests.exhaustive import exhaustive_unless
from tests.invariance.axis import assert_every_axis_holds
from tests.model_cases import STATEFUL, VOCAB_SIZE, compiled, random_model
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

NAMES = pytest.mark.parametrize("name", exhaustive_unless(lambda name: name not in ("rwkv",), STATEFUL))


def model_of(name: str, device: str) -> CompiledModel:
    return compiled(name, torch.bfloat16 if device == "cuda" else torch.float32, device)


@NAMES
def test_logits_are_those_of_hugging_face(name: str, device: str) -> None:
    """Past a chunk of its own scans, and of our attention; in bfloat16 as near to float32 as Hugging Face's own."""
    model = model_of(name, device)
    ids = torch.randint(0, VOCAB_SIZE, (2, 577), generator=torch.Generator().manual_seed(5)).to(device)
    with torch.no_grad():
        expected = random_model(name, torch.float32, device)(ids, use_cache=False).logits
        plain = random_model(name, model.dtype, device)(ids, use_cache=False).logits
    error, item = ((logits.float() - expected).norm() / expected.norm() for logits in (model(ids).logits, plain))
    assert error <= max(1e-5, 1.05 * item), f"{name}: {error:.3e}, Hugging Face's {item:.3e}"


@NAMES
@pytest.mark.parametrize(("length", "seed"), [(577, 1), (129, 2), (3, 3)])
def test_every_axis_holds(name: str, length: int, seed: int, device: str) -> None:
    assert_every_axis_holds(model_of(name, device), length, seed)


@NAMES
def test_the_engine_gives_each_request_what_it_gives_alone(name: str, device: str) -> None:
    """Chunked prefills, and few seats and blocks, so that sequences lose theirs and start over."""
    assert_serves_as_alone(model_of(name, device), engine_configs(12, 161), prompt_lengths=(1, 40, 70, 5, 17))


def test_a_sequence_that_lost_its_state_starts_over(device: str) -> None:
    model = model_of("lfm2", device)
    engine = engine_of(model, config_of(num_blocks=8, max_num_seqs=4), max_context=112)
    ids = [engine.add_request(prompt_of(20, seed), SamplingParams(temperature=0.0, max_tokens=50)) for seed in range(4)]
    outputs = {output.request_id: output for output in run(engine)}
    assert engine.stats.num_preemptions > 0
    for request_id in ids:
        assert_as_alone(model, outputs[request_id], SamplingParams(temperature=0.0, max_tokens=50))


def test_no_prefix_is_found_as_none_has_a_state(device: str) -> None:
    model = model_of("lfm2", device)
    engine = engine_of(model, config_of(prefix_caching=True))
    for _ in range(2):
        engine.add_request(prompt_of(50), GREEDY)
        (output,) = run(engine)
        assert_as_alone(model, output, GREEDY)
        assert output.metrics.num_cached_tokens == 0


def test_speculation_with_recurrent_states_is_rejected(device: str) -> None:
    model = model_of("mamba2", device)
    with pytest.raises(InvalidInput, match="carry a recurrent state"):
        model.engine(config_of(), speculation=SpeculationConfig(drafter=NGramDrafter(3)))
    with pytest.raises(InvalidInput, match="carry a state"):
        model.drafter(3)


def test_ranks_are_refused() -> None:
    ranks = TensorParallel(size=2, rank=0, group="never asked")
    with pytest.raises(UnsupportedModel, match="layers with a state over several ranks"):
        lower(random_model("mamba2", torch.float32), Numerics(), 64, ranks)


def test_states_take_their_share_of_the_memory(device: str) -> None:
    """Of a model without attention too, whose blocks hold nothing."""
    model = model_of("mamba2", device)
    config = EngineConfig(max_num_seqs=5, max_num_batched_tokens=64, cuda_graphs=False)
    room = room_for_cache(model.facts, model.executor.forwards.plain, config, drafts=False)
    assert affordable_states(model.facts, config, room) == 5
    states = new_cache(model.facts, 2, 16, 5).states
    assert len(states) == 4 and all(len(state) == 5 for state in states)
    assert {state.dtype for state in states} == {torch.float32, model.dtype}
    engine = engine_of(model, config)
    outputs = engine.generate([prompt_of(90, seed) for seed in range(7)], GREEDY, progress=False)
    for output in outputs:
        assert_as_alone(model, output, GREEDY)
