"""Experts' kernels: the bytes of each row's own matmul, whatever the schedule, the rows beside it and their experts."""

import pytest
import torch
from torch import Tensor

from detcompile.errors import ScheduleError
from detcompile.orders.numerics import matmul_order
from detcompile.templates.experts.gpu import EXPERTS, expert_matmul_cuda, experts_problem, probe_experts, run_experts
from detcompile.templates.experts.op import reference_expert_matmul
from detcompile.templates.experts.schedules import (
    REFERENCE,
    Decode,
    ExpertsSchedule,
    Grouped,
    Sorted,
    expert_candidates,
)
from detcompile.templates.matmul.launch import run_schedule
from detcompile.templates.matmul.schedules import PointerTiles
from tests.bits import assert_bitwise_equal
from tests.exhaustive import exhaustive_unless
from tests.templates.triton_interpreter import DEVICE, DOT_DTYPES, INTERPRETED, NEEDS_GPU, NEEDS_TRITON

pytestmark = NEEDS_TRITON
E, N, K = 5, 37, 134
DECODE = Decode(64, 32, 32, 4, 2, swapped=True)
SMALL = [
    DECODE,
    Decode(64, 64, 32, 4, 2),
    Grouped(16, 32, 32, 4, 2),
    Grouped(16, 64, 64, 4, 2, swapped=True, group=2),
]
DESCRIBED = [
    Grouped(16, 32, 32, 4, 2, descriptors=True),
    Grouped(16, 32, 32, 4, 2, swapped=True, descriptors=True),
    Sorted(16, 32, 32, 4, 2, group=2),
]


def problem(tokens: int, choices: int, dtype: torch.dtype = torch.float32, n: int = N, k: int = K, experts: int = E):
    """x [T, K], ids [T, C], w [E, N, K], bias [E, N]; heavy tails, some experts have many rows, some may have none."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        normal, spread = (torch.randn(*shape, generator=generator) for _ in range(2))
        return (normal * torch.exp(spread)).to(dtype).to(DEVICE)

    ids = (torch.rand(tokens, choices, generator=generator).square() * experts).long().to(DEVICE)
    return draw(tokens, k), ids, draw(experts, n, k), draw(experts, n)


def alone(x: Tensor, ids: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Each row by the matmul template with a schedule of its own."""
    schedule = PointerTiles(16, 32, 32, 4, 2)
    out = x.new_zeros(*ids.shape, w.shape[1])
    for t, row in enumerate(ids.tolist()):
        for c, expert in enumerate(row):
            of_expert = None if bias is None else bias[expert]
            out[t, c] = run_schedule(schedule, x[t : t + 1], w[expert], of_expert)[0]
    return out


@pytest.mark.parametrize("schedule", SMALL, ids=str)
def test_a_row_has_the_bytes_of_its_experts_matmul(schedule: ExpertsSchedule) -> None:
    x, ids, w, bias = problem(7, 3)
    expected = alone(x, ids, w, bias)
    assert_bitwise_equal(run_experts(schedule, x, ids, w, bias), expected)
    assert_bitwise_equal(run_experts(schedule, x, ids.int().long(), w, bias), expected, "again")
    turned = w.transpose(1, 2).contiguous().transpose(1, 2)
    assert_bitwise_equal(run_experts(schedule, x, ids, turned, bias), expected, "weights as [E, K, N]")
    each = x[:, None].expand(-1, 3, -1).contiguous()
    assert_bitwise_equal(run_experts(schedule, each, ids, w, bias), expected, "a row of x for each choice")


@pytest.mark.parametrize("schedule", DESCRIBED, ids=str)
def test_descriptors_have_the_bytes_of_matmul(schedule: ExpertsSchedule) -> None:
    """Of float32 up to one block of 128 k, which is one chain."""
    x, ids, w, bias = problem(9, 3, n=44, k=96)
    ids[3, 1], ids[5] = E, 2
    expected = run_experts(SMALL[2], x, ids, w, bias)
    assert_bitwise_equal(run_experts(schedule, x, ids, w, bias), expected)
    assert_bitwise_equal(run_experts(schedule, x, ids, w), run_experts(SMALL[2], x, ids, w), "without bias")
    poisoned = torch.full_like(x, torch.nan)
    poisoned[7] = x[7]
    assert_bitwise_equal(run_experts(schedule, poisoned, ids, w, bias)[7], expected[7], "beside NaN")


@pytest.mark.parametrize("schedule", [DECODE, DESCRIBED[0]] if INTERPRETED else [DECODE, SMALL[2], *DESCRIBED], ids=str)
def test_a_tree_over_k_has_the_bytes_of_matmuls(schedule: ExpertsSchedule) -> None:
    """Leaves of 32: descriptors take whole k-groups."""
    x, ids, w, bias = problem(9, 2, n=44, k=192)
    ids[3, 1] = E
    actual = run_experts(schedule, x, ids, w, bias, None, (3, 2))
    partial = run_experts(schedule, x[:, :64], ids, w[:, :, :64], None, torch.float32, (2,))
    by_matmul = PointerTiles(16, 32, 32, 4, 2)
    for t, row in enumerate(ids.tolist()):
        for c, expert in enumerate(row):
            if expert == E:
                assert not actual[t, c].any() and not partial[t, c].any()
                continue
            whole = run_schedule(by_matmul, x[t : t + 1], w[expert], bias[expert], None, (3, 2))
            assert_bitwise_equal(actual[t, c], whole[0], f"token {t}, choice {c}")
            subtree = run_schedule(by_matmul, x[t : t + 1, :64], w[expert, :, :64], None, None, (2,))
            assert_bitwise_equal(partial[t, c], subtree[0], f"a subtree of token {t}, choice {c}")


def test_float32_has_the_bytes_of_its_order() -> None:
    x, ids, w, _ = problem(4, 2)
    order = matmul_order(K, torch.float32, ())
    actual = run_experts(SMALL[-1], x, ids, w)
    for t, row in enumerate(ids.tolist()):
        for c, expert in enumerate(row):
            exact = order.evaluate(x[t : t + 1].cpu().numpy(), w[expert].cpu().numpy())
            assert_bitwise_equal(actual[t, c].cpu(), torch.from_numpy(exact)[0], f"token {t}, choice {c}")


@pytest.mark.parametrize("schedule", [DECODE, SMALL[-1]], ids=str)
def test_a_row_ignores_its_neighbors(schedule: ExpertsSchedule) -> None:
    x, ids, w, bias = problem(21, 3)
    whole = run_experts(schedule, x, ids, w, bias)
    others = (ids + 1) % E
    others[7] = ids[7]
    poisoned = torch.full_like(x, torch.nan)
    poisoned[7] = x[7]
    assert_bitwise_equal(run_experts(schedule, x[7:8], ids[7:8], w, bias), whole[7:8], "alone")
    assert_bitwise_equal(run_experts(schedule, poisoned, others, w, bias)[7], whole[7], "beside NaN of other experts")
    same = ids[7:8].expand_as(ids).contiguous()
    assert_bitwise_equal(run_experts(schedule, poisoned, same, w, bias)[7], whole[7], "beside NaN of its own experts")
    assert_bitwise_equal(run_experts(schedule, x.flip(0), ids.flip(0), w, bias), whole.flip(0), "in another order")


@pytest.mark.parametrize("schedule", SMALL, ids=str)
def test_no_expert_gives_zeros(schedule: ExpertsSchedule) -> None:
    x, ids, w, bias = problem(9, 2)
    whole = run_experts(schedule, x, ids, w, bias)
    for nobody in (E, E + 7, -1):
        ids[3, 1] = nobody
        actual = run_experts(schedule, x, ids, w, bias)
        assert not actual[3, 1].any()
        assert_bitwise_equal(actual[4:], whole[4:], f"beside the id {nobody}")
    nowhere = torch.full_like(ids, E)
    assert not run_experts(schedule, x, nowhere, w, bias).any()


@pytest.mark.usefixtures("gated")
def test_the_op_chooses_a_gated_schedule() -> None:
    x, ids, w, bias = problem(9, 2, DOT_DTYPES[0])
    out = expert_matmul_cuda(x, ids, w, bias)
    actual = experts_problem(ids.numel(), x, w, bias)
    assert_bitwise_equal(out, run_experts(REFERENCE, x, ids, w, bias))
    assert_bitwise_equal(out, alone(x, ids, w, bias), "the op and matmul")
    rows = [row for row in EXPERTS.tuner(x.device).table() if row["problem"] == str(actual)]
    assert rows and rows[0]["chosen"]
    exact = reference_expert_matmul(x, ids, w, bias)
    assert (out.double() - exact).norm() < 1e-2 * exact.norm()
    assert expert_matmul_cuda(x[:0], ids[:0], w, bias).shape == (0, 2, N)


def test_the_gate_refuses_another_order() -> None:
    x, ids, w, _ = problem(9, 2)
    actual = experts_problem(ids.numel(), x, w, None)
    bits = probe_experts(actual, x.device)
    assert bits(SMALL[-1]) == bits(SMALL[0])
    with pytest.raises(ScheduleError, match="not the blocks of float32"):
        bits(Grouped(16, 32, 32, 4, 2, descriptors=True))
    with pytest.raises(ScheduleError, match="holds 16 rows"):
        run_experts(Decode(16, 32, 32, 4, 2), x, ids, w)
    treed = experts_problem(ids.numel(), x[:, :120], w[:, :, :120], None, (2, 2))
    assert "Tree(120, 2x2" in str(treed)
    bits = probe_experts(treed, x.device)
    assert bits(SMALL[-1]) == bits(SMALL[0])
    with pytest.raises(ScheduleError, match="whole k-groups, not leaves of 30"):
        bits(Grouped(16, 32, 32, 4, 2, descriptors=True))


class TestOnTheGpu:
    pytestmark = NEEDS_GPU

    @pytest.mark.parametrize("shape", [(8, 8, 768, 2048), (128, 8, 1536, 768), (8, 2, 1000, 520)], ids=str)
    @pytest.mark.parametrize("tokens", exhaustive_unless((1, 8, 300).__contains__, [1, 7, 8, 64, 300, 1024]))
    def test_every_schedule_has_the_bytes_of_matmul(self, tokens: int, shape: tuple[int, int, int, int]) -> None:
        experts, choices, n, k = shape
        x, ids, w, _ = problem(tokens, choices, torch.bfloat16, n, k, experts)
        actual = experts_problem(ids.numel(), x, w, None)
        expected = run_experts(REFERENCE, x, ids, w)
        admitted = EXPERTS.tuner(x.device).admitted(
            str(actual), REFERENCE, expert_candidates(actual), probe_experts(actual, x.device)
        )
        refused = EXPERTS.tuner(x.device).refusals().get(str(actual))
        print(f"{actual}: {len(admitted)} of {len(expert_candidates(actual))}, refused {refused}")
        assert len(admitted) >= len(expert_candidates(actual)) / 2
        for schedule in admitted:
            assert_bitwise_equal(run_experts(schedule, x, ids, w), expected, str(schedule))

    @pytest.mark.parametrize("dtype", DOT_DTYPES)
    def test_a_row_ignores_the_token_count(self, dtype: torch.dtype) -> None:
        x, ids, w, bias = problem(1025, 8, dtype, 272, 520, 32)
        whole = expert_matmul_cuda(x, ids, w, bias)
        for count in (1, 2, 8, 9, 63, 64, 257, 1024):
            assert_bitwise_equal(expert_matmul_cuda(x[:count], ids[:count], w, bias), whole[:count], f"{count} tokens")
            last = expert_matmul_cuda(x[-count:], ids[-count:], w, bias)
            assert_bitwise_equal(last, whole[-count:], f"the last {count} tokens")
        assert_bitwise_equal(whole[::100], alone(x[::100], ids[::100], w, bias), "each row alone, by matmul")

    def test_errors_stay_within_torchs(self) -> None:
        x, ids, w, _ = problem(128, 4, torch.bfloat16, 512, 2048, 16)
        exact = reference_expert_matmul(x, ids, w)
        theirs = (w[ids] @ x[:, None, :, None])[..., 0]
        ours, torchs = ((y.double() - exact).norm().item() for y in (expert_matmul_cuda(x, ids, w, None), theirs))
        assert ours <= 1.05 * torchs

    def test_a_graph_replays_other_routings(self) -> None:
        x, ids, w, _ = problem(40, 4, torch.bfloat16, 256, 512, 16)
        expert_matmul_cuda(x, ids, w, None)
        static = ids.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = expert_matmul_cuda(x, static, w, None)
        for shift in (0, 1, 5):
            static.copy_((ids + shift) % 16)
            graph.replay()
            assert_bitwise_equal(out, expert_matmul_cuda(x, (ids + shift) % 16, w, None), f"experts moved by {shift}")

    def test_tuning_keeps_the_bits(self) -> None:
        x, ids, w, _ = problem(40, 4, torch.bfloat16, 256, 512, 16)
        expected = expert_matmul_cuda(x, ids, w, None)
        actual = experts_problem(ids.numel(), x, w, None)
        winner = EXPERTS.tune(actual, x.device, lambda schedule: float(schedule.block_k))
        assert str(winner) in {str(s) for s in (*expert_candidates(actual), REFERENCE)}
        assert_bitwise_equal(expert_matmul_cuda(x, ids, w, None), expected)
