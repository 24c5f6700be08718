"""Ranks give the bits of one: collectives, graphs of every architecture, and compiled models that serve steps.

Processes are slow to start, so that each number of ranks runs once, with everything in it.
"""

import functools
from typing import Any

import pytest
import torch

from detcompile import Numerics
from tests.bits import assert_bitwise_equal
from tests.conftest import NEEDS_CUDA
from tests.parallel.cases import (
    DENSE,
    SERVED,
    THREE,
    compile_one,
    dense_logits,
    one_layer,
    rank_results,
    served_logits,
)
from tests.parallel.ranks import run_ranks

MANY = ["llama", "qwen3", "mistral", "gemma3_text", "phi3", "gpt2", "tiny"]
ON_GPU = [(name, dtype) for name in MANY for dtype in (torch.bfloat16, torch.float32)]


def _needs_gpus(tp: int) -> list[Any]:
    return [
        pytest.mark.gpu,
        NEEDS_CUDA,
        pytest.mark.skipif(torch.cuda.device_count() < tp, reason=f"needs {tp} GPUs, one for each rank"),
    ]


def _each(*kinds: dict[int, list[Any]]) -> list[Any]:
    """(device, tp, case) for every case of ``kinds`` on the CPU, and the same on GPUs."""
    on_cpu, on_gpu = kinds
    return [pytest.param("cpu", tp, case, id=f"cpu-{tp}-{_name(case)}") for tp in on_cpu for case in on_cpu[tp]] + [
        pytest.param("cuda", tp, case, marks=_needs_gpus(tp), id=f"cuda-{tp}-{_name(case)}")
        for tp in on_gpu
        for case in on_gpu[tp]
    ]


def _name(case: Any) -> str:
    return case if isinstance(case, str) else f"{case[0]}-{str(case[1]).removeprefix('torch.')}"


SERVED_ON_GPU = {2: ON_GPU, 4: ON_GPU}
SIZES = [
    *(pytest.param("cpu", tp, id=f"cpu-{tp}") for tp in DENSE),
    *(pytest.param("cuda", tp, marks=_needs_gpus(tp), id=f"cuda-{tp}") for tp in SERVED_ON_GPU),
]


@functools.cache
def results(device: str, tp: int) -> list[dict[str, Any]]:
    """What each rank computed."""
    served = (SERVED_ON_GPU if device == "cuda" else SERVED)[tp]
    return run_ranks(tp, rank_results, tp, device, DENSE[tp], served, device_type=device)


@functools.cache
def alone(device: str, name: str, dtype: torch.dtype) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    model = compile_one(name, dtype, device, 1)
    return model.fingerprint_parts, served_logits(model)


@pytest.mark.parametrize(("device", "tp"), SIZES)
def test_partial_sums_meet_in_the_tree_and_bytes_move_whole(device: str, tp: int):
    """The assertions are in the ranks; here every one of them got to its end."""
    assert [result["collectives"] for result in results(device, tp)] == [24] * tp


@pytest.mark.parametrize(("device", "tp"), SIZES)
def test_a_rank_with_other_weights_is_found_before_the_first_step(device: str, tp: int):
    for result in results(device, tp):
        assert f"ranks 0 and {tp - 1}" in result["another model"]
        assert "weights" in result["another model"]


@pytest.mark.parametrize(("device", "tp", "name"), _each(DENSE, {tp: DENSE[tp] for tp in SERVED_ON_GPU}))
def test_the_certified_graph_of_an_architecture_keeps_its_bits(device: str, tp: int, name: str):
    whole = dense_logits(one_layer(name, device, tp), 1, THREE if tp == 3 else Numerics()).cpu()
    assert bool(whole.isfinite().all()) and len(whole.unique()) > whole.shape[0] * whole.shape[1]
    for rank, result in enumerate(results(device, tp)):
        assert_bitwise_equal(result["dense"][name], whole, f"{name} on rank {rank} of {tp}")


@pytest.mark.parametrize(("device", "tp", "case"), _each(SERVED, SERVED_ON_GPU))
def test_a_served_model_keeps_its_bits_and_its_fingerprint(device: str, tp: int, case: tuple[str, torch.dtype]):
    parts, whole = alone(device, *case)
    for rank, result in enumerate(results(device, tp)):
        rank_parts, logits = result["served"][case]
        assert rank_parts == parts
        for what, expected in whole.items():
            assert_bitwise_equal(logits[what], expected, f"{what} on rank {rank} of {tp}")
