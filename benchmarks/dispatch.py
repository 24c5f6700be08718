"""Which ways of choosing a GEMM's tile follow the runtime token count under Inductor, and what each costs.

    python -m benchmarks.dispatch [--commit HASH] [--seconds 200] [--aoti-only]

Needs a CUDA GPU. Writes dispatch_<gpu>.json to --out, by default benchmarks/results. docs/log/dispatch.md reads it.
Times are medians of CUDA-graph replays over weights rotated past the L2, in µs a call.
"""

import argparse
import faulthandler
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import triton
from torch._dynamo.decorators import mark_dynamic, mark_unbacked
from torch._inductor.utils import run_and_get_code

from benchmarks.dispatch_variants import PROGRAMS, launch, launch_branching

__all__ = ["main"]

SHAPES = ((4096, 4096), (12288, 4096))  # (N, K)
TOKEN_COUNTS = (64, 1, 16, 256, 4096)  # the first is the one compiled with
PACKAGED = (
    "a_template_16",
    "b_size_hints",
    "c_range_dispatch",
    "e_triton_op_frozen_64",
    "f_own_op_fused",
    "g_cond_over_templates",
)
# One rounding an op, as eager does, whatever Inductor fuses. An unbacked size counts as no shared data, so that without
# aggressive_fusion nothing of the token dimension fuses after lowering.
INDUCTOR = {"emulate_precision_casts": True, "fx_graph_cache": False, "aggressive_fusion": True}
# record -> (program, how the token dimension is marked, Inductor options that differ)
RUNS = {name: (name, mark_unbacked, {}) for name in PROGRAMS}
RUNS["a_template_16, no aggressive_fusion"] = ("a_template_16", mark_unbacked, {"aggressive_fusion": False})
RUNS["b_size_hints, no aggressive_fusion"] = ("b_size_hints", mark_unbacked, {"aggressive_fusion": False})
RUNS["b_size_hints, fusion not timed"] = ("b_size_hints", mark_unbacked, {"benchmark_epilogue_fusion": False})
RUNS["b_size_hints, backed T"] = ("b_size_hints", mark_dynamic, {})
RUNS["c_range_dispatch, backed T"] = ("c_range_dispatch", mark_dynamic, {})


def make_inputs(n, k):
    """x [4096, K], weights as transposed views [K, N], residual [4096, N]; bf16, seeded."""
    torch.manual_seed(0)
    count = max(2, int(6e8 / (2 * n * k)))
    x = torch.randn(max(TOKEN_COUNTS), k, device="cuda").bfloat16()
    weights = [(torch.randn(n, k, device="cuda") * k**-0.5).bfloat16().t() for _ in range(count)]
    return x, weights, torch.randn(max(TOKEN_COUNTS), n, device="cuda").bfloat16()


def rows(tensor, num_tokens, mark=mark_unbacked):
    """The first rows as a tensor of their own whose row count is unbacked (or as `mark` has it)."""
    part = tensor[:num_tokens].clone()
    if num_tokens > 1 or mark is mark_unbacked:
        mark(part, 0)
    return part


def graph_microseconds(function, calls, repeats=7):
    """Median time of one call: `calls` holds the argument tuples that one CUDA graph runs in turn."""
    for arguments in calls[:2]:
        function(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in calls:
            function(*arguments)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times, warm = [], time.perf_counter() + 0.03
    while time.perf_counter() < warm:
        graph.replay()
        torch.cuda.synchronize()
    for _ in range(repeats):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return round(statistics.median(times), 2)


def host_microseconds(function, arguments, calls=200):
    """Time the host needs to issue one call without a CUDA graph (or the GPU's, where that is longer)."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function(*arguments)
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return round(elapsed * 1e6 / calls, 1)


def describe(code):
    """Which kernels the generated wrapper holds, and whether the pointwise epilogue is one of its own."""
    code = re.sub(r"#.*", "", code)
    kernels = re.findall(r"async_compile\.triton\('(\w+)'", code)
    return {
        "triton_kernels": kernels,
        "extern": sorted(set(re.findall(r"extern_kernels\.\w+|torch\.ops\.dispatch\.\w+", code))),
        "size_hint_dispatch": "size_hint_multi_kernel" in code,
        "conditional": bool(re.search(r"_true_graph|true_graph_0", code)),
        "epilogue_fused": not any(name.startswith("triton_poi") for name in kernels),
    }


def first_line(error):
    """An exception in one line, for the table."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def measure(function, data, result, mark=mark_unbacked):
    """Fill `result` with times per token count, host time at one token, and whether row 0 kept its bits."""
    x, weights, residual = data
    result["us"], row = {}, {}
    for num_tokens in TOKEN_COUNTS:
        part = (rows(x, num_tokens, mark), rows(residual, num_tokens, mark))
        row[num_tokens] = function(part[0], weights[0], part[1])
        used = weights if num_tokens <= 256 else weights[:3]
        result["us"][num_tokens] = graph_microseconds(function, [(part[0], w, part[1]) for w in used])
    one = (rows(x, 1, mark), weights[0], rows(residual, 1, mark))
    result["host_us_1_token"] = host_microseconds(function, one)
    result["row_0_bits_equal_over_tokens"] = all(torch.equal(out[:1], row[1]) for out in row.values())
    return row


def run_jit(name, data):
    """torch.compile one variant, once for all token counts. Returns its record and its outputs."""
    program, mark, options = RUNS[name]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x, weights, residual = data
    function = torch.compile(PROGRAMS[program], fullgraph=True, options={**INDUCTOR, **options})
    result, start = {}, time.perf_counter()
    try:
        first = (rows(x, TOKEN_COUNTS[0], mark), weights[0], rows(residual, TOKEN_COUNTS[0], mark))
        _, code = run_and_get_code(function, *first)
        result["compile_s"] = round(time.perf_counter() - start, 1)
        result.update(describe("\n".join(code)))
        outputs = measure(function, data, result, mark)
    except Exception as error:  # the outcome of a probe: an option that does not compile is an answer
        return {**result, "error": first_line(error)}, {}
    result["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return result, outputs


def package_all(folder):
    """One process a package, all at once: each spends its time in a C++ compiler. Errors go to <variant>.log."""
    command = [sys.executable, "-m", "benchmarks.dispatch_aoti", "package"]
    processes = {}
    for name in PACKAGED:
        with open(f"{folder}/{name}.log", "w") as log:
            processes[name] = subprocess.Popen([*command, name, f"{folder}/{name}.pt2"], stderr=log, stdout=log)
    limit = time.monotonic() + 90
    for process in processes.values():
        try:
            process.wait(max(1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    return processes


def check_package(name, process, folder, jit_outputs):
    """Load one package in a process of its own and compare it with the JIT by bytes."""
    if process.wait():
        errors = Path(folder, f"{name}.log").read_text().strip()
        return {"compiled": False, "error": errors[-600:] if errors else "killed after 90 s"}
    torch.save({m: output.cpu() for m, output in jit_outputs.items()}, f"{folder}/{name}.pt")
    command = [sys.executable, "-m", "benchmarks.dispatch_aoti", "check", name]
    with open(f"{folder}/{name}.out", "w+") as out, open(f"{folder}/{name}.err", "w+") as err:
        files = (f"{folder}/{name}.pt2", f"{folder}/{name}.pt")
        child = subprocess.Popen([*command, *files], stdout=out, stderr=err)
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
        out.seek(0)
        err.seek(0)
        result = {"compiled": True}
        for line in out:
            if line.startswith("{"):
                result.update(json.loads(line))
        if child.wait():
            result["error"] = f"exit {child.returncode}: {err.read().strip()[-600:]}"
    return result


def run_packages(data, report, path):
    """Every packaged variant, against the plain launcher's bytes."""
    x, weights, residual = data
    reference = {m: launch(x[:m], weights[0], residual[:m])[0] for m in TOKEN_COUNTS}
    with tempfile.TemporaryDirectory() as folder:
        for name, process in package_all(folder).items():
            report["aoti"][name] = check_package(name, process, folder, reference)
            print("aoti", name, json.dumps(report["aoti"][name]), flush=True)
            path.write_text(json.dumps(report, indent=1) + "\n")


def kernel_resources(data):
    """Registers, spills and shared memory of the tiles alone and of the kernel that branches on M."""
    x, weights, residual = data
    compiled = {f"tile_{m}": launch(x, weights[0], residual, m)[1] for m in (16, 64, 128)}
    compiled["branching"] = launch_branching(x, weights[0], residual)[1]
    return {
        name: {"registers": k.n_regs, "spills": k.n_spills, "shared_bytes": k.metadata.shared}
        for name, k in compiled.items()
    }


def run_shape(shape, report, deadline, path):
    """Every variant at one weight shape, by the JIT."""
    data = make_inputs(*shape)
    x, weights, residual = data
    reference = {m: launch(x[:m], weights[0], residual[:m])[0] for m in TOKEN_COUNTS}
    results = report["jit"].setdefault("{}x{}".format(*shape), {})
    for name in RUNS:
        if time.monotonic() > deadline:
            results[name] = {"error": "not run: out of time"}
            continue
        results[name], outputs = run_jit(name, data)
        results[name]["bits_equal_launcher"] = bool(outputs) and all(
            torch.equal(outputs[m], reference[m]) for m in reference
        )
        print(shape, name, json.dumps(results[name]), flush=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


@torch.no_grad()
def main():
    """Run every variant that compiles and write the JSON report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--seconds", type=float, default=600, help="start no variant after this long")
    parser.add_argument("--aoti-only", action="store_true", help="only the packages, into the report that exists")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    faulthandler.enable()
    deadline = time.monotonic() + arguments.seconds
    gpu = torch.cuda.get_device_name()
    report = {"commit": arguments.commit, "gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}
    report.update({"cuda": torch.version.cuda, "jit": {}, "kernels": {}, "aoti": {}})
    path = arguments.out / f"dispatch_{gpu.split()[-1].lower()}.json"
    if arguments.aoti_only:
        report = {**report, **(json.loads(path.read_text()) if path.exists() else {})}
    else:
        for shape in SHAPES:
            run_shape(shape, report, deadline, path)
    data = make_inputs(*SHAPES[0])
    run_packages(data, report, path)
    report["kernels"] = kernel_resources(data)
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
