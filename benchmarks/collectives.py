"""Sums and moves beside NCCL's: the tree all-reduce, row-parallel GEMMs with it, a vocabulary's logits and
embedding rows. One process a GPU, on all GPUs.

    python -m benchmarks.collectives --commit $(git rev-parse --short HEAD) [--ranks 2] [--seconds 80]

"one shot" and "two shots" are our kernels over symmetric memory. "landing", for large sums, moves partials by copy
engines (for a GEMM, while it runs); "apart" runs the GEMM and then another of these sums; "library" is the same sum
with NCCL moving the partials. The peers are NCCL's all-reduce and symm_mem's two_shot_all_reduce_, which add in
bfloat16. The K of a row-parallel GEMM counts all ranks; its peer is cuBLAS with NCCL. A ratio is NCCL's time over ours:
above 1 we are faster. Times are those of the slowest rank.

Writes benchmarks/results/collectives-<device>x<ranks>-<commit>.json after each row.
"""

import argparse
import functools
import itertools
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor, multiprocessing
from torch.distributed import _symmetric_memory as symmetric_memory

from detcompile.config import settle_symmetric_memory
from detcompile.orders.numerics import Numerics
from detcompile.parallel import TensorParallel, tensor_parallel
from detcompile.templates.collectives.gather import all_gather_columns, sharded_embedding
from detcompile.templates.collectives.gpu import choose_schedule
from detcompile.templates.collectives.op import matmul_all_reduce, partial_product, tree_all_reduce
from detcompile.templates.collectives.peer_memory import peer_memory

TOKENS = (1, 8, 64, 256, 1024, 2048, 8192)
WIDTHS = (4096, 8192)
GEMMS = {"Qwen3-8B o": (4096, 4096), "Qwen3-8B down": (4096, 12288)}  # N, K of all ranks
VOCABULARY = 151936
L2_BYTES = 3e8  # rotated buffers together: several times the H200's 60 MB
FEWEST_LAUNCHES = 24  # a graph: the ranks start it at different times, which only its first launch waits for
REPEATS = 7


def all_reduce_rows(ranks: TensorParallel) -> Iterator[dict[str, Any]]:
    above, _ = Numerics().split_radices(ranks.size)
    for N in WIDTHS:
        for M in TOKENS:
            partials = [torch.randn(M, N, device="cuda") for _ in range(_copies(4 * M * N))]

            def reduce(partial: Tensor, two_shot: bool | None = None, **way: bool) -> Tensor:
                return tree_all_reduce(partial, None, None, above, ranks.group, torch.bfloat16, two_shot, **way)

            wanted = reduce(partials[0], peers=False)
            row: dict[str, Any] = {"what": "all-reduce", "M": M, "N": N}
            row["equal"] = all(torch.equal(reduce(partials[0], way), wanted) for way in (None, False, True))
            row["way"] = str(choose_schedule(M * N, ranks.size, 2))
            row["us"] = microseconds(partials, reduce)
            row["one shot us"] = microseconds(partials, functools.partial(reduce, two_shot=False))
            row["two shots us"] = microseconds(partials, functools.partial(reduce, two_shot=True))
            if M >= 256:
                row["equal"] = row["equal"] and torch.equal(reduce(partials[0], overlapped=True), wanted)
                row["landing us"] = microseconds(partials, functools.partial(reduce, overlapped=True))
            row["library us"] = microseconds(partials, functools.partial(reduce, peers=False))
            halves = [partial.bfloat16() for partial in partials]
            del partials
            row["NCCL us"] = microseconds(halves, dist.all_reduce)
            row["NCCL us"] = min(row["NCCL us"], microseconds(halves, dist.all_reduce))
            row["symm_mem two_shot us"] = _two_shot_peer(M * N, ranks)
            yield row | {"ratio": row["NCCL us"] / row["us"]}


def gemm_rows(ranks: TensorParallel) -> Iterator[dict[str, Any]]:
    above, below = Numerics().split_radices(ranks.size)
    for name, (N, K) in GEMMS.items():
        k = K // ranks.size
        weights = [torch.randn(N, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(_copies(2 * N * k))]
        for M in TOKENS:
            x = torch.randn(M, k, device="cuda", dtype=torch.bfloat16)

            def product(w: Tensor, x: Tensor = x) -> Tensor:
                return partial_product(x, w, below)

            def run(w: Tensor, x: Tensor = x, overlapped: bool | None = None) -> Tensor:
                return matmul_all_reduce(x, w, None, None, below, above, ranks.group, torch.bfloat16, overlapped)

            def peer(w: Tensor, x: Tensor = x) -> None:
                dist.all_reduce(torch.mm(x, w.t()))

            row: dict[str, Any] = {"what": f"{name} and all-reduce", "M": M, "N": N, "K": K}
            row["us"], row["NCCL us"] = microseconds(weights, run), microseconds(weights, peer)
            row["product us"] = microseconds(weights, product)
            if M >= 256:
                row["landing us"] = microseconds(weights, functools.partial(run, overlapped=True))
                row["apart us"] = microseconds(weights, functools.partial(run, overlapped=False))
                row["equal"] = torch.equal(run(weights[0], overlapped=True), run(weights[0], overlapped=False))
            row["cuBLAS us"] = microseconds(weights, lambda w, x=x: torch.mm(x, w.t()))
            yield row | {"ratio": row["NCCL us"] / row["us"]}


def move_rows(ranks: TensorParallel) -> Iterator[dict[str, Any]]:
    share, width = VOCABULARY // ranks.size, WIDTHS[0]
    table = torch.randn(share, width, device="cuda", dtype=torch.bfloat16)
    for M in TOKENS:
        copies = range(_copies(2 * M * VOCABULARY))
        logits = [torch.randn(M, share, device="cuda", dtype=torch.bfloat16) for _ in copies]
        generator = torch.Generator("cuda").manual_seed(M)
        ids = [torch.randint(VOCABULARY, (M,), generator=generator, device="cuda") for _ in range(FEWEST_LAUNCHES)]

        def columns(x: Tensor, peers: bool = True) -> Tensor:
            return all_gather_columns(x, ranks.group, share * ranks.size, peers)

        def rows(ids: Tensor, peers: bool = True) -> Tensor:
            return sharded_embedding(table, ids, ranks.rank * share, ranks.group, peers)

        for what, move, buffers in (("logits", columns, logits), ("embedding", rows, ids)):
            row: dict[str, Any] = {"what": what, "M": M, "N": share if what == "logits" else width}
            row["equal"] = torch.equal(move(buffers[0]), move(buffers[0], peers=False))
            row["us"] = microseconds(buffers, move)
            row["NCCL us"] = microseconds(buffers, functools.partial(move, peers=False))
            yield row | {"ratio": row["NCCL us"] / row["us"]}


def microseconds(buffers: list[Tensor], launch: Callable[[Tensor], object]) -> float:
    """Return microseconds of a launch: the median of a graph's replays over the buffers, on the slowest rank."""
    turns = [buffers[i % len(buffers)] for i in range(max(FEWEST_LAUNCHES, len(buffers)))]
    for buffer in turns[:2]:
        launch(buffer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for buffer in turns:
            launch(buffer)
    graph.replay()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(turns))
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


@functools.cache
def _peer_buffer(ranks: TensorParallel) -> Tensor:
    device = torch.device("cuda", ranks.rank)
    buffer = symmetric_memory.empty(max(TOKENS) * max(WIDTHS), dtype=torch.bfloat16, device=device)
    symmetric_memory.rendezvous(buffer, ranks.group)
    return buffer.zero_()


def _two_shot_peer(num_elements: int, ranks: TensorParallel) -> float | None:
    """Return the microseconds of two_shot_all_reduce_, or None if this machine's torch does not run it."""
    try:
        buffer = _peer_buffer(ranks)[:num_elements]
        return microseconds([buffer], lambda b: torch.ops.symm_mem.two_shot_all_reduce_(b, "sum", ranks.group))
    except RuntimeError as error:
        print(f"symm_mem.two_shot_all_reduce_: {error}", flush=True)
        return None


def _copies(size: int) -> int:
    return max(2, min(FEWEST_LAUNCHES, int(L2_BYTES / size) + 1))


def _measure(rank: int, num_ranks: int, port: int, arguments: argparse.Namespace) -> None:
    settle_symmetric_memory()
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, num_ranks, is_master=rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=num_ranks)
    ranks, started = tensor_parallel(num_ranks), time.monotonic()
    name = torch.cuda.get_device_name()
    report: dict[str, Any] = {"commit": arguments.commit, "device": name, "ranks": num_ranks}
    report |= {"torch": torch.__version__, "triton": triton.__version__}
    report["mapped memory"] = peer_memory(ranks.group, torch.device("cuda", rank)) is not None
    report |= {"unit": "us, bfloat16 results", "rows": []}
    path = arguments.output / f"collectives-{name.replace(' ', '-').lower()}x{num_ranks}-{arguments.commit}.json"
    for row in itertools.chain(all_reduce_rows(ranks), gemm_rows(ranks), move_rows(ranks)):
        if rank == 0:
            report["rows"].append(row)
            path.write_text(json.dumps(report, indent=1))
            fields = (f"{k} {v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items())
            print(f"[{time.monotonic() - started:4.0f} s]", "  ".join(fields), flush=True)
        late = torch.tensor(time.monotonic() - started > arguments.seconds, device="cuda", dtype=torch.int32)
        dist.broadcast(late, 0)  # one rank's clock decides for all
        if late.item():
            break
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--seconds", type=float, default=80.0, help="stop after this long; what was measured is kept")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if not 2 <= arguments.ranks <= torch.cuda.device_count():
        parser.error(f"{arguments.ranks} ranks want as many GPUs, two at least; here are {torch.cuda.device_count()}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    multiprocessing.spawn(_measure, (arguments.ranks, port, arguments), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
