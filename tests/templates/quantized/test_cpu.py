"""dequant_matmul: the bytes of matmul over the dequantized weights, which are what their format says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from detcompile.errors import InvalidInput, NumericsError
from detcompile.templates.matmul.op import matmul_cpu
from detcompile.templates.quantized.op import dequant_matmul_cpu, dequantized_cpu, reference_dequant_matmul
from detcompile.templates.quantized.weights import QuantizedWeight, dequantized, pack_nibbles, unpack_nibbles
from tests.bits import assert_bitwise_equal
from tests.templates.cases import DTYPES, ISAS, assert_as_accurate, sample
from tests.templates.quantized.cases import FORMATS, quantized_weight

N, K = 37, 264


def product(x: Tensor, weight: QuantizedWeight, *epilogue: Tensor | None, radices=(), isa: str | None = None) -> Tensor:
    bias, residual = (*epilogue, None, None)[:2]
    return dequant_matmul_cpu(x, weight, bias, residual, radices, isa=isa)


@given(n=st.integers(1, 9), k=st.integers(1, 400), seed=st.integers(0, 99))
def test_nibbles_come_out_as_they_went_in(n: int, k: int, seed: int) -> None:
    q = torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(seed))
    packed = pack_nibbles(q)
    assert packed.shape == (n, -(-k // 128) * 64) and torch.equal(unpack_nibbles(packed, k).long(), q)


def test_of_128_k_a_byte_holds_those_64_apart() -> None:
    q = torch.zeros(1, 256, dtype=torch.int64)
    q[0, 3], q[0, 67], q[0, 128 + 63], q[0, 255] = 5, 9, 1, 2
    packed = pack_nibbles(q)[0]
    assert packed[3] == 5 + 16 * 9 and packed[64 + 63] == 1 + 16 * 2 and packed.sum() == packed[3] + packed[127].int()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_dequantized_with_one_rounding(name: str, dtype: torch.dtype, isa: str) -> None:
    weight = quantized_weight(name, N, K)
    expected = dequantized(weight, dtype)
    assert_bitwise_equal(dequantized_cpu(weight, dtype, isa=isa), expected)
    assert_bitwise_equal(dequantized_cpu(weight, dtype, 5, 20, isa), expected[5:25], "some rows")
    exact = dequantized(weight, torch.float64)
    assert torch.equal(exact.to(torch.float32).to(dtype), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_every_float8_has_its_value(isa: str) -> None:
    w = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    weight = QuantizedWeight(w, torch.ones(1, 1), None, None, 256, 256, 1)
    assert_bitwise_equal(dequantized_cpu(weight, torch.float32, isa=isa), w.float())


@given(seed=st.integers(0, 99), isa=st.sampled_from(ISAS))
def test_minimum_is_added_to_rounded_product(seed: int, isa: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-128, 128, (3, 48), generator=generator, dtype=torch.int8)
    scales, mins = torch.randn(2, 3, 3, generator=generator)
    product = q.numpy().astype("float32") * scales.t().repeat_interleave(16, 1).numpy()
    weight = QuantizedWeight(q, scales, None, mins, 48, 16, 1)
    expected = torch.from_numpy(product + mins.t().repeat_interleave(16, 1).numpy())
    assert_bitwise_equal(dequantized(weight, torch.float32), expected)
    assert_bitwise_equal(dequantized_cpu(weight, torch.float32, isa=isa), expected)


@pytest.mark.parametrize("radices", [(), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_it_has_the_bytes_of_matmul(name: str, dtype: torch.dtype, radices: tuple[int, ...]) -> None:
    weight = quantized_weight(name, N, K)
    x, bias, residual = (sample("heavy", shape, dtype, seed) for seed, shape in enumerate([(7, K), (N,), (7, N)]))
    for epilogue in ((None, None), (bias, residual)):
        expected = matmul_cpu(x, dequantized(weight, dtype), *epilogue, radices)
        assert_bitwise_equal(product(x, weight, *epilogue, radices=radices), expected, f"{name} {dtype}")


@given(rows=st.integers(1, 40), row=st.integers(0, 39), name=st.sampled_from(sorted(FORMATS)))
def test_a_row_ignores_its_neighbors(rows: int, row: int, name: str) -> None:
    weight, x = quantized_weight(name, N, K), sample("heavy", (rows, K), torch.bfloat16)
    item = slice(row % rows, row % rows + 1)
    assert_bitwise_equal(product(x, weight)[item], product(x[item], weight))


def test_tiles_of_features_do_not_show() -> None:
    n, k = 700, 4096  # more features than are dequantized at a time
    weight, x = quantized_weight("int4, groups of 128", n, k), sample("normal", (3, k), torch.bfloat16)
    assert_bitwise_equal(product(x, weight), matmul_cpu(x, dequantized(weight, torch.bfloat16), None, None, ()))


@pytest.mark.parametrize(
    "name", ["int4, groups of 128", "int4, groups of 32, mins", "int8, channels", "fp8, blocks of 128"]
)
def test_it_is_as_accurate_as_torch(name: str) -> None:
    weight, x = quantized_weight(name, N, 512), sample("normal", (200, 512), torch.bfloat16)
    theirs = x @ dequantized(weight, torch.bfloat16).t()
    assert_as_accurate(product(x, weight), theirs, reference_dequant_matmul(x, weight), name)


def test_what_does_not_fit_is_refused() -> None:
    weight, x = quantized_weight("int4, groups of 128", N, K), sample("normal", (3, K), torch.float32)

    def product(x: Tensor, weight: QuantizedWeight, radices=()) -> Tensor:
        given = (x, *weight[:4], None, None, weight.group, weight.rows, radices)
        return torch.ops.detcompile.dequant_matmul(*given)

    with pytest.raises(InvalidInput, match="pack_nibbles"):
        product(x[:, :100], weight)
    with pytest.raises(InvalidInput, match=r"zeros is torch\.int16"):
        product(x, weight._replace(scales=weight.scales.t()))
    with pytest.raises(InvalidInput, match="int16"):
        product(x, weight._replace(zeros=weight.zeros.float()))
    mins = weight.scales.float()
    with pytest.raises(InvalidInput, match="mins exclude zeros"):
        product(x, weight._replace(mins=mins))
    with pytest.raises(InvalidInput, match=r"mins is torch\.float32 \(2, 37\)"):
        product(x, weight._replace(zeros=None, mins=mins[:2]))
    with pytest.raises(InvalidInput, match=r"w is torch\.float16"):
        product(x, weight._replace(w=torch.zeros(N, K, dtype=torch.float16)))
    with pytest.raises(NumericsError, match="equal leaves"):
        product(x, weight, radices=(5,))
