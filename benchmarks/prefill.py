"""Time a prefill step of an 8B model by kernel, and its products beside cuBLAS, under sustained load on one GPU.

    python -m benchmarks.prefill --commit $(git rev-parse --short HEAD) [--only products,steps] [--layers 36]

Qwen3-8B's shape with random weights in bf16, 8 prompts of 2048 tokens a step. Products and attention are timed in
turns of a quarter of a second, since sustained work lowers the clocks; each schedule's bytes are compared with those of
the reference schedule. Writes benchmarks/results/prefill-<device>-<commit>.json.
"""

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import detcompile
from benchmarks.model import build, prefill_run
from benchmarks.templates import in_turns as medians
from detcompile import Numerics
from detcompile.templates.attention.gpu import dense_attention_cuda
from detcompile.templates.attention.schedules import AttentionSchedule
from detcompile.templates.attention.scores import AttentionRule
from detcompile.templates.matmul.candidates import reference_schedule
from detcompile.templates.matmul.gpu import gemm_problem, run_gated
from detcompile.templates.matmul.launch import run_schedule
from detcompile.templates.matmul.schedules import GemmSchedule, HopperTiles

BF16 = torch.bfloat16
PROMPTS, LENGTH = 8, 2048
TOKENS = PROMPTS * LENGTH
TURN_SECONDS = 0.25
TURNS = 3
PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
SEQUENTIAL = [
    HopperTiles(128, 256, 64, 3),
    HopperTiles(128, 256, 64, 3, group=4),
    HopperTiles(128, 256, 64, 3, group=16),
    HopperTiles(128, 256, 64, 3, group=32),
    HopperTiles(128, 192, 64, 4),
]
GATED = [
    HopperTiles(128, 256, 64, 4, gated=True),
    HopperTiles(128, 256, 64, 4, gated=True, group=4),
    HopperTiles(128, 256, 64, 4, gated=True, group=16),
    HopperTiles(128, 256, 64, 3, gated=True),
]
TREES = {
    (2, 2, 2): [HopperTiles(128, 64, 64, 6), HopperTiles(128, 128, 64, 3), HopperTiles(128, 128, 64, 5, nodes=2)],
    (2, 4): [HopperTiles(128, 64, 64, 6), HopperTiles(128, 128, 64, 4), HopperTiles(128, 128, 64, 5, nodes=2)],
    (8,): [HopperTiles(128, 64, 64, 6), HopperTiles(128, 128, 64, 5), HopperTiles(128, 128, 64, 4)],
}
ATTENTION_SCHEDULES = [
    AttentionSchedule("hopper", 128, 8, 3),
    AttentionSchedule("hopper", 128, 8, 4),
    AttentionSchedule("hopper", 64, 4, 2),
]


class Clocks:
    """Clock and power of the first GPU while it is measured."""

    def __init__(self) -> None:
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "50"]
        self._process = subprocess.Popen([*query, "-i", "0"], stdout=subprocess.PIPE, text=True)
        self._rows: list[tuple[float, float, float]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                clock, power = map(float, line.split(","))
                self._rows.append((time.time(), clock, power))

    def between(self, start: float, end: float) -> dict[str, float]:
        """Return the means over a span of time.time()."""
        rows = [row for row in self._rows if start <= row[0] <= end]
        return {"MHz": statistics.mean(r[1] for r in rows), "W": statistics.mean(r[2] for r in rows)} if rows else {}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def one_turn(run: Callable[[], object], clocks: Clocks) -> dict[str, float]:
    """Return microseconds of a launch over a turn, with the clock that it ran at."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    run(), run()
    end.record()
    torch.cuda.synchronize()
    count = max(4, int(TURN_SECONDS / (start.elapsed_time(end) / 2e3)))
    began = time.time()
    start.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return {"us": 1e3 * start.elapsed_time(end) / count} | clocks.between(began, time.time())


def in_turns(runs: dict[str, Callable[[], object]], clocks: Clocks) -> dict[str, dict[str, float]]:
    """Return medians by name."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, run in runs.items():
            turns[name].append(one_turn(run, clocks))
    return {
        name: {key: round(statistics.median(turn[key] for turn in samples if key in turn), 1) for key in samples[0]}
        for name, samples in turns.items()
    }


def rotating(run: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> Callable[[], object]:
    """Return a launch that takes the next of these weights at each call."""
    state = [0]

    def launch() -> object:
        state[0] = (state[0] + 1) % len(weights)
        return run(weights[state[0]])

    return launch


def cases() -> Iterator[tuple[str, str, tuple[int, ...], GemmSchedule]]:
    """Yield products with their schedules: name, label, the order's radices, and the schedule."""
    for name in PRODUCTS:
        for schedule in GATED if name == "gate_up" else SEQUENTIAL:
            yield name, str(schedule), (), schedule
        if name in ("o", "down"):
            for radices, schedules in TREES.items():
                for schedule in schedules:
                    yield name, f"{radices} {schedule}", radices, schedule


def compile_kernel(name: str, radices: tuple[int, ...], schedule: GemmSchedule) -> None:
    """Launch a case once over few tokens; what cannot run is reported where it is measured."""
    n, k = PRODUCTS[name]
    x, w = (torch.zeros(rows, k, device="cuda", dtype=BF16) for rows in (256, n))
    with contextlib.suppress(Exception):
        launch_of(name, radices, schedule, x, x.new_zeros(256, n))(w)


def launch_of(
    name: str, radices: tuple[int, ...], schedule: GemmSchedule, x: torch.Tensor, residual: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a case's launch as a function of its weights; o and down add a residual, if one is given."""
    if name == "gate_up":
        return functools.partial(run_gated, schedule, x)
    added = residual if name in ("o", "down") else None
    return functools.partial(run_schedule, schedule, x, residual=added, radices=radices)


def products(clocks: Clocks) -> Iterator[tuple[str, object]]:
    """Time a layer's products under several schedules and orders, o and down with a residual; cuBLAS without it."""
    with multiprocessing.get_context("spawn").Pool(min(12, os.cpu_count() or 1)) as pool:
        pool.starmap(compile_kernel, [(name, *rest) for name, _, *rest in cases()], chunksize=2)
    for name, (n, k) in PRODUCTS.items():
        x = torch.randn(TOKENS, k, device="cuda", dtype=BF16)
        weights = [torch.randn(n, k, device="cuda", dtype=BF16) * 0.02 for _ in range(3)]
        residual, out = torch.randn(TOKENS, n, device="cuda", dtype=BF16), x.new_empty(TOKENS, n)
        runs: dict[str, Callable[[], object]] = {
            "cuBLAS": rotating(lambda w, x=x, out=out: torch.mm(x, w.t(), out=out), weights)
        }
        differing = []
        for _, label, radices, schedule in (case for case in cases() if case[0] == name):
            problem = gemm_problem(x, weights[0], None, None, radices, out, gated=name == "gate_up")
            few = [
                launch_of(name, radices, one, x[:517], residual[:517])
                for one in (schedule, reference_schedule(problem))
            ]
            try:
                actual, expected = (launch(weights[0]).view(torch.int16) for launch in few)
            except Exception as error:
                differing.append(f"{label}: {error!r}"[:200])
                continue
            differing += [label] * (not torch.equal(actual, expected))
            runs[label] = rotating(launch_of(name, radices, schedule, x, residual), weights)
        flops = 2 * TOKENS * n * k
        times = in_turns(runs, clocks)
        for row in times.values():
            row["TFLOP/s"] = round(flops / row["us"] * 1e-6, 1)
        yield name, times | {"differ": differing}


def sizes() -> Iterator[tuple[str, object]]:
    """Time trees, gated products and cuBLAS over fewer tokens: medians of alternating graph replays, microseconds."""
    for name, (n, k) in PRODUCTS.items():
        if name == "qkv":
            continue
        radices = () if name == "gate_up" else (2, 2, 2)
        schedules = GATED[:3] if name == "gate_up" else [HopperTiles(64, 128, 64, 6), *TREES[radices]]
        weights = [torch.randn(n, k, device="cuda", dtype=BF16) * 0.02 for _ in range(3)]
        for tokens in (256, 512, 1024, 2048, 4096, 8192):
            if name == "gate_up" and tokens < 1024:
                continue
            x = torch.randn(tokens, k, device="cuda", dtype=BF16)
            launches = [launch_of(name, radices, schedule, x, None) for schedule in schedules]
            runs = {"cuBLAS": lambda w, x=x: torch.mm(x, w.t())} | dict(zip(map(str, schedules), launches))
            times = medians([(w,) for w in weights], *runs.values())
            yield f"{name} {tokens}", {label: round(us, 1) for label, us in zip(runs, times)}


def attention(clocks: Clocks) -> Iterator[tuple[str, object]]:
    """Time causal attention of whole prompts, dense, under several schedules beside cuDNN and flash."""
    rule = AttentionRule(128**-0.5, 0, 512)
    for prompts, length in ((PROMPTS, LENGTH), (1, 8192), (1, 16384)):
        q, k, v = (torch.randn(prompts, heads, length, 128, device="cuda", dtype=BF16) for heads in (32, 8, 8))

        def peer(backend: SDPBackend, q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> object:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        ours = {
            str(schedule): functools.partial(dense_attention_cuda, q, k, v, rule, schedule=schedule)
            for schedule in ATTENTION_SCHEDULES
        }
        expected, *others = (run().view(torch.int16) for run in ours.values())
        differing = [label for label, actual in zip(list(ours)[1:], others) if not torch.equal(actual, expected)]
        runs: dict[str, Callable[[], object]] = {
            **ours,
            "cuDNN": functools.partial(peer, SDPBackend.CUDNN_ATTENTION),
            "flash": functools.partial(peer, SDPBackend.FLASH_ATTENTION),
        }
        times = in_turns(runs, clocks)
        for row in times.values():
            row["TFLOP/s"] = round(2 * prompts * length * length * 32 * 128 / row["us"] * 1e-6, 1)
        yield f"{prompts} x {length}", times | {"differ": differing}


def steps(clocks: Clocks, layers: int, tp_sizes: str) -> Iterator[tuple[str, object]]:
    """Yield a step's milliseconds under load, and the kernels of one step with the gaps between them."""
    for name in tp_sizes.split(";"):
        started = time.perf_counter()
        model = detcompile.compile(build(layers), numerics=Numerics(tp_sizes=tuple(map(int, name.split(",")))))
        run = prefill_run(model, LENGTH, PROMPTS)
        run(), torch.cuda.synchronize()
        ready = time.perf_counter() - started
        began, times = time.time(), []
        for _ in range(8):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            times.append((start, end))
        torch.cuda.synchronize()
        result = {"ready after s": ready, "ms": [round(start.elapsed_time(end), 2) for start, end in times]}
        result |= clocks.between(began, time.time()) | kernels_of(run)
        yield name, result
        del model, run
        torch.cuda.empty_cache()


def kernels_of(run: Callable[[], object]) -> dict[str, object]:
    """Return a step's kernels by name and place in a layer, milliseconds in all, and the gaps between them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        run()
        torch.cuda.synchronize()
    events = sorted(
        (event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA),
        key=lambda event: event.time_range.start,
    )
    events = events[len(events) // 2 :]  # of the second
    total: dict[str, list[float]] = {}
    gap, end, num_products = 0.0, events[0].time_range.start, 0
    for event in events:
        name = event.name[:60]
        if "matmul" in name:
            name += f" {list(PRODUCTS)[num_products % 4]}"
            num_products += 1
        total.setdefault(name, []).append(event.time_range.end - max(end, event.time_range.start))
        gap += max(0.0, event.time_range.start - end)
        end = max(end, event.time_range.end)
    table = {name: (len(times), round(sum(times) / 1e3, 3)) for name, times in total.items()}
    return {
        "kernels: launches, ms that nothing before covers": dict(sorted(table.items(), key=lambda row: -row[1][1])),
        "gaps, ms": round(gap / 1e3, 3),
        "span, ms": round((end - events[0].time_range.start) / 1e3, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--only", default="products,sizes,attention,steps")
    parser.add_argument("--tp-sizes", default="1;1,2,4,8", help="orders of the steps")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name().replace(" ", "-").lower()
    path = arguments.out / f"prefill-{name}-{arguments.commit}.json"
    report: dict[str, object] = {
        "commit": arguments.commit,
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tokens": TOKENS,
    }
    parts = {
        "products": products,
        "sizes": lambda clocks: sizes(),
        "attention": attention,
        "steps": functools.partial(steps, layers=arguments.layers, tp_sizes=arguments.tp_sizes),
    }
    clocks = Clocks()
    try:
        for part in arguments.only.split(","):
            report[part] = results = {}
            for key, value in parts[part](clocks):
                results[key] = value
                path.write_text(json.dumps(report, indent=1))
                print(part, key, json.dumps(value), flush=True)
    finally:
        clocks.close()


if __name__ == "__main__":
    main()
