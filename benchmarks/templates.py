"""Time GPU templates beside cuBLAS, SDPA and torch.compile: medians of CUDA-graph replays over rotated buffers.

    python -m benchmarks.templates --commit $(git rev-parse --short HEAD) [--only matmul,gated,rows] [--minutes 8]

Writes benchmarks/results/templates-<device>-<commit>.json. A ratio is the peer's time over ours: above 1 we are faster.
"""

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from detcompile.orders.numerics import row_order
from detcompile.templates.attention.gpu import ATTENTION, cached_attention_cuda, dense_attention_cuda
from detcompile.templates.attention.operands import Caches, StepMetadata
from detcompile.templates.attention.scores import AttentionRule
from detcompile.templates.device.cuda_graphs import graph_seconds
from detcompile.templates.matmul import gpu as matmul_gpu
from detcompile.templates.matmul import launch as matmul_launch
from detcompile.templates.matmul.candidates import candidates
from detcompile.templates.matmul.gate_gpu import silu_mul_cuda
from detcompile.templates.matmul.schedules import GemmSchedule
from detcompile.templates.rows import softmax_gpu, sums_and_norms_gpu

DEVICE = torch.device("cuda")
L2_BYTES = 3e8  # rotated buffers together: several times the H200's 60 MB
GEMMS = {  # name: N, K, whether it is row-parallel, so that a tree may be declared for it
    "Qwen3-8B qkv": (6144, 4096, False),
    "Qwen3-8B o": (4096, 4096, True),
    "Qwen3-8B gate_up": (24576, 4096, False),
    "Qwen3-8B down": (4096, 12288, True),
    "Llama-3-70B/8 qkv": (1280, 8192, False),
    "Llama-3-70B/8 o": (8192, 1024, True),
    "Llama-3-70B/8 gate_up": (7168, 8192, False),
    "Llama-3-70B/8 down": (8192, 3584, True),
}
TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
TREES = {"Sequential": (), "Tree(1,2,4,8)": (2, 2, 2)}
DECODES = (  # sequences, keys
    *((1, n) for n in (96, 1024, 2048, 4096, 8192, 16384, 32768)), (4, 1024), (8, 512), (8, 1024), (8, 8192),
    (16, 1024), (32, 1024), (32, 8192), (64, 512), (256, 96), (256, 512), (256, 1024), (256, 2048),
)  # fmt: skip
GROUPS = ((1, 64), (128, 512), (1024, 8192))  # token counts over which a geometric mean is taken


def measure(buffers: list[tuple], launch: Callable) -> float:
    """Return the microseconds of one launch over the given argument tuples."""
    return 1e6 * graph_seconds([functools.partial(launch, *arguments) for arguments in buffers])


def in_turns(buffers: list[tuple], *launches: Callable) -> list[float]:
    """Return the median of each, alternating, since sustained matrix work lowers the clocks of later launches."""
    rounds = [[measure(buffers, launch) for launch in launches] for _ in range(5)]
    return [statistics.median(times) for times in zip(*rounds)]


def copies(size: int) -> int:
    return max(2, min(64, int(L2_BYTES / size) + 1))


def matmul_rows() -> Iterator[dict]:
    _compile_gemms()
    for name, (n, k, row_parallel) in GEMMS.items():
        weights = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) * 0.02 for _ in range(copies(2 * n * k))]
        for m in TOKENS:
            x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
            for order, radices in TREES.items():
                if not radices or row_parallel:
                    row = _gemm([(x, w) for w in weights[: 3 if m >= 1024 else None]], radices)
                    yield {"kernel": "matmul", "shape": name, "order": order} | row


def _problem(n: int, k: int, m: int, radices: tuple[int, ...]) -> matmul_gpu.GemmProblem:
    x, w = (torch.empty(rows, k, device=DEVICE, dtype=torch.bfloat16) for rows in (m, n))
    return matmul_gpu.gemm_problem(x, w, None, None, radices, x.new_empty(1, n))


def _compile_gemms() -> None:
    """Compile every candidate on small operands in many processes, so that the gate and the clock need not."""
    schedules = dict.fromkeys(
        (schedule, radices)
        for n, k, row_parallel in GEMMS.values()
        for m in TOKENS
        for radices in TREES.values()
        if not radices or row_parallel
        for schedule in candidates(_problem(n, k, m, radices))
    )
    with multiprocessing.get_context("spawn").Pool(min(15, os.cpu_count() or 1)) as pool:
        pool.starmap(_compile_gemm, schedules, chunksize=4)


def _compile_gemm(schedule: GemmSchedule, radices: tuple[int, ...]) -> None:
    x, w = (torch.zeros(rows, 2048, device=DEVICE, dtype=torch.bfloat16) for rows in (256, 1024))
    with contextlib.suppress(Exception):  # what cannot run here is refused by the gate, which says why
        matmul_launch.run_schedule(schedule, x, w, radices=radices)


def _gemm(buffers: list[tuple], radices: tuple[int, ...]) -> dict:
    x, w = buffers[0]
    (m, k), n = x.shape, w.shape[0]
    problem = matmul_gpu.gemm_problem(x, w, None, None, radices, x.new_empty(1, n))
    launch = functools.partial(matmul_gpu.matmul_cuda, bias=None, residual=None, radices=radices)
    default_us, default_peer_us = in_turns(buffers, launch, lambda x, w: torch.mm(x, w.t()))
    started = time.monotonic()
    schedule = str(matmul_gpu.tune_matmul(problem, DEVICE))
    seconds = time.monotonic() - started
    us, peer_us = in_turns(buffers, launch, lambda x, w: torch.mm(x, w.t()))
    counts = {row["problem"]: (row["admitted"], row["refused"]) for row in matmul_gpu.MATMUL.tuner(DEVICE).table()}
    row = {"M": m, "N": n, "K": k, "us": us, "peer": "cuBLAS", "peer_us": peer_us, "ratio": peer_us / us}
    row |= {"default_ratio": default_peer_us / default_us, "tflops": 2e-6 * m * n * k / us, "schedule": schedule}
    return row | {"tuning_seconds": seconds, "admitted, refused": counts[str(problem)]}


def gated_rows() -> Iterator[dict]:
    """Time gate_up with silu·mul: fused as in the engine, separately, and by cuBLAS and torch.compile's kernel."""
    n, k, _ = GEMMS["Qwen3-8B gate_up"]
    weights = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) * 0.02 for _ in range(3)]

    def gate(both: torch.Tensor) -> torch.Tensor:
        left, right = both.chunk(2, dim=1)
        return torch.nn.functional.silu(left) * right

    def apart(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return silu_mul_cuda(*matmul_gpu.matmul_cuda(x, w, None, None, ()).chunk(2, dim=1))

    compiled = torch.compile(gate)
    for m in (1, 64, 256, 1024, 2048, 8192, 16896):
        buffers = [(torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16), w) for w in weights]
        ways = matmul_gpu.gated_matmul_cuda, lambda x, w: compiled(torch.mm(x, w.t())), apart
        us, peer_us, apart_us = in_turns(buffers, *ways)
        row = {"kernel": "gated matmul", "M": m, "N": n // 2, "K": k, "us": us, "peer": "cuBLAS, torch.compile"}
        yield row | {"peer_us": peer_us, "ratio": peer_us / us, "ratio to launches apart": apart_us / us}


def geometric_means(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Return geometric means of the GEMM ratios, tuned and by default, over GROUPS of token counts."""
    result: dict[str, dict[str, float]] = {}
    for order in TREES:
        for low, high in GROUPS:
            group = [r for r in rows if r["kernel"] == "matmul" and r["order"] == order and low <= r["M"] <= high]
            if group:
                means = {key: statistics.geometric_mean(r[key] for r in group) for key in ("ratio", "default_ratio")}
                result[f"{order}, {low} to {high} tokens"] = means
    return result


def attention_rows() -> Iterator[dict]:
    heads, kv_heads, d = 32, 8, 128
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}

    def ours(q, k, v):  # type: ignore[no-untyped-def]
        return dense_attention_cuda(q, k, v, AttentionRule(d**-0.5, 0, 512))

    def peer(backend, q, k, v):  # type: ignore[no-untyped-def]
        with sdpa_kernel(backend):
            return sdpa(q, k, v, is_causal=True, enable_gqa=True)

    peers = [functools.partial(peer, backend) for backend in backends.values()]
    for n in (2048, 4096, 8192, 16384):
        qkv = [
            tuple(torch.randn(1, h, n, d, device=DEVICE, dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads))
            for _ in range(4)
        ]
        us, *peers_us = in_turns(qkv, ours, *peers)
        row = {"kernel": "attention prefill", "keys": n, "us": us, "tflops": 2e-6 * n * n * heads * d / us}
        for name, peer_us in zip(backends, peers_us):
            row |= {f"{name}_us": peer_us, f"ratio to {name}": peer_us / us}
        yield row
    for batch, n in DECODES:
        yield _decode(batch, n, heads, kv_heads, d, 64)


def _decode(batch: int, n: int, heads: int, kv_heads: int, d: int, page: int) -> dict:
    """Time one token a sequence against n cached keys, beside SDPA over contiguous keys and a copy."""
    pages = -(-n // page)
    rotated = copies(2 * 2 * batch * n * kv_heads * d)
    caches = [
        tuple(torch.randn(batch * pages, page, kv_heads, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        for _ in range(rotated)
    ]
    table = torch.randperm(batch * pages, device=DEVICE).view(batch, pages).int()
    cu = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32)
    lens = torch.full((batch,), n, device=DEVICE, dtype=torch.int32)
    q = torch.randn(batch, heads, d, device=DEVICE, dtype=torch.bfloat16)

    def ours(k_cache, v_cache):  # type: ignore[no-untyped-def]
        step, rule = StepMetadata(cu, lens, table), AttentionRule(d**-0.5, 0, 512)
        return cached_attention_cuda(q, Caches(k_cache, v_cache), step, rule)

    def peer(k_cache, v_cache):  # type: ignore[no-untyped-def]
        keys, values = (t.view(batch, pages * page, kv_heads, d)[:, :n].transpose(1, 2) for t in (k_cache, v_cache))
        return sdpa(q[:, :, None], keys, values, enable_gqa=True)

    count = batch * n * kv_heads * d

    def copy(k_cache, v_cache):  # type: ignore[no-untyped-def]
        return k_cache.view(-1)[:count].copy_(v_cache.view(-1)[:count])  # reads and writes as much as decoding reads

    us, peer_us, copy_us = in_turns(caches, ours, peer, copy)
    moved = 2 * 2 * count
    row = {"kernel": "attention decode", "batch": batch, "keys": n, "page": page, "us": us, "TB/s": moved / us * 1e-6}
    return row | {
        "copy_us": copy_us,
        "of_copy": copy_us / us,
        "peer": "SDPA",
        "peer_us": peer_us,
        "ratio": peer_us / us,
    }


def row_rows() -> Iterator[dict]:
    short = ((131072, 64), (131072, 128), (65536, 256), (32768, 512), (1024, 128), (8192, 128), (8192, 256))
    for t, r in (*short, (1, 4096), (64, 4096), (4096, 4096), (1, 151936), (8, 151936), (256, 151936)):
        xs = [(torch.randn(t, r, device=DEVICE, dtype=torch.bfloat16),) for _ in range(copies(4 * t * r))]
        weight = torch.randn(r, device=DEVICE, dtype=torch.bfloat16)
        cases = {
            "rms_norm": (
                lambda x, weight: sums_and_norms_gpu.rms_norm_cuda(x, weight, 1e-6, True),
                lambda x, weight: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6),
            ),
            "softmax": (lambda x, weight: softmax_gpu.softmax_cuda(x, None, ()), lambda x, weight: x.softmax(-1)),
            "log_softmax": (
                lambda x, weight: softmax_gpu.log_softmax_cuda(x, torch.float32, ()),
                lambda x, weight: x.log_softmax(-1, dtype=torch.float32),
            ),
        }
        for name, (ours, plain) in cases.items():
            torch._dynamo.reset()
            ways = (functools.partial(way, weight=weight) for way in (ours, torch.compile(plain)))
            us, peer_us = in_turns(xs, *ways)
            row = {"kernel": name, "rows": t, "length": r, "us": us, "peer": "torch.compile", "peer_us": peer_us}
            moved = t * r * (2 + ours(*xs[0], weight=weight).itemsize)
            yield row | {"ratio": peer_us / us, "TB/s": moved / us * 1e-6, "order": str(row_order(r, "cuda"))}


def gates() -> dict[str, dict[str, int]]:
    """Return how many schedules the gates admitted and refused, over all problems on this device."""
    families = matmul_gpu.MATMUL, ATTENTION
    tables = {gate.family: gate.tuner(DEVICE).table() for gate in families}
    return {
        name: {"problems": len(table)}
        | {kind: sum(int(row[kind]) for row in table) for kind in ("admitted", "refused")}
        for name, table in tables.items()
    }


FAMILIES = {"matmul": matmul_rows, "gated": gated_rows, "attention": attention_rows, "rows": row_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after this long; what was measured is kept")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    started, rows = time.monotonic(), []
    for family in arguments.only.split(","):
        for row in FAMILIES[family]():
            rows.append(row)
            keys = [k for k in row if k not in ("refused", "tuning_seconds", "peer")]
            print("  ".join(f"{row[k]:.3g}" if isinstance(row[k], float) else str(row[k]) for k in keys), flush=True)
            if time.monotonic() - started > 60 * arguments.minutes:
                break
    name = torch.cuda.get_device_name()
    result = {"commit": arguments.commit, "device": name, "torch": torch.__version__, "triton": triton.__version__}
    result |= {"unit": "us: median of CUDA-graph replays, buffers rotated past the L2", "rows": rows}
    result |= {"geometric means": geometric_means(rows), "gate": gates()}
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"templates-{name.replace(' ', '-').lower()}-{arguments.commit}.json"
    path.write_text(json.dumps(result, indent=1))
    print(path)


if __name__ == "__main__":
    main()
