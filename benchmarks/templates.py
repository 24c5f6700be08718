"""GPU times of the templates beside cuBLAS, SDPA and torch.compile: medians of CUDA-graph replays over rotated buffers.

    python benchmarks/templates.py --commit $(git rev-parse --short HEAD) [--only matmul,attention,rows] [--minutes 8]

Writes benchmarks/results/templates-<device>-<commit>.json. A ratio is the peer's time over ours: above 1 we are faster.
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

from detcompile.numerics import row_order
from detcompile.templates import attention_triton, matmul_triton, rows_triton, softmax_triton
from detcompile.templates.tuning import graph_seconds

DEVICE = torch.device("cuda")
L2_BYTES = 3e8  # rotated buffers together: several times the H200's 60 MB
GEMMS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
TOKENS = (1, 16, 64, 256, 1024, 4096)
TREES = {"Sequential": (), "Tree(1,2,4,8)": (2, 2, 2)}


def measure(buffers: list[tuple], launch: Callable) -> float:
    """Microseconds of one launch over the given argument tuples."""
    return 1e6 * graph_seconds([functools.partial(launch, *arguments) for arguments in buffers])


def _alternate(buffers: list[tuple], ours: Callable, peer: Callable) -> tuple[float, float]:
    """Medians of both, taken in turns: sustained matrix work lowers the clocks of whoever comes second."""
    pairs = [(measure(buffers, ours), measure(buffers, peer)) for _ in range(5)]
    return statistics.median(us for us, _ in pairs), statistics.median(us for _, us in pairs)


def copies(size: int) -> int:
    return max(2, min(64, int(L2_BYTES / size) + 1))


def matmul_rows() -> Iterator[dict]:
    for name, (n, k) in GEMMS.items():
        weights = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) * 0.02 for _ in range(copies(2 * n * k))]
        for m in TOKENS:
            x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
            for order, radices in TREES.items():
                if not radices or name in ("o", "down"):  # the others are column-parallel: no tree
                    row = _gemm([(x, w) for w in weights], radices)
                    yield {"kernel": "matmul", "shape": name, "order": order} | row


def _gemm(buffers: list[tuple], radices: tuple[int, ...]) -> dict:
    x, w = buffers[0]
    (m, k), n = x.shape, w.shape[0]
    problem = matmul_triton.gemm_problem(x, w, None, None, radices, x.new_empty(1, n))
    launch = functools.partial(matmul_triton.matmul_cuda, bias=None, residual=None, radices=radices)
    untuned_us = measure(buffers, launch)
    started = time.monotonic()
    schedule = str(matmul_triton.tune_matmul(problem, DEVICE))
    seconds = time.monotonic() - started
    us, peer_us = _alternate(buffers, launch, lambda x, w: torch.mm(x, w.t()))
    counts = {row["problem"]: (row["admitted"], row["refused"]) for row in matmul_triton.tuner(DEVICE).table()}
    row = {"M": m, "N": n, "K": k, "us": us, "untuned_us": untuned_us, "peer": "cuBLAS", "peer_us": peer_us}
    row |= {"ratio": peer_us / us, "tflops": 2e-6 * m * n * k / us, "schedule": schedule, "tuning_seconds": seconds}
    return row | {"admitted, refused": counts[str(problem)]}


def attention_rows() -> Iterator[dict]:
    heads, kv_heads, d, page = 32, 8, 128, 16
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for n in (2048, 8192):
        qkv = [
            tuple(torch.randn(1, h, n, d, device=DEVICE, dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads))
            for _ in range(4)
        ]
        peer = measure(qkv, lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True))
        for name in ("chosen", *map(str, attention_triton.attention_candidates(_dense_problem(qkv[0])))):
            schedule = _named(name, _dense_problem(qkv[0]))
            launch = functools.partial(_dense, schedule=schedule)
            ours = measure(qkv, launch)
            row = {"kernel": "attention prefill", "keys": n, "schedule": name, "us": ours, "peer": "SDPA (flash)"}
            yield row | {"peer_us": peer, "ratio": peer / ours, "tflops": 2e-6 * n * n * heads * d / ours}
    for batch, n in ((1, 2048), (1, 8192), (32, 2048), (32, 8192)):
        yield from _decode(batch, n, heads, kv_heads, d, page)


def _dense(q, k, v, schedule=None):  # type: ignore[no-untyped-def]
    return attention_triton.dense_attention_cuda(q, k, v, 128**-0.5, 0, 512, schedule=schedule)


def _dense_problem(qkv: tuple) -> attention_triton.AttentionProblem:
    return attention_triton.AttentionProblem(
        dtype="bfloat16", heads=qkv[0].shape[1], kv_heads=qkv[1].shape[1], d=128, dv=128, page=0, chunk=512,
        windowed=False, few=False, split=False,
    )  # fmt: skip


def _named(name: str, problem: attention_triton.AttentionProblem) -> attention_triton.AttentionSchedule | None:
    return {str(s): s for s in attention_triton.attention_candidates(problem)}.get(name)


def _decode(batch: int, n: int, heads: int, kv_heads: int, d: int, page: int) -> Iterator[dict]:
    """One token a sequence against n keys, beside SDPA over contiguous keys and a copy of the cache."""
    pages = batch * n // page
    rotated = copies(2 * 2 * batch * n * kv_heads * d)
    caches = [
        tuple(torch.randn(pages, page, kv_heads, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        for _ in range(rotated)
    ]
    table = torch.randperm(pages, device=DEVICE).view(batch, -1).int()
    last = table[:, -1].long() * page + page - 1
    cu = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32)
    lens = torch.full((batch,), n, device=DEVICE, dtype=torch.int32)
    q, k, v = (torch.randn(batch, h, d, device=DEVICE, dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads))

    def ours(k_cache, v_cache, schedule=None):  # type: ignore[no-untyped-def]
        return attention_triton.paged_attention_cuda(
            q, k, v, k_cache, v_cache, last, cu, lens, table, d**-0.5, 0, 512, schedule=schedule
        )

    def peer(k_cache, v_cache):  # type: ignore[no-untyped-def]
        keys, values = (t.view(batch, n, kv_heads, d).transpose(1, 2) for t in (k_cache, v_cache))
        return torch.nn.functional.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)

    peer_us = measure(caches, peer)
    moved = sum(t.numel() * t.element_size() for t in caches[0])
    copy_us = measure(caches, lambda a, b: a.copy_(b))  # reads and writes as many bytes as decoding reads
    problem = attention_triton.AttentionProblem(
        dtype="bfloat16", heads=heads, kv_heads=kv_heads, d=d, dv=d, page=page, chunk=512, windowed=False, few=True,
        split=True,
    )  # fmt: skip
    for schedule in (None, *attention_triton.attention_candidates(problem)):
        us = measure(caches, functools.partial(ours, schedule=schedule))
        row = {"kernel": "attention decode", "batch": batch, "keys": n, "us": us, "peer": "SDPA", "peer_us": peer_us}
        row |= {"ratio": peer_us / us, "TB/s": moved / us * 1e-6, "of_copy": copy_us / us}
        yield row | {"schedule": str(schedule or "chosen")}


def row_rows() -> Iterator[dict]:
    for t, r in ((1, 4096), (64, 4096), (4096, 4096), (131072, 128), (8, 151936)):
        xs = [(torch.randn(t, r, device=DEVICE, dtype=torch.bfloat16),) for _ in range(copies(4 * t * r))]
        weight = torch.randn(r, device=DEVICE, dtype=torch.bfloat16)
        cases = {
            "rms_norm": (
                lambda x, weight: rows_triton.rms_norm_cuda(x, weight, 1e-6, True),
                lambda x, weight: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6),
            ),
            "softmax": (lambda x, weight: softmax_triton.softmax_cuda(x, None, ()), lambda x, weight: x.softmax(-1)),
        }
        for name, (ours, plain) in cases.items():
            torch._dynamo.reset()
            us = measure(xs, functools.partial(ours, weight=weight))
            peer_us = measure(xs, functools.partial(torch.compile(plain), weight=weight))
            row = {"kernel": name, "rows": t, "length": r, "us": us, "peer": "torch.compile", "peer_us": peer_us}
            yield row | {"ratio": peer_us / us, "TB/s": 4 * t * r / us * 1e-6, "schedule": str(row_order(r, "cuda"))}


FAMILIES = {"matmul": matmul_rows, "attention": attention_rows, "rows": row_rows}


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
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"templates-{name.replace(' ', '-').lower()}-{arguments.commit}.json"
    path.write_text(json.dumps(result, indent=1))
    print(path)


if __name__ == "__main__":
    main()
