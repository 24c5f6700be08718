"""GEMM kernels: one class of bits an order, whatever the schedule, the token count and the neighbors."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from detcompile.errors import ScheduleError
from detcompile.orders.numerics import matmul_order
from detcompile.templates.device.cuda_graphs import constants, for_graph
from detcompile.templates.device.gate import Tuner
from detcompile.templates.matmul.candidates import candidates, reference_schedule
from detcompile.templates.matmul.gate_gpu import silu_mul_cuda
from detcompile.templates.matmul.gpu import MATMUL, gemm_problem, matmul_cuda, probe_bits, run_gated, tune_matmul
from detcompile.templates.matmul.launch import run_schedule
from detcompile.templates.matmul.schedules import (
    BatchedLeaves,
    GemmProblem,
    HopperTiles,
    PointerTiles,
    RingTiles,
    TmaTiles,
)
from tests.bits import assert_bitwise_equal
from tests.exhaustive import exhaustive_unless
from tests.gpus import is_hopper_here
from tests.templates.triton_interpreter import (
    DEVICE,
    DOT_DTYPES,
    INTERPRETED,
    NEEDS_GPU,
    NEEDS_TRITON,
)

pytestmark = NEEDS_TRITON
HOPPER = is_hopper_here()

BUCKETS = [8, 16, 32, 64, 128, 256, 512, 1024]
SMALL = [
    PointerTiles(16, 32, 32, 4, 2),
    PointerTiles(32, 16, 64, 4, 2, swapped=True),
    PointerTiles(16, 32, 16, 4, 2, split=True),
    PointerTiles(16, 16, 32, 4, 2, swapped=True, split=True),
]


def heavy_tailed(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal, spread = (torch.randn(*shape, generator=generator) for _ in range(2))
    return (normal * torch.exp(spread)).to(dtype).to(DEVICE)


def problem_of(x: Tensor, w: Tensor, radices: tuple[int, ...], bucket: int) -> GemmProblem:
    out = x.new_empty(1, w.shape[0])
    return dataclasses.replace(gemm_problem(x, w, None, None, radices, out), bucket=bucket)


CHAINS: list[tuple[int, tuple[int, ...]]] = [(1, ()), (127, ()), (128, ()), (129, ()), (300, ())]
TREES = [(144, (2, 2, 2)), (390, (3, 2)), (264, (8,)), (96, (2,) * 5)]


@pytest.mark.parametrize(
    ("k", "radices"), CHAINS + (exhaustive_unless(lambda tree: tree[0] == 144, TREES) if INTERPRETED else TREES)
)
def test_float32_has_the_bytes_of_its_order(k: int, radices: tuple[int, ...]) -> None:
    x, w = heavy_tailed(5, k), heavy_tailed(18, k, seed=1)
    bias, residual = heavy_tailed(18, seed=2), heavy_tailed(5, 18, seed=3)
    order = matmul_order(k, torch.float32, radices)
    exact = torch.from_numpy(order.evaluate(x.cpu().numpy(), w.cpu().numpy())).to(DEVICE)
    for schedule in SMALL:
        if len(radices) > 4 and not schedule.split:
            continue
        for weights in (w, w.t().contiguous().t()):
            assert_bitwise_equal(run_schedule(schedule, x, weights, radices=radices), exact, f"{order} {schedule}")
            out = run_schedule(schedule, x, weights, bias, residual, radices)
            assert_bitwise_equal(out, residual + (exact + bias), f"{order} {schedule} with its epilogue")


def test_a_residual_outside_the_range_of_the_output_counts_whole() -> None:
    """A bfloat16 one beside float16 outputs; LLVM would round it to float16 (device/primitives.py)."""
    x, w = heavy_tailed(5, 64), heavy_tailed(40, 64, seed=1)
    w[:20] *= 1e-8  # outputs among float16's subnormals, beside a residual halfway between two of them
    w[20:] *= 400  # and outputs that bring one beyond float16's range back into it
    residual = torch.tensor([2.5 * 2.0**-24] * 20 + [7e4] * 20, device=DEVICE).bfloat16().expand(5, 40)
    for schedule in SMALL:
        y = run_schedule(schedule, x, w, out_dtype=torch.float16)
        actual = run_schedule(schedule, x, w, None, residual, out_dtype=torch.float16)
        assert_bitwise_equal(actual, (residual.float() + y.float()).half(), str(schedule))


@pytest.mark.parametrize(("k", "levels"), [(144, 3), (200, 1), (96, 5), (320, 2)])
def test_leaves_side_by_side_have_the_bytes_of_their_tree(k: int, levels: int) -> None:
    x, w = heavy_tailed(19, k), heavy_tailed(40, k, seed=1)
    bias, residual = heavy_tailed(40, seed=2), heavy_tailed(19, 40, seed=3)
    radices = (2,) * levels
    order = matmul_order(k, torch.float32, radices)
    exact = torch.from_numpy(order.evaluate(x.cpu().numpy(), w.cpu().numpy())).to(DEVICE)
    schedule = BatchedLeaves(16, 16, 16, 4, 2)
    for weights in (w, w.t().contiguous().t()):
        assert_bitwise_equal(run_schedule(schedule, x, weights, radices=radices), exact, f"{order}")
        out = run_schedule(schedule, x, weights, bias, residual, radices)
        assert_bitwise_equal(out, residual + (exact + bias), f"{order} with its epilogue")
    leaf = k >> levels
    moved = run_schedule(schedule, x.roll(leaf, 1), w.roll(leaf, 1), radices=radices)
    assert torch.equal(moved, exact) == (levels == 1), "other leaves have met, but for two, whose sum commutes"


def test_leaves_side_by_side_refuse_other_trees() -> None:
    x, w = heavy_tailed(3, 288), heavy_tailed(16, 288)
    schedule = BatchedLeaves(16, 16, 16, 4, 2)
    for radices in ((), (2, 3)):
        with pytest.raises(ScheduleError, match="radix 2"):
            run_schedule(schedule, x, w, radices=radices)
    with pytest.raises(ScheduleError, match="leaves of 144"):
        run_schedule(schedule, x, w, radices=(2,))


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("features", "k"), [(48, 300), (20, 64), (7, 129)])
def test_a_gate_inside_the_product_has_the_bytes_of_one_behind_it(features: int, k: int, dtype: torch.dtype) -> None:
    x, w = heavy_tailed(19, k, dtype=dtype), heavy_tailed(2 * features, k, dtype=dtype, seed=1) / 64
    w[3], w[features + 5, 7] = 0, torch.inf
    plain = PointerTiles(16, 32, 32, 4, 2, swapped=True)
    expected = run_gated(plain, x, w)
    assert_bitwise_equal(run_gated(dataclasses.replace(plain, gated=True), x, w), expected)
    assert_bitwise_equal(expected, silu_mul_cuda(*run_schedule(plain, x, w).chunk(2, dim=1)))


def test_a_gate_needs_swapped_tiles() -> None:
    x, w = heavy_tailed(3, 32), heavy_tailed(16, 32)
    with pytest.raises(ScheduleError, match="has no gate"):
        run_gated(PointerTiles(16, 16, 32, 4, 2, gated=True), x, w)


@pytest.mark.parametrize(("n", "k", "radices"), [(64, 128, (2,)), (64, 100, ()), (72, 128, ())])
def test_ring_rejects_unsupported_problems(n: int, k: int, radices: tuple[int, ...]) -> None:
    x, w = torch.zeros(1, k, dtype=torch.bfloat16), torch.zeros(n, k, dtype=torch.bfloat16)
    schedule = RingTiles(8, 64, 256, 5, gated=n == 72)
    with pytest.raises(ScheduleError, match=f"K={k}"):
        run_gated(schedule, x, w) if schedule.gated else run_schedule(schedule, x, w, radices=radices)


def test_float32_sees_a_planted_order_swap() -> None:
    x, w = heavy_tailed(5, 300), heavy_tailed(18, 300, seed=1)
    order = matmul_order(300, torch.float32, ())
    exact = torch.from_numpy(order.evaluate(x.cpu().numpy(), w.cpu().numpy())).to(DEVICE)
    assert not torch.equal(run_schedule(SMALL[0], x.flip(1), w.flip(1)), exact)


def test_empty_inputs() -> None:
    x, w = heavy_tailed(0, 64), heavy_tailed(18, 64)
    assert matmul_cuda(x, w, None, None, ()).shape == (0, 18)
    assert matmul_cuda(heavy_tailed(3, 64), w[:0], None, None, ()).shape == (3, 0)


@pytest.mark.usefixtures("gated")
def test_the_op_chooses_a_gated_schedule() -> None:
    x, w = heavy_tailed(3, 140, dtype=DOT_DTYPES[0]), heavy_tailed(24, 140, dtype=DOT_DTYPES[0], seed=1)
    out = matmul_cuda(x, w, None, None, (2, 2))
    reference = reference_schedule(problem_of(x, w, (2, 2), 16))
    assert_bitwise_equal(out, run_schedule(reference, x, w, radices=(2, 2)))
    rows = MATMUL.tuner(x.device).table()
    assert any(row["chosen"] and "Tree(140, 2x2" in str(row["problem"]) for row in rows)


class TestOnTheGpu:
    pytestmark = NEEDS_GPU

    @pytest.mark.parametrize(
        ("dtype", "radices", "k"),
        exhaustive_unless(
            {(torch.bfloat16, radices, 1000) for radices in ((), (2, 2, 2), (8,))}.union(
                {(torch.bfloat16, (2, 2, 2), 1024), (torch.float32, (), 1000), (torch.float32, (8,), 1000)}
            ).__contains__,
            itertools.product(DOT_DTYPES, ((), (2, 2, 2), (8,)), (1024, 1000)),
        ),
    )
    def test_every_schedule_has_one_class_of_bits(self, dtype: torch.dtype, radices: tuple[int, ...], k: int) -> None:
        x, w = heavy_tailed(261, k, dtype=dtype), heavy_tailed(336, k, dtype=dtype, seed=1)
        gate = Tuner("test", {}, MATMUL.tuner(x.device).path.parent / "test")
        gate._decisions.clear()
        problem = problem_of(x, w, radices, 256)
        every = dict.fromkeys(s for bucket in BUCKETS for s in candidates(dataclasses.replace(problem, bucket=bucket)))
        bits = probe_bits(problem, x.device)
        admitted = gate.admitted(str(problem), reference_schedule(problem), list(every), bits)
        refused = gate.refusals().get(str(problem), {})
        print(f"{dtype} K={k} {radices}: {len(admitted)} admitted, {len(refused)} refused {refused}")
        assert not any("bits differ" in reason for reason in refused.values()), refused
        assert len(admitted) >= 0.7 * len(every)
        if radices == (2, 2, 2) and dtype is not torch.float32:
            assert any(isinstance(schedule, BatchedLeaves) for schedule in admitted)

    @pytest.mark.parametrize("epilogue", ["plain", "bias", "residual", "both", "float32"])
    @pytest.mark.parametrize("dtype", DOT_DTYPES)
    def test_epilogues_round_once_inside_every_kind_of_schedule(self, dtype: torch.dtype, epilogue: str) -> None:
        x, w = heavy_tailed(69, 512, dtype=dtype), heavy_tailed(200, 512, dtype=dtype, seed=1)
        bias = heavy_tailed(200, dtype=dtype, seed=2) if epilogue in ("bias", "both") else None
        residual = heavy_tailed(69, 200, dtype=dtype, seed=3) if epilogue in ("residual", "both") else None
        out_dtype = torch.float32 if epilogue == "float32" else dtype
        schedules = [PointerTiles(64, 64, 32, 4, 2), PointerTiles(16, 64, 32, 4, 2, swapped=True)]
        if dtype is not torch.float32:
            schedules += [TmaTiles(128, 64, 64, 4, 3), TmaTiles(64, 64, 64, 4, 3, swapped=True)]
        for radices in ((), (2, 2)):
            exact = run_schedule(schedules[0], x, w, radices=radices, out_dtype=torch.float32)
            y = (exact if bias is None else exact + bias.float()).to(out_dtype)
            expected = y if residual is None else (residual.float() + y.float()).to(out_dtype)
            for schedule in (s for s in schedules for s in (s, dataclasses.replace(s, split=True))):
                out = run_schedule(schedule, x, w, bias, residual, radices, out_dtype)
                assert_bitwise_equal(out, expected, f"{schedule} {radices}")

    @pytest.mark.skipif(not HOPPER, reason="the kernel is made of a Hopper GPU's instructions")
    @pytest.mark.parametrize("radices", [(), (2,), (8,), (2, 2, 2), (3, 2), (2, 2, 2, 2)], ids=str)
    @pytest.mark.parametrize("swapped", [False, True])
    def test_the_hopper_kernel_sums_in_the_order(self, swapped: bool, radices: tuple[int, ...]) -> None:
        """Every shape of tree, masks on both sides, several tiles a program, each epilogue."""
        k = 3072  # leaves of whole k-groups for every tree above
        x, w = heavy_tailed(203, k, dtype=torch.bfloat16), heavy_tailed(17000, k, dtype=torch.bfloat16, seed=1)
        bias, residual = (heavy_tailed(*shape, dtype=torch.bfloat16, seed=2) for shape in ((17000,), (203, 17000)))
        plain = TmaTiles(64, 64, 32, 4, 3)
        widths = (64, 128)[: 4 - len(radices)] if radices else (16, 64, 96, 160, 256)  # as many nodes as fit
        for rows, width in itertools.product((64, 128), widths):
            if swapped and width & (width - 1):
                continue
            blocks = (width, rows) if swapped else (rows, width)
            nodes = 2 if len(radices) > 1 and not swapped else 1
            schedule = HopperTiles(*blocks, 64, 3, nodes=nodes, swapped=swapped)
            for epilogue in ((), (bias,), (None, residual), (bias, residual)):
                expected = run_schedule(plain, x, w, *epilogue, radices=radices)
                assert_bitwise_equal(run_schedule(schedule, x, w, *epilogue, radices=radices), expected, f"{schedule}")
            exact = run_schedule(plain, x, w, radices=radices, out_dtype=torch.float32)
            out = run_schedule(schedule, x, w, radices=radices, out_dtype=torch.float32)
            assert_bitwise_equal(out, exact, f"{schedule}, unrounded")

    @pytest.mark.skipif(not HOPPER, reason="the kernel is made of a Hopper GPU's instructions")
    def test_hopper_kernel_rejects_unsupported_problems(self) -> None:
        x, w = heavy_tailed(5, 512, dtype=torch.bfloat16), heavy_tailed(64, 512, dtype=torch.bfloat16, seed=1)
        with pytest.raises(ScheduleError, match="96 columns"):
            run_schedule(HopperTiles(64, 96, 64, 3), x, w, radices=(2, 2))
        with pytest.raises(ScheduleError, match="leaves of 32"):
            run_schedule(HopperTiles(64, 64, 64, 3), x, w, radices=(2, 2, 2, 2))

    @pytest.mark.skipif(not HOPPER, reason="the kernel is made of a Hopper GPU's instructions")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("schedule", [RingTiles(8, 64, 256, 5), RingTiles(8, 32, 256, 10)], ids=str)
    def test_ring_sums_in_declared_order(self, schedule: RingTiles, dtype: torch.dtype) -> None:
        """Tiles and k-groups that end early, several tiles a program, more tokens than a tile, each epilogue, a gate;
        with and without weights that arrive before x."""
        plain = PointerTiles(32, 64, 32, 4, 2)
        for n, k in ((17000, 1024), (1000, 320), (72, 64), (336, 1984), (4096, 12288)):
            w = heavy_tailed(n, k, dtype=dtype)
            bias = heavy_tailed(n, dtype=dtype, seed=1)
            for m in (1, 5, 8, 13):
                x, residual = heavy_tailed(m, k, dtype=dtype, seed=2), heavy_tailed(m, n, dtype=dtype, seed=3)
                for known in ([], [w]):
                    with for_graph(), constants(known):
                        for epilogue in ((), (bias,), (None, residual), (bias, residual)):
                            out = run_schedule(schedule, x, w, *epilogue)
                            assert_bitwise_equal(out, run_schedule(plain, x, w, *epilogue), f"{n} {k} {m}")
                        exact = run_schedule(plain, x, w, out_dtype=torch.float32)
                        out = run_schedule(schedule, x, w, out_dtype=torch.float32)
                        assert_bitwise_equal(out, exact, f"{n} {k} {m}, unrounded")
                        if n % 16 == 0:
                            out = run_gated(dataclasses.replace(schedule, gated=True), x, w)
                            assert_bitwise_equal(out, run_gated(plain, x, w), f"{n} {k} {m}, gated")

    @pytest.mark.parametrize("radices", [(), (2, 2, 2)])
    @pytest.mark.parametrize("dtype", DOT_DTYPES)
    def test_a_row_ignores_the_token_count(self, dtype: torch.dtype, radices: tuple[int, ...]) -> None:
        x, w = heavy_tailed(1025, 1024, dtype=dtype), heavy_tailed(272, 1024, dtype=dtype, seed=1)
        whole = matmul_cuda(x, w, None, None, radices)
        for m in (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 257, 511, 513, 1024):
            assert_bitwise_equal(matmul_cuda(x[:m], w, None, None, radices), whole[:m], f"{m} tokens")
            assert_bitwise_equal(matmul_cuda(x[-m:], w, None, None, radices), whole[-m:], f"the last {m} tokens")
        poisoned = x.clone()
        poisoned[7] = torch.nan
        assert_bitwise_equal(matmul_cuda(poisoned, w, None, None, radices)[8:], whole[8:], "beside NaN")

    @pytest.mark.parametrize("dtype", DOT_DTYPES)
    def test_strides_and_layouts_do_not_matter(self, dtype: torch.dtype) -> None:
        x, w = heavy_tailed(70, 520, dtype=dtype), heavy_tailed(264, 520, dtype=dtype, seed=1)
        expected = matmul_cuda(x, w, None, None, (2, 2))
        wide = torch.zeros(70, 523, dtype=dtype, device=DEVICE)
        wide[:, 1:521] = x
        assert_bitwise_equal(matmul_cuda(wide[:, 1:521], w, None, None, (2, 2)), expected, "an unaligned slice")
        assert_bitwise_equal(matmul_cuda(x, w.t().contiguous().t(), None, None, (2, 2)), expected, "weights [K, N]")
        assert_bitwise_equal(matmul_cuda(x.t().contiguous().t(), w, None, None, (2, 2)), expected, "x [K, M]")

    @pytest.mark.parametrize("radices", [(), (2, 2, 2)])
    @pytest.mark.parametrize("dtype", DOT_DTYPES)
    def test_errors_stay_within_cublas(self, dtype: torch.dtype, radices: tuple[int, ...]) -> None:
        x, w = heavy_tailed(256, 4096, dtype=dtype), heavy_tailed(512, 4096, dtype=dtype, seed=1)
        exact = x.double() @ w.double().t()
        ours, cublas = (
            ((out.double() - exact).norm() / exact.norm()).item()
            for out in (matmul_cuda(x, w, None, None, radices), x @ w.t())
        )
        print(f"{dtype} {radices}: {ours:.3e} / cuBLAS {cublas:.3e}")
        assert ours <= 1.05 * cublas
        if radices and dtype is not torch.float32:  # of few tokens, the same schedule for each
            schedule = BatchedLeaves(8, 16, 128, 8, 3)
            assert_bitwise_equal(run_schedule(schedule, x, w, radices=radices), matmul_cuda(x, w, None, None, radices))

    def test_a_schedule_of_another_order_is_refused(self) -> None:
        """One long float32 chain (the descriptor kernel) is not Blocked(128); a wrong tree is not the tree."""
        x, w = heavy_tailed(69, 512), heavy_tailed(64, 512, seed=1)
        problem = problem_of(x, w, (), 64)
        with pytest.raises(ScheduleError, match="bits differ"):
            bits = probe_bits(problem, x.device)
            MATMUL.tuner(x.device).require(str(problem), SMALL[0], TmaTiles(32, 32, 32, 4, 2), bits)
        half = (x.bfloat16(), w.bfloat16())
        orders = [(), (2, 2, 2), (8,), (2, 4)]
        trees = [run_schedule(SMALL[0], *half, radices=radices, out_dtype=torch.float32) for radices in orders]
        assert len({t.cpu().numpy().tobytes() for t in trees}) == 4
        swapped = run_schedule(SMALL[0], half[0].flip(1), half[1].flip(1), out_dtype=torch.float32)
        assert not torch.equal(swapped, trees[0])

    def test_capture_never_gates(self) -> None:
        x, w = heavy_tailed(4, 256, dtype=torch.bfloat16), heavy_tailed(80, 256, dtype=torch.bfloat16, seed=1)
        k = 256 + 16 * (math.floor(torch.rand(()).item() * 1e6) % 997)  # a problem no earlier process has decided
        fresh = heavy_tailed(4, k, dtype=torch.bfloat16), heavy_tailed(80, k, dtype=torch.bfloat16)
        with pytest.raises(ScheduleError, match="before CUDA graph capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            matmul_cuda(*fresh, None, None, ())
        expected = matmul_cuda(x, w, None, None, ())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = matmul_cuda(x, w, None, None, ())
        graph.replay()
        assert_bitwise_equal(captured, expected)

    def test_tuning_keeps_the_bits(self) -> None:
        x, w = heavy_tailed(40, 512, dtype=torch.bfloat16), heavy_tailed(144, 512, dtype=torch.bfloat16, seed=1)
        expected = matmul_cuda(x, w, None, None, (2, 2))
        problem = gemm_problem(x, w, None, None, (2, 2), expected)
        winner = tune_matmul(problem, x.device)
        assert str(winner) in {str(s) for s in (*candidates(problem), reference_schedule(problem))}
        assert_bitwise_equal(matmul_cuda(x, w, None, None, (2, 2)), expected)
