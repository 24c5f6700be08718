"""Compare GPU times of a trainer's templates with torch's: token_matmul and cuBLAS, attention's backward and SDPA's.

    python -m benchmarks.training_ops --commit $(git rev-parse --short HEAD) [--only token_matmul,…] [--minutes 8]

Writes benchmarks/results/training-ops-<device>-<commit>.json. A ratio is the peer's time over ours: above 1 we are
faster. cuBLAS adds all tokens in one sum, bfloat16 out; ours gives an exact float64 sum of leaves. Both are measured in
turns, since sustained matrix work lowers the clocks of later launches.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from detcompile.templates.attention.scores import AttentionRule
from detcompile.templates.device.cuda_graphs import graph_seconds
from detcompile.templates.training import attention_gpu, token_sums_gpu
from detcompile.templates.training.attention_schedules import GradientTiles, candidates, reference_tiles

DEVICE = torch.device("cuda")
PRODUCTS = {  # name: N, K of a weight [N, K]
    "Qwen3-8B qkv": (6144, 4096),
    "Qwen3-8B o": (4096, 4096),
    "Qwen3-8B gate_up": (24576, 4096),
    "Qwen3-8B down": (4096, 12288),
}
TOKENS = 16384
LEAF = 1024
SEQUENCES = {  # name: tokens of a sequence
    "one sequence": 16384,
    "4096 tokens each": 4096,
    "1024 tokens each": 1024,
    "200 tokens each": 200,
}
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


def in_turns(*launches: Callable[[], object]) -> list[float]:
    """Return median microseconds of each, alternating. No CUDA graph: autograd stays on its forward's stream."""
    for launch in launches:
        launch()
    rounds = [[microseconds(launch) for launch in launches] for _ in range(7)]
    return [statistics.median(times) for times in zip(*rounds)]


def microseconds(launch: Callable[[], object], repeats: int = 5) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        launch()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / repeats


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def leaf_table(length: int, leaf: int) -> Tensor:
    """Return the leaves of TOKENS tokens in sequences of ``length``."""
    table = [0]
    while table[-1] < TOKENS:
        end_of_sequence = (table[-1] // length + 1) * length
        table.append(min(table[-1] + leaf, end_of_sequence, TOKENS))
    return torch.tensor(table, dtype=torch.int32, device=DEVICE)


def token_matmul_rows() -> Iterator[dict]:
    for name, (n, k) in PRODUCTS.items():
        g, x = bf16(TOKENS, n) * 1e-4, bf16(TOKENS, k)
        problem = token_sums_gpu.token_problem(g, x)
        schedule = token_sums_gpu.tune_token_matmul(problem, DEVICE, TOKENS, LEAF)
        counts = {row["problem"]: row for row in token_sums_gpu.TOKEN_MATMUL.tuner(DEVICE).table()}[str(problem)]
        one_leaf = torch.tensor([0, 512], dtype=torch.int32, device=DEVICE)
        for sequences, length in SEQUENCES.items():
            leaves = leaf_table(length, LEAF)
            ours = functools.partial(token_sums_gpu.run_token_matmul, schedule, g, x, leaves)
            us, peer_us = in_turns(ours, lambda g=g, x=x: torch.mm(g.t(), x))
            exact = g[:512].double().t() @ x[:512].double()
            actual = token_sums_gpu.run_token_matmul(schedule, g[:512], x[:512], one_leaf)
            row = {"kernel": "token_matmul", "shape": name, "T": TOKENS, "N": n, "K": k, "sequences": sequences}
            row |= {"leaves": len(leaves) - 1, "us": us, "peer": "cuBLAS", "peer_us": peer_us, "ratio": peer_us / us}
            row |= {"tflops": 2e-6 * TOKENS * n * k / us, "schedule": str(schedule)}
            row["relative error"] = float((actual - exact).norm() / exact.norm())
            yield row | {"admitted, refused": (counts["admitted"], counts["refused"])}


def flush_rows() -> Iterator[dict]:
    """Measure the cost of a leaf's end: one product, leaves of many lengths."""
    n, k = PRODUCTS["Qwen3-8B o"]
    g, x = bf16(TOKENS, n) * 1e-4, bf16(TOKENS, k)
    schedule = token_sums_gpu.TOKEN_MATMUL.schedule(token_sums_gpu.token_problem(g, x), DEVICE)
    for leaf in (128, 256, 512, 1024, 2048, 4096, TOKENS):
        ours = functools.partial(token_sums_gpu.run_token_matmul, schedule, g, x, leaf_table(TOKENS, leaf))
        us, peer_us = in_turns(ours, lambda: torch.mm(g.t(), x))
        yield {"kernel": "flush", "leaf": leaf, "us": us, "peer": "cuBLAS", "peer_us": peer_us, "ratio": peer_us / us}


def sum_rows() -> Iterator[dict]:
    """Time sums of rows beside torch's float32 sum and float32 scatter of rows."""
    g, ids = bf16(TOKENS, 4096), torch.randint(0, 151936, (TOKENS,), device=DEVICE)
    wide = torch.zeros(151936, 4096, device=DEVICE)
    ours, peer = in_turns(lambda: token_sums_gpu.token_sum_cuda(g), lambda: g.sum(0, dtype=torch.float32))
    yield {"kernel": "token_sum", "T": TOKENS, "N": 4096, "us": ours, "peer": "torch.sum", "peer_us": peer}
    ours, peer = in_turns(
        lambda: token_sums_gpu.token_scatter_cuda(g, ids, 151936), lambda: wide.zero_().index_add_(0, ids, g.float())
    )
    yield {"kernel": "token_scatter", "T": TOKENS, "V": 151936, "us": ours, "peer": "index_add_", "peer_us": peer}


def attention_rows() -> Iterator[dict]:
    for name, length in SEQUENCES.items():
        count = TOKENS // length
        T = count * length
        q, k, v, g = (bf16(T, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS))
        cu_seqlens = torch.arange(0, T + 1, length, dtype=torch.int32, device=DEVICE)
        rule = AttentionRule(HEAD_DIM**-0.5, 0, 512)
        out, lse = attention_gpu.packed_attention_cuda(q, k, v, cu_seqlens, rule)
        operands = (g, q, k, v, lse.t().contiguous(), torch.randn(HEADS, T, device=DEVICE))
        tiles = [_tuned(keys, operands, cu_seqlens, rule) for keys in (False, True)]
        ours = functools.partial(attention_gpu.packed_attention_backward_cuda, g, (q, k, v, out, lse), cu_seqlens, rule)
        parts = (
            functools.partial(attention_gpu.query_gradient, tiles[0], operands, cu_seqlens, rule),
            functools.partial(attention_gpu.key_gradients, tiles[1], operands, cu_seqlens, rule),
        )
        peers = {backend.name: backward for backend in BACKENDS if (backward := _sdpa(backend, q, k, v, g, count))}
        us, dq_us, dkdv_us, *peer_us = in_turns(ours, *parts, *peers.values())
        row = {"kernel": "attention backward", "sequences": name, "tokens": T, "count": count, "us": us}
        row |= {"dq us": dq_us, "dk dv us": dkdv_us, "dq": str(tiles[0]), "dk dv": str(tiles[1])}
        row |= {"tflops": 1e-6 * 2.5 * 4 * HEADS * HEAD_DIM * count * length * (length + 1) / 2 / us}
        times = dict(zip(peers, peer_us))
        row["peers us"] = times
        if times:
            row |= {"peer": min(times, key=times.get), "ratio": min(times.values()) / us}
        yield row


def _tuned(of_keys: bool, operands: tuple[Tensor, ...], cu_seqlens: Tensor, rule: AttentionRule) -> GradientTiles:
    """Return the fastest schedule that passes the gate."""
    run = attention_gpu.key_gradients if of_keys else attention_gpu.query_gradient
    problem = attention_gpu.gradient_problem(*operands[1:4], rule, of_keys=of_keys)
    assert reference_tiles(problem) not in candidates(problem)

    def seconds(tiles: GradientTiles) -> float:
        return graph_seconds([functools.partial(run, tiles, operands, cu_seqlens, rule)] * 2)

    return attention_gpu.ATTENTION_GRADIENTS.tune(problem, DEVICE, seconds)


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, g: Tensor, count: int) -> Callable[[], object] | None:
    """Return the backward of causal SDPA over a batch with shared KV heads; None if it does not run."""
    q, k, v, g = (rows.unflatten(0, (count, -1)).transpose(1, 2).contiguous() for rows in (q, k, v, g))
    leaves = [rows.requires_grad_() for rows in (q, k, v)]
    try:
        with sdpa_kernel(backend):
            out = sdpa(*leaves, is_causal=True, enable_gqa=True)
            torch.autograd.grad(out, leaves, g, retain_graph=True)
    except RuntimeError as error:
        print(f"{backend.name} does not run: {str(error)[:200]}", flush=True)
        return None
    return lambda: torch.autograd.grad(out, leaves, g, retain_graph=True)


KERNELS = {
    "token_matmul": token_matmul_rows,
    "flush": flush_rows,
    "sums": sum_rows,
    "attention": attention_rows,
}


def main() -> None:
    """Measure the chosen rows until time is up, and write the JSON after every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--only", default=",".join(KERNELS), help="any of " + ", ".join(KERNELS))
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.cuda.get_device_name(DEVICE)
    about = {"device": device, "torch": torch.__version__, "triton": triton.__version__, "commit": arguments.commit}
    rows: list[dict] = []
    path = arguments.out / f"training-ops-{device.lower().replace(' ', '-')}-{arguments.commit}.json"
    started = time.monotonic()
    for name in arguments.only.split(","):
        for row in KERNELS[name]():
            print(json.dumps(row), flush=True)
            rows.append(row)
            path.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
            if time.monotonic() - started > 60 * arguments.minutes:
                print(f"stopped after {arguments.minutes} minutes, in {name}")
                return


if __name__ == "__main__":
    main()
