"""Ranks give the bits of one: collectives, graphs of every architecture, and compiled models that serve steps.

Processes are slow to start, so that on CPUs each number of ranks runs once, with everything in it. On GPUs each part
runs in processes of its own, and what breaks one of them is no word on the others.
"""

import functools
from typing import Any

import pytest
import torch

from detcompile.parallel import rank_device
from tests.bits import assert_bitwise_equal
from tests.exhaustive import EXHAUSTIVE
from tests.parallel.cases import (
    DENSE,
    PARTS,
    SERVED,
    Failure,
    compile_one,
    dense_logits,
    needs_gpus,
    numerics_of,
    one_layer,
    rank_results,
    served_logits,
)
from tests.parallel.ranks import run_ranks

# Compilations on a GPU take their time, so that each model is served by two ranks or by four.
SERVED_ON_GPU: dict[int, list[Any]] = {
    2: [("tiny", torch.bfloat16), ("llama", torch.bfloat16), ("qwen3", torch.bfloat16), ("gpt2", torch.float32)],
    3: [],
    4: [
        ("tiny", torch.bfloat16),
        ("mistral", torch.bfloat16),
        ("gemma3_text", torch.bfloat16),
        ("phi3", torch.float16),
    ],
}
ON_CPU: dict[int, Any] = {2: (), 3: EXHAUSTIVE, 4: EXHAUSTIVE}
DENSE_ON_GPU = {
    2: ["falcon", "gemma3_text", "mistral", "phi3 in gptq"],
    3: DENSE[3],
    4: ["falcon", "llama", "olmo2", "qwen3"],
}


def _each(*kinds: dict[int, list[Any]]) -> list[Any]:
    """(device, tp, case) for every case of ``kinds`` on the CPU, and the same on GPUs."""
    on_cpu, on_gpu = kinds
    return [
        pytest.param("cpu", tp, case, marks=ON_CPU[tp], id=f"cpu-{tp}-{_name(case)}")
        for tp in on_cpu
        for case in on_cpu[tp]
    ] + [
        pytest.param("cuda", tp, case, marks=needs_gpus(tp), id=f"cuda-{tp}-{_name(case)}")
        for tp in on_gpu
        for case in on_gpu[tp]
    ]


def _name(case: Any) -> str:
    return case if isinstance(case, str) else f"{case[0]}-{str(case[1]).removeprefix('torch.')}"


ON_GPUS = [pytest.param(tp, marks=needs_gpus(tp), id=f"cuda-{tp}") for tp in SERVED_ON_GPU]
SIZES = [
    *(pytest.param("cpu", tp, marks=ON_CPU[tp], id=f"cpu-{tp}") for tp in DENSE),
    *(pytest.param("cuda", tp, marks=needs_gpus(tp), id=f"cuda-{tp}") for tp in SERVED_ON_GPU),
]


def results(device: str, tp: int, part: str, name: str | tuple[str, torch.dtype]) -> list[Any]:
    """Return the result of each rank for a case of a part."""
    actual = [ranks[part][name] if part in ("dense", "served") else ranks[name] for ranks in _ranks(device, tp, part)]
    for rank, result in enumerate(actual):
        assert not isinstance(result, Failure), f"rank {rank} of {tp}:\n{result}"
    return actual


def _ranks(device: str, tp: int, part: str) -> list[dict[str, Any]]:
    return _run(device, tp, (part,) if device == "cuda" else PARTS)


@functools.cache
def _run(device: str, tp: int, parts: tuple[str, ...]) -> list[dict[str, Any]]:
    dense, served = (DENSE_ON_GPU, SERVED_ON_GPU) if device == "cuda" else (DENSE, SERVED)
    return run_ranks(tp, rank_results, tp, device, parts, dense[tp], served[tp], device_type=device)


@functools.cache
def alone(device: str, name: str, dtype: torch.dtype) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    model = compile_one(name, dtype, device, 1)
    return model.fingerprint_parts, served_logits(model)


@pytest.mark.parametrize(("device", "tp"), SIZES)
def test_collectives_keep_sum_order_and_bytes(device: str, tp: int):
    """The assertions run in the ranks. This checks that every rank finished."""
    assert results(device, tp, "collectives", "collectives") == [24] * tp


@pytest.mark.parametrize("tp", ON_GPUS)
def test_peer_memory_sums_have_bits_of_the_library(tp: int):
    """Even if ranks are late, and in CUDA graphs."""
    others = {rank_device("cuda", rank).index for rank in range(tp)} - {0}
    if not all(torch.cuda.can_device_access_peer(0, other) for other in others):
        pytest.skip("these GPUs do not map each other's memory")
    assert results("cuda", tp, "collectives", "peers") == [True] * tp


@pytest.mark.parametrize(("device", "tp"), SIZES)
def test_rank_with_other_weights_is_detected_before_first_step(device: str, tp: int):
    for refusal in results(device, tp, "collectives", "another model"):
        assert f"ranks 0 and {tp - 1}" in refusal
        assert "weights" in refusal


@pytest.mark.parametrize(("device", "tp", "name"), _each(DENSE, DENSE_ON_GPU))
def test_the_certified_graph_of_an_architecture_keeps_its_bits(device: str, tp: int, name: str):
    whole = dense_logits(one_layer(name, device, tp), 1, numerics_of(name, tp)).cpu()
    assert bool(whole.isfinite().all()) and len(whole.unique()) > whole.shape[0] * whole.shape[1]
    for rank, logits in enumerate(results(device, tp, "dense", name)):
        assert_bitwise_equal(logits, whole, f"{name} on rank {rank} of {tp}")


@pytest.mark.parametrize(("device", "tp", "case"), _each(SERVED, SERVED_ON_GPU))
def test_a_served_model_keeps_its_bits_and_its_fingerprint(device: str, tp: int, case: tuple[str, torch.dtype]):
    parts, whole = alone(device, *case)
    for rank, (rank_parts, logits, num_blocks) in enumerate(results(device, tp, "served", case)):
        assert num_blocks == 40
        assert rank_parts == parts
        for what, expected in whole.items():
            assert_bitwise_equal(logits[what], expected, f"{what} on rank {rank} of {tp}")
