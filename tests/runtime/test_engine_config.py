"""EngineConfig rejects impossible settings by name."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from detcompile import CompiledModel, EngineConfig, InvalidInput
from detcompile.runtime.kv.kv_cache import KVCache
from detcompile.step import KVGroup, KVShape, StateShape
from tests.runtime.engine_cases import engine_of, tiny_model

BAD = [
    {"num_blocks": "50"},
    {"num_blocks": 50.5},
    {"num_blocks": 1},
    {"num_blocks": 10**12},
    {"max_num_batched_tokens": None},
    {"max_num_batched_tokens": 10.5},
    {"max_num_batched_tokens": 10**12},
    {"max_num_seqs": 1.5},
    {"max_num_seqs": True},
    {"block_size": "64"},
    {"block_size": 64.0},
    {"memory_fraction": "0.5"},
    {"memory_fraction": float("nan")},
    {"prefix_caching": "no"},
    {"cuda_graphs": 1},
    {"overlap": "yes"},
    {"aging": 1.0},
    {"restarts": None},
    {"tbt_slo": "5"},
    {"tbt_slo": float("inf")},
    {"scheduler": ["stall_free"]},
    {"allocation": 5},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_value_that_cannot_be_is_refused_by_its_name(bad) -> None:
    with pytest.raises(InvalidInput, match=next(iter(bad))):
        EngineConfig(**bad)


def test_numpy_and_torch_numbers_are_accepted() -> None:
    given = EngineConfig(num_blocks=np.int64(50), max_num_seqs=torch.tensor(3), memory_fraction=np.float32(0.5))
    assert given == EngineConfig(num_blocks=50, max_num_seqs=3, memory_fraction=0.5)
    assert type(given.num_blocks) is int


@pytest.mark.parametrize("settings", [{"config": {"num_blocks": 5}}, {"config": {}}, {"speculation": "ngram"}])
def test_engine_rejects_settings_of_other_types(settings) -> None:
    model = SimpleNamespace(tokenizer=None)
    with pytest.raises(InvalidInput, match=r"pass (EngineConfig|SpeculationConfig)\(\.\.\.\)"):
        CompiledModel.engine(model, **settings)


def test_a_context_without_memory_for_tables_is_refused() -> None:
    config = EngineConfig(num_blocks=8)
    with pytest.raises(InvalidInput, match="max_num_seqs=1024 sequences of max_context=1000000000000 tokens"):
        engine_of(tiny_model("cpu"), config, max_context=10**12)
    assert engine_of(tiny_model("cpu"), EngineConfig(num_blocks=8, max_num_seqs=1), max_context=10**6)


@pytest.mark.parametrize("num_blocks", [2 * 10**9, 1 << 62], ids=["no_memory", "no_int64"])
def test_too_large_cache_error_names_setting(num_blocks: int) -> None:
    shapes, groups = [KVShape(8, 128, 128)], [KVGroup((0,), 0)]
    with pytest.raises(InvalidInput, match=f"{num_blocks} KV blocks of 64 tokens do not fit the memory of cpu"):
        KVCache(shapes, groups, dtype=torch.float32, device="cpu", num_blocks=num_blocks, block_size=64)
    states = [StateShape((1 << 20,), float32=True)]
    with pytest.raises(InvalidInput, match=f"the states of {num_blocks} sequences do not fit .* smaller max_num_seqs"):
        KVCache(
            shapes,
            groups,
            dtype=torch.float32,
            device="cpu",
            num_blocks=2,
            block_size=64,
            states=states,
            num_state_slots=num_blocks,
        )
