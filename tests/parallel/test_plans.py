"""Every architecture that docs/models.md says two ranks can share gives the bytes of one rank.

All of them run module by module over pinned products, which takes a fraction of a second each. mpt runs as a certified
graph too (as the architectures of cases.py), and a model whose keys and values come from a latent serves steps. torch's
own silu rounds an element by its place in the tensor, so that a rank's part of a hidden layer fills whole vectors.
"""

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from detcompile import Numerics, UnsupportedModel
from detcompile.parallel import TensorParallel, tensor_parallel
from detcompile.passes.capture import freeze_rope, probe_attention
from detcompile.passes.modules.experts import pin_experts
from detcompile.passes.modules.positions import give_positions
from detcompile.passes.sharding.shard import moves_after_sharding, pin_row_parallel, shard
from tests.bits import assert_bitwise_equal
from tests.exhaustive import EXHAUSTIVE
from tests.model_cases import certified
from tests.parallel.cases import Failure, answers, attempt, dense_logits
from tests.parallel.ranks import run_ranks
from tools.generate_models import load
from tools.model_configs import MAX_CONTEXT, OVERRIDES, SIZES, tiny_model

ops = torch.ops.detcompile

WIDE = {name: 128 for name in SIZES if name.endswith(("intermediate_size", "ffn_dim"))}
# Configurations that are no defaults, and one layer where graphs are traced.
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3, queries of no latent": ("deepseek_v3", {"q_lora_rank": None}),
    "gpt_bigcode, a key for each query": ("gpt_bigcode", {"multi_query": False}),
    "mpt, clipped": ("mpt", {"attn_config": {"clip_qkv": 0.5}}),
    "stablelm, a norm for each head": ("stablelm", {"qk_layernorm": True, "num_key_value_heads": 2}),
    "minicpm3, one layer": ("minicpm3", {"num_hidden_layers": 1, "v_head_dim": 8}),
    "mpt, one layer": ("mpt", {"n_layers": 1}),
}
SHARED = [name for name, row in load().items() if row.get("tp2") == "yes"]  # none with another transformers or torch
# By number of ranks; a name stands in one list, since each list is one start of the ranks.
QUICK = [*SHARED[::5], *list(CHANGES)[:4]]
MODULES = {
    (2, "quick"): QUICK,
    (2, "others"): [name for name in SHARED if name not in QUICK],
    # Some have fewer key heads than ranks.
    (4, "others"): ["codegen", "gpt_bigcode", "mpt", "nemotron", "stablelm, a norm for each head"],
}
GRAPH, SERVED = "mpt, one layer", "minicpm3, one layer"


def architecture(case: str) -> PreTrainedModel:
    """A tiny model of CHANGES, or of the default configuration."""
    name, changes = CHANGES.get(case, (case, {}))
    overrides = {name: OVERRIDES.get(name, {}) | changes}
    with mock.patch.dict(SIZES, WIDE), mock.patch.dict(OVERRIDES, overrides):
        return tiny_model(name)


def prepared(case: str) -> PreTrainedModel:
    """Return the model in the state in which compile() looks for attention."""
    model = architecture(case)
    give_positions(model)
    freeze_rope(model, MAX_CONTEXT)
    pin_experts(model)
    return model


def modules_logits(case: str, tp: int) -> Tensor:
    """Logits [4, 8, V] of the model's own modules on each of tp ranks, where every linear takes a pinned product."""
    model, numerics = prepared(case), Numerics()
    attention, _ = probe_attention(model, numerics.kv_chunk)
    if tp == 1:
        pin_row_parallel(model, numerics)
    else:
        shard(model, attention, numerics, tensor_parallel(tp))
    input_ids = (torch.arange(32) * 13 % 150).view(4, 8)
    linear = mock.patch.object(nn.functional, "linear", _linear)
    with linear, mock.patch.object(Conv1D, "forward", _conv1d), torch.no_grad():
        return model(input_ids=input_ids, position_ids=torch.arange(8).repeat(4, 1), use_cache=False).logits


def _linear(x: Tensor, w_NK: Tensor, bias: Tensor | None = None) -> Tensor:
    return ops.matmul(x.flatten(0, -2), w_NK, bias, None, []).view(*x.shape[:-1], w_NK.shape[0])


def _conv1d(self: Conv1D, x: Tensor) -> Tensor:
    return _linear(x, self.weight.t(), self.bias)


def served(tp: int) -> dict[str, Tensor]:
    return answers(certified(architecture(SERVED), tp=tp, max_context=MAX_CONTEXT))


def on_a_rank(rank: int, tp: int, which: str) -> dict[str, dict[str, Any]]:
    """Run the checks of one of tp ranks. A case that raises returns its traceback."""
    return {
        "modules": {case: attempt(lambda case=case: modules_logits(case, tp)) for case in MODULES[tp, which]},
        "graphs": {GRAPH: attempt(lambda: dense_logits(prepared(GRAPH), tp))} if which == "quick" else {},
        "served": {SERVED: attempt(lambda: served(tp))} if which == "quick" else {},
    }


@functools.cache
def _ranks(tp: int, which: str) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(tp, on_a_rank, tp, which)


def results(tp: int, part: str, case: str, which: str = "quick") -> list[Any]:
    """Return the results of each of tp ranks."""
    actual = [rank[part][case] for rank in _ranks(tp, which)]
    for rank, result in enumerate(actual):
        assert not isinstance(result, Failure), f"rank {rank} of {tp}:\n{result}"
    return actual


@pytest.mark.parametrize(
    ("tp", "which", "case"),
    [
        pytest.param(tp, which, case, marks=() if which == "quick" else EXHAUSTIVE, id=f"{tp}-{case}")
        for (tp, which), cases in MODULES.items()
        for case in cases
    ],
)
def test_sharded_architecture_has_bytes_of_one_rank(tp: int, which: str, case: str) -> None:
    whole = modules_logits(case, 1)
    assert bool(whole.isfinite().all()) and len(whole.unique()) > whole.numel() / 2
    for rank, logits in enumerate(results(tp, "modules", case, which)):
        assert_bitwise_equal(logits, whole, f"{case} on rank {rank} of {tp}")


def test_the_certified_graph_gives_the_bytes_of_one() -> None:
    whole = dense_logits(prepared(GRAPH), 1)
    for rank, logits in enumerate(results(2, "graphs", GRAPH)):
        assert_bitwise_equal(logits, whole, f"{GRAPH} on rank {rank} of 2")


def test_rank_caches_only_its_heads_of_latent_attention() -> None:
    whole = served(1)
    for rank, actual in enumerate(results(2, "served", SERVED)):
        for what, expected in whole.items():
            assert_bitwise_equal(actual[what], expected, f"{what} on rank {rank} of 2")


def shared(case: str, tp: int) -> PreTrainedModel:
    """Return what the last of tp ranks keeps."""
    model = prepared(case)
    attention, _ = probe_attention(model, 512)
    shard(model, attention, Numerics(), TensorParallel(size=tp, rank=tp - 1, group="never asked"))
    return model


def test_each_rank_keeps_the_whole_latent() -> None:
    """Rank 3 of 4 has the last of four heads: 24 features of its query, 16 and 16 of its key and value."""
    whole, item = (model.model.layers[0].self_attn for model in (architecture("deepseek_v3"), shared("deepseek_v3", 4)))
    for latent in ("q_a_proj", "kv_a_proj_with_mqa", "q_a_layernorm", "kv_a_layernorm"):
        assert_bitwise_equal(item.get_submodule(latent).weight, whole.get_submodule(latent).weight, latent)
    assert_bitwise_equal(item.q_b_proj.weight, whole.q_b_proj.weight[72:])
    assert_bitwise_equal(item.kv_b_proj.weight, whole.kv_b_proj.weight[96:])
    assert_bitwise_equal(item.o_proj.weight, whole.o_proj.weight[:, 48:])


def test_selection_among_all_features_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.mlp\.gate_proj: which of its features are kept depends"):
        shared("gemma3n_text", 2)


def test_models_without_parallel_plan_are_refused_by_name() -> None:
    for name, where in (("bitnet", "BitNetForCausalLM has no"), ("diffllama", "DiffLlamaForCausalLM has no")):
        with pytest.raises(UnsupportedModel, match=f"{where} tensor-parallel plan"):
            shared(name, 2)


def test_computed_alibi_slopes_need_no_move_after_sharding() -> None:
    assert not moves_after_sharding(architecture("mpt"))
