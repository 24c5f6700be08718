"""Compare the memory of an 8B model's default engine on an 80 GB GPU, under the worst load, with its limit.

    python -m benchmarks.memory --commit $(git rev-parse --short HEAD) [--layers 36] [--budgets 8192,16896]

The model is Qwen3-8B's shape with random weights in bf16, the engine's config the default one at memory_fraction 0.9.
On a larger GPU this process takes no more than 80 GB. For each token budget: the three workloads of
benchmarks/serve.py, once each; then a full house that asks for all that a sampler can be asked for, with prompt
logprobs; then, without CUDA graphs, some requests again, by bytes. The program fails if memory was taken that may not
be ("left" below 0), or if an answer differs.

Writes benchmarks/results/memory-<device>-<commit>.json after each part. ``unshared`` is what the graphs' outputs would
take if each kept its own.
"""

import argparse
import dataclasses
import gc
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import detcompile
from benchmarks.model import QWEN3_8B, build
from benchmarks.serve import prompts, workload
from detcompile import CompiledModel, Numerics
from detcompile.runtime import engine_setup
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.sampling.sampler import SamplingParams

H100_BYTES = int(79.1 * 2**30)  # that CUDA reports of one
GIB = 2**30
EVERYTHING = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "presence_penalty": 0.5, "logprobs": 20}
NUM_COMPARED = 48


def measured_engine(model: CompiledModel, config: EngineConfig) -> tuple[Engine, dict[str, Any]]:
    """Return an engine and the measurements of its sizing."""
    measured: dict[str, Any] = {}

    def recorded(name: str) -> Any:
        inner: Callable[..., Any] = getattr(engine_setup, name)

        def record(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = inner(*arguments, **options)
            measured[name] = result if isinstance(result, int) else dict(result._asdict())
            measured[f"{name}, seconds"] = time.perf_counter() - start
            return result

        return mock.patch.object(engine_setup, name, record)

    start = time.perf_counter()
    with recorded("step_needs"), recorded("graph_needs"), recorded("room_for_cache"):
        engine = model.engine(config)
    measured["seconds"] = time.perf_counter() - start
    graphs = list(engine._pipeline._worker.runner._graphs)
    measured["blocks"] = engine.stats.num_blocks
    measured["graphs"] = len(graphs)
    measured["unshared"] = sum(layout.rows for layout in graphs) * QWEN3_8B["vocab_size"] * 2
    return engine, measured


def taken(engine: Engine) -> dict[str, float]:
    """Return GiB: the most reserved so far, what else the process holds, and the limit for both together."""
    config, memory = engine.config, engine._pipeline._worker.memory
    free, total = torch.cuda.mem_get_info()
    allowed = total * torch.cuda.get_per_process_memory_fraction() * config.memory_fraction
    most, now = torch.cuda.max_memory_reserved(), torch.cuda.memory_reserved()
    outside = total - free - now
    left = allowed - most - outside
    return {
        "reserved": now / GIB,
        "most reserved": most / GIB,
        "outside": outside / GIB,
        "allowed": allowed / GIB,
        "left": left / GIB,
        "refills": 0 if memory is None else memory.num_refills,
    }


def served(engine: Engine, name: str) -> float:
    """Return the seconds of a workload of benchmarks/serve.py."""
    given, params = workload(name)
    return seconds(engine, given, params)


def full_house(engine: Engine) -> float:
    """Return the seconds of more requests than fit at once, all with every sampling option."""
    rng = random.Random(0)
    seats = engine.config.max_num_seqs
    lengths = [rng.choice([16, 16, 16, 700]) for _ in range(seats + 100)]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, seed=index, **EVERYTHING) for index in range(len(lengths))]
    for index in range(0, len(params), 40):
        params[index] = dataclasses.replace(params[index], prompt_logprobs=20)
    return seconds(engine, prompts(rng, lengths), params)


def seconds(engine: Engine, given: list[list[int]], params: list[SamplingParams]) -> float:
    """Return the seconds of the requests; none may fail."""
    start = time.perf_counter()
    outputs = engine.generate(given, params, progress=False)
    assert all(output.error is None and output.outputs[0].finish_reason == "length" for output in outputs)
    return time.perf_counter() - start


def answers(engine: Engine) -> list[object]:
    """Return tokens and logprobs of some requests."""
    rng = random.Random(1)
    given = prompts(rng, [rng.randint(1, 900) for _ in range(NUM_COMPARED)])
    kinds = [{"temperature": 0, "logprobs": 2}, {"temperature": 1.0, "logprobs": 2}, EVERYTHING]
    params = [
        SamplingParams(max_tokens=rng.randint(1, 40), seed=index, ignore_eos=True, **kinds[index % 3])
        for index in range(NUM_COMPARED)
    ]
    outputs = engine.generate(given, params, progress=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def parts(model: CompiledModel, config: EngineConfig) -> Iterator[tuple[str, object]]:
    """Yield figures by name."""
    torch.cuda.reset_peak_memory_stats()
    engine, measured = measured_engine(model, config)
    yield "engine", measured
    yield "after warm-up", taken(engine)
    for name in "abc":
        yield name, {"seconds": served(engine, name), **taken(engine)}
    yield "full house", {"seconds": full_house(engine), **taken(engine)}
    with_graphs = answers(engine)
    yield "preemptions", engine.stats.num_preemptions
    engine.check()
    del engine
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()
    plain = answers(model.engine(dataclasses.replace(config, cuda_graphs=False, num_blocks=2000)))
    different = sum(one != other for one, other in zip(with_graphs, plain, strict=True))
    yield "without graphs", {"requests": len(plain), "different": different}


def emulate_80_gb() -> float:
    """Limit this process to the memory of an H100; return the share of the GPU that it may take."""
    _, total = torch.cuda.mem_get_info()
    fraction = min(1.0, H100_BYTES / total)
    torch.cuda.set_per_process_memory_fraction(fraction)
    return fraction


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--budgets", default="8192", help="max_num_batched_tokens of each engine, measured in turn")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name().replace(" ", "-").lower()
    path = arguments.out / f"memory-{device}-{arguments.commit}.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    report: dict[str, Any] = {
        "commit": arguments.commit,
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": f"Qwen3-8B shape, {arguments.layers} layers, bf16, random weights",
        "part of the GPU": emulate_80_gb(),
    }

    def keep(place: dict[str, Any], name: str, value: object) -> None:
        place[name] = value
        path.write_text(json.dumps(report, indent=1))
        print(f"[{time.monotonic() - started:5.0f} s] {name}: {value}", flush=True)

    failures: list[str] = []
    model = detcompile.compile(build(arguments.layers), numerics=Numerics(tp_sizes=(1,)))
    keep(report, "compiled, seconds", time.monotonic() - started)
    for budget in map(int, arguments.budgets.split(",")):
        config = EngineConfig(max_num_batched_tokens=budget)
        for name, value in parts(model, config):
            keep(report.setdefault(f"max_num_batched_tokens={budget}", {}), name, value)
            if isinstance(value, dict) and (value.get("left", 0) < 0 or value.get("different", 0)):
                failures.append(f"budget {budget}, {name}: {value}")
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
