"""matmul on the CPU: the order's bits for every M, stride, thread count and instruction set; accuracy; refusals."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput, NumericsError
from detcompile.orders import Blocked, Sequential, Tree
from detcompile.orders.float32 import fma_float32, fma_flushed
from detcompile.orders.numerics import matmul_order
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.matmul.op import matmul_cpu, reference_matmul
from tests.bits import assert_bitwise_equal
from tests.templates.cases import DTYPES, ISAS, KINDS, assert_as_accurate, normal, sample

RADICES = [(), (2, 2, 2), (8,), (3, 2), (2, 1, 3)]
OWN_ORDER = (torch.bfloat16, "amx")  # all others have one order for a dtype; this one: test_matmul_amx.py
ALIKE = [(dtype, isa) for dtype in DTYPES for isa in ISAS if (dtype, isa) != OWN_ORDER]


def in_its_order(x, w, radices=(), isa=None):
    """The bits of the order, float32: numpy evaluates it one multiply-add at a time."""
    fma = fma_flushed if x.dtype is torch.bfloat16 else fma_float32
    order = matmul_order(x.shape[1], x.dtype, radices, isa or cpu_library.isa())
    return torch.from_numpy(order.evaluate(x.float().numpy(), w.float().numpy(), fma))


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    m=st.integers(1, 70), start=st.integers(0, 13), k=st.sampled_from([1, 31, 128, 257, 384, 515]), n=st.integers(1, 67)
)
def test_a_row_ignores_its_neighbors(dtype, m, start, k, n):
    x, w = sample("heavy", (90, k), dtype, k), sample("normal", (n, k), dtype, n)
    together = matmul_cpu(x, w, None, None, (), torch.float32)
    assert_bitwise_equal(
        matmul_cpu(x[start : start + m], w, None, None, (), torch.float32), together[start : start + m]
    )


def test_a_row_ignores_its_neighbors_beyond_a_group():
    x, w = normal((1100, 300), torch.float32), normal((40, 300), torch.float32)
    for radices in ((), (2, 2)):
        together = matmul_cpu(x, w, None, None, radices)
        for row in (0, 90, 183, 184, 191, 192, 511, 512, 1023, 1024, 1099):
            alone = matmul_cpu(x[row : row + 1], w, None, None, radices)
            assert_bitwise_equal(alone, together[row : row + 1])
            assert_bitwise_equal(alone, in_its_order(x[row : row + 1], w, radices))


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    m=st.integers(1, 27) | st.just(61),  # up to several tiles
    n=st.integers(1, 50),
    leaf_k=st.sampled_from([1, 16, 33, 129, 290]),  # many leaves are packed at once, or a part of one
    radices=st.sampled_from(RADICES),
)
def test_bits_are_those_of_the_order(dtype, m, n, leaf_k, radices):
    k = leaf_k * int(np.prod(radices)) if radices else 5 * leaf_k
    x, w = sample("heavy", (m, k), dtype, 1), sample("heavy", (n, k), dtype, 2)
    expected = in_its_order(x, w, radices)
    for layout in (w, w.t().contiguous().t()):
        assert_bitwise_equal(matmul_cpu(x, layout, None, None, radices, torch.float32), expected)


@pytest.mark.parametrize(
    ("radices", "swapped"),
    [
        ((2, 2, 2), Tree(768, (4, 2), Blocked(96))),
        ((4, 2), Tree(768, (2, 2, 2), Blocked(96))),
        ((2, 2, 2), Tree(768, (8,), Blocked(96))),
        ((2, 2, 2), Tree(768, (2, 2), Blocked(192))),
        ((2,), Tree(768, (2,), Sequential(384))),
        ((), Sequential(768)),
        ((), Blocked(768, 64)),
    ],
    ids=str,
)
def test_another_order_has_other_bits(radices, swapped):
    x, w = sample("heavy", (16, 768), torch.float32, 1), sample("heavy", (64, 768), torch.float32, 2)
    ours = matmul_cpu(x, w, None, None, radices)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(ours, torch.from_numpy(swapped.evaluate(x.numpy(), w.numpy())))


def test_k_reversed_has_other_bits():
    x, w = normal((16, 768), torch.bfloat16, 1), normal((64, 768), torch.bfloat16, 2)
    forward = matmul_cpu(x, w, None, None, (), torch.float32)
    assert not torch.equal(matmul_cpu(x.flip(1), w.flip(1), None, None, (), torch.float32), forward)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("radices", "tp_size"), [((2, 2, 2), 2), ((2, 2, 2), 4), ((2, 2, 2), 8), ((8,), 8), ((3, 2), 3)]
)
def test_shards_combine_to_the_whole(dtype, radices, tp_size):
    k = 96 * 8
    x, w = sample("heavy", (9, k), dtype, 3), sample("heavy", (35, k), dtype, 4)
    order = matmul_order(k, dtype, radices)
    rest = getattr(order.subtree(tp_size), "radices", ())
    shards = zip(x.chunk(tp_size, 1), w.chunk(tp_size, 1), strict=True)
    parts = [matmul_cpu(x_part, w_part, None, None, rest, torch.float32).numpy() for x_part, w_part in shards]
    whole = matmul_cpu(x, w, None, None, radices, torch.float32)
    assert_bitwise_equal(torch.from_numpy(order.combine(parts)), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@given(m=st.integers(1, 15), n=st.integers(1, 40), k=st.integers(1, 300), offset=st.integers(0, 5))
def test_strides_and_offsets_do_not_matter(dtype, m, n, k, offset):
    x, w = normal((m, k), dtype, 5), normal((n, k), dtype, 6)
    expected = matmul_cpu(x, w, None, None, ())
    wide = torch.full((m, k + 7), torch.nan, dtype=dtype)
    wide[:, offset : offset + k] = x
    padded = torch.full((k + 2, n + 7), torch.nan, dtype=dtype)
    padded[1 : k + 1, offset : offset + n] = w.t()
    layouts = [w.t().contiguous().t(), padded[1 : k + 1, offset : offset + n].t(), w[:, None].expand(n, 2, k)[:, 1]]
    both_strided = torch.empty((n, 2, k, 2), dtype=dtype)[:, 1, :, 1].copy_(w)
    for layout in [*layouts, both_strided]:
        assert_bitwise_equal(matmul_cpu(wide[:, offset : offset + k], layout, None, None, ()), expected)
    assert_bitwise_equal(matmul_cpu(x.t().contiguous().t(), w, None, None, ()), expected)


@pytest.mark.parametrize(("dtype", "isa"), ALIKE)
def test_instruction_sets_agree(dtype, isa):
    for m, n, k, radices in ((1, 33, 515, ()), (4, 33, 198, (3, 2)), (13, 64, 768, (2, 2, 2)), (61, 47, 96, (3, 2))):
        x, w = sample("heavy", (m, k), dtype, 7), sample("heavy", (n, k), dtype, 8)
        bias, residual = normal((n,), dtype, 9), normal((m, n), dtype, 10)
        for weight in (w, w.t().contiguous().t()):
            ours = matmul_cpu(x, weight, bias, residual, radices, isa=isa)
            assert_bitwise_equal(ours, matmul_cpu(x, w, bias, residual, radices, isa="portable"), isa)


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormals_overflow_and_nan_are_alike_on_every_instruction_set(dtype):
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    values = torch.tensor([largest, -largest, smallest, smallest / 4, -0.0, 0.0, torch.inf, torch.nan, 1.0, -3.0]).to(
        dtype
    )
    x, w = values[:, None].repeat(1, 3).contiguous(), values[:, None] * torch.tensor([1.0, 0.0, 0.5]).to(dtype)
    outs = [matmul_cpu(x, w, None, None, (), isa=isa) for item, isa in ALIKE if item is dtype]
    for out in outs:
        assert torch.equal(out.isnan(), outs[0].isnan())
        assert_bitwise_equal(out.nan_to_num(7.0), outs[0].nan_to_num(7.0))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(m=st.integers(1, 14), k=st.integers(1, 40), seed=st.integers(0, 1 << 20))
def test_chains_through_subnormals_are_those_of_the_order(dtype, isa, m, k, seed):
    """Products and sums around 2^-126, where bfloat16 flushes and float32 does not."""
    x, w = near_the_smallest_normal(m, 37, k, dtype, seed)
    assert_bitwise_equal(matmul_cpu(x, w, None, None, (), torch.float32, isa), in_its_order(x, w, (), isa), isa)


def near_the_smallest_normal(m, n, k, dtype, seed):
    """x [m, k] and w [n, k] with products of 2^-130 to 2^-120; every third of them has a subnormal operand."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.where(torch.arange(k) % 3 == 2, torch.tensor([[-128], [3]]), torch.tensor([[-63], [-62]]))
    x, w = (
        torch.randn(rows, k, generator=generator).double()
        * 2.0 ** (exponents[i] + torch.randint(-2, 3, (rows, k), generator=generator)).double()
        for i, rows in enumerate((m, n))
    )
    return x.to(dtype), w.to(dtype)


def test_flushing_is_seen():
    """The data above serves its purpose: without flushing, bfloat16 has other bits."""
    x, w = near_the_smallest_normal(9, 37, 40, torch.bfloat16, 1)
    kept = matmul_order(40, torch.bfloat16, (), cpu_library.isa()).evaluate(x.float().numpy(), w.float().numpy())
    assert (in_its_order(x, w).numpy() != kept).mean() > 0.5
    subnormal = (x.float().abs() < 2.0**-126) & (x != 0)
    assert subnormal.any()


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("isa", ISAS)
def test_nodes_and_epilogues_keep_the_subnormals_that_chains_flush(isa, rows):
    """Two leaves of normal numbers with a subnormal sum; then one of two with a subnormal sum with the bias."""
    x = torch.tensor([[1.5, -1.0]], dtype=torch.bfloat16).repeat(rows, 1) * 2.0**-63
    w = torch.full((3, 2), 2.0**-63, dtype=torch.bfloat16)
    node = matmul_cpu(x, w, None, None, (2,), torch.float32, isa)
    assert (node == 2.0**-127).all(), f"{isa}: {node[0].tolist()}"
    bias = torch.full((3,), -(2.0**-126))
    sums = matmul_cpu(x[:, :1].contiguous(), w[:, :1].contiguous(), bias, None, (), torch.float32, isa)
    assert (sums == 2.0**-127).all(), f"{isa}: {sums[0].tolist()}"


@pytest.mark.parametrize("isa", ISAS)
def test_the_signs_of_zeros_and_an_odd_k_are_those_of_the_order(isa):
    """A chain that was flushed to -0 stays -0 behind the odd last k of a pair, and in each leaf of a tree."""
    x = torch.tensor([[-(2.0**-100), 2.0**-100, 0.0]]).bfloat16()
    w = torch.tensor([[2.0**-100, 0.0, 1.0], [2.0**-100, -0.0, -1.0], [1.0, 1.0, -0.0]]).bfloat16()
    for k in (1, 2, 3):
        ours = matmul_cpu(x[:, :k], w[:, :k], None, None, (), torch.float32, isa)
        assert_bitwise_equal(ours, in_its_order(x[:, :k], w[:, :k], (), isa), f"{isa} k={k}")
    leaves = [value.repeat(1, 2) for value in (x, w)]
    ours = matmul_cpu(*leaves, None, None, (2,), torch.float32, isa)
    assert_bitwise_equal(ours, in_its_order(*leaves, (2,), isa), isa)


@pytest.mark.parametrize("m", [1, 3, 20])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_blocks_of_negative_zeros_add_to_one(isa, m, blocks):
    """A chain from +0 gives -0 only where a product below all subnormals rounds to it; sums of such blocks are -0."""
    x, w = torch.zeros(m, 128 * blocks), -torch.ones(5, 128 * blocks)
    x[:, ::128], w[:, ::128] = 1e-30, -1e-30
    expected = in_its_order(x, w, (), isa)
    assert torch.signbit(expected).all() and not expected.any()
    assert_bitwise_equal(matmul_cpu(x, w, None, None, (), isa=isa), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 9])
def test_weights_may_change_in_place(dtype, m):
    """Nothing of a weight is kept between calls, however it is written to."""
    x, w = normal((m, 96), dtype, 21), normal((40, 96), dtype, 22)
    before = matmul_cpu(x, w, None, None, ())
    changed = normal((40, 96), dtype, 23)
    w.data.copy_(changed)  # no version counter sees this
    after = matmul_cpu(x, w, None, None, ())
    assert_bitwise_equal(after, matmul_cpu(x, changed.clone(), None, None, ()))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("m", [1, 7, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_thread_counts_do_not_matter(dtype, m):
    x, w = normal((m, 300), dtype, 11), normal((700, 300), dtype, 12)
    threads = torch.get_num_threads()
    outs = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        outs.append(matmul_cpu(x, w, None, None, (2,)))
    torch.set_num_threads(threads)
    assert_bitwise_equal(outs[0], outs[1])
    assert_bitwise_equal(outs[0], outs[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_epilogue_rounds_once_then_adds_the_residual(dtype):
    x, w = normal((5, 64), dtype, 13), normal((37, 64), dtype, 14)
    bias, residual = normal((37,), dtype, 15), normal((5, 37), dtype, 16)
    acc = matmul_cpu(x, w, None, None, (), torch.float32)
    y = (acc + bias.float()).to(dtype)
    assert_bitwise_equal(matmul_cpu(x, w, bias, None, ()), y)
    assert_bitwise_equal(matmul_cpu(x, w, bias, residual, ()), (residual.float() + y.float()).to(dtype))
    assert_bitwise_equal(matmul_cpu(x, w, None, residual, ()), (residual.float() + acc.to(dtype).float()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("radices", [(), (2, 2, 2)])
def test_as_accurate_as_torch(dtype, kind, radices):
    x, w, bias = (
        sample(kind, (64, 2048), dtype, 17),
        sample(kind, (128, 2048), dtype, 18),
        sample(kind, (128,), dtype, 19),
    )
    theirs = torch.nn.functional.linear(x, w, bias)
    assert_as_accurate(matmul_cpu(x, w, bias, None, radices), theirs, reference_matmul(x, w, bias), f"{dtype} {kind}")


def test_none_stands_for_no_radices():
    """AOTInductor's proxy executor hands None where the graph has an empty list."""
    x, w = normal((3, 64), torch.float32, 1), normal((5, 64), torch.float32, 2)
    assert_bitwise_equal(matmul_cpu(x, w, None, None, None), matmul_cpu(x, w, None, None, []))


def test_no_rows_give_an_empty_result():
    out = torch.ops.detcompile.matmul(torch.empty(0, 8), torch.empty(5, 8), None, None, [])
    assert out.shape == (0, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_op_and_its_fake_agree(dtype):
    x, w = normal((3, 8), dtype), normal((5, 8), dtype)
    torch.library.opcheck(torch.ops.detcompile.matmul.default, (x, w, None, None, [2], torch.float32))


@pytest.mark.parametrize(
    ("x", "w", "bias", "residual", "message"),
    [
        ((2, 8), (5, 9), None, None, r"w is torch\.float32 \(5, 9\) .* \[N, K\] with K = 8"),
        ((2, 3, 8), (5, 8), None, None, r"x .* must be .* \[M, K\]"),
        ((2, 8), (5, 8), (4,), None, r"bias .* \(4,\) .* \[N\] with N = 5"),
        ((2, 8), (5, 8), None, (5,), r"residual .* \[M, N\] with M = 2, N = 5"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(x, w, bias, residual, message):
    bias, residual = (None if shape is None else torch.zeros(shape) for shape in (bias, residual))
    with pytest.raises(InvalidInput, match=message):
        torch.ops.detcompile.matmul(torch.zeros(x), torch.zeros(w), bias, residual, ())


def test_dtypes_that_do_not_fit_are_refused():
    with pytest.raises(InvalidInput, match=r"w is torch\.bfloat16 .* must be torch\.float32"):
        torch.ops.detcompile.matmul(torch.zeros(2, 8), torch.zeros(5, 8, dtype=torch.bfloat16), None, None, ())
    with pytest.raises(InvalidInput, match=r"x is torch\.float64 .*Convert"):
        torch.ops.detcompile.matmul(torch.zeros(2, 8).double(), torch.zeros(5, 8).double(), None, None, ())


def test_leaves_that_do_not_divide_k_are_refused():
    with pytest.raises(NumericsError, match=r"K=12 does not split into 8 equal leaves.*tp_sizes that fit"):
        matmul_cpu(torch.zeros(2, 12), torch.zeros(5, 12), None, None, (2, 2, 2))
    with pytest.raises(NumericsError, match="at least 1"):
        torch.ops.detcompile.matmul(torch.zeros(2, 12), torch.zeros(5, 12), None, None, (0,))
