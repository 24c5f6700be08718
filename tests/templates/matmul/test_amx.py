"""Products of bfloat16 on AMX's tiles: the bits of the order for every shape, stride and value; M and threads."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.orders.float32 import fma_flushed
from detcompile.orders.numerics import matmul_order
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.experts.op import expert_matmul_cpu
from detcompile.templates.matmul.op import matmul_cpu, reference_matmul
from detcompile.templates.quantized.op import dequant_matmul_cpu
from detcompile.templates.quantized.weights import dequantized
from tests.bits import assert_bitwise_equal
from tests.templates.cases import ISAS, KINDS, assert_as_accurate, normal, sample
from tests.templates.quantized.cases import quantized_weight

pytestmark = pytest.mark.skipif("amx" not in ISAS, reason="needs AMX's tiles of bfloat16, and Linux's permission")

RADICES = st.sampled_from([(), (2,), (2, 2, 2), (3, 2), (2, 1, 3)])
LEAF_K = st.integers(1, 70) | st.sampled_from([96, 127, 256, 259, 515])
SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0**-133, -(2.0**-127), 2.0**-126, -(2.0**127)])


def in_its_order(x, w, radices=()):
    order = matmul_order(x.shape[1], torch.bfloat16, radices, "amx")
    return torch.from_numpy(order.evaluate(x.float().numpy(), w.float().numpy(), fma_flushed))


def on_tiles(x, w, *rest, radices=(), out_dtype=torch.float32):
    bias, residual = rest or (None, None)
    return matmul_cpu(x, w, bias, residual, radices, out_dtype, "amx")


def strided(values, along):
    """The same values inside NaN, of unit stride along one dim, at an odd place."""
    rows, columns = values.shape if along == 1 else values.t().shape
    wide = torch.full((rows + 1, columns + 9), torch.nan, dtype=values.dtype)
    inside = wide[1:, 5 : 5 + columns]
    inside.copy_(values if along == 1 else values.t())
    return inside if along == 1 else inside.t()


@given(st.integers(1, 70), st.integers(1, 70), LEAF_K, RADICES, st.sampled_from(KINDS))
def test_bits_are_those_of_the_order(m, n, leaf_k, radices, kind):
    k = leaf_k * math.prod(radices)
    x, w = (sample(kind, (rows, k), torch.bfloat16, rows) for rows in (m, n))
    expected = in_its_order(x, w, radices)
    assert_bitwise_equal(on_tiles(x, w, radices=radices), expected)
    for along in (0, 1):
        assert_bitwise_equal(on_tiles(strided(x, 1), strided(w, along), radices=radices), expected, f"along {along}")


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 100), st.floats(0.001, 0.5), st.integers(0, 1 << 20))
def test_special_values_are_those_of_the_order(m, n, k, share, seed):
    generator = torch.Generator().manual_seed(seed)
    operands = []
    for rows in (m, n):
        exponents = torch.randint(-66, -58, (rows, k), generator=generator)
        values = torch.randn(rows, k, generator=generator) * 2.0**exponents
        special = SPECIAL[torch.randint(len(SPECIAL), (rows, k), generator=generator)]
        chosen = torch.rand(rows, k, generator=generator) < share / k
        operands.append(torch.where(chosen, special, values).bfloat16())
    ours, expected = on_tiles(*operands), in_its_order(*operands)
    assert torch.equal(ours.isnan(), expected.isnan())
    assert_bitwise_equal(ours.nan_to_num(7.0, torch.inf, -torch.inf), expected.nan_to_num(7.0, torch.inf, -torch.inf))


def test_the_zero_of_a_chain_keeps_its_sign_behind_a_short_block():
    """Padding adds nothing: neither to a chain, nor to a running sum that was flushed to -0."""
    x = torch.zeros(1, 66)
    x[0, 0], x[0, 32], x[0, 64:] = 2.0**-63, -1.5 * 2.0**-63, -(2.0**-100)
    x, w = x.bfloat16(), torch.full((1, 66), 2.0**-63).bfloat16()
    for k in range(33, 67):
        assert_bitwise_equal(on_tiles(x[:, :k], w[:, :k]), in_its_order(x[:, :k], w[:, :k]), f"k={k}")
    assert math.copysign(1.0, float(on_tiles(x, w))) == -1.0


@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 80), RADICES)
def test_the_epilogue_is_that_of_every_instruction_set(m, n, leaf_k, radices):
    k = leaf_k * math.prod(radices)
    x, w = normal((m, k), torch.bfloat16, 1), normal((n, k), torch.bfloat16, 2)
    bias, residual = normal((n,), torch.bfloat16, 3), normal((m, n), torch.bfloat16, 4)
    y = (in_its_order(x, w, radices) + bias.float()).bfloat16()
    ours = on_tiles(x, w, bias, residual, radices=radices, out_dtype=None)
    assert_bitwise_equal(ours, (residual.float() + y.float()).bfloat16())


@given(m=st.integers(1, 70), start=st.integers(0, 1000), k=st.sampled_from([31, 64, 257]), n=st.integers(1, 67))
def test_a_row_ignores_its_neighbors(m, start, k, n):
    x, w = sample("heavy", (1100, k), torch.bfloat16, k), sample("normal", (n, k), torch.bfloat16, n)
    assert_bitwise_equal(on_tiles(x[start : start + m], w), on_tiles(x, w)[start : start + m])


@pytest.mark.parametrize("m", [1, 7, 129, 600])
def test_thread_counts_do_not_matter(m):
    x, w = normal((m, 300), torch.bfloat16, 11), normal((700, 300), torch.bfloat16, 12)
    threads = torch.get_num_threads()
    outs = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        outs.append(on_tiles(x, w, radices=(2,)))
    torch.set_num_threads(threads)
    assert_bitwise_equal(outs[0], in_its_order(x, w, (2,)))
    assert_bitwise_equal(outs[0], outs[1])
    assert_bitwise_equal(outs[0], outs[2])


@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_shards_combine_to_the_whole(tp_size):
    x, w = sample("heavy", (9, 41 * 8), torch.bfloat16, 3), sample("heavy", (35, 41 * 8), torch.bfloat16, 4)
    order = matmul_order(41 * 8, torch.bfloat16, (2, 2, 2), "amx")
    rest = getattr(order.subtree(tp_size), "radices", ())
    shards = zip(x.chunk(tp_size, 1), w.chunk(tp_size, 1), strict=True)
    parts = [on_tiles(*shard, radices=rest).numpy() for shard in shards]
    assert_bitwise_equal(torch.from_numpy(order.combine(parts)), on_tiles(x, w, radices=(2, 2, 2)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("radices", [(), (2, 2, 2)])
def test_as_accurate_as_torch(kind, radices):
    x, w, bias = (sample(kind, shape, torch.bfloat16, 17) for shape in ((64, 2048), (128, 2048), (128,)))
    ours = matmul_cpu(x, w, bias, None, radices, isa="amx")
    assert_as_accurate(ours, torch.nn.functional.linear(x, w, bias), reference_matmul(x, w, bias), kind)


def test_another_order_has_other_bits():
    """The data tells the orders apart: tiles sum unlike the chain of every other instruction set."""
    x, w = sample("heavy", (16, 768), torch.bfloat16, 1), sample("heavy", (64, 768), torch.bfloat16, 2)
    assert not torch.equal(on_tiles(x, w), matmul_cpu(x, w, None, None, (), torch.float32, "portable"))


def test_experts_are_summed_alike():
    x, w = normal((6, 100), torch.bfloat16, 5), normal((3, 40, 100), torch.bfloat16, 6)
    ids = torch.tensor([[0], [2], [2], [1], [3], [0]])
    actual = expert_matmul_cpu(x, ids, w, None, (), torch.float32, "amx")
    for row, expert in enumerate(ids[:, 0].tolist()):
        expected = torch.zeros(1, 40) if expert == 3 else in_its_order(x[row : row + 1], w[expert])
        assert_bitwise_equal(actual[row], expected)


@pytest.mark.parametrize("name", ["int4, groups of 64, symmetric", "fp8, blocks of 128"])
def test_quantized_weights_are_summed_alike(name):
    weight = quantized_weight(name, 70, 264)
    x = sample("heavy", (9, 264), torch.bfloat16, 7)
    expected = in_its_order(x, dequantized(weight, torch.bfloat16), (2,))
    assert_bitwise_equal(dequant_matmul_cpu(x, weight, None, None, (2,), torch.float32, "amx"), expected)


def test_the_probe_finds_no_fault_here():
    assert cpu_library.tile_faults() == 0
