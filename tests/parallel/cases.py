"""Computations of the ranks in tests/parallel: graphs and compiled models, compared with those of one rank."""

import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import detcompile
from detcompile import CompiledModel, InvalidInput, Numerics
from detcompile.commands.axes import score
from detcompile.config import gpus_shared
from detcompile.models.hub import EMBEDDED
from detcompile.parallel import tensor_parallel
from detcompile.passes.backend import Backend, Expected
from detcompile.passes.capture import DenseForward, observe_attention, probe_attention
from detcompile.passes.roles import dense_role
from detcompile.passes.sharding.shard import pin_row_parallel, shard
from detcompile.passes.tracing import with_fresh_code
from detcompile.runtime import engine_setup
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.speculation.speculator import SpeculationConfig
from tests.conftest import NEEDS_CUDA
from tests.invariance.axis import configuration_for
from tests.model_cases import MAX_CONTEXT, certified, random_model
from tests.parallel.collective_cases import check_all
from tests.parallel.peer_cases import check_peers
from tests.quantized_checkpoints import write_checkpoint
from tests.runtime.speculation.test_speculator import Oracle

__all__ = [
    "DENSE",
    "Failure",
    "PARTS",
    "SERVED",
    "answers",
    "attempt",
    "compile_one",
    "dense_logits",
    "needs_gpus",
    "numerics_of",
    "one_layer",
    "quantized_layer",
    "rank_results",
    "served_logits",
]

THREE = Numerics(tp_sizes=(1, 3, 6))
OF_FOUR = Numerics(tp_sizes=(1, 4))  # one level of four
# For three ranks: six heads over two key heads, so one rank reads both; and four heads, which every rank computes.
CHANGES = {
    (3, "llama"): {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 6, "head_dim": 16},
    (3, "gpt2"): {"n_embd": 96},
}
# Models whose certified graph runs on each number of ranks; with four, two ranks hold each of two key heads.
DENSE = {
    2: ["bloom", "gemma3_text", "gpt_neox", "phi3 in gptq"],
    3: ["gpt2", "llama"],
    4: ["falcon", "gptj", "olmo2", "opt", "phi3"],
}
QUANTIZED = {"phi3 in gptq": ("phi3", "gptq_v2, act order")}  # fused q, k, v; K in an order by group
# Models that are compiled to serve steps.
SERVED = {2: [("gpt2", torch.float32), ("tiny-draft", torch.bfloat16)], 3: [], 4: [("llama", torch.bfloat16)]}
PARTS = ("collectives", "dense", "served")
STEPS = [("composition", 65), ("chunking", 97), ("decode", 17), ("padding", 33)]


class Failure(str):
    """The traceback of a case that raised."""


def needs_gpus(tp: int) -> list[Any]:
    """Return marks for a test that needs so many GPUs."""
    return [
        pytest.mark.gpu,
        NEEDS_CUDA,
        pytest.mark.skipif(
            torch.cuda.device_count() < (1 if gpus_shared() else tp),
            reason=f"needs {tp} GPUs, one for each rank, or DETCOMPILE_SHARED_GPUS=1",
        ),
    ]


def rank_results(
    rank: int, tp: int, device: str, parts: tuple[str, ...], dense: list[str], served: list[tuple[str, torch.dtype]]
) -> dict[str, Any]:
    """Run the named cases of each part of PARTS on one rank; return their results by name.

    A case that raises leaves its traceback as its result. All ranks reach the end, so that the next case can run.
    """
    results: dict[str, Any] = {}
    if "collectives" in parts:
        results["collectives"] = attempt(lambda: check_all(rank, tp, device))
        results["another model"] = attempt(lambda: _refusal_of_another_model(rank, tp, device))
        if device == "cuda":
            results["peers"] = attempt(lambda: check_peers(rank, tp))
    if "dense" in parts:
        results["dense"] = {name: attempt(lambda name=name: _dense(name, device, tp)) for name in dense}
    if "served" in parts:
        results["served"] = {case: attempt(lambda case=case: _served(*case, device, tp, rank)) for case in served}
    return results


def compile_one(name: str, dtype: torch.dtype, device: str, tp: int) -> CompiledModel:
    """Compile a model of tests.model_cases, or an embedded one, on tp ranks; on a CPU Inductor compiles the latter."""
    if name in EMBEDDED:
        return detcompile.compile(detcompile.load_model(name, dtype=dtype, device=device), tp=tp)
    compile_model = certified if device == "cpu" else detcompile.compile
    return compile_model(random_model(name, dtype, device), tp=tp, max_context=MAX_CONTEXT)


def served_logits(model: CompiledModel) -> dict[str, Tensor]:
    """Return logits of a batch, of its first row alone, and of a target in each kind of step; and generated tokens."""
    ids = (torch.arange(74, device=model.device) * 7 % 150).view(2, 37)
    logits = {"batch": model(ids).logits, "row": model(ids[:1, :5]).logits}
    for axis, length in [*STEPS, *([("cuda_graphs", 33)] if model.device.type == "cuda" else [])]:
        logits[axis] = score(model, configuration_for(axis, length, 3))
    prompts = {"input_ids": ids[:, :9], "attention_mask": torch.ones_like(ids[:, :9])}
    logits["tokens"] = model.generate(**prompts, max_new_tokens=5)
    logits["drawn tokens"] = model.generate(**prompts, max_new_tokens=5, do_sample=True, seed=[1, 2])
    logits["drafted tokens"] = _drafted(model)
    return {name: values.cpu() for name, values in logits.items()}


def answers(model: CompiledModel) -> dict[str, Tensor]:
    """Return logits of a batch and of a row, and generated tokens with logprobs, which use the ranks' caches."""
    ids = (torch.arange(74, device=model.device) * 7 % 150).view(2, 37)
    actual = {"batch": model(ids).logits.cpu(), "row": model(ids[:1, :5]).logits.cpu()}
    params = [SamplingParams(max_tokens=6, temperature=t, seed=3, logprobs=0, ignore_eos=True) for t in (0.0, 1.0)]
    outputs = model.engine(EngineConfig(num_blocks=30, block_size=16)).generate(
        [[5, 6, 7], list(range(40))], params, progress=False
    )
    for request, (answer,) in enumerate(output.outputs for output in outputs):
        actual[f"tokens {request}"] = torch.tensor(answer.token_ids)
        actual[f"logprobs {request}"] = torch.tensor([entry.logprob for entry in answer.logprobs or ()])
    return actual


def _drafted(model: CompiledModel) -> Tensor:
    """Return tokens and logprobs of two answers with random draft trees; fail if plain decoding gives others."""
    prompts = [[5, 6, 7], list(range(40))]
    params = [SamplingParams(max_tokens=12, temperature=t, seed=3, logprobs=0, ignore_eos=True) for t in (0.0, 1.0)]
    config = EngineConfig(num_blocks=80, block_size=16)
    plain = model.engine(config).generate(prompts, params, progress=False)
    speculation = SpeculationConfig(drafter=Oracle(plain, 0.7, seed=1), switch="always")
    engine = model.engine(config, speculation=speculation)
    actual = engine.generate(prompts, params, progress=False)
    assert engine.speculator is not None and engine.speculator.error is None
    assert 0 < engine.speculator.num_accepted < engine.speculator.num_drafted
    assert [output.outputs for output in actual] == [output.outputs for output in plain]
    return torch.tensor(
        [[o.outputs[0].token_ids, [entry.logprob for entry in o.outputs[0].logprobs or ()]] for o in actual],
        dtype=torch.float64,
    )


def dense_logits(model: PreTrainedModel, tp: int, numerics: Numerics = Numerics(), replicate: bool = False) -> Tensor:
    """Return logits [3, 7, V] of the certified graph over a batch, without Inductor, on each of tp ranks."""
    attention, _ = probe_attention(model, numerics.kv_chunk)
    if tp == 1:
        pin_row_parallel(model, numerics)
    else:
        shard(model, attention, numerics, tensor_parallel(tp), replicate)
        attention, _ = observe_attention(model, numerics.kv_chunk)
    backend = Backend(numerics, dense_role, expects=Expected(len(attention)), certify_only=True)
    dense = torch.compile(with_fresh_code(DenseForward(model)), backend=backend, fullgraph=True, dynamic=None)
    device = next(model.parameters()).device
    input_ids = (torch.arange(21, device=device) * 13 % model.config.vocab_size).view(3, 7)
    position_ids = torch.arange(7, device=device).repeat(3, 1)
    for tensor in (input_ids, position_ids):
        torch._dynamo.mark_dynamic(tensor, [0, 1])
    with torch.no_grad():
        return dense(input_ids, position_ids)


def numerics_of(name: str, tp: int) -> Numerics:
    """Return the numerics of a model of DENSE[tp]."""
    if tp == 3:
        return THREE
    return OF_FOUR if (name, tp) == ("olmo2", 4) else Numerics()


def one_layer(name: str, device: str, tp: int) -> PreTrainedModel:
    """Return a model of DENSE[tp]."""
    if name in QUANTIZED:
        architecture, checkpoint = QUANTIZED[name]
        return quantized_layer(checkpoint, torch.float32, device, architecture)
    return random_model(name, torch.float32, device, num_hidden_layers=1, **CHANGES.get((tp, name), {}))


def quantized_layer(
    checkpoint: str, dtype: torch.dtype, device: str, architecture: str = "qwen3", layers: int = 1
) -> PreTrainedModel:
    """Return a model of tests.quantized_checkpoints, with one layer by default."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), checkpoint, dtype, architecture, num_hidden_layers=layers)
        return detcompile.load_model(folder, device=device)


def attempt(compute: Callable[[], Any]) -> Any:
    """Return the result of ``compute``, or a Failure."""
    try:
        return compute()
    except Exception:
        return Failure(traceback.format_exc())


def _dense(name: str, device: str, tp: int) -> Tensor:
    return dense_logits(one_layer(name, device, tp), tp, numerics_of(name, tp), tp == 3).cpu()


def _served(
    name: str, dtype: torch.dtype, device: str, tp: int, rank: int
) -> tuple[dict[str, str], dict[str, Tensor], int]:
    """Return a model's fingerprint, its logits, and an engine's number of blocks if each rank has room for more."""
    model = compile_one(name, dtype, device, tp)
    logits = served_logits(model)
    with mock.patch.object(engine_setup, "affordable_blocks", lambda *_: 41 + rank):  # one block is reserved
        engine = model.engine(EngineConfig(cuda_graphs=False))
    return model.fingerprint_parts, logits, engine.stats.num_blocks


def _refusal_of_another_model(rank: int, tp: int, device: str) -> str:
    """Return the error of compile() if one rank has other weights."""
    model = random_model("llama", torch.float32, device, num_hidden_layers=1)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += rank == tp - 1
    try:
        certified(model, tp=tp, max_context=MAX_CONTEXT, numerics=THREE if tp == 3 else None)
    except InvalidInput as error:
        return str(error)
    return ""
