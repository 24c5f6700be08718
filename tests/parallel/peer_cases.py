"""Checks on one rank of sums and moves over peer memory of GPUs: the bytes of the communication library."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from detcompile import Numerics
from detcompile.parallel import TensorParallel, rank_device, tensor_parallel
from detcompile.templates.collectives.gather import all_gather_columns, sharded_embedding
from detcompile.templates.collectives.op import matmul_all_reduce, tree_all_reduce
from detcompile.templates.collectives.peer_memory import peer_memory
from tests.bits import assert_bitwise_equal

__all__ = ["check_peers"]

# The last ones use the boxes several times, in one shot and in two.
SHAPES = [(1, 1), (1, 4096), (3, 67), (16, 4096), (65, 1000), (256, 4096), (300, 8192), (1500, 8192)]
GATHERS = [(1, 33, 5), (64, 4096, 0), (900, 4096, 7)]  # tokens, columns of a rank, padding; the last ones too
SLEEP_CYCLES = 2_000_000  # about a millisecond: many sums of the other ranks
NUM_SUMS = 300
NUM_REPLAYS = 7


def check_peers(rank: int, tp: int) -> bool:
    """Run every check on this rank; return whether the GPUs have peer memory."""
    ranks, device = tensor_parallel(tp), rank_device("cuda", rank)
    if peer_memory(ranks.group, device) is None:
        return False
    numerics = Numerics(tp_sizes=(1, 3, 6)) if tp == 3 else Numerics()
    above, below = numerics.split_radices(tp)
    for seed, (M, N) in enumerate(SHAPES):
        for way in ({"two_shot": False}, {"two_shot": True}, {}, {"overlapped": True}):
            _check_shape(ranks, above, M, N, seed, way)
    _check_products_that_land(ranks, above, below)
    _check_ranks_that_come_late(ranks, above)
    _check_graphs(ranks, above)
    for M, n, padding in GATHERS:
        _check_gathers(ranks, above, M, n, padding)
    torch.cuda.synchronize()
    return True


def _draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    normal, spread = (torch.randn(shape, generator=generator, device="cuda") for _ in range(2))
    return (normal * torch.exp(spread)).to(dtype)


def _check_shape(
    ranks: TensorParallel, above: tuple[int, ...], M: int, N: int, seed: int, way: dict[str, bool]
) -> None:
    partial = _draw(100 * seed + ranks.rank, M, N)
    bias, residual = _draw(seed + 50, N), _draw(seed + 60, M, N, dtype=torch.bfloat16)
    half = torch.bfloat16
    for dtype, *epilogue in ((half, None, None), (half, bias, residual), (torch.float32, bias, None)):
        expected = tree_all_reduce(partial, *epilogue, above, ranks.group, dtype, peers=False)
        out = tree_all_reduce(partial, *epilogue, above, ranks.group, dtype, **way)
        assert_bitwise_equal(out, expected, f"{M, N}, {dtype}, {way}")


def _check_products_that_land(ranks: TensorParallel, above: tuple[int, ...], below: tuple[int, ...]) -> None:
    """Compare overlapped sums, of one piece and of several, with a product and its sum; some ranks own nothing."""
    for seed, (M, N, K) in enumerate([(1, 256, 64), (130, 4096, 512), (2500, 1000, 256), (9001, 8192, 128)]):
        x, w = _draw(seed, M, K, dtype=torch.bfloat16), _draw(seed + 10, N, K, dtype=torch.bfloat16)
        x, w = x * (1 + ranks.rank), w * (ranks.size - ranks.rank)
        residual = _draw(seed + 20, M, N, dtype=torch.bfloat16)
        given = (x, w, None, residual, below, above, ranks.group, torch.bfloat16)
        expected = matmul_all_reduce(*given, overlapped=False)
        for _ in range(2):
            assert_bitwise_equal(matmul_all_reduce(*given, overlapped=True), expected, f"{M, N, K}")


def _sums(ranks: TensorParallel, above: tuple[int, ...], count: int) -> list[tuple[Tensor, Callable[[], Tensor]]]:
    """Return sums of all sizes and methods, in the same order on all ranks: a partial and its reduction."""
    rng = random.Random(ranks.size)
    actual = []
    for index in range(count):
        M, N = rng.choice((1, 2, 8, 65, 256)), rng.choice((64, 333, 4096))
        item = rng.choice(({"two_shot": False}, {"two_shot": True}, {}, {"overlapped": True}))
        partial = _draw(1000 * index + ranks.rank, M, N)

        def reduce(partial: Tensor = partial, item: dict[str, bool] = item, **way: bool) -> Tensor:
            return tree_all_reduce(partial, None, None, above, ranks.group, torch.bfloat16, **(way or item))

        actual.append((partial, reduce))
    return actual


def _check_ranks_that_come_late(ranks: TensorParallel, above: tuple[int, ...]) -> None:
    """Check that a sleeping rank gets the right data while the others continue."""
    sums = _sums(ranks, above, NUM_SUMS)
    expected = [reduce(peers=False) for _, reduce in sums]
    item = random.Random(ranks.rank)
    outs = []
    for _, reduce in sums:
        if item.random() < 0.1:
            torch.cuda._sleep(item.randrange(SLEEP_CYCLES))
        outs.append(reduce())
    for index, (out, wanted) in enumerate(zip(outs, expected)):
        assert_bitwise_equal(out, wanted, f"sum {index}")


def _check_graphs(ranks: TensorParallel, above: tuple[int, ...]) -> None:
    """Replay graphs with an odd and an even number of synchronizations, mixed with sums outside."""
    item = random.Random(ranks.rank)
    graphs = []
    for count in (3, 8):
        sums = _sums(ranks, above, count)
        for _, reduce in sums:
            reduce()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [reduce() for _, reduce in sums]
        graphs.append((graph, sums, outs))
    for replay in range(NUM_REPLAYS):
        for graph, sums, outs in graphs[: 1 + replay % 2]:
            for index, (partial, _) in enumerate(sums):
                partial.copy_(_draw(replay * 31 + index * 7 + ranks.rank, *partial.shape))
            torch.cuda._sleep(item.randrange(SLEEP_CYCLES))
            graph.replay()
            for index, ((_, reduce), out) in enumerate(zip(sums, outs)):
                assert_bitwise_equal(out, reduce(peers=False), f"replay {replay}, sum {index}")
            sums[0][1]()


def _check_gathers(ranks: TensorParallel, above: tuple[int, ...], M: int, n: int, padding: int) -> None:
    """Gather columns and rows with a sum in between, directly and in a graph that is replayed with new data."""
    memory = peer_memory(ranks.group, torch.device("cuda", torch.cuda.current_device()))
    assert memory is not None
    rows, width = 1000, 4096
    x = torch.empty(M, n, device="cuda", dtype=torch.bfloat16)
    weight = _draw(ranks.rank, rows, width, dtype=torch.bfloat16)
    ids = torch.zeros(M, device="cuda", dtype=torch.int64)
    item = random.Random(ranks.rank)

    def fill(seed: int) -> None:
        x.copy_(_draw(100 * seed + ranks.rank, M, n))
        generator = torch.Generator("cuda").manual_seed(seed)
        ids.copy_(torch.randint(-3, ranks.size * rows, (M,), generator=generator, device="cuda"))

    def move(peers: bool) -> list[Tensor]:
        actual = sharded_embedding(weight, ids, ranks.rank * rows, ranks.group, peers)
        total = tree_all_reduce(actual.float(), None, None, above, ranks.group, torch.bfloat16, peers=peers)
        return [actual, total, all_gather_columns(x, ranks.group, ranks.size * n - padding, peers)]

    fill(0)
    before = int(memory.epochs[0])
    move(True)
    assert int(memory.epochs[0]) >= before + 3  # the library was not used
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = move(True)
    for seed in range(NUM_REPLAYS):
        fill(seed)
        torch.cuda._sleep(item.randrange(SLEEP_CYCLES))
        graph.replay()
        for what, actual, at_once, expected in zip(("rows", "sum", "columns"), outs, move(True), move(False)):
            assert_bitwise_equal(actual, expected, f"{what} of {M, n} in a graph, seed {seed}")
            assert_bitwise_equal(at_once, expected, f"{what} of {M, n}, seed {seed}")
