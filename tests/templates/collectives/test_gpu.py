"""Kernels of sums and moves over ranks, with all ranks' memories on one device and one rank after the other.

Nobody waits here: flags are high from the start, and the kernels run again until what they read has been written.
That they wait as they should is tested in tests/parallel, on several GPUs.
"""

import pytest
import torch
from torch import Tensor

from detcompile.orders.float32 import add_tree
from detcompile.templates.collectives import gather_gpu, overlapped, peer_memory
from detcompile.templates.collectives import gpu as collectives_gpu
from detcompile.templates.collectives import op as collectives
from detcompile.templates.collectives.gpu import Reduction
from detcompile.templates.collectives.peer_memory import CHANNELS, LANES, Landing, PeerMemory
from detcompile.templates.device import cuda_graphs
from tests.bits import assert_bitwise_equal
from tests.templates.triton_interpreter import DEVICE, INTERPRETED, NEEDS_TRITON

pytestmark = NEEDS_TRITON

PITCH = 4096  # elements of a share that land
HIGH = 1 << 30  # an epoch that nobody reaches
BOX = 256 if INTERPRETED else peer_memory.BOX
CASES = [(1, 5, (2,)), (3, 100, (3,)), (9, 170, (2,)), (7, 161, (2, 2)), (3, 100, (3, 2)), (1, 64, (2, 2, 2))]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time: small boxes and few channels, so that loops go round: no more than once, since
    a box is read only once every rank has filled all of its own."""
    if INTERPRETED:
        monkeypatch.setattr(collectives_gpu, "BOX", BOX)
        monkeypatch.setattr(collectives_gpu, "CHANNELS", 3)
        monkeypatch.setattr(collectives_gpu, "BLOCKS", ((64, 4), (BOX, 4)))
        monkeypatch.setattr(overlapped, "CHANNELS", 2)
        monkeypatch.setattr(overlapped, "BLOCK", 64)


def landing(num_ranks: int) -> Landing:
    """Of every rank, all on one device, with more than it holds behind it."""
    shape = (num_ranks, PITCH)
    memory = [torch.full((2 * num_ranks + 1, PITCH), float("nan"), device=DEVICE) for _ in range(num_ranks)]
    return Landing(tuple(m[:num_ranks].view(shape) for m in memory), tuple(m[num_ranks:-1].view(shape) for m in memory))


def memories(num_ranks: int) -> list[PeerMemory]:
    """Of every rank, all on one device."""
    boxes = tuple(torch.full((CHANNELS * 2 * num_ranks * BOX,), float("nan"), device=DEVICE) for _ in range(num_ranks))
    flags = [torch.full((CHANNELS * LANES,), HIGH, dtype=torch.int32, device=DEVICE) for _ in range(num_ranks)]
    addresses = torch.tensor([there.data_ptr() for there in flags], device=DEVICE)
    return [
        PeerMemory(
            rank=rank,
            boxes=boxes,
            flags=flags[rank],
            flag_addresses=addresses,
            epochs=torch.full((CHANNELS,), 7, dtype=torch.int32, device=DEVICE),
        )
        for rank in range(num_ranks)
    ]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    normal, spread = torch.randn(*shape), torch.randn(*shape)
    return (normal * torch.exp(spread)).to(dtype)


@pytest.mark.parametrize("two_shot", [False, True], ids=["one_shot", "two_shot"])
@pytest.mark.parametrize(("M", "N", "radices"), CASES, ids=str)
def test_every_rank_has_the_sum_in_the_order_of_the_tree(M: int, N: int, radices: tuple[int, ...], two_shot: bool):
    torch.manual_seed(M * N)
    num_ranks = int(torch.tensor(radices).prod())
    partials, bias, residual = values(num_ranks, M, N), values(N), values(M, N + 3, dtype=torch.float16)[:, :N]
    total = torch.from_numpy(add_tree(list(partials.numpy()), radices))
    for out_dtype, given in ((torch.float32, (None, None)), (torch.float16, (bias, residual))):
        expected = (total if given[0] is None else total + bias).to(out_dtype)
        if given[1] is not None:
            expected = (residual.float() + expected.float()).to(out_dtype)
        ranks, outs = memories(num_ranks), [torch.empty(M, N, dtype=out_dtype, device=DEVICE) for _ in partials]
        epilogue = [None if tensor is None else tensor.to(DEVICE) for tensor in given]
        for _ in range(3 if two_shot else 2):
            for memory, partial, out in zip(ranks, partials, outs):
                memory.epochs.fill_(7)
                reduction = Reduction(partial.to(DEVICE), *epilogue, radices, out)
                collectives_gpu.reduce_over_peers(memory, reduction, two_shot)
        for out in outs:
            assert_bitwise_equal(out.cpu(), expected, f"{out_dtype}")


@pytest.mark.parametrize(("M", "N", "radices"), CASES, ids=str)
def test_sums_that_land_are_those_of_the_tree(M: int, N: int, radices: tuple[int, ...]):
    """What lands is copied here; in the first round nobody has the others' sums yet."""
    torch.manual_seed(M * N)
    num_ranks = int(torch.tensor(radices).prod())
    partials, bias, residual = values(num_ranks, M, N), values(N), values(M, N + 3, dtype=torch.float16)[:, :N]
    total = torch.from_numpy(add_tree(list(partials.numpy()), radices))
    share = -(-M // num_ranks) * N
    for out_dtype, given in ((torch.float32, (None, None)), (torch.float16, (bias, residual))):
        expected = (total if given[0] is None else total + bias).to(out_dtype)
        if given[1] is not None:
            expected = (residual.float() + expected.float()).to(out_dtype)
        ranks, place = memories(num_ranks), landing(num_ranks)
        for owner, landed in enumerate(place.partials):
            for sender, partial in enumerate(partials):
                item = partial.flatten()[owner * share : (owner + 1) * share]
                if sender != owner:
                    landed[sender, : len(item)] = item.to(DEVICE)
        outs = [torch.empty(M, N, dtype=out_dtype, device=DEVICE) for _ in partials]
        epilogue = [None if tensor is None else tensor.to(DEVICE) for tensor in given]
        for _ in range(2):
            for memory, partial, out in zip(ranks, partials, outs):
                memory.epochs.fill_(7)
                reduction = Reduction(partial.to(DEVICE), *epilogue, radices, out)
                overlapped._gather(memory, place, reduction, share)
        for out in outs:
            assert_bitwise_equal(out.cpu(), expected, f"{out_dtype}")
        assert ranks[0].epochs[:1].tolist() == [9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("num_ranks", "M", "n", "columns"), [(2, 1, 5, 9), (3, 3, 16, 48), (4, 7, 11, 42), (8, 2, 1, 8), (4, 5, 200, 799)]
)
def test_columns_arrive_side_by_side(num_ranks: int, M: int, n: int, columns: int, dtype: torch.dtype):
    """Whatever they say, and without the padding of the last rank."""
    size = dtype.itemsize
    whole = torch.randint(0, 256, (M, num_ranks * n * size), dtype=torch.uint8).view(dtype)
    ranks = memories(num_ranks)
    for _ in range(2):
        outs = []
        for memory in ranks:
            memory.epochs.fill_(7)
            item = whole[:, memory.rank * n : (memory.rank + 1) * n].contiguous().to(DEVICE)
            outs.append(gather_gpu.columns_over_peers(memory, item, columns))
    for out in outs:
        assert_bitwise_equal(out.cpu(), whole[:, :columns].contiguous(), f"{dtype}")
    assert ranks[0].epochs[:3].tolist() == epochs_after(M * n, num_ranks)


def epochs_after(num_elements: int, num_ranks: int) -> list[int]:
    """Of the first three channels: one a block that they had."""
    block = collectives_gpu.shot_schedule(num_elements, num_ranks, two_shot=False).block
    blocks = -(-num_elements // block)
    programs = min(collectives_gpu.CHANNELS, blocks)
    return [7 + len(range(channel, blocks, programs)) if channel < programs else 7 for channel in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_ranks", "v", "D", "shape"), [(2, 5, 9, (3,)), (4, 1, 16, (2, 3)), (8, 3, 1, (40,)), (4, 7, 64, (20,))]
)
def test_rows_arrive_from_the_rank_that_has_them(
    num_ranks: int, v: int, D: int, shape: tuple[int, ...], dtype: torch.dtype
):
    """Ids outside the table are rows of zeros, as where ranks add their bytes."""
    torch.manual_seed(v)
    table = torch.randint(0, 256, (num_ranks * v, D * dtype.itemsize), dtype=torch.uint8).view(dtype)
    ids = torch.randint(-2, num_ranks * v + 2, shape)
    known = (ids >= 0) & (ids < num_ranks * v)
    rows = table.view(torch.int16 if dtype.itemsize == 2 else torch.int32)[torch.where(known, ids, 0)]
    expected = torch.where(known.unsqueeze(-1), rows, 0).view(dtype)
    ranks = memories(num_ranks)
    for _ in range(2):
        outs = []
        for memory in ranks:
            memory.epochs.fill_(7)
            item = table[memory.rank * v : (memory.rank + 1) * v].to(DEVICE)
            outs.append(gather_gpu.rows_over_peers(memory, item, ids.to(DEVICE)))
    for out in outs:
        assert_bitwise_equal(out.cpu(), expected, f"{dtype}")
    assert ranks[0].epochs[:3].tolist() == epochs_after(ids.numel() * D, num_ranks)


def test_gathers_of_nothing_and_of_wide_elements_are_left_to_the_library() -> None:
    (memory, _) = memories(2)
    for x in (torch.zeros(0, 4, device=DEVICE), torch.zeros(2, 4, dtype=torch.int64, device=DEVICE)):
        assert gather_gpu.columns_over_peers(memory, x, 8) is None
    rows = torch.zeros(4, 2, device=DEVICE)
    assert gather_gpu.rows_over_peers(memory, rows, torch.zeros(0, dtype=torch.int64, device=DEVICE)) is None


def test_epochs_advance_by_one_for_each_meeting_and_only_where_a_program_was():
    (first, _), partial = memories(2), torch.zeros(1, 64, device=DEVICE)
    for two_shot in (False, True):
        reduction = Reduction(partial, None, None, (2,), torch.empty_like(partial))
        collectives_gpu.reduce_over_peers(first, reduction, two_shot)
    assert first.epochs[:4].tolist() == [10, 7, 7, 7]
    assert int(first.flags[first.rank]) == 10  # lanes without another rank speak with themselves


def test_products_of_many_tokens_land_where_a_graph_is_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collectives, "landing_of", lambda group, device: "a landing")
    (memory, _) = memories(2)

    def where(M: int, wanted: bool | None = None) -> object:
        return collectives._landing_for(memory, "a group", M, 64, (2,), wanted)

    assert [where(4096), where(4096, True), where(0, True), where(4096, False)] == [None, "a landing", None, None]
    with cuda_graphs.for_graph():
        assert [where(1023), where(1024), where(4096, False)] == [None, "a landing", None]
    assert where(1024) is None


def test_more_is_sent_in_two_shots_and_no_block_outgrows_its_box():
    chosen = [collectives_gpu.choose_schedule(1 << power, 4, 2) for power in range(10, 28)]
    assert [schedule.two_shot for schedule in chosen] == sorted(schedule.two_shot for schedule in chosen)
    assert not chosen[0].two_shot and chosen[-1].two_shot
    assert max(schedule.block for schedule in chosen) <= BOX
