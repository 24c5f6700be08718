"""The kernels of tree_all_reduce, with all ranks' memories on one device and one rank after the other.

Nobody waits here: flags and epochs of words are high from the start, and the kernels run again until what they read has
been written. That they wait as they should is tested in tests/parallel, on several GPUs.
"""

import pytest
import torch
from torch import Tensor

from detcompile.float32 import add_tree
from detcompile.templates import collectives_memory, collectives_triton
from detcompile.templates.collectives_memory import CHANNELS, LANES, PeerMemory
from detcompile.templates.collectives_triton import Way
from tests.bits import assert_bitwise_equal
from tests.templates.triton_interpreter import DEVICE, INTERPRETED, NEEDS_TRITON

pytestmark = NEEDS_TRITON

WAYS: tuple[Way, ...] = ("packed", "one_shot", "two_shot")
HIGH = 1 << 30  # an epoch that nobody reaches
BOX = 256 if INTERPRETED else collectives_memory.BOX
WORDS = (64, 256) if INTERPRETED else collectives_memory.WORDS
CASES = [(1, 5, (2,)), (3, 100, (3,)), (9, 170, (2,)), (7, 161, (2, 2)), (3, 100, (3, 2)), (1, 64, (2, 2, 2))]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time: small boxes and few channels, so that loops go round: no more than once, since
    a box is read only once every rank has filled all of its own."""
    if INTERPRETED:
        monkeypatch.setattr(collectives_triton, "BOX", BOX)
        monkeypatch.setattr(collectives_triton, "CHANNELS", 3)
        monkeypatch.setattr(collectives_triton, "BLOCKS", ((64, 4), (BOX, 4)))
        monkeypatch.setattr(collectives_triton, "WORDS", WORDS)
        monkeypatch.setattr(collectives_triton, "PACKED_BLOCKS", tuple((words, 4) for words in WORDS))


def memories(num_ranks: int) -> list[PeerMemory]:
    """Of every rank, all on one device."""
    boxes = tuple(torch.full((CHANNELS * 2 * num_ranks * BOX,), float("nan"), device=DEVICE) for _ in range(num_ranks))
    flags = [torch.full((CHANNELS * LANES,), HIGH, dtype=torch.int32, device=DEVICE) for _ in range(num_ranks)]
    sizes = [CHANNELS * 2 * num_ranks * size for size in WORDS]
    words = tuple(tuple(torch.full((size,), HIGH << 32, device=DEVICE) for _ in range(num_ranks)) for size in sizes)
    addresses = torch.tensor([there.data_ptr() for there in flags], device=DEVICE)
    return [
        PeerMemory(
            rank=rank,
            boxes=boxes,
            words=words,
            flags=flags[rank],
            flag_addresses=addresses,
            epochs=torch.full((1 + len(WORDS), CHANNELS), 7, dtype=torch.int32, device=DEVICE),
        )
        for rank in range(num_ranks)
    ]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    normal, spread = torch.randn(*shape), torch.randn(*shape)
    return (normal * torch.exp(spread)).to(dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("M", "N", "radices"), CASES, ids=str)
def test_every_rank_has_the_sum_in_the_order_of_the_tree(M: int, N: int, radices: tuple[int, ...], way: Way):
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
        for _ in range(3 if way == "two_shot" else 2):
            for memory, partial, out in zip(ranks, partials, outs):
                memory.epochs.fill_(7)
                collectives_triton.reduce_over_peers(memory, partial.to(DEVICE), *epilogue, radices, out, way)
        for out in outs:
            assert_bitwise_equal(out.cpu(), expected, f"{out_dtype}")


def test_epochs_advance_by_one_for_each_meeting_and_only_where_a_program_was():
    (first, _), partial = memories(2), torch.zeros(1, 64, device=DEVICE)
    for way in WAYS:
        collectives_triton.reduce_over_peers(first, partial, None, None, (2,), torch.empty_like(partial), way)
    assert first.epochs[:, :4].tolist() == [[10, 7, 7, 7], [8, 7, 7, 7], *[[7] * 4] * (len(WORDS) - 1)]
    assert int(first.flags[first.rank]) == 10  # lanes without another rank speak with themselves


def test_more_is_sent_in_two_shots_and_no_block_outgrows_its_box():
    chosen = [collectives_triton.choose_schedule(int(1.2**power), 4, 2) for power in range(30, 100)]
    order = [WAYS.index(schedule.way) for schedule in chosen]
    assert order == sorted(order) and set(order) == {0, 1, 2}
    for schedule in chosen:
        assert schedule.block in WORDS if schedule.way == "packed" else schedule.block <= BOX
