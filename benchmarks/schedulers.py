"""Compare the three schedulers, and both ways to allocate KV blocks, on one trace, simulated and served.

    python -m benchmarks.schedulers --commit $(git rev-parse --short HEAD) [--only simulated,real] [--requests 500]

Simulated: benchmarks/simulation.py, with a cost model of an 8B model on an H200. Real: the embedded model on a CPU
under a small trace, or Qwen3-8B's shape with random weights on a GPU; the answers of all schedulers must be equal.
Writes benchmarks/results/schedulers-simulated-<commit>.json and schedulers-<hardware>-<commit>.json.
"""

import argparse
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import detcompile
from benchmarks.cpu import cpu_name
from benchmarks.model import build
from benchmarks.simulation import H200_8B, Arrival, latencies, log_normal_trace, simulate, summarize
from detcompile import CompiledModel, SamplingParams
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.outputs import RequestOutput

__all__ = ["allocation_rows", "real_rows", "scheduler_rows"]

# Name -> scheduler and token budget. "prefill_first" computes prompts whole; its budget is only how many share a step.
POLICIES = {
    "stall_free 512": {"scheduler": "stall_free", "max_num_batched_tokens": 512},
    "stall_free 2048": {"scheduler": "stall_free", "max_num_batched_tokens": 2048},
    "prefill_first 8192": {"scheduler": "prefill_first", "max_num_batched_tokens": 8192},
    "simple_chunking 2048": {"scheduler": "simple_chunking", "max_num_batched_tokens": 2048},
}
RATES = (1, 2, 3, 4, 5, 6, 7, 8, 9)  # requests a second
MOST_SEQUENCES = 256
ROOMY = 11000  # blocks of 64 tokens: what an H200 has for an 8B model, about 700 000 tokens
TIGHT = (600, 1200, 2400)  # blocks under which memory, not compute, limits the batch
TIGHT_RATE = 8


def scheduler_rows(requests: int, rates: tuple[float, ...] = RATES, seed: int = 0) -> Iterator[dict]:
    """Yield a row for each policy at each rate, with enough blocks."""
    for rate in rates:
        trace = log_normal_trace(requests, rate, seed)
        for name, settings in POLICIES.items():
            config = EngineConfig(**settings, max_num_seqs=MOST_SEQUENCES)
            yield {"policy": name, "rate": rate, "blocks": ROOMY} | summarize(simulate(trace, config, ROOMY))


def allocation_rows(requests: int, seed: int = 0) -> Iterator[dict]:
    """Compare lazy and reserved blocks with few blocks; clients set max_tokens=2048 and use a fifth of it."""
    trace = log_normal_trace(requests, TIGHT_RATE, seed)
    for blocks in TIGHT:
        for allocation in ("lazy", "reserve"):
            config = EngineConfig(
                scheduler="stall_free",
                max_num_batched_tokens=2048,
                max_num_seqs=MOST_SEQUENCES,
                allocation=allocation,
            )
            summary = summarize(simulate(trace, config, blocks))
            yield {"allocation": allocation, "rate": TIGHT_RATE, "blocks": blocks} | summary


def real_rows(
    model: CompiledModel, trace: list[Arrival], policies: dict[str, dict], num_blocks: int | None
) -> Iterator[dict]:
    """Yield a row for each policy on the same requests, sent at the trace's times.

    Raises:
        AssertionError: a policy changed an answer.
    """
    rng = np.random.Generator(np.random.Philox(1))
    prompts = [rng.integers(0, model.vocab_size, arrival.num_prompt).tolist() for arrival in trace]
    before: list[list[int]] | None = None
    for name, settings in policies.items():
        engine = model.engine(
            EngineConfig(**settings, max_num_seqs=MOST_SEQUENCES, num_blocks=num_blocks, prefix_caching=False)
        )
        engine.generate(prompts[:2], SamplingParams(max_tokens=4, ignore_eos=True), progress=False)  # warms up
        steps, started = engine.stats.num_steps, time.monotonic()
        outputs = _serve(engine, trace, prompts, started)
        seconds = time.monotonic() - started
        answers = [output.outputs[0].token_ids for output in outputs]
        assert before is None or answers == before, f"{name} changed an answer"
        before = answers
        row = {"policy": name, "requests": len(trace), "steps": engine.stats.num_steps - steps}
        yield row | _times(outputs, trace, started) | {"output_tokens_per_s": sum(map(len, answers)) / seconds}
        del engine


def _serve(engine: Engine, trace: list[Arrival], prompts: list[list[int]], started: float) -> list[RequestOutput]:
    names: list[str] = []
    outputs: dict[str, RequestOutput] = {}
    while len(names) < len(trace) or engine.has_unfinished_requests:
        while len(names) < len(trace) and trace[len(names)].time <= time.monotonic() - started:
            place = len(names)
            params = SamplingParams(max_tokens=trace[place].num_output, ignore_eos=True, seed=place)
            names.append(engine.add_request(prompts[place], params))
        if engine.has_unfinished_requests:
            outputs |= {output.request_id: output for output in engine.step()}
        else:
            time.sleep(max(0.0, trace[len(names)].time - (time.monotonic() - started)))
    return [outputs[name] for name in names]


def _times(outputs: list[RequestOutput], trace: list[Arrival], started: float) -> dict[str, Any]:
    """Return the times for ``summarize``; a first token is counted from the request's arrival in the trace."""
    times = [output.metrics.token_times for output in outputs if output.metrics is not None]
    first = [1e3 * (row_times[0] - started - arrival.time) for row_times, arrival in zip(times, trace, strict=True)]
    between = [1e3 * (b - a) for row_times in times for a, b in pairwise(row_times)]
    ends = {round(b - started, 3): round(1e3 * (b - a), 1) for row_times in times for a, b in pairwise(row_times)}
    longest = sorted(ends.items(), key=lambda end: -end[1])[:5]
    return latencies(first, between) | {"longest gaps: seconds since the start, ms": longest}


def _simulated(requests: int) -> dict[str, object]:
    return {
        "what": "simulated: scheduler and blocks are real, the seconds of a step are a model of an H200 with an 8B",
        "cost": H200_8B._asdict(),
        "trace": f"{requests} requests, Poisson, log-normal lengths: prompts 1730 (P90 5696), answers 415 (P90 834)",
        "schedulers": list(_shown(scheduler_rows(requests))),
        "allocation": list(_shown(allocation_rows(requests))),
    }


def _real(requests: int) -> dict[str, object]:
    if torch.cuda.is_available():
        model, policies = detcompile.compile(build(36)), POLICIES
        trace, num_blocks = log_normal_trace(min(requests, 150), 4), None
        about = "Qwen3-8B shape, random weights; the simulated trace at 4 requests a second"
    else:
        model, num_blocks = detcompile.compile(detcompile.load_model("tiny", device="cpu")), 2000
        trace = log_normal_trace(min(requests, 80), 2, prompt=(200, 700, 1000), output=(48, 96, 200))
        small = {"stall_free": 128, "simple_chunking": 128, "prefill_first": 1024}
        policies = {f"{s} {b}": {"scheduler": s, "max_num_batched_tokens": b} for s, b in small.items()}
        about = "embedded model; log-normal prompts 200 (P90 700), answers 48 (P90 96); 2 requests a second"
    rows = list(_shown(real_rows(model, trace, policies, num_blocks)))
    report = {"what": about, "torch": torch.__version__, "threads": torch.get_num_threads()}
    return report | {"answers equal": True, "rows": rows}


def _shown(rows: Iterator[dict]) -> Iterator[dict]:
    for row in rows:
        print("  ".join(f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--only", default="simulated,real")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    parts = {"simulated": ("simulated", _simulated), "real": (hardware.replace(" ", "-").lower(), _real)}
    arguments.output.mkdir(parents=True, exist_ok=True)
    for part in arguments.only.split(","):
        name, measure = parts[part]
        path = arguments.output / f"schedulers-{name}-{arguments.commit}.json"
        path.write_text(json.dumps({"commit": arguments.commit, **measure(arguments.requests)}, indent=1))
        print(path)


if __name__ == "__main__":
    main()
