"""Compare CPU times of matmul, exact linears and the tiny model with torch's, alternating, on the same threads.

    python -m benchmarks.cpu --commit $(git rev-parse --short HEAD) [--threads 2] [--only gemm,exact,model] [--isa avx2]

Writes benchmarks/results/cpu-<cpu>-<commit>.json. A ratio is the peer's best time over our best: above 1 we are faster.
Other work on the same cores delays a parallel kernel by whole time slices, which shows in the medians. Exact linears
are timed by the CPU seconds of all threads.
"""

import argparse
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import detcompile
from detcompile.orders.exact import ARITHMETICS
from detcompile.templates.cpp_dispatch import direct_ops
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.cpu import shared_objects
from detcompile.templates.exact.linear import linear_cpu
from detcompile.templates.matmul.op import matmul_cpu

SHAPES = ((2048, 2048), (4096, 1024), (1024, 4096))  # N, K
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
STEPS = {"prefill 512": (1, 512), "decode 1": (1, 1), "decode 8": (8, 1)}  # ids [B, C] of one dense call
DTYPES = (torch.float32, torch.bfloat16)
EXACT_SIZES, EXACT_TOKENS, EXACT_BYTES = (1024, 2048, 4096), (1, 4, 16, 64), 1 << 26  # N = K; of weights read in turns
EXACT_DIGITS = {name: (digits.activations, digits.weights) for name, digits in ARITHMETICS.items()}
ERROR_SHAPE = (64, 512, 2048)  # M, N, K of the comparison with float64


def in_turns(
    ours: Callable[[], object],
    peer: Callable[[], object],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict:
    """Return best and median microseconds of both, called alternately for ``seconds``, at least five times."""
    times: tuple[list[float], list[float]] = ([], [])
    ours(), peer()
    end = clock() + seconds
    while clock() < end or len(times[0]) < 5:
        for call, taken in zip((ours, peer), times):
            started = clock()
            call()
            taken.append(1e6 * (clock() - started))
    (us, peer_us), (median, peer_median) = map(min, times), map(statistics.median, times)
    row = {"us": us, "peer_us": peer_us, "ratio": peer_us / us, "calls": len(times[0])}
    return row | {"median_us": median, "peer_median_us": peer_median, "median_ratio": peer_median / median}


def gemm_rows(isa: str | None, seconds: float) -> Iterator[dict]:
    direct = direct_ops()[torch.ops.detcompile.matmul.default]  # as a compiled graph calls it
    ours = partial(matmul_cpu, isa=isa) if isa else direct
    for dtype in DTYPES:
        for n, k in SHAPES:
            w = (torch.randn(n, k) * 0.02).to(dtype)
            for m in TOKENS:
                x = torch.randn(m, k).to(dtype)
                row = {"kernel": "matmul", "dtype": str(dtype)[6:], "M": m, "N": n, "K": k, "peer": "linear"}
                row |= in_turns(partial(ours, x, w, None, None, []), partial(torch.nn.functional.linear, x, w), seconds)
                yield row | {"gflops": 2e-3 * m * n * k / row["us"], "peer_gflops": 2e-3 * m * n * k / row["peer_us"]}
        yield _error_row(dtype)


def exact_rows(isa: str | None, seconds: float) -> Iterator[dict]:
    """Time exact linears beside torch's bfloat16; each call reads other weights, as in a model."""
    for size in EXACT_SIZES:
        copies = EXACT_BYTES // size**2
        weights = itertools.cycle(torch.randn(copies, size, size).bfloat16())
        for digits in (1, 2):
            exact = itertools.cycle(torch.randint(-127, 128, (copies, digits, size, size), dtype=torch.int8))
            for name, left in ((name, left) for name, (left, right) in EXACT_DIGITS.items() if right == digits):
                for m in EXACT_TOKENS:
                    ours = _exact_call(torch.randn(m, size), exact, left, isa)
                    peer = _linear_call(torch.randn(m, size).bfloat16(), weights)
                    row = {"kernel": "exact_linear", "arithmetic": name, "M": m, "N": size, "K": size, "peer": "bf16"}
                    yield row | in_turns(ours, peer, seconds, time.process_time)


def _exact_call(x: Tensor, weights: Iterator[Tensor], digits: int, isa: str | None) -> Callable[[], Tensor]:
    scale = torch.rand(x.shape[1])
    return lambda: linear_cpu(x, next(weights), scale, None, digits, isa)


def _linear_call(x: Tensor, weights: Iterator[Tensor]) -> Callable[[], Tensor]:
    return lambda: torch.nn.functional.linear(x, next(weights))


def _error_row(dtype: torch.dtype) -> dict:
    """Return the relative error of both against float64, root mean square."""
    m, n, k = ERROR_SHAPE
    x, w = torch.randn(m, k).to(dtype), (torch.randn(n, k) * 0.02).to(dtype)
    exact = x.double() @ w.double().t()
    ours, theirs = torch.ops.detcompile.matmul(x, w, None, None, []), torch.nn.functional.linear(x, w)
    errors = [float((y.double() - exact).norm() / exact.norm()) for y in (ours, theirs)]
    row = {"kernel": "matmul error", "dtype": str(dtype)[6:], "M": m, "N": n, "K": k}
    return row | {"error": errors[0], "peer_error": errors[1]}


def model_rows(isa: str | None, seconds: float) -> Iterator[dict]:
    """Time dense calls ``model(ids)`` of the embedded model; torch.compile's writes no KV cache."""
    for dtype in DTYPES:
        model = detcompile.compile(detcompile.load_model("tiny", dtype=dtype, device="cpu"))
        torch._dynamo.reset()
        plain = torch.compile(detcompile.load_model("tiny", dtype=dtype, device="cpu"))
        for name, shape in STEPS.items():
            ids = torch.randint(0, model.vocab_size, shape)
            row = {"kernel": "tiny", "dtype": str(dtype)[6:], "step": name, "peer": "torch.compile"}
            yield row | in_turns(partial(model, ids), partial(plain, input_ids=ids, use_cache=False), 5 * seconds)


FAMILIES = {"gemm": gemm_rows, "exact": exact_rows, "model": model_rows}


def device_name(device: str | torch.device | None) -> str:
    """Return the name of a device; None and "cuda" mean a GPU if there is one."""
    return cpu_name() if str(device) == "cpu" or not torch.cuda.is_available() else torch.cuda.get_device_name()


def cpu_name() -> str:
    """Return the CPU's name in /proc/cpuinfo, without trademarks."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.split(":")[1] for line in lines if line.startswith("model name")), "unknown")
    return " ".join(re.sub(r"\(\w+\)|Processor", "", name).split())


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.add_argument("--isa", choices=cpu_library.supported_isas(), help="of the GEMMs; default: the model's own")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="of each pair of GEMMs; five times as long for a model"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows = []
    for family in arguments.only.split(","):
        for row in FAMILIES[family](arguments.isa, arguments.seconds):
            rows.append(row)
            print("  ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
    result = {"commit": arguments.commit, "cpu": cpu_name(), "threads": arguments.threads, "torch": torch.__version__}
    result |= {"isa": arguments.isa or cpu_library.isa(), "compiler": shared_objects.compiler_version()}
    result |= {"unit": "us: best of alternating calls; medians beside; exact: CPU us", "rows": rows}
    arguments.output.mkdir(parents=True, exist_ok=True)
    suffix = f"-{arguments.isa}" if arguments.isa else ""
    path = arguments.output / f"cpu-{cpu_name().replace(' ', '-').lower()}-{arguments.commit}{suffix}.json"
    path.write_text(json.dumps(result, indent=1))
    print(path)


if __name__ == "__main__":
    main()
