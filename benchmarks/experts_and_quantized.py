"""Compare GPU times of experts' products and of products with quantized weights with torch's.

    python -m benchmarks.experts_and_quantized --commit $(git rev-parse --short HEAD) [--only qwen,int4]

Medians of CUDA-graph replays, as benchmarks/templates.py takes them; weights rotate past the L2 (of experts: routings
do, over weights that are larger). Writes benchmarks/results/experts-and-quantized-<device>-<commit>.json. A ratio is
the peer's time over ours: above 1 we are faster. Our products start at the router's ids and group the rows themselves.
A product with quantized weights has a row for each order that it may have: row-parallel linears have a tree by default.

| peer | what it does |
|---|---|
| grouped_mm | torch's grouped product alone, of rows that are sorted by expert already |
| grouped_mm, whole | the same with sort, offsets, gather and the way back, as transformers calls it |
| cuBLAS loop | one product an expert with rows, of sorted rows, the counts known to the host |
| int4pack, int8pack | torch._weight_int4pack_mm, torch._weight_int8pack_mm |
| dequantize + cuBLAS | the dequantization by torch.compile, then torch.mm |
| cuBLAS bfloat16, scaled_mm | for information: weights of 16 bits; both operands float8 |
"""

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from torch import Tensor

from benchmarks.templates import DEVICE, TREES, copies, measure
from detcompile.templates.experts import gpu as experts_gpu
from detcompile.templates.experts.schedules import ExpertsSchedule, expert_candidates
from detcompile.templates.quantized import gpu as dequant_gpu
from detcompile.templates.quantized.schedules import DequantSchedule, dequant_candidates
from detcompile.templates.quantized.weights import QuantizedWeight, dequantized, pack_nibbles

MIXTURES = {  # experts, experts of a token, {product: N, K, whether a token's choices share its row}
    "qwen": ("Qwen3-30B-A3B", 128, 8, {"gate_up": (1536, 2048, True), "down": (2048, 768, False)}),
    "mixtral": ("Mixtral 8x7B", 8, 2, {"gate_up": (28672, 4096, True), "down": (4096, 14336, False)}),
}
EXPERT_TOKENS = (1, 8, 64, 512, 4096)
LINEARS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}  # Qwen3-8B
ROW_PARALLEL = ("o", "down")
TOKENS = (1, 8, 64, 512)
GROUP = 128
BFLOAT16 = torch.bfloat16


def expert_rows(key: str) -> Iterator[dict]:
    model, experts, choices, products = MIXTURES[key]
    _compile_all(_compile_experts, _expert_compilations(key))
    for name, (n, k, shared) in products.items():
        w = torch.randn(experts, n, k, device=DEVICE, dtype=BFLOAT16) * 0.02
        for tokens in EXPERT_TOKENS:
            buffers = list(_routings(tokens, experts, choices, k, shared))
            problem = experts_gpu.experts_problem(tokens * choices, buffers[0][0], w, None)
            run = functools.partial(experts_gpu.run_experts, w=w)
            schedule = experts_gpu.EXPERTS.tune(
                problem, DEVICE, lambda s, run=run, buffers=buffers: measure(buffers, functools.partial(run, s))
            )
            ours = functools.partial(experts_gpu.expert_matmul_cuda, w=w, bias=None)
            peers = {
                "grouped_mm": ([_sorted(x, ids, experts) for x, ids in buffers], functools.partial(_grouped_mm, w)),
                "grouped_mm, whole": (buffers, functools.partial(_whole_grouped_mm, w)),
                "cuBLAS loop": ([_slices(x, ids, w) for x, ids in buffers], _cublas_loop),
            }
            row = {"kernel": "experts", "model": model, "product": name, "tokens": tokens, "N": n, "K": k}
            row |= _beside(buffers, ours, peers)
            flops = 2e-6 * tokens * choices * n * k / row["us"]
            row |= {"tflops": flops, "schedule": str(schedule)}
            yield row | _gate(experts_gpu.EXPERTS.tuner(DEVICE), problem)


def _routings(tokens: int, experts: int, choices: int, k: int, shared: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield x and ids of several routings: a token's choices are distinct, and all experts equally likely."""
    for _ in range(12 if tokens <= 64 else 3):
        x = torch.randn(tokens, *(() if shared else (choices,)), k, device=DEVICE, dtype=BFLOAT16)
        yield x, torch.rand(tokens, experts, device=DEVICE).argsort(-1)[:, :choices].contiguous()


def _sorted(x: Tensor, ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    order = ids.flatten().argsort(stable=True)
    rows = x.reshape(-1, x.shape[-1])[order // (ids.shape[1] if x.dim() == 2 else 1)]
    return rows, torch.bincount(ids.flatten(), minlength=experts).cumsum(0).int()


def _grouped_mm(w: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return grouped(rows, w.transpose(1, 2), offs=offsets)


def _whole_grouped_mm(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    sorted_ids, order = ids.flatten().sort()
    rows = x.reshape(-1, x.shape[-1])[order // (ids.shape[1] if x.dim() == 2 else 1)]
    counts = torch.histc(sorted_ids.int(), bins=len(w), min=0, max=len(w) - 1)
    out = _grouped_mm(w, rows, counts.cumsum(0, dtype=torch.int32))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=DEVICE)
    return out[back]


def _slices(x: Tensor, ids: Tensor, w: Tensor) -> tuple[list[tuple[Tensor, Tensor]]]:
    rows, offsets = _sorted(x, ids, len(w))
    ends = [0, *offsets.tolist()]
    return ([(rows[a:b], w[e].t()) for e, (a, b) in enumerate(itertools.pairwise(ends)) if b > a],)


def _cublas_loop(slices: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [torch.mm(rows, w) for rows, w in slices]


def quantized_rows(key: str) -> Iterator[dict]:
    _compile_all(_compile_dequant, _dequant_compilations(key))
    for name, (n, k) in LINEARS.items():
        size = n * k // 2 if key == "int4" else n * k
        weights = [_quantized(key, n, k) for _ in range(min(12, copies(size)))]
        plain = [torch.randn(n, k, device=DEVICE, dtype=BFLOAT16) * 0.02 for _ in range(min(6, copies(2 * n * k)))]
        for tokens in TOKENS:
            x = torch.randn(tokens, k, device=DEVICE, dtype=BFLOAT16)
            peers = _quantized_peers(key, x, weights, plain)
            for order, radices in TREES.items():
                if not radices or name in ROW_PARALLEL:
                    row = {"kernel": key, "model": "Qwen3-8B", "product": name, "order": order, "tokens": tokens}
                    row |= {"N": n, "K": k} | _quantized_row(x, weights, radices, peers)
                    yield row | {"TB/s": size / row["us"] * 1e-6}


def _quantized_row(x: Tensor, weights: list[QuantizedWeight], radices: tuple[int, ...], peers: dict) -> dict:
    problem = dequant_gpu.dequant_problem(x, weights[0], None, None, radices, BFLOAT16)
    buffers = [(weight,) for weight in weights]

    def seconds(schedule: DequantSchedule) -> float:
        return measure(buffers, lambda w: dequant_gpu.run_dequant(schedule, x, w, radices=radices))

    schedule = dequant_gpu.DEQUANT.tune(problem, DEVICE, seconds)
    row = _beside(buffers, lambda w: dequant_gpu.dequant_matmul_cuda(x, w, None, None, radices), peers)
    return row | {"schedule": str(schedule)} | _gate(dequant_gpu.DEQUANT.tuner(DEVICE), problem)


def _quantized(key: str, n: int, k: int) -> QuantizedWeight:
    if key == "int4":
        q = pack_nibbles(torch.randint(0, 16, (n, k), device=DEVICE))
        return QuantizedWeight(q, torch.rand(k // GROUP, n, device=DEVICE).to(BFLOAT16) * 0.01, None, None, k, GROUP, 1)
    if key == "int8":
        q = torch.randint(-128, 128, (n, k), device=DEVICE, dtype=torch.int8)
        return QuantizedWeight(q, torch.rand(1, n, device=DEVICE) * 0.01, None, None, k, k, 1)
    q = torch.randn(n, k, device=DEVICE).to(torch.float8_e4m3fn)
    return QuantizedWeight(q, torch.rand(k // 128, n // 128, device=DEVICE) * 0.01, None, None, k, 128, 128)


def _quantized_peers(key: str, x: Tensor, weights: list[QuantizedWeight], plain: list[Tensor]) -> dict:
    dequantize = torch.compile(_dequantize)
    peers: dict[str, tuple[list[tuple], Callable]] = {
        "dequantize + cuBLAS": ([(w,) for w in weights], lambda w: torch.mm(x, dequantize(w).t())),
        "cuBLAS bfloat16": ([(w,) for w in plain], lambda w: torch.mm(x, w.t())),
    }
    if key == "int4":
        packed = []
        for weight in weights:
            q = torch.randint(0, 256, (len(weight.w), weight.k // 2), device=DEVICE, dtype=torch.uint8)
            zeros = torch.zeros_like(weight.scales)
            scales = torch.stack([weight.scales, zeros], 2).contiguous()
            packed.append((torch._convert_weight_to_int4pack(q, 8), scales))
        peers["int4pack"] = packed, lambda w, s: torch._weight_int4pack_mm(x, w, GROUP, s)
    elif key == "int8":
        scaled = [(weight.w, weight.scales[0].to(BFLOAT16)) for weight in weights]
        peers["int8pack"] = scaled, lambda w, s: torch._weight_int8pack_mm(x, w, s)
    else:
        a, a_scale = x.to(torch.float8_e4m3fn), torch.ones(len(x), 1, device=DEVICE)
        b_scale = torch.ones(1, len(weights[0].w), device=DEVICE)
        peers["scaled_mm"] = (
            [(weight.w,) for weight in weights],
            lambda w: torch._scaled_mm(a, w.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=BFLOAT16),
        )
    return peers


def _dequantize(weight: QuantizedWeight) -> Tensor:
    if weight.w.dtype is torch.float8_e4m3fn:
        scales = weight.scales.t().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (weight.w.float() * scales).to(BFLOAT16)
    return dequantized(weight, BFLOAT16)


def _beside(buffers: list[tuple], ours: Callable, peers: dict[str, tuple[list[tuple], Callable]]) -> dict:
    """Return medians of ours and of every peer, alternating; for a peer that cannot run, the reason."""
    rounds = 3
    times: dict[str, list[float]] = {"ours": []}
    failed = {}
    for _ in range(rounds):
        times["ours"].append(measure(buffers, ours))
        for name, (arguments, peer) in peers.items():
            if name not in failed:
                try:
                    times.setdefault(name, []).append(measure(arguments, peer))
                except Exception as error:  # of whatever kind: this torch or device has no such product
                    failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
                    torch.cuda.synchronize()
    us = statistics.median(times.pop("ours"))
    medians = {name: statistics.median(samples) for name, samples in times.items() if name not in failed}
    row = {"us": us, "peer_us": medians, "ratio": {name: peer / us for name, peer in medians.items()}}
    return row | ({"failed": failed} if failed else {})


def _gate(tuner, problem) -> dict:
    row = next(row for row in tuner.table() if row["problem"] == str(problem))
    return {"admitted, refused": (row["admitted"], row["refused"])}


def _expert_compilations(key: str) -> list[tuple]:
    _, experts, choices, products = MIXTURES[key]
    compilations = []
    for n, k, shared in products.values():
        x, w = (torch.empty(shape, device=DEVICE, dtype=BFLOAT16) for shape in ((1, k), (experts, n, k)))
        for tokens in EXPERT_TOKENS:
            problem = experts_gpu.experts_problem(tokens * choices, x, w, None)
            compilations += [(schedule, experts, choices if shared else 1) for schedule in expert_candidates(problem)]
    return list(dict.fromkeys(compilations))


def _dequant_compilations(key: str) -> list[tuple]:
    weight = _quantized(key, 256, 4096)
    xs = [torch.empty(tokens, 4096, device=DEVICE, dtype=BFLOAT16) for tokens in TOKENS]
    compilations = []
    for x, radices in itertools.product(xs, TREES.values()):
        problem = dequant_gpu.dequant_problem(x, weight, None, None, radices, BFLOAT16)
        compilations += [(schedule, key, radices) for schedule in dequant_candidates(problem)]
    return list(dict.fromkeys(compilations))


def _compile_all(compile_one: Callable, arguments: list[tuple]) -> None:
    """Compile every candidate in many processes, so that the gate and the clock find it compiled."""
    with multiprocessing.get_context("spawn").Pool(min(15, os.cpu_count() or 1)) as pool:
        pool.starmap(compile_one, arguments, chunksize=1)


def _compile_experts(schedule: ExpertsSchedule, experts: int, choices: int) -> None:
    x = torch.zeros(1, *(() if choices > 1 else (1,)), 2048, device=DEVICE, dtype=BFLOAT16)
    ids = torch.zeros(1, choices, device=DEVICE, dtype=torch.int64)
    w = torch.zeros(experts, 256, 2048, device=DEVICE, dtype=BFLOAT16)
    with contextlib.suppress(Exception):  # what cannot run here is refused by the gate, which says why
        experts_gpu.run_experts(schedule, x, ids, w)


def _compile_dequant(schedule: DequantSchedule, key: str, radices: tuple[int, ...]) -> None:
    with contextlib.suppress(Exception):
        x = torch.zeros(32, 4096, device=DEVICE, dtype=BFLOAT16)
        dequant_gpu.run_dequant(schedule, x, _quantized(key, 256, 4096), radices=radices)


FAMILIES: dict[str, Callable[[str], Iterator[dict]]] = {key: expert_rows for key in MIXTURES}
FAMILIES |= {key: quantized_rows for key in ("int4", "int8", "fp8")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after this long; what was measured is kept")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    started, rows = time.monotonic(), []
    name = torch.cuda.get_device_name()
    result = {"commit": arguments.commit, "device": name, "torch": torch.__version__, "triton": triton.__version__}
    result |= {"unit": "us: median of CUDA-graph replays, buffers rotated past the L2", "rows": rows}
    arguments.output.mkdir(parents=True, exist_ok=True)
    suffix = "" if arguments.only == ",".join(FAMILIES) else "-" + arguments.only.replace(",", "-")
    path = arguments.output / f"experts-and-quantized{suffix}-{name.replace(' ', '-').lower()}-{arguments.commit}.json"
    for key in arguments.only.split(","):
        for row in FAMILIES[key](key):
            rows.append(row)
            path.write_text(json.dumps(result, indent=1))
            ratios = "  ".join(f"{peer} {ratio:.2f}" for peer, ratio in row["ratio"].items())
            name = f"{row['model']} {row['kernel']} {row['product']} {row.get('order', '')}".rstrip()
            print(f"{name} {row['tokens']}: {row['us']:.1f} us  {ratios}"
                  f"  {row['schedule']} {row['admitted, refused']} {row.get('failed', '')}", flush=True)  # fmt: skip
            if time.monotonic() - started > 60 * arguments.minutes:
                break
    print(path)


if __name__ == "__main__":
    main()
