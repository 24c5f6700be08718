"""Row kernels: the bytes of Row.evaluate, whatever the neighbors; errors within 1.05x of torch's own."""

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from detcompile.orders.numerics import row_order
from detcompile.templates.rows import softmax_gpu, sums_and_norms_gpu
from detcompile.templates.rows import tiles as row_tiles
from detcompile.templates.rows.softmax_gpu import log_softmax_cuda, logsumexp_cuda, softmax_cuda
from detcompile.templates.rows.sums_and_norms_gpu import (
    SQUARE,
    layer_norm_cuda,
    rms_norm_cuda,
    row_sum_cuda,
    row_var_mean_cuda,
)
from detcompile.templates.tokens import embedding
from tests.bits import assert_bitwise_equal
from tests.exhaustive import EXHAUSTIVE, exhaustive_unless
from tests.templates.triton_interpreter import DEVICE, INTERPRETED, NEEDS_GPU, NEEDS_TRITON

pytestmark = NEEDS_TRITON

LENGTHS = [1, 33, 127, 128, 1025, 33000]
if not INTERPRETED:
    LENGTHS += [31, 32, 129, 256, 257, 1000, 1023, 1024, 4095, 4096, 4097, 8193, 16384, 32768, 151936, 262144]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def heavy_tailed(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal, spread = (torch.randn(*shape, generator=generator) for _ in range(2))
    return (normal * torch.exp(spread)).to(dtype).to(DEVICE)


def evaluate(terms: Tensor, length: int, radices: tuple[int, ...] = ()) -> Tensor:
    order = row_order(length, "cuda", radices, terms.dtype)
    return torch.from_numpy(order.evaluate(terms.float().cpu().numpy())).to(DEVICE)


@pytest.mark.parametrize("length", LENGTHS)
def test_row_sum_has_the_bytes_of_its_order(length: int) -> None:
    for dtype in DTYPES:
        x = heavy_tailed(5, length, dtype=dtype)
        assert_bitwise_equal(row_sum_cuda(x, torch.float32), evaluate(x, length), f"{dtype} {length}")


@pytest.mark.parametrize("length", LENGTHS)
def test_squares_are_rounded_before_they_are_added(length: int) -> None:
    x = heavy_tailed(5, length)
    assert_bitwise_equal(row_sum_cuda(x, term=SQUARE), evaluate(x * x, length))


def test_the_sum_of_negative_zeros_is_that_of_its_order() -> None:
    for length in (1, 33, 128, 1025):
        x = torch.full((5, length), -0.0, device=DEVICE)
        assert_bitwise_equal(row_sum_cuda(x), evaluate(x, length), str(length))


@pytest.mark.parametrize("length", LENGTHS)
def test_variance_and_mean_have_the_bytes_of_their_order(length: int) -> None:
    x = heavy_tailed(5, length)
    var, mean = row_var_mean_cuda(x, 1.0)
    expected_mean = evaluate(x, length) / torch.tensor(float(length), device=DEVICE)  # torch multiplies by 1 / scalar
    assert_bitwise_equal(mean, expected_mean)
    centered = x - expected_mean[:, None]
    expected = evaluate(centered * centered, length) / torch.tensor(float(max(length - 1, 0)), device=DEVICE)
    assert_bitwise_equal(var.nan_to_num(), expected.nan_to_num())


def test_weights_outside_the_range_of_the_rows_count_whole() -> None:
    """bfloat16 ones beside float16 rows; LLVM would round them to float16 (device/primitives.py)."""
    x = heavy_tailed(5, 130, dtype=torch.float16)
    weight = 1.25 * 2.0 ** torch.arange(-65, 65, device=DEVICE).bfloat16()
    plain = rms_norm_cuda(x, None, 1e-6, True)
    assert_bitwise_equal(rms_norm_cuda(x, weight, 1e-6, True), (plain.float() * weight.float()).half())


@pytest.mark.parametrize("radices", [(2, 2, 2), (3, 2), (8,)])
@pytest.mark.parametrize("length", [7, 1000, 4097])
def test_logsumexp_over_sharded_leaves_has_the_bytes_of_its_order(length: int, radices: tuple[int, ...]) -> None:
    x = heavy_tailed(3, length)
    # Without the maximum and with exact powers of two, exp and log cannot blur which sum was taken.
    x = torch.where(x > 0, 0.0, -torch.inf)
    x[:, 0] = 0.0
    ones = torch.exp(x)
    total = evaluate(ones, length, radices)
    assert_bitwise_equal(logsumexp_cuda(x, radices), logsumexp_cuda(torch.log(total)[:, None], ()))
    y = heavy_tailed(3, length)
    softmax = softmax_cuda(y, torch.float32, radices)
    exponentials = softmax_cuda(y, torch.float32, radices) * torch.exp(logsumexp_cuda(y, radices) - y.amax(-1))[:, None]
    assert torch.allclose(softmax, y.softmax(-1), atol=1e-6) and exponentials.isfinite().all()


NEIGHBORS = [(dtype, length) for length in (33, 128, 1000, 4097) for dtype in DTYPES]
if INTERPRETED:
    NEIGHBORS = [(torch.float16, 128), pytest.param(torch.bfloat16, 1000, marks=EXHAUSTIVE)]


@pytest.mark.parametrize(("dtype", "length"), NEIGHBORS)
def test_a_row_ignores_its_neighbors(dtype: torch.dtype, length: int) -> None:
    x = heavy_tailed(9, length, dtype=dtype)
    weight, bias = heavy_tailed(length, dtype=dtype, seed=1), heavy_tailed(length, dtype=dtype, seed=2)
    kernels = {
        "row_sum": lambda t: row_sum_cuda(t),
        "var": lambda t: row_var_mean_cuda(t, 1.0)[0],
        "rms_norm": lambda t: rms_norm_cuda(t, weight, 1e-6, True),
        "layer_norm": lambda t: layer_norm_cuda(t, weight, bias, 1e-5),
        "softmax": lambda t: softmax_cuda(t, torch.float32, ()),
        "softmax of 16 bits": lambda t: softmax_cuda(t, torch.bfloat16, ()),
        "softmax of 16 bits in leaves": lambda t: softmax_cuda(t, torch.bfloat16, (2, 2)),
        "log_softmax": lambda t: log_softmax_cuda(t, None, (2, 2)),
        "logsumexp": lambda t: logsumexp_cuda(t, ()),
    }
    strided = torch.zeros(9, length + 3, dtype=dtype, device=DEVICE)
    strided[:, :length] = x
    for name, kernel in kernels.items():
        whole = kernel(x)
        for first, last in ((3, 4), (1, 7)) if INTERPRETED else ((0, 1), (3, 4), (8, 9), (1, 7)):
            assert_bitwise_equal(kernel(x[first:last]), whole[first:last], f"{name} rows {first}..{last}")
        assert_bitwise_equal(kernel(strided[:, :length]), whole, f"{name} over strided rows")
        assert_bitwise_equal(kernel(x.view(3, 3, length)).flatten(0, 1), whole, f"{name} in three dims")
        poisoned = x.clone()
        poisoned[4] = torch.nan
        assert_bitwise_equal(kernel(poisoned)[:4], whole[:4], f"{name} beside NaN")


@pytest.mark.parametrize("length", [32, 128, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_a_wider_product_are_read_in_place(length: int, dtype: torch.dtype) -> None:
    """q is a slice of the rows of qkv: two strides, the inner one not a whole row of x."""
    wide = heavy_tailed(3, 4 * length, dtype=dtype)
    heads = wide[:, length : 3 * length].view(3, 2, length)
    rows = row_tiles.row_layout(heads, 8)
    assert rows.start.data_ptr() == heads.data_ptr() and (rows.T, rows.heads) == (6, 2)
    weight = heavy_tailed(length, dtype=dtype, seed=1)
    assert_bitwise_equal(row_sum_cuda(heads), row_sum_cuda(heads.contiguous()))
    assert_bitwise_equal(
        rms_norm_cuda(heads, weight, 1e-6, True), rms_norm_cuda(heads.contiguous(), weight, 1e-6, True)
    )
    assert_bitwise_equal(softmax_cuda(heads, None, ()), softmax_cuda(heads.contiguous(), None, ()))


def test_rows_that_are_not_aligned_as_their_length_are_copied() -> None:
    wide = heavy_tailed(4, 100)
    padded = heavy_tailed(4, 102)[:, :100]  # two elements short of being aligned
    cases = ((wide[:, :64], False), (wide[:, 1:65], True), (wide.t()[:32], True), (padded, True), (wide[2:, 8:], False))
    for x, copied in cases:
        rows = row_tiles.row_layout(x, 4)
        assert (rows.start.data_ptr() != x.data_ptr()) == copied, x.shape
        assert_bitwise_equal(row_sum_cuda(x), row_sum_cuda(x.contiguous()))


@pytest.mark.parametrize("radices", [(), (2, 2)])
def test_softmax_of_a_row_in_parts_is_torchs(radices: tuple[int, ...]) -> None:
    """The parts have maxima of their own, and some hold nothing but -inf."""
    x = heavy_tailed(3, 20_000) * 8
    x[0, :9000] = -torch.inf
    x[1] -= 300.0
    exact = x.double()
    assert torch.allclose(softmax_cuda(x, None, radices).double(), exact.softmax(-1), rtol=1e-5, atol=1e-12)
    assert torch.allclose(log_softmax_cuda(x, None, radices).double(), exact.log_softmax(-1), rtol=1e-5, atol=1e-5)
    assert torch.allclose(logsumexp_cuda(x, radices).double(), exact.logsumexp(-1), rtol=1e-6)
    for row in range(3):
        assert_bitwise_equal(softmax_cuda(x[row], None, radices), softmax_cuda(x, None, radices)[row])


def test_a_planted_order_swap_is_seen() -> None:
    """The same terms in another order give other bytes, so that the equalities above mean something."""
    for length in (129, 1000, 4097):
        x = heavy_tailed(16, length)
        assert not torch.equal(row_sum_cuda(x, torch.float32), evaluate(x.flip(1), length))
        order = row_order(length, "cuda", (), x.dtype)
        swapped = type(order)(length, order.lanes // 2, order.vector)
        assert not np.array_equal(row_sum_cuda(x).cpu().numpy(), swapped.evaluate(x.cpu().numpy()))


def test_rows_of_infinities_are_torchs() -> None:
    x = torch.zeros(4, 40, device=DEVICE)
    x[0] = -torch.inf
    x[1, 3:] = -torch.inf
    x[2, 5] = torch.inf
    wide = torch.full((4, 17_000), -torch.inf, device=DEVICE)
    wide[:, 9000:9040] = x
    for rows, radices in ((x, ()), (x, (2, 2)), (wide, ())):
        for dtype in DTYPES:
            actual, expected = softmax_cuda(rows, dtype, radices), rows.softmax(-1).to(dtype)
            assert torch.allclose(actual, expected, rtol=max(1e-5, torch.finfo(dtype).eps), equal_nan=True)
        assert torch.allclose(log_softmax_cuda(rows, None, radices), rows.log_softmax(-1), equal_nan=True)
        assert torch.allclose(logsumexp_cuda(rows, radices), rows.logsumexp(-1), equal_nan=True)


@pytest.mark.parametrize("radices", [(), (2, 2)])
def test_a_nan_among_infinities_is_not_lost(radices: tuple[int, ...]) -> None:
    """The maximum of a part does not see a NaN; its sum does."""
    x = torch.full((1, 20_000), -torch.inf, device=DEVICE)
    x[0, 11_000], x[0, 5] = torch.nan, 1.0
    assert logsumexp_cuda(x, radices).isnan().all()
    assert log_softmax_cuda(x, None, radices).isnan().all()
    assert all(softmax_cuda(x, dtype, radices).isnan().all() for dtype in DTYPES)


def test_empty_inputs() -> None:
    x = torch.zeros(0, 16, device=DEVICE)
    assert row_sum_cuda(x).shape == (0,) and softmax_cuda(x, None, ()).shape == (0, 16)
    assert rms_norm_cuda(x, None, 1e-6, False).shape == (0, 16)
    assert_bitwise_equal(row_sum_cuda(torch.zeros(3, 0, device=DEVICE)), torch.zeros(3, device=DEVICE))


def test_embedding_copies_rows_and_never_reads_outside() -> None:
    weight = heavy_tailed(50, 33)
    ids = torch.tensor([[0, 49, 7], [-1, 50, 2**40]], device=DEVICE)
    out = embedding.embedding_cuda(weight, ids)
    assert_bitwise_equal(out[0], weight[ids[0]])
    assert out[1].isnan().all()
    assert_bitwise_equal(embedding.embedding_cuda(weight.t().contiguous().t(), ids[:1].int())[0], out[0])
    assert embedding.embedding_cuda(weight, ids[:0]).shape == (0, 3, 33)


class TestOnTheGpu:
    pytestmark = NEEDS_GPU

    @pytest.mark.parametrize("length", [20, 128, 1000])
    def test_shuffles_and_spelled_out_additions_agree(self, length: int) -> None:
        x = heavy_tailed(5, length)
        with mock.patch.multiple(
            sums_and_norms_gpu,
            _row_sum_kernel=_without_shuffles(sums_and_norms_gpu._row_sum_kernel),
            _chunks_kernel=_without_shuffles(sums_and_norms_gpu._chunks_kernel),
        ):
            spelled_out = row_sum_cuda(x)
        assert_bitwise_equal(spelled_out, row_sum_cuda(x))

    @pytest.mark.parametrize(
        ("length", "tile"),
        exhaustive_unless(
            lambda case: case[0] in (31, 96, 257) or case[1] == (2048, 4, 2),
            itertools.product(
                (31, 64, 80, 96, 128, 192, 256, 257, 512),
                ((2048, 4, 2), (4096, 4, 4), (1024, 2, 2), (2048, 2, 1), (256, 4, 2)),
            ),
        ),
    )
    def test_every_tile_of_short_rows_has_the_same_bytes(self, length: int, tile: tuple[int, int, int]) -> None:
        weight = heavy_tailed(length, dtype=torch.bfloat16, seed=1)
        kernels = {
            "row_sum": lambda t: row_sum_cuda(t, torch.float32),
            "rms_norm": lambda t: rms_norm_cuda(t, weight, 1e-6, True),
            "layer_norm": lambda t: layer_norm_cuda(t, weight, weight, 1e-5),
            "softmax": lambda t: softmax_cuda(t, torch.float32, ()),
            "softmax of 16 bits": lambda t: softmax_cuda(t, torch.float16, ()),
            "log_softmax": lambda t: log_softmax_cuda(t, torch.float32, ()),
            "log_softmax of 16 bits": lambda t: log_softmax_cuda(t, torch.float16, ()),
        }
        for dtype in (torch.bfloat16, torch.float32):
            x = heavy_tailed(1001, length, dtype=dtype)
            expected = {name: kernel(x) for name, kernel in kernels.items()}
            short = row_tiles.ShortTile(*tile)
            with (
                mock.patch.object(sums_and_norms_gpu, "SHORT", short),
                mock.patch.multiple(softmax_gpu, SHORT=short, SHORT_FEW=short, SHORT_LOG=short),
            ):
                for name, kernel in kernels.items():
                    assert_bitwise_equal(kernel(x), expected[name], f"{name} {dtype}")

    @pytest.mark.parametrize("length", LENGTHS)
    def test_a_rows_sum_ignores_the_weight(self, length: int) -> None:
        """A tile's layout, hence its tree, could follow a weight that is loaded in wider pieces than the rows are."""
        for dtype in DTYPES:
            x = heavy_tailed(5, length, dtype=dtype)
            plain = rms_norm_cuda(x, None, 1e-6, True).float()
            for weight_dtype in DTYPES:
                weight = heavy_tailed(length, dtype=weight_dtype, seed=1)
                expected = (plain * weight.float()).to(dtype)
                assert_bitwise_equal(rms_norm_cuda(x, weight, 1e-6, True), expected, f"{dtype} {weight_dtype} {length}")

    @pytest.mark.parametrize("length", LENGTHS)
    def test_a_rows_sum_ignores_the_results_dtype(self, length: int) -> None:
        """As with the weight: 16 bits are stored in wider pieces than rows of fp32 are loaded."""
        for dtype in DTYPES:
            x = heavy_tailed(1001, length, dtype=dtype)
            wide = log_softmax_cuda(x, torch.float32, ())
            for narrow in (torch.bfloat16, torch.float16):
                assert_bitwise_equal(log_softmax_cuda(x, narrow, ()), wide.to(narrow), f"{dtype} {narrow} {length}")

    def test_shared_reciprocals_give_the_bytes_of_divisions(self) -> None:
        x = _rows_with_exponentials_of_every_size(128)
        shared = softmax_cuda(x, None, ())
        with mock.patch.object(softmax_gpu, "ONCE_WIDTH", 0):
            assert_bitwise_equal(shared, softmax_cuda(x, None, ()))

    @pytest.mark.parametrize("length", [128, 20_000])  # of one kernel, and in parts
    @pytest.mark.parametrize(("dtype", "others"), [(torch.bfloat16, 3e-4), (torch.float16, 5e-4)])
    def test_approximations_are_the_rounded_quotient_or_next_to_it(
        self, dtype: torch.dtype, others: float, length: int
    ) -> None:
        x = _rows_with_exponentials_of_every_size(length)
        actual, exact = softmax_cuda(x, dtype, ()), x.double().softmax(-1)
        near = exact.to(dtype)
        assert_bitwise_equal(actual.isnan(), near.isnan())
        seen = (exact >= 2.0**-125).flatten()  # a smaller quotient may be of an exponential that is taken for zero
        units = (actual.view(torch.int16).int() - near.view(torch.int16).int()).flatten()[seen].abs()
        assert units.max() <= 1 and units.double().mean() <= others, (units.max(), units.double().mean())
        assert actual.flatten()[~seen & ~exact.isnan().flatten()].max() <= 2.0**-124

    def test_tiles_of_many_short_rows_have_the_same_bytes(self) -> None:
        x = heavy_tailed(20_000, 128)
        assert x.numel() > softmax_gpu.FEW_ELEMENTS  # so that the first rows alone take the other tile
        assert_bitwise_equal(row_sum_cuda(x), evaluate(x, 128))
        for dtype in DTYPES:
            assert_bitwise_equal(softmax_cuda(x, dtype, ())[:100], softmax_cuda(x[:100], dtype, ()))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("length", [128, 4096, 4097])
    def test_errors_stay_within_torchs(self, length: int, dtype: torch.dtype) -> None:
        x = heavy_tailed(4096, length, dtype=dtype)  # so many rows that the ratio of two errors is known within 2 %
        weight, bias = heavy_tailed(length, dtype=dtype, seed=1), heavy_tailed(length, dtype=dtype, seed=2)
        f = torch.nn.functional
        pairs = {
            "row_sum": (row_sum_cuda, lambda t: t.sum(-1)),
            "rms_norm": (
                lambda t: rms_norm_cuda(t, weight, 1e-6, False),
                lambda t: f.rms_norm(t, (length,), weight.to(t), 1e-6),
            ),
            "layer_norm": (
                lambda t: layer_norm_cuda(t, weight, bias, 1e-5),
                lambda t: f.layer_norm(t, (length,), weight.to(t), bias.to(t), 1e-5),
            ),
            "softmax": (lambda t: softmax_cuda(t, None, ()), lambda t: t.softmax(-1)),
            "log_softmax": (lambda t: log_softmax_cuda(t, None, ()), lambda t: t.log_softmax(-1)),
            "logsumexp": (lambda t: logsumexp_cuda(t, ()), lambda t: t.to(_at_least_float32(t)).logsumexp(-1)),
        }
        report = {}
        for name, (ours, torchs) in pairs.items():
            exact = torchs(x.double())
            errors = [(run(x).double() - exact).norm() / exact.norm() for run in (ours, torchs)]
            report[name] = tuple(e.item() for e in errors)
        print(dtype, length, {k: f"{a:.3e} / {b:.3e}" for k, (a, b) in report.items()})
        assert all(ours <= 1.05 * torchs for ours, torchs in report.values()), report


def _rows_with_exponentials_of_every_size(length: int) -> Tensor:
    """Subnormal ones and subnormal quotients too, zeros, NaN, and a row of -inf alone."""
    rows = 20_000 * 128 // length
    x = heavy_tailed(rows, length) * torch.logspace(-2, 2, rows, device=DEVICE)[:, None]
    x[::7, 3:90] = -torch.inf
    x[::11] = -torch.linspace(0.0, 110.0, length, device=DEVICE)
    x[5, 5], x[6] = torch.nan, -torch.inf
    return x


def _at_least_float32(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def _without_shuffles(kernel):  # type: ignore[no-untyped-def]
    class Launcher:
        def __getitem__(self, grid):  # type: ignore[no-untyped-def]
            return lambda *args, **options: kernel[grid](*args, **options | {"SHUFFLE": False})

    return Launcher()
