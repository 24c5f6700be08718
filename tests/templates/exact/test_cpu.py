"""The CPU kernels of exact-1: the bytes of the reference, on every instruction set."""

import functools
from itertools import pairwise

import numpy as np
import pytest
import torch

from detcompile.errors import InvalidInput
from detcompile.templates.exact.attention import ExactRule, dense_attention_cpu, paged_attention_cpu
from detcompile.templates.exact.linear import expert_linear_cpu, expert_totals_cpu, linear_cpu, totals_cpu
from detcompile.templates.exact.ranks import peaks_of, scaled
from detcompile.templates.exact.rows import (
    FUNCTIONS,
    divide_cpu,
    function_cpu,
    layer_norm_cpu,
    quantize_cpu,
    rms_norm_cpu,
    sum_cpu,
)
from tests.exact import definition as exact
from tests.exact import driver, golden
from tests.exact.definition import F, U
from tests.exhaustive import EXHAUSTIVE_BY_CASE, exhaustive_unless
from tests.templates.cases import ISAS
from tests.templates.exact.cases import (
    DIVIDED,
    QUOTIENTS,
    RULE_NAMES,
    RULES,
    assert_same,
    function_inputs,
    paged,
    ruled_case,
    tensor,
)

pytestmark = pytest.mark.parametrize("isa", ISAS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_equals_the_reference(name: str, isa: str) -> None:
    x = function_inputs(name)
    for part in (x, x[:5], x.reshape(16, -1)[:, :33]):
        assert_same(function_cpu(tensor(part), name, isa), getattr(exact, name)(part))


def test_quotient_equals_the_reference(isa: str) -> None:
    x, y = golden.function_sample(), golden.function_sample()[::-1].copy()[:4096]
    assert_same(divide_cpu(tensor(x), tensor(y[7:8]), isa), x / y[7:8])
    assert_same(divide_cpu(tensor(x.reshape(16, -1)), tensor(y), isa), x.reshape(16, -1) / y)
    assert_same(divide_cpu(*map(tensor, DIVIDED), isa), QUOTIENTS)


@EXHAUSTIVE_BY_CASE
@pytest.mark.parametrize("name", golden.kept()["sweep"])
def test_function_gives_the_sums_of_the_sweep(name: str, isa: str) -> None:
    """A sixteenth of all inputs, 2^28: 20 CPU seconds a function and instruction set."""
    sums = []
    for segment in range(0, 256, 16):
        inputs = np.arange(1 << 24, dtype=U) + U(segment << 24)
        sums.append(golden.segment_sum(inputs, function_cpu(tensor(inputs.view(F)), name, isa).numpy()))
    assert sums == golden.kept()["sweep"][name]["every 16th segment"]


@pytest.mark.parametrize("K", [1, 200])
def test_norm_equals_the_reference(K: int, isa: str) -> None:
    x, weight = golden.rows()[:, :K], golden.values((K,), 2)
    assert_same(rms_norm_cpu(tensor(x), tensor(weight), 1e-6, isa), exact.rms_norm(x, weight, 1e-6))
    bias = golden.values((K,), 4)
    for rows in (x, x + F(100)):
        actual = layer_norm_cpu(tensor(rows), tensor(weight), tensor(bias), 1e-5, isa)
        assert_same(actual, exact.layer_norm(rows, weight, bias, 1e-5))


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("digits", [1, 2])
def test_quantized_rows_equal_the_reference(digits: int, right: bool, isa: str) -> None:
    for x in (golden.rows(), golden.rows()[:, 7:8]):
        for actual, expected in zip(quantize_cpu(tensor(x), digits, right, isa), exact.quantize(x, digits, right)):
            assert_same(actual, expected)


SIZES = [(1, 1, 1), (5, 7, 333), (4, 8, 64), (33, 6, 100), (5, 6, 65536 + 70)]
SIZES += [(16, 32, 64), (40, 71, 100), (9, 32, 70), (17, 33, 65536), (49, 64, 192)]  # and panels


@pytest.mark.parametrize("name", golden.DIGITS)
@pytest.mark.parametrize(("M", "N", "K"), SIZES)
def test_linear_equals_the_reference(name: str, M: int, N: int, K: int, isa: str) -> None:
    left, right = golden.DIGITS[name]
    x, bias, w_scale = golden.values((M, K), 5), golden.values((N,), 6), np.abs(golden.values((N,), 7))
    w = golden.planes((right, N, K), 8)
    if K >= exact.LONGEST:  # every product of the largest magnitude, and of one sign
        x[:], w[0], w[1:] = 1, -127, -128
    for b in (None, bias):
        actual = linear_cpu(tensor(x), tensor(w), tensor(w_scale), None if b is None else tensor(b), left, isa)
        assert_same(actual, exact.linear(x, left, w, w_scale, b))


@pytest.mark.parametrize("name", golden.DIGITS)
@pytest.mark.parametrize("cuts", [(70,), (1, 199), (7, 8, 100)])
def test_parts_of_k_add_up_to_the_reference(name: str, cuts: tuple[int, ...], isa: str) -> None:
    left, right = golden.DIGITS[name]
    x, w, w_scale, bias = golden.rows(), golden.planes((right, 38, 200), 8), *(golden.values((38,), n) for n in (7, 6))
    parts = [slice(*edges) for edges in pairwise((0, *cuts, 200))]
    peaks = torch.stack([peaks_of(tensor(x[:, part])) for part in parts]).amax(0)
    totals = sum(totals_cpu(tensor(x[:, part]), peaks, tensor(w[:, :, part]), left, isa) for part in parts)
    for b in (None, bias):
        actual = scaled(totals, peaks, tensor(w_scale), None if b is None else tensor(b), left)
        assert_same(actual, exact.linear(x, left, w, w_scale, b))


def test_sum_equals_the_reference(isa: str) -> None:
    for x in (golden.rows(), golden.rows()[:, :1]):
        assert_same(sum_cpu(tensor(x), isa), exact.row_sum(x))


@pytest.mark.parametrize("name", golden.DIGITS)
def test_products_with_experts_equal_the_reference(name: str, isa: str) -> None:
    left, right = golden.DIGITS[name]
    x, ids = golden.values((4, 333), 5), np.array([[0, 2], [2, 1], [0, 1], [2, 0]], np.int64)
    w, w_scale = golden.planes((right, 3, 7, 333), 8), np.abs(golden.values((3, 7), 7))
    bias = golden.values((3, 7), 6)
    expected = exact.expert_linear(x, ids, left, w, w_scale, bias)
    given = tensor(ids), tensor(w), tensor(w_scale), tensor(bias), left, isa
    assert_same(expert_linear_cpu(tensor(x), *given), expected)
    assert_same(expert_linear_cpu(tensor(np.repeat(x, 2, 0).reshape(4, 2, -1)), *given), expected)
    none = torch.full((4, 2), 3)
    assert expert_linear_cpu(tensor(x), none, *given[1:]).eq(0).all()


@pytest.mark.parametrize("name", golden.DIGITS)
def test_parts_of_k_of_experts_add_up_to_the_reference(name: str, isa: str) -> None:
    left, right = golden.DIGITS[name]
    x, ids = golden.values((4, 333), 5), np.array([[0, 2], [2, 3], [0, 1], [2, 0]], np.int64)
    w = golden.planes((right, 4, 7, 333), 8)
    w_scale = np.ones((4, 7), F)
    for rows in (tensor(x), tensor(np.repeat(x, 2, 0)).view(4, 2, -1)):
        peaks = peaks_of(rows).flatten()
        totals = [
            expert_totals_cpu(rows[..., part], peaks, tensor(ids), tensor(w[..., part]), left, isa)
            for part in (slice(0, 100), slice(100, 333))
        ]
        by_pair = peaks_of(tensor(x))[:, None].expand(4, 2)
        actual = scaled(totals[0] + totals[1], by_pair, tensor(w_scale[ids]), None, left)
        assert_same(actual, exact.expert_linear(x, ids, left, w, w_scale))
    none = expert_totals_cpu(rows, peaks, torch.full((4, 2), 4), tensor(w), left, isa)
    assert none.eq(0).all()


def test_poisoned_row_leaves_others_unchanged(isa: str) -> None:
    x, w, w_scale = golden.rows(), golden.planes((1, 3, 200), 8), np.ones(3, F)
    y = linear_cpu(tensor(x), tensor(w), tensor(w_scale), None, 2, isa)
    assert_same(y, exact.linear(x, 2, w, w_scale))
    assert y.isnan().any(1).tolist() == (~(np.abs(x).max(1) < 2.0**40)).tolist()


def test_weight_of_more_digits_is_rejected(isa: str) -> None:
    with pytest.raises(InvalidInput, match="2 digits"):
        linear_cpu(torch.ones(1, 4), torch.ones(2, 3, 4, dtype=torch.int8), torch.ones(3), None, 1, isa)


@pytest.mark.parametrize(("cuts", "block_size"), [((), 16), ((1, 2, 40, 41, 129), 128), ((128, 139), 300)])
@pytest.mark.parametrize("name", ["kv 1, 300", "kv 2, 300", "kv 2, 1200", "large scores", "poisoned"])
def test_attention_equals_the_reference(name: str, cuts: tuple[int, ...], block_size: int, isa: str) -> None:
    case = golden.attention_cases()[name]
    out = paged(lambda *given: paged_attention_cpu(*given, isa=isa), case, cuts, block_size)
    assert exact.digest(out.numpy()) == golden.kept()["attention"][name]


@pytest.mark.parametrize(("H", "G", "dim"), [(1, 1, 4), (6, 2, 64), (3, 1, 132)])
def test_heads_of_other_sizes_equal_the_reference(H: int, G: int, dim: int, isa: str) -> None:
    q, k, v = golden.attention_operands(131, 131, H, G, dim)
    batch = [tensor(np.stack([x.swapaxes(0, 1)] * 2)) for x in (q, k, v)]
    out = dense_attention_cpu(*batch, 2, isa=isa)
    for row in out:
        assert_same(row.transpose(0, 1), golden.attended(q, k, v, 2))


@pytest.mark.parametrize(("rule", "width"), RULES, ids=RULE_NAMES)
def test_rules_equal_the_reference(rule: ExactRule, width: int, isa: str) -> None:
    case, expected = ruled_case(rule, width)
    for cuts in ((), (1, 40, 129)):
        assert_same(paged(lambda *given: paged_attention_cpu(*given, rule, isa), case, cuts, 16), expected)


def test_non_finite_sink_poisons_its_head(isa: str) -> None:
    q, k, v, digits = golden.attention_cases()["kv 1, 300"]
    for sink in (float("nan"), float("inf"), -float("inf"), 3e38):
        rule = ExactRule(sinks=torch.tensor([0.0, sink, 0.0, 0.0]))
        out = paged(functools.partial(paged_attention_cpu, rule=rule, isa=isa), (q, k, v, digits), (), 16)
        assert out.isnan().all((0, 2)).tolist() == [False, True, False, False]
        assert_same(out, golden.attended(q, k, v, digits, 0.0, 0, 0.0, rule.sinks.numpy()))


@pytest.mark.parametrize(
    "variant", exhaustive_unless(lambda name: name == "exact16", exact.VARIANTS, EXHAUSTIVE_BY_CASE)
)
def test_tiny_gives_its_golden_logits(variant: str, isa: str) -> None:
    decoder = exact.Decoder(golden.TINY, exact.VARIANTS[variant], driver.Native(isa), 64)
    logits, _ = decoder.forward(exact.fixed_tokens(64))
    assert exact.digest(logits) == golden.kept()["logits"][variant]["64"]
