"""Packed attention on the GPU: serving's bytes, and gradients that no schedule and no packing moves."""

import itertools

import pytest
import torch
from torch import Tensor

from detcompile.templates.attention.gpu import dense_attention_cuda
from detcompile.templates.attention.scores import AttentionRule
from detcompile.templates.device.gate import Tuner
from detcompile.templates.training import attention_gpu as gpu
from detcompile.templates.training.attention import reference_packed_attention
from detcompile.templates.training.attention_schedules import GradientTiles, candidates, reference_tiles
from tests.bits import assert_bitwise_equal
from tests.exhaustive import exhaustive_unless
from tests.gpus import is_hopper_here
from tests.templates.cases import normal
from tests.templates.training.cases import cu_seqlens_of, packings, split
from tests.templates.triton_interpreter import (
    DEVICE,
    DOT_DTYPES,
    INTERPRETED,
    NEEDS_GPU,
    NEEDS_TRITON,
    QUICK_DOT_DTYPES,
    exhaustive_interpreted,
)

pytestmark = NEEDS_TRITON
LENGTHS = [3, 140] if INTERPRETED else [3, 700, 1, 129, 64, 1500]
HEADS, KV_HEADS, D, DV = (4, 2, 16, 24) if INTERPRETED else (8, 2, 128, 128)
SLOPES, SINKS = 2.0 ** -torch.arange(1.0, HEADS + 1), torch.linspace(-1, 2, HEADS)
RULES = {
    "plain": AttentionRule(0.25, 0, 64),
    "window": AttentionRule(0.25, 50, 64),
    "tokens in chunks": AttentionRule(0.25, 0, 64, attention_chunk=70),
    "all": AttentionRule(-0.3, 140, 64, 3.0, SINKS, SLOPES),
}
CASES = exhaustive_unless(
    {*itertools.product(RULES, (torch.bfloat16,)), ("all", torch.float32)}.__contains__,
    itertools.product(RULES, DOT_DTYPES),
)
PACKED_CASES = [("all", torch.float32)] if INTERPRETED else CASES
SCHEDULES = [GradientTiles(32, 64, 4, 1), GradientTiles(64, 32, 4, 2), GradientTiles(16, 64, 4, 1)]
WIDE = GradientTiles(16, 128, 4, 1)  # not of dq


def rule_of(name: str) -> AttentionRule:
    rule = RULES[name]
    return rule if rule.sinks is None else rule._replace(sinks=SINKS.to(DEVICE), alibi_slopes=SLOPES.to(DEVICE))


def drawn(dtype: torch.dtype, heads: int = HEADS) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output."""
    T = sum(LENGTHS)
    shapes = [(T, heads, D), (T, KV_HEADS, D), (T, KV_HEADS, DV), (T, heads, DV)]
    return tuple(normal(shape, dtype, seed).to(DEVICE) for seed, shape in enumerate(shapes))


def operands_of(dtype: torch.dtype, rule: AttentionRule) -> tuple[tuple[Tensor, ...], Tensor]:
    q, k, v, g = drawn(dtype)
    cu_seqlens = cu_seqlens_of(LENGTHS).to(DEVICE)
    lse = gpu.attention_lse(q, k, cu_seqlens, rule).t().contiguous()
    return (g, q, k, v, lse, normal((HEADS, len(q)), torch.float32, 9).to(DEVICE)), cu_seqlens


def forward_and_backward(q, k, v, g, lengths, rule) -> tuple[Tensor, ...]:
    cu_seqlens = cu_seqlens_of(lengths).to(DEVICE)
    out, lse = gpu.packed_attention_cuda(q, k, v, cu_seqlens, rule)
    return out, lse, *gpu.packed_attention_backward_cuda(g, (q, k, v, out, lse), cu_seqlens, rule)


@pytest.mark.parametrize(("name", "dtype"), PACKED_CASES)
def test_the_forward_has_servings_bytes(name, dtype):
    q, k, v, _ = drawn(dtype)
    out, lse = gpu.packed_attention_cuda(q, k, v, cu_seqlens_of(LENGTHS).to(DEVICE), rule_of(name))
    for item, *given in zip(*(split(rows, LENGTHS) for rows in (out, q, k, v))):
        dense = dense_attention_cuda(*(rows.transpose(0, 1)[None] for rows in given), rule_of(name))
        assert_bitwise_equal(item, dense[0].transpose(0, 1))
    assert bool(lse.isfinite().all())


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_no_schedule_moves_a_bit(name, dtype):
    operands, cu_seqlens = operands_of(dtype, rule_of(name))
    dq, *dkv = (
        gpu.query_gradient(SCHEDULES[0], operands, cu_seqlens, rule_of(name)),
        *gpu.key_gradients(SCHEDULES[0], operands, cu_seqlens, rule_of(name)),
    )
    for schedule in SCHEDULES[1:]:
        assert_bitwise_equal(gpu.query_gradient(schedule, operands, cu_seqlens, rule_of(name)), dq, str(schedule))
    for schedule in (*SCHEDULES[1:], WIDE):
        for actual, expected in zip(gpu.key_gradients(schedule, operands, cu_seqlens, rule_of(name)), dkv):
            assert_bitwise_equal(actual, expected, str(schedule))


@pytest.mark.skipif(not is_hopper_here(), reason="the kernel is for Hopper GPUs")
@pytest.mark.parametrize("by_head", [pytest.param(by_head, marks=NEEDS_GPU) for by_head in (False, True)])
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "d"),
    [(torch.bfloat16, 8, 2, 128), (torch.float16, 6, 2, 128), (torch.bfloat16, 4, 4, 64)],
)
def test_hopper_kernels_do_not_move_a_bit(dtype, heads, kv_heads, d, by_head):
    """Lengths at and next to tile boundaries; everything after the last compared sequence is infinite."""
    lengths, rule = [3, 700, 1, 129, 64, 256, 127, 1500, 40], AttentionRule(d**-0.5, 0, 64)
    T, end, cu_seqlens = sum(lengths) + 5, sum(lengths[:-1]), cu_seqlens_of(lengths).to(DEVICE)
    q, k, v, g = (
        normal((T, count, d), dtype, seed).to(DEVICE) for seed, count in enumerate((heads, kv_heads, kv_heads, heads))
    )
    if by_head:
        q, k, v = (rows.transpose(0, 1).contiguous().transpose(0, 1) for rows in (q, k, v))
    lse = gpu.attention_lse(q, k, cu_seqlens, rule).t().contiguous()
    for rows in (q, k, v, g):
        rows[end:] = float("inf")
    operands = (g, q, k, v, lse, normal((heads, T), torch.float32, 9).to(DEVICE))
    for of_keys in (False, True):
        problem = gpu.gradient_problem(q, k, v, rule, of_keys=of_keys)
        expected, *others = (
            gpu.key_gradients(tiles, operands, cu_seqlens, rule)
            if of_keys
            else (gpu.query_gradient(tiles, operands, cu_seqlens, rule),)
            for tiles in (reference_tiles(problem), *(tiles for tiles in candidates(problem) if tiles.hopper))
        )
        assert others
        for actual in others:
            for ours, rows in zip(actual, expected, strict=True):
                assert bool(rows[:end].isfinite().all())
                assert_bitwise_equal(ours[:end], rows[:end])
                assert not ours[T - 5 :].any()


@exhaustive_interpreted
@pytest.mark.parametrize(("name", "dtype"), PACKED_CASES)
def test_what_else_is_packed_does_not_matter(name, dtype):
    given = drawn(dtype)
    rows = [split(rows, LENGTHS) for rows in given]
    expected = [split(rows, LENGTHS) for rows in forward_and_backward(*given, LENGTHS, rule_of(name)) if len(rows)]
    for mine in ([1, 0],) if INTERPRETED else itertools.chain(*list(packings(len(LENGTHS)).values())[1:]):
        lengths = [LENGTHS[number] for number in mine]
        actual = forward_and_backward(*(torch.cat([of[n] for n in mine]) for of in rows), lengths, rule_of(name))
        for ours, whole in zip([split(part, lengths) for part in actual if len(part)], expected):
            for number, item in zip(mine, ours):
                assert_bitwise_equal(item, whole[number], f"sequence {number} of {mine}")


@exhaustive_interpreted
@pytest.mark.parametrize(("name", "dtype"), PACKED_CASES)
def test_gradients_are_float64_autograds(name, dtype):
    q, k, v, g = drawn(dtype)
    rule = rule_of(name)
    leaves = [rows.double().requires_grad_() for rows in (q, k, v)]
    sinks = None if rule.sinks is None else rule.sinks.double().requires_grad_()
    exact_out = reference_packed_attention(*leaves, cu_seqlens_of(LENGTHS), rule._replace(sinks=sinks))
    exact = torch.autograd.grad(exact_out, leaves if sinks is None else [*leaves, sinks], g.double())
    _, _, *actual = forward_and_backward(q, k, v, g, LENGTHS, rule)
    if sinks is not None:
        actual[3] = actual[3].double().sum(0)
    most = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for ours, value in zip(actual, exact, strict=False):
        assert (ours.double() - value).norm() < most * value.norm()


@exhaustive_interpreted
@pytest.mark.parametrize("dtype", QUICK_DOT_DTYPES[:1])
def test_the_address_of_a_gradient_does_not_matter(dtype):
    q, k, v, g = drawn(dtype)
    shifted = torch.cat([g.new_zeros(1), g.flatten()])[1:].view(g.shape)
    assert shifted.data_ptr() % 16 and shifted.is_contiguous()
    expected, actual = (forward_and_backward(q, k, v, rows, LENGTHS, rule_of("plain")) for rows in (g, shifted))
    for ours, rows in zip(actual, expected):
        assert_bitwise_equal(ours, rows)


@pytest.mark.parametrize("dtype", QUICK_DOT_DTYPES[:1])
def test_padding_gets_zeros(dtype):
    q, k, v, g = drawn(dtype)
    count = LENGTHS[0]
    whole = forward_and_backward(*(rows[:count] for rows in (q, k, v, g)), LENGTHS[:1], rule_of("all"))
    for actual, item in zip(forward_and_backward(q, k, v, g, LENGTHS[:1], rule_of("all")), whole):
        assert_bitwise_equal(actual[:count], item)
        assert not actual[count:].any()


@exhaustive_interpreted
@pytest.mark.parametrize("dtype", QUICK_DOT_DTYPES)
@pytest.mark.parametrize("of_keys", [True] if INTERPRETED else [False, True])
def test_the_gate_admits_the_candidates(of_keys, dtype, tmp_path):
    q, k, v, _ = drawn(dtype)
    problem = gpu.gradient_problem(q, k, v, rule_of("plain"), of_keys=of_keys)
    fits = candidates(problem)[:1] if INTERPRETED else candidates(problem)
    bits = gpu.probe_bits(problem, torch.device(DEVICE))
    admitted = Tuner("gradients", {}, tmp_path).admitted(str(problem), reference_tiles(problem), fits, bits)
    assert len(admitted) >= len(fits) // 2  # what takes more memory than the GPU has is refused


@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS_GPU) for name in RULES])
def test_a_second_run_has_the_same_bytes(name):
    given = drawn(torch.bfloat16)
    first, second = (forward_and_backward(*given, LENGTHS, rule_of(name)) for _ in range(2))
    for a, b in zip(first, second):
        assert_bitwise_equal(a, b)
