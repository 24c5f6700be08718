"""The Triton kernels of exact-1: the bytes of the reference. A GPU also sweeps the functions over all 2^32 inputs."""

import dataclasses
import hashlib
import uuid
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

from detcompile.errors import ScheduleError
from detcompile.step import PADDING_SLOT
from detcompile.templates.attention.operands import Caches
from detcompile.templates.exact import attention_gpu, gpu
from detcompile.templates.exact.attention import ExactRule, _paged_cuda, paged_attention_cpu, row_words
from detcompile.templates.exact.cache_gpu import Rotation, write_heads
from detcompile.templates.exact.gpu import (
    RowFunction,
    divide_cuda,
    expert_cuda,
    expert_totals_cuda,
    function_cuda,
    layer_norm_cuda,
    linear_cuda,
    quantize_cuda,
    rms_norm_cuda,
    sum_cuda,
    totals_cuda,
)
from detcompile.templates.exact.linear import expert_totals_cpu, totals_cpu
from detcompile.templates.exact.ranks import peaks_of
from detcompile.templates.exact.rows import FUNCTIONS
from tests.bits import assert_bitwise_equal
from tests.exact import definition as exact
from tests.exact import golden
from tests.exact.definition import Array, F, I, U
from tests.exhaustive import exhaustive_unless
from tests.templates.exact.cases import (
    DIVIDED,
    QUOTIENTS,
    RULE_NAMES,
    RULES,
    assert_same,
    function_inputs,
    paged,
    ruled_case,
)
from tests.templates.exact.cases import tensor as host_tensor
from tests.templates.triton_interpreter import DEVICE, INTERPRETED, NEEDS_GPU, NEEDS_TRITON

pytestmark = NEEDS_TRITON
GPU_NAN = U(0x7FFFFFFF).view(F)


@pytest.fixture(autouse=True)
def exact_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter rounds an fma twice, its dot takes no int8, and a GPU's NaN has all bits set."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    def fma(builder, x, y, z):  # type: ignore[no-untyped-def]
        total = exact.fma(x.data, y.data, z.data)
        return interpreter.TensorHandle(np.where(np.isnan(total), GPU_NAN, total), z.dtype.scalar)

    def dot(builder, a, b, d, *_):  # type: ignore[no-untyped-def]
        x, y = (t.data if t.dtype.scalar == tl.int8 else (t.data.astype(U) << 16).view(F) for t in (a, b))
        x, y = x.astype(d.data.dtype), y.astype(d.data.dtype)
        assert d.dtype.scalar == tl.int32 or (np.abs(x) @ np.abs(y)).max() < 1 << 24, "float32 rounds larger sums"
        return interpreter.TensorHandle(x @ y + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def tensor(array: Array) -> Tensor:
    return host_tensor(array).to(DEVICE)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_equals_the_reference(name: str) -> None:
    x = function_inputs(name, 16 if INTERPRETED else 1)
    assert_same(function_cuda(tensor(x), name), getattr(exact, name)(x))


def test_quotient_equals_the_reference() -> None:
    x, y = golden.function_sample()[::16], golden.function_sample()[::-16].copy()
    assert_same(divide_cuda(tensor(x), tensor(y)), x / y)
    assert_same(divide_cuda(*map(tensor, DIVIDED)), QUOTIENTS)


def signed(bits: int) -> int:
    return bits - (1 << 32) if bits >> 31 else bits


def segment_sum(inputs: Tensor, y: Tensor) -> str:
    """Return golden.segment_sum of int32 inputs and float32 results, computed where they are."""
    u = torch.where(y.isnan(), 0x7FC00000, y.view(torch.int32)) ^ (inputs * signed(0x9E3779B1))
    for places, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):  # golden.mix
        u = (u ^ ((u >> places) & ((1 << (32 - places)) - 1))) * signed(factor)
    return f"{int((u.long() & 0xFFFFFFFF).sum()):x}"


def test_device_sum_equals_host_sum() -> None:
    inputs = np.arange(1 << 16, dtype=U) * U(65537)
    expected = golden.segment_sum(inputs, inputs.view(F))
    assert segment_sum(tensor(inputs.view(I)), tensor(inputs.view(F))) == expected


@pytest.mark.parametrize("name", golden.kept()["sweep"])
@NEEDS_GPU[1]
def test_function_gives_the_sums_of_the_sweep(name: str) -> None:
    sums = []
    for segment in range(256):
        inputs = torch.arange(1 << 24, dtype=torch.int32, device=DEVICE) + signed(segment << 24)
        sums.append(segment_sum(inputs, function_cuda(inputs.view(torch.float32), name)))
    assert hashlib.sha256(" ".join(sums).encode()).hexdigest()[:16] == golden.kept()["sweep"][name]["sha256 of all 256"]


def test_norm_equals_the_reference() -> None:
    weight = golden.values((200,), 2)
    assert_same(rms_norm_cuda(tensor(golden.rows()), tensor(weight), 1e-6), exact.rms_norm(golden.rows(), weight, 1e-6))
    bias, rows = golden.values((200,), 4), golden.rows() + F(1)
    actual = layer_norm_cuda(tensor(rows), tensor(weight), tensor(bias), 1e-5)
    assert_same(actual, exact.layer_norm(rows, weight, bias, 1e-5))


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("digits", [1, 2])
def test_quantized_rows_equal_the_reference(digits: int, right: bool) -> None:
    x = golden.rows()
    for actual, expected in zip(quantize_cuda(tensor(x), digits, right), exact.quantize(x, digits, right)):
        assert_same(actual, expected)


@pytest.mark.parametrize("name", golden.DIGITS)
@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 1, 1), (5, 7, 333), (65, 6, 128), (1, 2, 65536 + 70), (17, 130, 1040), (150, 260, 4112)]
)
def test_linear_equals_the_reference(name: str, M: int, N: int, K: int) -> None:
    left, right = golden.DIGITS[name]
    x, bias, w_scale = golden.values((M, K), 5), golden.values((N,), 6), np.abs(golden.values((N,), 7))
    w = golden.planes((right, N, K), 8)
    if K > exact.LONGEST:  # every product of the largest magnitude, and of one sign
        x[:], w[0], w[1:] = 1, -127, -128
    actual = linear_cuda(tensor(x), tensor(w), tensor(w_scale), tensor(bias), left)
    assert_same(actual, exact.linear(x, left, w, w_scale, bias))


@pytest.mark.parametrize("name", golden.DIGITS)
@pytest.mark.parametrize(("M", "N", "K"), [(34, 7, 70), (34, 7, 96), (1, 2, 65536 + 70)])
def test_totals_of_a_part_of_k_are_those_of_the_cpu(name: str, M: int, N: int, K: int) -> None:
    left, right = golden.DIGITS[name]
    x, w = golden.rows()[:, :K] if K < 200 else golden.values((M, K), 5), golden.planes((right, N, K), 8)
    peaks = peaks_of(host_tensor(golden.rows() if K < 200 else x * F(3)))
    actual = totals_cuda(tensor(x), peaks.to(DEVICE), tensor(w), left)
    assert_bitwise_equal(actual.cpu(), totals_cpu(host_tensor(x), peaks, host_tensor(w), left))


@pytest.fixture
def bfloat16_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETCOMPILE_INT8_TENSOR_CORES", "0")


@pytest.mark.parametrize("name", golden.DIGITS)
@pytest.mark.parametrize(("M", "N", "K"), [(5, 7, 333), (65, 6, 2100), (17, 130, 1040)])
@pytest.mark.usefixtures("bfloat16_cores", "gated")
def test_bfloat16_tensor_cores_give_the_same_products(name: str, M: int, N: int, K: int) -> None:
    left, right = golden.DIGITS[name]
    x, w, scales = golden.values((M, K), 5), golden.planes((right, N, K), 8), np.abs(golden.values((N,), 7))
    x[0], w[:, 0] = 1, -127  # the largest sums
    assert_same(linear_cuda(tensor(x), tensor(w), tensor(scales), None, left), exact.linear(x, left, w, scales))


@pytest.mark.parametrize("K", [144, 1040])
@pytest.mark.usefixtures("gated")
def test_product_that_differs_from_host_is_rejected(K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It differs in the last bit of one number. The right kernel is admitted."""
    x, w, scales = host_tensor(golden.values((17, K), 5)), host_tensor(golden.planes((1, 20, K), 8)), torch.ones(20)
    right = gpu._multiply

    def wrong(*operands: Any, **tiles: Any) -> None:
        right(*operands, **tiles)
        last = operands[5][-1, -1]
        last.copy_(last.nextafter(torch.full_like(last, float("inf"))))

    def multiply() -> Tensor:
        return linear_cuda(x.to(DEVICE), w.to(DEVICE), scales.to(DEVICE), None, 2)

    monkeypatch.setattr(gpu, "_require", gpu._require.__wrapped__)
    monkeypatch.setattr(gpu, "PRODUCTS", dataclasses.replace(gpu.PRODUCTS, family=f"planted {uuid.uuid4()}"))
    monkeypatch.setattr(gpu, "_multiply", wrong)
    with pytest.raises(ScheduleError, match="host's integers"):
        multiply()
    monkeypatch.setattr(gpu, "PRODUCTS", dataclasses.replace(gpu.PRODUCTS, family=f"right {uuid.uuid4()}"))
    monkeypatch.setattr(gpu, "_multiply", right)
    multiply()
    assert [row["admitted"] for row in gpu.PRODUCTS.tuner(torch.device(DEVICE)).table()] == [1]


def test_the_host_multiplies_whatever_the_default_device_is() -> None:
    product = gpu.Product(2, 2, 5, 48, gpu.PlainTiles(16, 32, 512, 4, 3, int8=True))
    expected = gpu.probe_bits(product, torch.device(DEVICE))(None)
    with torch.device("meta"):
        assert gpu.probe_bits(product, torch.device(DEVICE))(None) == expected


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("surroundings", ["gate", "norm", "sum", "rounded sum", "all"])
@pytest.mark.parametrize("M", exhaustive_unless(lambda M: M < 130 or not INTERPRETED, [5, 17, 130]))
def test_fused_linear_equals_its_parts(surroundings: str, digits: int, M: int) -> None:
    K, N, every = 208, 130, surroundings == "all"
    pair, norm = np.resize(golden.rows()[:, : 2 * K], (M, 2 * K)), golden.values((K,), 2)
    w, w_scale, bias = golden.planes((1, N, K), 8), np.abs(golden.values((N,), 7)), golden.values((N,), 6)
    residual, rounded = golden.values((M, N), 9), every or surroundings == "rounded sum"
    x, before, columns = pair[:, :K], RowFunction(), tensor(pair)
    if every or surroundings == "gate":
        x = exact.silu(x) * pair[:, K:]
        before = before._replace(up=columns[:, K:], function="silu")
    if every or surroundings == "norm":
        x = exact.rms_norm(x, norm, 1e-6)
        before = before._replace(norm=tensor(norm), eps=1e-6)
    expected = exact.linear(x, digits, w, w_scale, bias)
    given = None
    if every or "sum" in surroundings:
        expected, given = residual + expected, tensor(residual)
    expected = exact.bf16(expected) if rounded else expected
    weight = tensor(w), tensor(w_scale), tensor(bias)
    assert_same(linear_cuda(columns[:, :K], *weight, digits, before, given, rounded), expected)


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize(("D", "E", "has_norm"), [(64, 64, True), (36, 20, False), (36, 36, True)])
def test_norm_and_rotation_equal_separate_operations(digits: int, D: int, E: int, has_norm: bool) -> None:
    """10 heads of q and 9 of k and v, side by side in the rows of one product; two copies of 5 tokens in the cache."""
    T, HQ, HK = 5, 10, 9
    rows = np.resize(golden.rows(), (T, (HQ + 2 * HK) * D))
    q, k, v = (part.reshape(T, -1, D) for part in np.split(rows, [HQ * D, (HQ + HK) * D], 1))
    cos, sin = golden.values((T, E), 3), golden.values((T, E), 4)
    weights = golden.values((2, D), 2) if has_norm else [None, None]
    slots = torch.tensor([3, 9, PADDING_SLOT, 0, 7, 12, 1, 15, PADDING_SLOT, 4], device=DEVICE)

    def rotated(x: Array, weight: Array | None) -> Array:
        x = x if weight is None else exact.rms_norm(x, weight, 1e-6)
        turned = x[..., :E]
        half = np.concatenate([-turned[..., E // 2 :], turned[..., : E // 2]], -1)
        return np.concatenate([turned * cos[:, None] + half * sin[:, None], x[..., E:]], -1)

    def written(heads: list[Tensor], rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        zeros = [torch.zeros((4, 4, HK, row_words(D, digits)), device=DEVICE) for _ in range(2)]
        out = write_heads(Caches(*zeros), slots, *heads, digits, rotation)
        return out, torch.stack(zeros).view(torch.int32)

    columns = tensor(rows).split([HQ * D, HK * D, HK * D], 1)
    given = [None if weight is None else tensor(weight) for weight in weights]
    rotation = Rotation(tensor(cos), tensor(sin), *given, 1e-6)
    out, cached = written([part.unflatten(1, (-1, D)) for part in columns], rotation)
    assert_same(out, rotated(q, weights[0]))
    apart = written([tensor(x) for x in (q, rotated(k, weights[1]), v)], None)
    assert_bitwise_equal(cached, apart[1])


def test_sum_equals_the_reference() -> None:
    for x in (golden.rows(), golden.rows()[:, :1]):
        assert_same(sum_cuda(tensor(x)), exact.row_sum(x))


@pytest.mark.parametrize("name", golden.DIGITS)
def test_products_with_experts_equal_the_reference(name: str) -> None:
    left, right = golden.DIGITS[name]
    x, ids = golden.values((4, 333), 5), np.array([[0, 2], [2, 1], [0, 1], [2, 0]], np.int64)
    w, w_scale = golden.planes((right, 3, 7, 333), 8), np.abs(golden.values((3, 7), 7))
    bias = golden.values((3, 7), 6)
    expected = exact.expert_linear(x, ids, left, w, w_scale, bias)
    given = tensor(w), tensor(w_scale), tensor(bias), left
    assert_same(expert_cuda(tensor(x), tensor(ids).flatten(), *given), expected.reshape(8, -1))
    assert_same(expert_cuda(tensor(np.repeat(x, 2, 0)), tensor(ids).flatten(), *given), expected.reshape(8, -1))
    assert expert_cuda(tensor(x), tensor(np.full(8, 3, np.int64)), *given).eq(0).all()


@pytest.mark.parametrize("name", golden.DIGITS)
def test_totals_of_experts_are_those_of_the_cpu(name: str) -> None:
    left, right = golden.DIGITS[name]
    x, ids = golden.values((4, 70), 5), np.array([[0, 2], [2, 1], [0, 3], [2, 0]], np.int64)  # of three experts
    w, peaks = golden.planes((right, 3, 7, 70), 8), peaks_of(host_tensor(x * F(3)))
    expected = expert_totals_cpu(host_tensor(x), peaks, host_tensor(ids), host_tensor(w), left)
    actual = expert_totals_cuda(tensor(x), peaks.to(DEVICE), tensor(ids).flatten(), tensor(w), left)
    assert_bitwise_equal(actual.cpu(), expected.view(8, 7))


QUICK = ("kv 1, 1200", "poisoned")


@pytest.mark.parametrize(("cuts", "block_size"), [((), 16), ((1, 2, 40, 41, 129), 128)])
@pytest.mark.parametrize(
    "name", exhaustive_unless(lambda name: name in QUICK or not INTERPRETED, golden.kept()["attention"])
)
def test_attention_equals_the_reference(name: str, cuts: tuple[int, ...], block_size: int) -> None:
    q, k, v, digits = golden.attention_cases()[name]
    write = None
    if INTERPRETED:  # a program a token takes 0.1 s
        q, write = q[-3:] if len(k) > 200 else q[-12:], paged_attention_cpu
    out = paged(_paged_cuda, (q, k, v, digits), cuts, block_size, DEVICE, write)
    assert_same(out, golden.attended(q, k, v, digits))


def test_cached_rows_are_aligned_and_identify_digits() -> None:
    for features in range(4, 516, 4):
        one, two = (row_words(features, digits) for digits in (1, 2))
        assert one % 4 == two % 4 == 0
        assert features // 4 < one < two
        assert features // 2 < two


@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize("steps", ["whole", "single tokens"])
def test_no_split_of_the_keys_changes_a_byte(steps: str, unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 64 features, which Hopper's kernels take, as tiles of tokens and as single tokens."""
    q, k, v = (golden.values((1300, heads, 64), seed) for seed, heads in enumerate((4, 2, 2)))
    q, write = (q[-2:], paged_attention_cpu) if INTERPRETED else (q, None)
    cuts = () if steps == "whole" else range(len(k) - 4, len(k))
    monkeypatch.setattr(attention_gpu, "_unit", lambda *_: unit)
    for digits in (1,) if INTERPRETED else (1, 2):
        out = paged(_paged_cuda, (q, k, v, digits), tuple(cuts), 64, DEVICE, write)
        assert_same(out, golden.attended(q, k, v, digits))


@pytest.mark.parametrize(("rule", "width"), RULES, ids=RULE_NAMES)
def test_rules_equal_the_reference(rule: ExactRule, width: int) -> None:
    (q, k, v, digits), expected = ruled_case(rule, width)
    rule = ExactRule(*(field.to(DEVICE) if isinstance(field, Tensor) else field for field in rule))
    write = None
    if INTERPRETED:
        q, expected, write = q[-3:], expected[-3:], lambda *given: paged_attention_cpu(*given, rule)
    assert_same(paged(lambda *given: _paged_cuda(*given, rule), (q, k, v, digits), (), 16, DEVICE, write), expected)


@pytest.mark.parametrize("name", ["two blocks", "wide values", "all of them"])
@pytest.mark.usefixtures("bfloat16_cores")
def test_bfloat16_tensor_cores_give_the_same_attention(name: str) -> None:
    test_rules_equal_the_reference(*RULES[RULE_NAMES.index(name)])
