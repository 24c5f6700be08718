"""Each rank keeps whole heads with their key heads, and every feature once; other splits are rejected."""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import detcompile
from detcompile import InvalidInput, Numerics, NumericsError, UnsupportedModel
from detcompile.parallel import TensorParallel, tensor_parallel
from detcompile.passes.capture import probe_attention
from detcompile.passes.sharding import plans as parallel_plans
from detcompile.passes.sharding.heads import HeadShare, features_of, head_share
from detcompile.passes.sharding.modules import GatheredLinear, RowShardLinear, ShardedEmbedding
from detcompile.passes.sharding.shard import moves_after_sharding, pin_row_parallel, shard
from tests.bits import assert_bitwise_equal
from tests.model_cases import random_model


def a_rank(tp: int, rank: int = 0) -> TensorParallel:
    return TensorParallel(size=tp, rank=rank, group="never asked")


def sharded(name: str, tp: int, rank: int = 0, replicate: bool = False, numerics: Numerics = Numerics(), **changes):
    model = random_model(name, torch.float32, **changes)
    calls, _ = probe_attention(model, numerics.kv_chunk)
    shard(model, calls, numerics, a_rank(tp, rank), replicate)
    return model


def shares_of(num_heads: int, members: int, tp: int, uneven: bool = False) -> list[HeadShare]:
    call = mock.Mock(num_heads=num_heads, shape=(num_heads // members, 4, 4), head_dims=(4, 4))
    shares = [head_share(call, a_rank(tp, rank), "attention", False, uneven) for rank in range(tp)]
    assert None not in shares
    return shares


HEADS = st.tuples(st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 2, 3, 4, 6, 8]))


@given(HEADS)
def test_each_query_head_has_one_rank_and_reads_its_own_key_head(drawn: tuple[int, int, int]):
    item, members, tp = drawn
    num_heads = item * tp * members  # divides, whatever the members
    shares = shares_of(num_heads, members, tp)
    assert [head for share in shares for head in share.q] == list(range(num_heads))
    for share in shares:
        for place, head in enumerate(share.q):
            assert share.kv[place // (len(share.q) // len(share.kv))] == head // members
    assert len({(len(share.q), len(share.kv)) for share in shares}) == 1


@given(HEADS)
def test_uneven_cuts_count_each_head_once(drawn: tuple[int, int, int]):
    num_kv_heads, members, tp = drawn
    num_heads = num_kv_heads * members
    shares = shares_of(num_heads, members, tp, uneven=True)
    assert [head for share in shares if share.counts for head in share.q] == list(range(num_heads))
    for share in shares:
        assert 1 <= len(share.q) <= num_heads // tp + 1
        assert range(num_heads * 4)[share.outputs] == range(share.q[0] * 4, share.q[-1] * 4 + 4)
        for place, head in enumerate(share.q):
            assert share.kv[place // (len(share.q) // len(share.kv))] == head // members


@given(st.sampled_from([(6, 3, 3), (8, 4, 4), (8, 8, 8), (6, 2, 3), (12, 6, 4), (4, 1, 2)]))
def test_key_heads_are_shared_if_there_are_more_ranks(drawn: tuple[int, int, int]):
    num_heads, members, tp = drawn
    for share in shares_of(num_heads, members, tp):
        assert all(
            share.kv[place // (len(share.q) // len(share.kv))] == head // members for place, head in enumerate(share.q)
        )


@given(st.sampled_from([(8, 2, 2), (8, 4, 4), (8, 8, 8), (6, 1, 3), (6, 3, 3)]))
def test_fused_projections_give_the_same_heads_as_separate_ones(drawn: tuple[int, int, int]):
    """Features are marked with (kind, head, feature); a rank's slice of each layout names the same heads."""
    num_heads, members, tp = drawn
    kv = num_heads // members
    counts = (("q", num_heads), ("k", kv), ("v", kv))
    q, k, v = ([(kind, head, i) for head in range(n) for i in range(4)] for kind, n in counts)
    grouped = [
        mark
        for group in range(kv)
        for mark in [
            *q[group * members * 4 : (group + 1) * members * 4],
            *k[group * 4 : group * 4 + 4],
            *v[group * 4 : group * 4 + 4],
        ]
    ]
    for share in shares_of(num_heads, members, tp):

        def kept(leaf: str, marks: list, model_type: str, share: HeadShare = share) -> list:
            return [marks[i] for i in features_of(leaf, nn.Linear(1, len(marks)), share, model_type, "attention")]

        own_q, own_k, own_v = kept("q_proj", q, ""), kept("k_proj", k, ""), kept("v_proj", v, "")
        assert kept("qkv_proj", q + k + v, "phi3") == own_q + own_k + own_v
        fused = kept("query_key_value", grouped, "falcon")
        for kind, item in (("q", own_q), ("k", own_k), ("v", own_v)):
            assert [mark for mark in fused if mark[0] == kind] == item


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "bloom"])
def test_the_ranks_rows_are_the_whole_matrix(name: str):
    whole = {path: weight for path, weight in random_model(name, torch.float32).named_parameters()}
    ranks = [dict(sharded(name, 2, rank).named_parameters()) for rank in range(2)]
    rowwise = [
        path.removesuffix(".weight")
        for path, module in sharded(name, 2).named_modules()
        if isinstance(module, RowShardLinear)
    ]
    assert len(rowwise) == 4  # two in each of two layers
    for path in rowwise:
        dim = 0 if name == "gpt2" else 1  # Conv1D holds [K, N]
        assert_bitwise_equal(torch.cat([rank[f"{path}.weight"] for rank in ranks], dim), whole[f"{path}.weight"], path)
    held, all_of_it = (sum(weight.numel() for weight in weights.values()) for weights in (ranks[0], whole))
    assert held < 0.6 * all_of_it or name == "gpt2"  # most of this one is its table of positions, which stays whole


def test_a_rank_holds_the_tied_rows_once():
    model = sharded("gemma3_text", 4)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(model.lm_head.weight) == 40


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3_text", "olmo2", "gpt2", "opt"])
def test_the_share_goes_to_the_ranks_device_and_keeps_none_of_the_whole(name: str, tmp_path: Path):
    """From a file that is mapped; "meta" stands for a GPU."""
    random_model(name, torch.float32).save_pretrained(tmp_path)
    for device in (None, torch.device("meta")):
        model = detcompile.load_model(tmp_path, device="cpu")
        assert moves_after_sharding(model)
        calls, _ = probe_attention(model, 512)
        shard(model, calls, Numerics(), dataclasses.replace(a_rank(2), device=device))
        for what, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
            assert tensor.device == (device or torch.device("cpu")), what
        for what, module in model.named_modules():
            if isinstance(module, (RowShardLinear, ShardedEmbedding, GatheredLinear)):
                assert module.weight.untyped_storage().nbytes() == module.weight.nbytes, what


def test_models_whose_constants_are_computed_by_compile_are_moved_before():
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert not moves_after_sharding(random_model("llama", torch.float32, rope_parameters=dynamic))
    assert not moves_after_sharding(random_model("bloom", torch.float32))
    assert moves_after_sharding(random_model("granite_swa", torch.float32))


def test_heads_that_do_not_divide_are_refused_unless_replicated():
    with pytest.raises(NumericsError, match=r"h\.0\.attn: 4 heads over tp=8 ranks; choose tp among \[1, 2, 4\]"):
        sharded("gpt2", 8)
    model = sharded("gpt2", 8, replicate=True)
    attention = model.transformer.h[0].attn
    assert attention.num_heads == 4 and attention.c_attn.weight.shape == (80, 240)
    assert attention.c_proj.weight.shape == (10, 80)
    assert model.transformer.h[0].mlp.c_fc.weight.shape == (80, 40)


def test_what_has_no_equal_leaves_is_refused_with_the_sets_that_fit():
    with pytest.raises(NumericsError, match=r"down_proj: K=180 does not split into 8 .* fit this K: \(1, 2, 4\)"):
        sharded("llama", 2, intermediate_size=180)


def test_features_that_do_not_divide_are_refused():
    numerics = Numerics(tp_sizes=(1, 2))
    with pytest.raises(NumericsError, match=r"mlp\.\w+: "):
        sharded("llama", 2, intermediate_size=175, numerics=numerics)


def test_experts_of_another_kind_are_refused_by_name():
    plan = {"layers.*.mlp.experts.identity_expert": "moe_identity_expert"}
    with pytest.raises(UnsupportedModel, match="the tensor-parallel style 'moe_identity_expert' is not known"):
        parallel_plans.style_of("layers.0.mlp.experts.identity_expert", plan)
    model = random_model("llama", torch.float32)
    calls, _ = probe_attention(model, 512)
    plan = {"layers.*.mlp": "moe_tp_experts", "layers.*.self_attn.o_proj": "rowwise"}
    planned = mock.patch.object(type(model.config), "base_model_tp_plan", plan)
    with planned, pytest.raises(UnsupportedModel, match=r"layers\.0\.mlp: the experts of a LlamaMLP over several"):
        shard(model, calls, Numerics(), a_rank(2))


def test_an_architecture_without_a_plan_is_refused():
    model = random_model("llama", torch.float32)
    calls, _ = probe_attention(model, 512)
    unplanned = mock.patch.object(type(model.config), "base_model_tp_plan", None)
    with unplanned, pytest.raises(UnsupportedModel, match="LlamaForCausalLM has no tensor-parallel plan"):
        shard(model, calls, Numerics(), a_rank(2))


def test_plan_with_unknown_module_names_is_ignored():
    """llama4's names are counted from a module that its causal LM does not have."""
    with pytest.raises(UnsupportedModel, match="Llama4ForCausalLM has no tensor-parallel plan"):
        sharded("llama4_text", 2, head_dim=20, intermediate_size_mlp=96, moe_layers=[])


def test_a_projection_of_unknown_layout_is_refused():
    share = shares_of(4, 2, 2)[0]
    with pytest.raises(UnsupportedModel, match=r"0\.kv_b_proj: how its 24 features belong to heads is not known"):
        features_of("kv_b_proj", nn.Linear(1, 24), share, "llama", "0")


def test_sizes_that_were_not_declared_and_processes_that_are_not_there():
    with pytest.raises(NumericsError, match=r"tp=3 is not one of Numerics.tp_sizes=\(1, 2, 4, 8\)"):
        detcompile.compile("tiny", tp=3)
    for numerics in (None, Numerics(arithmetic="exact16")):
        with pytest.raises(InvalidInput, match="tp=0: a model has at least one rank"):
            detcompile.compile("tiny", tp=0, numerics=numerics)
    with pytest.raises(InvalidInput, match="tp=2 wants 2 processes, each of which calls compile"):
        tensor_parallel(2)


def test_radices_above_and_below_the_ranks():
    assert Numerics().split_radices(1) == ((), (2, 2, 2))
    assert Numerics().split_radices(4) == ((2, 2), (2,))
    assert Numerics(tp_sizes=(1, 3, 6)).split_radices(3) == ((3,), (2,))
    assert Numerics(tp_sizes=(1, 4)).split_radices(4) == ((4,), ())


def test_a_share_is_a_value():
    share = shares_of(4, 2, 2)[1]
    assert dataclasses.replace(share) == share and share.q == (2, 3) and share.kv == (1,)


def hooked(linear: nn.Module) -> None:
    linear.register_forward_hook(lambda _, args, out: out * 2)


def with_another_forward(linear: nn.Module) -> None:
    forward = linear.forward
    linear.forward = lambda x: forward(x) * 2


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("change", [hooked, with_another_forward, lambda linear: setattr(linear, "__class__", Doubled)])
@pytest.mark.parametrize("name", ["mlp.down_proj", "self_attn.o_proj"])
def test_what_a_user_has_changed_stays_or_is_rejected_over_ranks(name: str, change) -> None:
    models = [random_model("llama", torch.float32) for _ in range(3)]
    for model in models:
        change(model.model.layers[0].get_submodule(name))
    assert pin_row_parallel(models[0], Numerics()) in (3, 4)  # of two layers
    ids = torch.arange(20)[None]
    with torch.no_grad():
        actual, expected = (model(ids, use_cache=False).logits for model in models[:2])
    assert (actual - expected).norm() < 1e-5 * expected.norm()
    calls, _ = probe_attention(models[2], 64)
    with pytest.raises(UnsupportedModel, match=rf"layers\.0\.{name} has hooks or another forward"):
        shard(models[2], calls, Numerics(), a_rank(2), False)
