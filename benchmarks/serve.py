"""Measure the engine on one GPU: three offline workloads, the price of determinism, and equal bytes at size.

    python -m benchmarks.serve --commit $(git rev-parse --short HEAD) [--layers 36] [--parts ours,plain,equal,repeat]
    python -m benchmarks.serve --commit $(git rev-parse --short HEAD) --tp 2 [--layers 36]     workers on two GPUs

The model is Qwen3-8B's shape with random weights in bf16. Workloads: (a) one sequence, prompt 16, 128 tokens out;
(b) 1000 requests, prompt 16, 90 to 110 out; (c) 64 requests, prompt 2048, 16 out; greedy, end tokens ignored, no prefix
cache. "plain" is the same engine, scheduler and attention with aten.mm (cuBLAS) and Inductor's own reductions. Writes
benchmarks/results/serve-<device>-<commit>.json after each part. Each workload runs twice; the second run counts.
"""

import argparse
import contextlib
import functools
import gc
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest import mock

import torch
from torch._inductor.decomposition import select_decomp_table

import detcompile
from benchmarks.model import QWEN3_8B, STEPS, build, step_breakdown
from detcompile import CompiledModel, Numerics
from detcompile.models.remote import compile_in_workers
from detcompile.passes import backend, lowering, program_source
from detcompile.passes.proof.certificate import Certificate
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.sampling.sampler import SamplingParams, sample, token_logprobs
from detcompile.runtime.step.builder import build_step

# 132 tiles of 128 tokens: whole waves of GEMM tiles on an H200.
CONFIG = EngineConfig(prefix_caching=False, max_num_seqs=1024, max_num_batched_tokens=16896)
NUM_EQUAL = 512  # requests compared with the plain forward


def prompts(rng: random.Random, lengths: list[int]) -> list[list[int]]:
    return [[rng.randrange(QWEN3_8B["vocab_size"]) for _ in range(length)] for length in lengths]


def workload(name: str) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and parameters, the same at every call."""
    rng = random.Random(name)
    lengths, outs = {
        "a": ([16], [128]),
        "b": ([16] * 1000, [rng.randint(90, 110) for _ in range(1000)]),
        "c": ([2048] * 64, [16] * 64),
    }[name]
    return prompts(rng, lengths), [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in outs]


def measure(engine: Engine, name: str) -> dict[str, float]:
    """Return the seconds of a workload, and those of the host in its steps."""
    seconds = []
    for _ in range(2):
        given, params = workload(name)
        torch.cuda.synchronize()
        before, start = engine.stats, time.perf_counter()
        engine.generate(given, params, progress=False)
        seconds.append(time.perf_counter() - start)
        after = engine.stats
    steps = after.num_steps - before.num_steps
    host = [record.host_seconds for record in after.recent[-steps:]]
    result = {"seconds": seconds[-1], "first run": seconds[0], "steps": steps}
    result["host ms a step"] = 1e3 * sum(host) / steps
    if name == "a":
        result["ms a token"] = 1e3 * seconds[-1] / 128
    return result


SAMPLING = {
    "sampled": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.5},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}


def host_milliseconds(engine: Engine, running: int, **kind: float) -> dict[str, float]:
    """Return host time of decode steps of ``running`` sequences, and the time between steps."""
    rng = random.Random(running)
    params = SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True} | kind)
    before = engine.stats.num_steps
    engine.generate(prompts(rng, [16] * running), params, progress=False)
    records = [r for r in engine.stats.recent[before - engine.stats.num_steps :] if r.num_decodes == running]
    gaps = [b.finished - a.finished for a, b in itertools.pairwise(records)]
    return {
        "host ms": 1e3 * statistics.median(r.host_seconds for r in records),
        "step ms": 1e3 * statistics.median(gaps),
    }


def serve(model: CompiledModel, sampling: Iterable[str] = SAMPLING) -> Iterator[tuple[str, object]]:
    """Yield figures of an engine by name, as they are measured."""
    start = time.perf_counter()
    engine = model.engine(CONFIG)
    yield "engine seconds", time.perf_counter() - start
    yield "blocks", engine.stats.num_blocks
    for name in "abc":
        yield name, measure(engine, name)
    for running in (256, 1000):
        yield f"{running} running", host_milliseconds(engine, running)
    for name in sampling:
        yield f"256 running, {name}", host_milliseconds(engine, 256, **SAMPLING[name])
    engine.check()


@contextlib.contextmanager
def plain_lowering() -> Iterator[None]:
    """Compile without our passes, orders and proof: cuBLAS and Inductor's reductions around the same attention."""
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (backend, "rewrite", lambda gm: gm),
            (backend, "decompositions", select_decomp_table),
            (backend, "ROUNDING", {"aggressive_fusion": True}),
            (backend, "certify", lambda *_: mock.create_autospec(Certificate, instance=True)),
            (lowering, "pin_row_parallel", lambda model, numerics: None),
            (program_source, "certify_batches", lambda *_: None),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


@torch.no_grad()
def equal(model: CompiledModel) -> dict[str, object]:
    """Compare random requests, with preemptions and prefix hits, with each alone by the plain forward."""
    rng = random.Random(0)
    stems = prompts(rng, [rng.randint(1, 900) for _ in range(12)])
    given, params = [], []
    for index in range(NUM_EQUAL):
        stem = rng.choice(stems)
        given.append(stem[: rng.randint(1, len(stem))] + prompts(rng, [rng.randint(1, 60)])[0])
        kind = rng.choice([{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50}])
        length = rng.randint(1, 100)
        params.append(SamplingParams(max_tokens=length, seed=index, logprobs=0, ignore_eos=True, **kind))
    config = EngineConfig(num_blocks=1500, block_size=32, max_num_batched_tokens=1000, max_num_seqs=200)
    engine = model.engine(config)
    outputs = engine.generate(given, params, progress=False)
    engine.check()
    wrong = 0
    for tokens, one, output in zip(given, params, outputs):
        wrong += not _equals_alone(model, tokens, one, output)
    stats = engine.stats
    return {
        "requests": NUM_EQUAL,
        "different": wrong,
        "preemptions": stats.num_preemptions,
        "cached tokens": stats.num_cached_tokens,
        "steps": stats.num_steps,
    }


def _equals_alone(model: CompiledModel, tokens: list[int], params: SamplingParams, output) -> bool:  # type: ignore[no-untyped-def]
    """Run one forward of the whole sequence, in which row t sees only what precedes it, and compare."""
    drawn = output.outputs[0]
    whole = tokens + drawn.token_ids
    runner, blocks = model.new_runner(len(whole) + 64)
    arrays = build_step([(Sequence(whole[:-1]), len(whole) - 1)], blocks, all_logits=True)
    logits = runner.run(arrays)[len(tokens) - 1 :]
    count = len(drawn.token_ids)
    chosen = sample(logits, [params] * count, list(range(len(tokens), len(tokens) + count)))
    logprobs = token_logprobs(logits, chosen).chosen.tolist()
    return chosen.tolist() == drawn.token_ids and logprobs == [entry.logprob for entry in drawn.logprobs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size; above 1, --parts does not apply")
    parser.add_argument("--parts", default="ours,equal,plain,tree")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name().replace(" ", "-").lower() + (f"x{arguments.tp}" if arguments.tp > 1 else "")
    path = arguments.out / f"serve-{name}-{arguments.commit}.json"
    report: dict[str, object] = {
        "commit": arguments.commit,
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": f"Qwen3-8B shape, {arguments.layers} layers, bf16, random weights",
    }
    started = time.monotonic()

    def keep(part: str, value: object) -> None:
        report[part] = value
        path.write_text(json.dumps(report, indent=1))
        print(f"[{time.monotonic() - started:5.0f} s] {part}: {value}", flush=True)

    def keep_all(part: str, rows: Iterator[tuple[str, object]]) -> None:
        report[part] = results = {}
        for name, value in rows:
            results[name] = value
            path.write_text(json.dumps(report, indent=1))
            print(f"[{time.monotonic() - started:5.0f} s] {part}, {name}: {value}", flush=True)

    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.tp > 1:
        made = functools.partial(build, arguments.layers)  # on every rank, with the same weights
        start = time.perf_counter()
        with compile_in_workers(made, tp=arguments.tp, numerics=Numerics()) as workers:
            keep("compile seconds", time.perf_counter() - start)
            part = f"tp_sizes=(1, 2, 4, 8), tp={arguments.tp}"
            keep_all(part, serve(workers, ["sampled"]))
            gc.collect()  # the engine and its cache
            keep_all("steps of each rank", ((name, workers.apply(step_breakdown, name)) for name in STEPS))
        return
    parts = arguments.parts.split(",")
    if "ours" in parts or "equal" in parts:
        model = detcompile.compile(build(arguments.layers), numerics=Numerics(tp_sizes=(1,)))
        if "ours" in parts:
            keep_all("tp_sizes=(1,)", serve(model))
        if "equal" in parts:
            keep("equal to the plain forward", equal(model))
        del model
        torch.cuda.empty_cache()
    if "plain" in parts:
        with plain_lowering():
            model = detcompile.compile(build(arguments.layers), numerics=Numerics(tp_sizes=(1,)))
        keep_all("plain", serve(model))
        del model
        torch.cuda.empty_cache()
    if "tree" in parts:
        keep_all("tp_sizes=(1, 2, 4, 8)", serve(detcompile.compile(build(arguments.layers))))


if __name__ == "__main__":
    main()
