"""Measure a model on a GPU: axes by bytes, compile seconds, and times beside torch.compile and HF generate.

    python -m benchmarks.model --commit $(git rev-parse --short HEAD) [--layers 36] [--minutes 8] [--only one,peers]

The model is Qwen3-8B's shape with random weights in bf16. Writes benchmarks/results/model-<device>-<commit>.json after
each part, so that an interrupted run keeps its results. Times are medians.
"""

import argparse
import functools
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

import detcompile
from detcompile import CompiledModel, Numerics
from detcompile.commands.verification import available_axes, verify
from detcompile.models.spec import ModelSpec
from detcompile.passes import program_source
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.step.builder import build_step
from detcompile.templates.matmul import gpu as matmul_gpu

QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "bos_token_id": None,
    "eos_token_id": None,
}
Keep = Callable[[str, object], None]  # writes a part's figures
Has = Callable[[float], bool]  # whether so many seconds are left
CONTEXT = 512  # keys of each sequence in the decode rows that have a peer
DECODE_BATCHES = (1, 8, 64, 256)
SHORT_CONTEXT = 96
SHORT_DECODES = (1, 256, 1000)
PREFILLS = (2048, 8192)
PACKED_PREFILL = (4, 2048)  # sequences, tokens of each


def build(layers: int) -> PreTrainedModel:
    """Build the model on the GPU with random weights, the same at every call."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", num_hidden_layers=layers, **QWEN3_8B)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def milliseconds(run: Callable[[], object], repeats: int = 7) -> float:
    """Return the median of single calls, timed by device events after two to warm up."""
    times = []
    for i in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times += [start.elapsed_time(end)] if i > 1 else []
    return statistics.median(times)


def random_tokens(count: int) -> list[int]:
    return torch.randint(0, QWEN3_8B["vocab_size"], (count,)).tolist()


def decode_replay(model: CompiledModel, batch: int, keys: int, width: int = 1) -> Callable[[], object]:
    """Return a replay of a decode step's CUDA graph: ``batch`` sequences of ``keys`` keys, the new token's included.

    Args:
        width: least number of blocks in a sequence's table.
    """
    runner, blocks = model.new_runner(batch * (keys + 128), cuda_graphs=True)
    past = keys - 1
    sequences = [Sequence(random_tokens(past)) for _ in range(batch)]
    together = max(1, 8192 // past)
    for first in range(0, batch, together):
        runner.run(build_step([(sequence, past) for sequence in sequences[first : first + together]], blocks))
    for sequence in sequences:
        sequence.num_computed = past
        sequence.token_ids.append(1)
    arrays = build_step([(sequence, 1) for sequence in sequences], blocks)
    more = max(0, width - arrays.block_tables.shape[2])
    arrays = arrays._replace(block_tables=np.pad(arrays.block_tables, ((0, 0), (0, 0), (0, more))))
    runner.run(arrays)
    return runner._graphs[runner.layout(arrays)].graph.replay


def decode_milliseconds(model: CompiledModel, batch: int, keys: int = CONTEXT, width: int = 1) -> float:
    """Return the milliseconds of such a step."""
    return milliseconds(decode_replay(model, batch, keys, width))


def prefill_run(model: CompiledModel, tokens: int, count: int = 1) -> Callable[[], object]:
    """Return one step of ``count`` whole prompts of ``tokens`` tokens each."""
    runner, blocks = model.new_runner(count * tokens)
    arrays = build_step([(Sequence(random_tokens(tokens)), tokens) for _ in range(count)], blocks)
    return lambda: runner.run(arrays)


def prefill_milliseconds(model: CompiledModel, tokens: int, count: int = 1) -> float:
    """Return the milliseconds of such a step."""
    return milliseconds(prefill_run(model, tokens, count), 3)


FAMILIES = {
    "all-reduce": ("one_shot_kernel", "two_shot_kernel"),
    "gathers": ("columns_kernel", "rows_kernel"),
    "overlapped sums": ("gather_kernel", "Memcpy"),
    "NCCL": ("nccl",),
    "next tokens": ("best_of", "fill_pending"),
    "GEMM": ("tile_kernel", "tma_kernel", "combine_kernel", "hopper_matmul_kernel", "batched_leaves_kernel"),
    "attention": ("attention_kernel", "hopper_decode_kernel", "merge_kernel", "write_kv_kernel"),
    "norms and rotation": ("rms_norm", "rope"),
    "gate": ("silu",),
}


def breakdown(run: Callable[[], object], repeats: int = 5) -> dict[str, object]:
    """Return milliseconds of a step, of its launch by the host, of its kernels by family and the longest by name.

    A kernel that starts while the one before ends counts from its start, so that the sum can be more than the step. An
    all-reduce counts from its start on this rank, so that it counts the wait for other ranks too. Every copy counts as
    an overlapped sum.
    """
    whole = milliseconds(run)
    start = time.perf_counter()
    run()
    host = 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    kernels = {event.key: event.self_device_time_total / 1e3 / repeats for event in profile.key_averages()}
    families = dict.fromkeys((*FAMILIES, "rest"), 0.0)
    for kernel, taken in kernels.items():
        family = next((name for name, parts in FAMILIES.items() if any(part in kernel for part in parts)), "rest")
        families[family] += taken
    longest = {name[:80]: taken for name, taken in sorted(kernels.items(), key=lambda row: -row[1])[:14]}
    return {"ms": whole, "host ms": host, "families": families, "kernels": longest}


STEPS = {"prefill 4 x 2048": (4, 2048)} | {
    f"decode {batch} x {keys} keys": (batch, keys) for batch, keys in ((1, 96), (64, 512), (256, 96), (1000, 96))
}


def step_breakdown(model: CompiledModel, name: str) -> dict[str, object]:
    """Break down the time of one of STEPS."""
    torch.manual_seed(0)  # the same tokens on every rank
    gc.collect()
    torch.cuda.empty_cache()
    batch, tokens = STEPS[name]
    if name.startswith("prefill"):
        return breakdown(prefill_run(model, tokens, batch), 2)
    return breakdown(decode_replay(model, batch, tokens))


def measure_axes(model: CompiledModel) -> dict[str, object]:
    """Measure every axis that needs no second copy of the model."""
    axes = [axis for axis in available_axes("cuda") if axis != "restart"]
    results = verify(model, ModelSpec("random qwen3"), axes, count=4)
    return {axis: result.to_json() | {"holds": result.holds} for axis, result in results.items()}


def measure_ours(model: CompiledModel) -> dict[str, float]:
    count, tokens = PACKED_PREFILL
    times = {f"decode {batch}": decode_milliseconds(model, batch) for batch in DECODE_BATCHES}
    for batch in SHORT_DECODES:
        times[f"decode {batch} x {SHORT_CONTEXT} keys"] = decode_milliseconds(model, batch, SHORT_CONTEXT)
        torch.cuda.empty_cache()
    times |= {f"prefill {length}": prefill_milliseconds(model, length) for length in PREFILLS}
    return times | {f"prefill {count} x {tokens}": prefill_milliseconds(model, tokens, count)}


def measure_peers(layers: int, keep: Keep, has: Has) -> None:
    """Time the Hugging Face model under torch.compile default, cuBLAS and SDPA: prefill as is, decode steps as CUDA
    graphs over caches that hold CONTEXT keys; and eager generate."""
    if not has(60):
        return
    model = build(layers)
    times: dict[str, float] = {}
    for batch in DECODE_BATCHES[::-1]:  # as the largest are compared most narrowly
        if has(60):
            times[f"torch.compile decode {batch}"] = _peer_decode(model, batch)
            keep("ms, peers", times)
    model.set_attn_implementation("sdpa")
    for tokens in PREFILLS:
        if has(60):
            torch._dynamo.reset()
            times[f"torch.compile prefill {tokens}"] = _peer_prefill(model, tokens)
            keep("ms, peers", times)
    if has(20):
        times["HF generate ms a token"] = _peer_generate(model)
        keep("ms, peers", times)


@torch.no_grad()
def _peer_prefill(model: PreTrainedModel, tokens: int) -> float:
    compiled = torch.compile(model, dynamic=False)
    ids = torch.randint(0, QWEN3_8B["vocab_size"], (1, tokens), device="cuda")
    return milliseconds(lambda: compiled(input_ids=ids, use_cache=False, logits_to_keep=1), 3)


def _peer_generate(model: PreTrainedModel) -> float:
    """Return the milliseconds a token of eager generate."""
    ids = torch.randint(0, QWEN3_8B["vocab_size"], (1, 16), device="cuda")

    def seconds(new: int) -> float:
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(4)
    return 1e3 * (seconds(40) - seconds(8)) / 32


def _peer_decode(model: PreTrainedModel, batch: int) -> float:
    """Return milliseconds of one compiled step, which writes to a dense cache and attends all of it by SDPA."""
    config = model.config
    shape = (batch, config.num_key_value_heads, CONTEXT, config.head_dim)
    caches = [
        [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        for _ in range(config.num_hidden_layers)
    ]

    def attend(module, q, k, v, mask, scaling, **_):  # type: ignore[no-untyped-def]
        keys, values = caches[module.layer_idx]
        keys[:, :, -1:] = k
        values[:, :, -1:] = v
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    AttentionInterface.register("dense_decode", attend)
    model.set_attn_implementation("dense_decode")
    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=False)
    ids = torch.randint(0, QWEN3_8B["vocab_size"], (batch, 1), device="cuda")
    positions = torch.full((batch, 1), CONTEXT - 1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        for _ in range(3):
            compiled(input_ids=ids, position_ids=positions, use_cache=False)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            compiled(input_ids=ids, position_ids=positions, use_cache=False)
    return milliseconds(graph.replay)


def gate_counts(model: CompiledModel) -> dict[str, int]:
    """Return the number of problems the GEMM gate has seen, and of schedules it admitted and refused."""
    rows = matmul_gpu.MATMUL.tuner(model.device).table()
    return {"problems": len(rows)} | {kind: sum(int(row[kind]) for row in rows) for kind in ("admitted", "refused")}


def compile_seconds(model: PreTrainedModel, numerics: Numerics) -> tuple[CompiledModel, float]:
    start = time.perf_counter()
    compiled = detcompile.compile(model, numerics=numerics)
    return compiled, time.perf_counter() - start


def measure_all_sizes(layers: int, keep: Keep, has: Has) -> None:
    """Measure the default numerics: compile seconds, step times, axes and the gate."""
    model, seconds = compile_seconds(build(layers), Numerics())
    keep("compile seconds cold", seconds)
    keep("certificate", model.certificate.summary())
    keep("ms, tp_sizes=(1, 2, 4, 8)", measure_ours(model))
    keep("axes", measure_axes(model))
    keep("GEMM gate", gate_counts(model))


def measure_one_size(layers: int, keep: Keep, has: Has) -> None:
    """Measure the step times of ``tp_sizes=(1,)``."""
    if has(110):
        model, _ = compile_seconds(build(layers), Numerics(tp_sizes=(1,)))
        keep("ms, tp_sizes=(1,)", measure_ours(model))


def measure_warm_compile(layers: int, keep: Keep, has: Has) -> None:
    """Measure the compile seconds if the Inductor cache holds the model."""
    if has(60):
        _, seconds = compile_seconds(build(layers), Numerics())
        keep("compile seconds warm", seconds)


def measure_regions(layers: int, keep: Keep, has: Has) -> None:
    """Compare one region for all layers with one graph of all layers: logits' bytes, and alternating times."""
    models = {"regions": detcompile.compile(build(layers))}
    with mock.patch.object(program_source, "find_repeats", lambda *_: None):
        models["one graph"], seconds = compile_seconds(build(layers), Numerics())
    keep("one graph, compile seconds", seconds)
    keep_in_turns(models, keep)


def measure_archive(layers: int, keep: Keep, has: Has) -> None:
    """Compare the model from an archive with the exported one: logits' bytes, and alternating times."""
    model = detcompile.compile(build(layers))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        path = detcompile.export(model, Path(folder) / "model.pt2", weights="inside")
        keep("archive, export seconds", time.perf_counter() - start)
        start = time.perf_counter()
        loaded = detcompile.load(path)
        keep("archive, load seconds", time.perf_counter() - start)
    keep_in_turns({"archive": loaded, "compiled": model}, keep)


def keep_in_turns(models: dict[str, CompiledModel], keep: Keep) -> None:
    """Keep whether two models' logits have equal bytes, and alternating times of their steps with the ratio."""
    name, other = models
    ids = torch.tensor([random_tokens(300)], device="cuda")
    logits = [model(ids).logits for model in models.values()]
    keep(f"{name}, logits equal", torch.equal(*(one.view(torch.int16) for one in logits)))
    del logits
    for step, new_run in {
        **{f"decode {batch}": functools.partial(decode_replay, batch=batch, keys=CONTEXT) for batch in DECODE_BATCHES},
        **{f"prefill {length}": functools.partial(prefill_run, tokens=length) for length in PREFILLS},
    }.items():
        runs = {kind: new_run(model) for kind, model in models.items()}
        times: dict[str, list[float]] = {kind: [] for kind in runs}
        for _ in range(5):
            for kind, run in runs.items():
                times[kind].append(milliseconds(run, 5))
        medians = {kind: statistics.median(taken) for kind, taken in times.items()}
        ratio = medians[name] / medians[other]
        keep(f"{name}, {step}", {"ms": medians[name], f"{other}, ms": medians[other], "ratio": ratio})
        del runs, run
        gc.collect()
        torch.cuda.empty_cache()


def measure_tables(layers: int, keep: Keep, has: Has) -> None:
    """Compare decode steps of few keys in graphs with block tables for the longest sequence and for 512 keys."""
    model = detcompile.compile(build(layers))
    for batch in DECODE_BATCHES:
        narrow = decode_milliseconds(model, batch)
        wide = decode_milliseconds(model, batch, width=QWEN3_8B["max_position_embeddings"] // 16)
        keep(f"tables, decode {batch}", {"narrow, ms": narrow, "wide, ms": wide, "ratio": wide / narrow})


PARTS = {
    "sizes": measure_all_sizes,
    "one": measure_one_size,
    "peers": measure_peers,
    "warm": measure_warm_compile,
    "regions": measure_regions,
    "archive": measure_archive,
    "tables": measure_tables,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--only", default="sizes,one,peers,warm", help="parts, in this order")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"--only: {', '.join(sorted(unknown))} are not among {', '.join(PARTS)}")
    started = time.monotonic()
    name = torch.cuda.get_device_name().replace(" ", "-").lower()
    path = arguments.out / f"model-{name}-{arguments.commit}.json"
    report: dict[str, object] = {
        "commit": arguments.commit,
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": f"Qwen3-8B shape, {arguments.layers} layers, bf16, random weights",
        "decode_context": CONTEXT,
    }

    def keep(part: str, value: object) -> None:
        report[part] = value
        path.write_text(json.dumps(report, indent=1))
        print(f"[{time.monotonic() - started:5.0f} s] {part}: {value}", flush=True)

    def has(seconds: float) -> bool:
        return time.monotonic() - started + seconds < 60 * arguments.minutes

    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # cold
    os.environ["DETCOMPILE_KEEP_PROGRAMS"] = "0"
    for part in parts:
        PARTS[part](arguments.layers, keep, has)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
