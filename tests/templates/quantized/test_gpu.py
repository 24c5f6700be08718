"""dequant_matmul's kernels: the bytes of matmul over dequantized weights, whatever the schedule and the token count."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from detcompile.errors import ScheduleError
from detcompile.templates.matmul.launch import run_schedule
from detcompile.templates.matmul.schedules import PointerTiles
from detcompile.templates.ops import ours
from detcompile.templates.quantized.gpu import (
    DEQUANT,
    dequant_matmul_cuda,
    dequant_problem,
    expanded,
    probe_dequant,
    run_dequant,
)
from detcompile.templates.quantized.op import reference_dequant_matmul
from detcompile.templates.quantized.schedules import EXPAND, Fused, Int4Decode, dequant_candidates
from detcompile.templates.quantized.weights import NIBBLE_BLOCK, QuantizedWeight, dequantized
from tests.bits import assert_bitwise_equal
from tests.exhaustive import exhaustive_unless
from tests.templates.cases import assert_as_accurate
from tests.templates.quantized.cases import FORMATS, quantized_weight
from tests.templates.triton_interpreter import DEVICE, DOT_DTYPES, INTERPRETED, NEEDS_GPU, NEEDS_TRITON

pytestmark = NEEDS_TRITON
N, K = 37, 200
DTYPE = DOT_DTYPES[0]  # of fused products: 16 bits on a GPU, where those of float32 are expanded
PLAIN = PointerTiles(16, 32, 32, 4, 2)
# On a GPU fewer than 64 features a tile take mma.sync, which the gate may refuse.
FEATURES = (32, 16) if INTERPRETED else (64, 64)
SMALL = [
    Fused(16, FEATURES[0], 128, 4, 2),
    Fused(32, FEATURES[1], 128, 4, 2, group=2),
]
MODELS = [  # what checkpoints hold
    "int4, groups of 128",
    "int4, groups of 32",
    "int4, groups of 32, mins",
    "int8, channels",
    "fp8, blocks of 128",
]


def heavy_tailed(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal, spread = (torch.randn(*shape, generator=generator) for _ in range(2))
    return (normal * torch.exp(spread)).to(dtype).to(DEVICE)


def by_matmul(x: Tensor, weight: QuantizedWeight, *epilogue: Tensor | None, radices: tuple[int, ...] = ()) -> Tensor:
    return run_schedule(PLAIN, x, dequantized(weight, x.dtype), *epilogue, radices=radices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_expanded_weights_have_the_bytes_of_the_definition(name: str, dtype: torch.dtype) -> None:
    weight = quantized_weight(name, N, K, DEVICE)
    assert_bitwise_equal(expanded(weight, dtype), dequantized(weight, dtype))


def test_minimum_is_added_to_rounded_product() -> None:
    for weight in (quantized_weight("int4, groups of 32, mins", N, K), quantized_weight("int8, channels", N, K)):
        generator = torch.Generator().manual_seed(1)
        scales, mins = torch.randn(2, *weight.scales.shape, generator=generator).to(DEVICE)  # products round
        weight = weight._replace(w=weight.w.to(DEVICE), scales=scales, mins=mins)
        assert_bitwise_equal(expanded(weight, torch.float32), dequantized(weight, torch.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_a_fused_product_has_the_bytes_of_matmul(name: str) -> None:
    weight, x = quantized_weight(name, N, K, DEVICE), heavy_tailed(5, K, dtype=DTYPE)
    bias, residual = heavy_tailed(N, dtype=DTYPE, seed=2), heavy_tailed(5, N, dtype=DTYPE, seed=3)
    for schedule in SMALL:
        assert_bitwise_equal(run_dequant(schedule, x, weight), by_matmul(x, weight), f"{name} {schedule}")
        actual = run_dequant(schedule, x, weight, bias, residual)
        assert_bitwise_equal(actual, by_matmul(x, weight, bias, residual), f"{name} {schedule} with its epilogue")


@pytest.mark.parametrize("name", MODELS)
def test_leaves_of_a_tree_are_whole_steps(name: str) -> None:
    weight, x = quantized_weight(name, N, 512, DEVICE), heavy_tailed(5, 512, dtype=DTYPE)
    for radices in ((2, 2), (4,)):
        actual = run_dequant(SMALL[0], x, weight, radices=radices)
        assert_bitwise_equal(actual, by_matmul(x, weight, radices=radices), f"{name} {radices}")
    with pytest.raises(ScheduleError, match="whole steps of 128"):
        run_dequant(SMALL[0], x, weight, radices=(8,))


@pytest.mark.parametrize("name", MODELS)
def test_leaves_of_programs_of_their_own_have_the_bytes_of_one_program(name: str) -> None:
    weight, x = quantized_weight(name, N, 512, DEVICE), heavy_tailed(5, 512, dtype=DTYPE)
    bias, residual = heavy_tailed(N, dtype=DTYPE, seed=2), heavy_tailed(5, N, dtype=DTYPE, seed=3)
    for schedule, radices in ((SMALL[0], (2, 2)), (SMALL[1], (4,)), (SMALL[0], ())):
        split = replace(schedule, split=True)
        expected = run_dequant(schedule, x, weight, bias, residual, radices)
        actual = run_dequant(split, x, weight, bias, residual, radices)
        assert_bitwise_equal(actual, expected, f"{name} {radices}")
        if not INTERPRETED:  # there a block's product is numpy's, whose errors are not ours
            ours, theirs = run_dequant(split, x, weight, radices=radices), x @ dequantized(weight, x.dtype).t()
            assert_as_accurate(ours, theirs, reference_dequant_matmul(x, weight), f"{name} {radices}")


def test_few_tokens_of_a_tree_may_split_its_leaves() -> None:
    for k, step in ((1024, 128), (4096, 512)):
        weight, x = quantized_weight("int4, groups of 128", N, k, DEVICE), heavy_tailed(1, k, dtype=torch.float16)
        actual = dequant_candidates(dequant_problem(x, weight, None, None, (2, 2, 2), x.dtype))
        assert max(schedule.block_k for schedule in actual[:-1] if schedule.split) == step
        assert actual[0].split and actual[-1] == EXPAND
        plain = dequant_candidates(dequant_problem(x, weight, None, None, (), x.dtype))
        assert not any(schedule.split for schedule in plain if schedule != EXPAND)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the gate decides: test_every_schedule_has_the_bytes_of_matmul")
@pytest.mark.parametrize("radices", [(), (2,)], ids=str)
@pytest.mark.parametrize("name", ["int4, groups of 128", "int4, channels"])
def test_steps_of_several_blocks_have_the_bytes_of_matmul(name: str, radices: tuple) -> None:
    weight, x = quantized_weight(name, N, 1024, DEVICE), heavy_tailed(11, 1024, dtype=torch.float16)
    problem = dequant_problem(x, weight, None, None, radices, x.dtype)
    tiles = [schedule for schedule in dequant_candidates(problem) if schedule != EXPAND]
    several = [schedule for schedule in tiles if schedule.block_k > NIBBLE_BLOCK]
    assert len(several) == (7 if radices else 3)
    expected = by_matmul(x, weight, radices=radices)
    for schedule in several:
        assert_bitwise_equal(run_dequant(schedule, x, weight, radices=radices), expected, f"{name} {schedule}")


def test_steps_of_several_blocks_want_whole_steps_and_a_scale_for_a_block() -> None:
    schedule = Fused(8, 16, 512, 1, 3)
    for name, k, message in [
        ("int4, groups of 128", 768, "whole steps of 512"),
        ("int4, groups of 32", 512, "groups of 128"),
    ]:
        weight, x = quantized_weight(name, N, k, DEVICE), heavy_tailed(5, k, dtype=torch.float16)
        assert schedule not in dequant_candidates(dequant_problem(x, weight, None, None, (), x.dtype))
        with pytest.raises(ScheduleError, match=message):
            run_dequant(schedule, x, weight)


def test_warps_of_their_own_want_16_bits_throughout_and_whole_vectors() -> None:
    weight, x = quantized_weight("int4, groups of 128", 48, 4096, DEVICE), heavy_tailed(5, 4096, dtype=torch.float16)
    problem = replace(dequant_problem(x, weight, None, None, (), x.dtype), narrow=True)
    actual = [schedule for schedule in dequant_candidates(problem) if isinstance(schedule, Int4Decode)]
    assert actual and actual == list(dequant_candidates(problem)[: len(actual)])
    tree = [s for s in dequant_candidates(replace(problem, radices=(2, 2, 2))) if isinstance(s, Int4Decode)]
    assert tree and all(s.split and 4096 // 8 % s.block_k == 0 for s in tree)
    for misfit in ({"narrow": False}, {"n": 56}, {"group": 64}, {"k": 4096 + 128}, {"bucket": 32}):
        assert not any(isinstance(s, Int4Decode) for s in dequant_candidates(replace(problem, **misfit))), misfit
    for thin, radices in ((weight._replace(scales=weight.scales.float()), ()), (weight, (2, 2, 2))):
        with pytest.raises(ScheduleError, match="one scale of x's dtype"):
            run_dequant(actual[0], x, thin, radices=radices)


def test_a_row_ignores_its_neighbors() -> None:
    weight, x = quantized_weight("int4, groups of 128", N, K, DEVICE), heavy_tailed(20, K, dtype=DTYPE)
    whole = run_dequant(SMALL[0], x, weight)
    poisoned = torch.full_like(x, torch.nan)
    poisoned[17] = x[17]
    assert_bitwise_equal(run_dequant(SMALL[0], poisoned, weight)[17], whole[17], "beside NaN")
    assert_bitwise_equal(run_dequant(SMALL[1], x[17:18], weight)[0], whole[17], "alone")


def test_op_runs_a_gated_schedule() -> None:
    weight, x = quantized_weight("int8, groups of 128", N, K, DEVICE), heavy_tailed(3, K, dtype=DTYPE)
    assert_bitwise_equal(dequant_matmul_cuda(x, weight, None, None, ()), by_matmul(x, weight))
    problem = dequant_problem(x, weight, None, None, (), x.dtype)
    bits = probe_dequant(problem, x.device)
    assert bits(SMALL[0]) == bits(EXPAND)
    assert dequant_matmul_cuda(x[:0], weight, None, None, ()).shape == (0, N)


class TestOnTheGpu:
    pytestmark = NEEDS_GPU

    @pytest.mark.parametrize(
        ("name", "dtype", "radices"),
        exhaustive_unless(
            lambda case: case[1] is torch.bfloat16 and (not case[2] or case[0] == next(iter(MODELS))),
            itertools.product(MODELS, (torch.bfloat16, torch.float16), ((), (2, 2, 2))),
        ),
    )
    def test_every_schedule_has_the_bytes_of_matmul(self, name: str, dtype: torch.dtype, radices: tuple) -> None:
        weight = quantized_weight(name, 600, 4096, DEVICE)
        for tokens in (1, 16, 31, 64, 100, 300):
            x = heavy_tailed(tokens, 4096, dtype=dtype, seed=tokens)
            residual = heavy_tailed(tokens, 600, dtype=dtype, seed=3)
            problem = dequant_problem(x, weight, None, residual, radices, dtype)
            candidates = dequant_candidates(problem)
            gate = DEQUANT.tuner(x.device)
            admitted = gate.admitted(str(problem), EXPAND, candidates, probe_dequant(problem, x.device))
            refused = gate.refusals().get(str(problem))
            print(f"{problem}: {len(admitted)} of {len(candidates)}, refused {refused}")
            assert len(admitted) >= len(candidates) / 2
            expected = by_matmul(x, weight, None, residual, radices=radices)
            for schedule in admitted:
                actual = run_dequant(schedule, x, weight, None, residual, radices)
                assert_bitwise_equal(actual, expected, f"{name} {schedule}")

    @pytest.mark.parametrize("radices", [(), (2, 2, 2)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", ["int4, groups of 128", "int4, channels"])  # with and without zero points
    def test_warps_of_their_own_have_the_bytes_of_matmul(self, name: str, dtype: torch.dtype, radices: tuple) -> None:
        weight = quantized_weight(name, 336, 4096, DEVICE)
        weight = weight._replace(scales=weight.scales.to(dtype))
        bias, residual = heavy_tailed(336, dtype=dtype, seed=2), heavy_tailed(20, 336, dtype=dtype, seed=3)
        for tokens in (1, 8, 9, 20):
            x = heavy_tailed(20, 4096 + 8, dtype=dtype, seed=tokens)[:tokens, 8:]  # rows that no copy of 16 bytes takes
            problem = replace(dequant_problem(x, weight, None, None, radices, dtype), bucket=16)
            schedules = [s for s in dequant_candidates(problem) if isinstance(s, Int4Decode)]
            assert len(schedules) >= 4
            for epilogue in ((None, None), (bias, residual[:tokens])):
                expected = by_matmul(x, weight, *epilogue, radices=radices)
                for schedule in schedules:
                    actual = run_dequant(schedule, x, weight, *epilogue, radices)
                    assert_bitwise_equal(actual, expected, f"{name} {schedule} {tokens} tokens")

    @pytest.mark.parametrize("dtype", DOT_DTYPES)
    @pytest.mark.parametrize("name", MODELS)
    def test_a_row_ignores_the_token_count(self, name: str, dtype: torch.dtype) -> None:
        weight, x = quantized_weight(name, 272, 1024, DEVICE), heavy_tailed(1025, 1024, dtype=dtype)
        whole = dequant_matmul_cuda(x, weight, None, None, (2, 2))
        for m in (1, 2, 15, 16, 17, 33, 64, 65, 127, 129, 257, 1024):
            assert_bitwise_equal(dequant_matmul_cuda(x[:m], weight, None, None, (2, 2)), whole[:m], f"{m} tokens")
            assert_bitwise_equal(dequant_matmul_cuda(x[-m:], weight, None, None, (2, 2)), whole[-m:], f"last {m}")

    def test_a_graph_and_tuning_keep_the_bits(self) -> None:
        weight, x = quantized_weight("int4, groups of 128", 272, 1024, DEVICE), heavy_tailed(7, 1024).bfloat16()
        expected = dequant_matmul_cuda(x, weight, None, None, ())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = dequant_matmul_cuda(x, weight, None, None, ())
        graph.replay()
        assert_bitwise_equal(captured, expected, "captured")
        problem = dequant_problem(x, weight, None, None, (), x.dtype)
        DEQUANT.tune(problem, x.device, lambda schedule: float(getattr(schedule, "block_n", 1024)))
        assert_bitwise_equal(dequant_matmul_cuda(x, weight, None, None, ()), expected, "tuned")


@NEEDS_GPU[0]
@NEEDS_GPU[1]
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_quantized_experts_have_the_bytes_of_dequantized_ones(name: str, tokens: int) -> None:
    experts, n, k = 8, 256, 512
    weight = quantized_weight(name, experts * n, k, DEVICE)
    w, x = dequantized(weight, torch.bfloat16).view(experts, n, k), heavy_tailed(tokens, k, dtype=torch.bfloat16)
    ids = (torch.arange(tokens * 2, device=DEVICE) * 3 % experts).view(tokens, 2)
    bias = heavy_tailed(experts, n, dtype=torch.bfloat16, seed=2)
    sizes = (weight.group, weight.rows)
    actual = ours.dequant_expert_matmul(x, ids, *weight[:4], bias, *sizes, [2, 4], experts)
    assert_bitwise_equal(actual, ours.expert_matmul(x, ids, w, bias, [2, 4]), name)
    actual = ours.dequant_expert_matmul_partial(x, ids, *weight[:4], *sizes, [4], experts, 2)
    assert_bitwise_equal(actual, ours.expert_matmul_partial(x, ids, w, [4], 2), name)
