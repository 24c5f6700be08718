"""Mixtures of experts over several ranks: the logits, tokens and logprobs of one, and shares that are refused.

Each number of ranks runs once, with everything in it; on CPUs without Inductor, for time. torch's own sigmoid rounds
an element by its place in the tensor, so that gpt_oss has inner features that fill whole vectors on every rank.
"""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import detcompile
from detcompile import Numerics
from detcompile.errors import NumericsError, UnsupportedModel
from detcompile.parallel import TensorParallel
from detcompile.passes.modules.experts import find_experts, pin_experts
from detcompile.passes.sharding.experts import shard_experts
from tests.bits import assert_bitwise_equal
from tests.exhaustive import EXHAUSTIVE
from tests.model_cases import certified, random_model
from tests.parallel.cases import answers, dense_logits, needs_gpus
from tests.parallel.ranks import run_ranks

SIX = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 3}
MIXTURES = {
    "qwen3_moe": SIX | {"moe_intermediate_size": 48, "norm_topk_prob": True, "decoder_sparse_step": 1},
    "mixtral": SIX,
    "gpt_oss": SIX | {"head_dim": 16, "sliding_window": 70, "intermediate_size": 256},
}
SERVED = {
    ("cpu", 2): [("gpt_oss", torch.bfloat16)],
    ("cpu", 4): [("qwen3_moe", torch.float32)],
    ("cuda", 2): [("gpt_oss", torch.bfloat16), ("qwen3_moe", torch.bfloat16)],
    ("cuda", 4): [("gpt_oss", torch.bfloat16), ("mixtral", torch.bfloat16), ("qwen3_moe", torch.float32)],
}


def mixture(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """One layer of a model of MIXTURES."""
    return random_model(name, dtype, device, num_hidden_layers=1, **MIXTURES[name])


ON_CPU: dict[int, object] = {2: (), 4: EXHAUSTIVE}
# Mixtures whose certified graph is run; four ranks on CPUs serve qwen3_moe, whose experts have mixtral's layout.
GRAPHS = {("cpu", 2): ["mixtral"], ("cpu", 4): [], ("cuda", 2): ["mixtral"], ("cuda", 4): ["mixtral"]}


def graph_logits(name: str, device: str, tp: int) -> Tensor:
    model = mixture(name, device=device)
    pin_experts(model)
    return dense_logits(model, tp).cpu()


def served(name: str, dtype: torch.dtype, device: str, tp: int) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The fingerprint, and answers."""
    compile_model = certified if device == "cpu" else detcompile.compile
    model = compile_model(mixture(name, dtype, device), tp=tp, max_context=256)
    return model.fingerprint_parts, answers(model)


Found = tuple[list[Tensor], list[tuple[dict[str, str], dict[str, Tensor]]]]


def on_a_rank(rank: int, device: str, tp: int) -> Found:
    graphs = [graph_logits(name, device, tp) for name in GRAPHS[device, tp]]
    return graphs, [served(*case, device, tp) for case in SERVED[device, tp]]


@pytest.mark.parametrize(
    ("device", "tp"),
    [
        pytest.param(device, tp, marks=needs_gpus(tp) if device == "cuda" else ON_CPU[tp], id=f"{device}-{tp}")
        for device, tp in SERVED
    ],
)
def test_sharded_experts_have_bits_of_one_rank(device: str, tp: int) -> None:
    graphs = {name: graph_logits(name, device, 1) for name in GRAPHS[device, tp]}
    wholes = {case: served(*case, device, 1) for case in SERVED[device, tp]}
    for rank, (rank_graphs, cases) in enumerate(run_ranks(tp, on_a_rank, device, tp, device_type=device)):
        for (name, graph), rank_graph in zip(graphs.items(), rank_graphs, strict=True):
            assert_bitwise_equal(rank_graph, graph, f"{name} on rank {rank} of {tp}")
        for ((name, _), (parts, whole)), (rank_parts, actual) in zip(wholes.items(), cases, strict=True):
            assert rank_parts == parts
            for what, expected in whole.items():
                assert len(expected.unique()) > 1, what
                assert_bitwise_equal(actual[what], expected, f"{what} of {name} on rank {rank} of {tp}")


def shared(model: PreTrainedModel, tp: int, rank: int, numerics: Numerics | None = None) -> list[dict[str, Tensor]]:
    """The experts' weights that a rank keeps, one dictionary a module."""
    kept = []
    for name, module in find_experts(model):
        shard_experts(name, module, numerics or Numerics(), TensorParallel(size=tp, rank=rank, group="never asked"))
        kept.append({parameter: value.detach() for parameter, value in module.named_parameters()})
    return kept


def test_rank_keeps_its_features_of_every_expert() -> None:
    """Gate and up of the same features, interleaved (gpt_oss) or separate, and the rows of down that read them."""
    for name in ("gpt_oss", "mixtral"):
        ((_, experts),) = find_experts(mixture(name))
        whole = {parameter: value.detach() for parameter, value in experts.named_parameters()}
        (kept,) = shared(mixture(name), 4, rank=1)
        assert sum(map(torch.Tensor.numel, kept.values())) < sum(map(torch.Tensor.numel, whole.values())) / 3
        if name == "gpt_oss":  # [E, K, 2 I] and [E, I, K], 256 inner features of which rank 1 has 64 to 127
            assert_bitwise_equal(kept["gate_up_proj"], whole["gate_up_proj"][:, :, 128:256])
            assert_bitwise_equal(kept["gate_up_proj_bias"], whole["gate_up_proj_bias"][:, 128:256])
            assert_bitwise_equal(kept["down_proj"], whole["down_proj"][:, 64:128])
            assert_bitwise_equal(kept["down_proj_bias"], whole["down_proj_bias"])
        else:  # [E, 2 I, K] and [E, K, I], 176 inner features
            gate, up = whole["gate_up_proj"].chunk(2, 1)
            assert_bitwise_equal(kept["gate_up_proj"], torch.cat([gate[:, 44:88], up[:, 44:88]], 1))
            assert_bitwise_equal(kept["down_proj"], whole["down_proj"][:, :, 44:88])


def test_unshareable_mixtures_are_refused_by_name() -> None:
    with pytest.raises(NumericsError, match=r"layers\.0\.mlp\.experts\.down_proj: K=176 does not split into 6 equal"):
        shared(mixture("mixtral"), 2, 0, Numerics(tp_sizes=(1, 2, 6)))
    with pytest.raises(NumericsError, match=r"layers\.0\.mlp\.experts\.down_proj: K=72 does not split into 16 equal"):
        detcompile.compile(
            random_model("mixtral", torch.float32, **SIX | {"intermediate_size": 72}),
            numerics=Numerics(tp_sizes=(1, 16)),
        )
    model = mixture("mixtral")
    ((_, experts),) = find_experts(model)
    experts.is_concatenated = False  # but its gate is the first half
    with pytest.raises(UnsupportedModel, match="MixtralExperts gates features that a rank does not have"):
        shared(model, 2, 0)
