"""The engine's tests at the size of an 8B model on a GPU: equal bits under any load, and stalls.

    python -m benchmarks.at_size --commit $(git rev-parse --short HEAD) [--parts machine,repeat,trace,plain]

The model is Qwen3-8B's shape with random weights in bf16.

machine  the state machine of tests/runtime/test_engine_machine.py: requests, cancels, preemptions and settings drawn
         by hypothesis; each request is compared by bytes with a plain forward of it alone.
repeat   one prompt many times, greedy, under random arrivals (benchmarks/repeat.py): how many answers differ.
trace    the schedulers on one trace of arrivals (benchmarks/schedulers.py).
plain    ``repeat``, in the same engine around the plain Inductor graph with cuBLAS; fewer completions and tokens.

Writes benchmarks/results/at-size-<device>-<commit>.json after each part.
"""

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, settings

import detcompile
from benchmarks.model import QWEN3_8B, build
from benchmarks.repeat import Workload, agreement, repeat_ours
from benchmarks.schedulers import POLICIES, real_rows
from benchmarks.serve import plain_lowering, prompts
from benchmarks.simulation import log_normal_trace
from detcompile import CompiledModel, Numerics
from tests.runtime.test_engine_machine import run_machine

__all__ = ["machine", "repeat", "trace"]

PROMPT_LENGTH = 32
GAMES = 4  # of the state machine, between two looks at the count
BUDGETS = (4096, 100, 512, 40, 4096, 7)  # tokens of a step
settings.register_profile("at size", deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


def machine(model: CompiledModel, requests: int) -> dict[str, object]:
    """Play until so many requests were compared; a difference ends the program."""
    tally: Counter[str] = Counter()
    started, games = time.perf_counter(), 0
    while tally["requests"] < requests:
        overlap = games % (2 * GAMES) == 0
        tally += run_machine(model, overlap=overlap, max_examples=GAMES, budgets=BUDGETS, crowd=4)
        games += GAMES
        print(games, dict(tally), flush=True)
    return {"games": games, **tally, "seconds": time.perf_counter() - started}


def repeat(model: CompiledModel, completions: int, tokens: int, max_num_seqs: int) -> dict[str, object]:
    """Count the different answers to one greedy prompt."""
    (prompt,) = prompts(random.Random(0), [PROMPT_LENGTH])
    work = Workload(prompt, completions, tokens, max_num_seqs)
    started = time.perf_counter()
    answers, sizes = repeat_ours(model, work)
    return agreement(answers, sizes) | {"neighbors": work.neighbors, "seconds": time.perf_counter() - started}


def trace(model: CompiledModel, requests: int, rate: float, policies: list[str]) -> dict[str, object]:
    """Return latencies of each policy on the same arrivals; the program ends if their answers differ."""
    chosen = {name: POLICIES[name] for name in policies}
    rows = list(real_rows(model, log_normal_trace(requests, rate), chosen, None))
    lengths = "log-normal lengths: prompts 1730 (P90 5696), answers 415 (P90 834)"
    return {"trace": f"{requests} requests, Poisson, {rate} a second, {lengths}", "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--parts", default="machine,repeat,trace,plain")
    parser.add_argument("--requests", type=int, default=500, help="that the state machine compares")
    parser.add_argument("--completions", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--trace-requests", type=int, default=80)
    parser.add_argument("--policies", default=",".join(POLICIES), help="of the trace")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name()
    report: dict[str, object] = {
        "commit": arguments.commit,
        "hardware": name,
        "torch": torch.__version__,
        "model": f"Qwen3-8B shape ({QWEN3_8B['vocab_size']} tokens), {arguments.layers} layers, bf16, random weights",
        "numerics": "tp_sizes=(1,)",
    }
    path = arguments.out / f"at-size-{name.replace(' ', '-').lower()}-{arguments.commit}.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()

    def keep(part: str, value: object) -> None:
        report[part] = value
        path.write_text(json.dumps(report, indent=1))
        print(f"[{time.monotonic() - started:5.0f} s] {part}: {value}", flush=True)

    settings.load_profile("at size")
    parts = arguments.parts.split(",")
    numerics = Numerics(tp_sizes=(1,))
    if set(parts) != {"plain"}:
        model = detcompile.compile(build(arguments.layers), numerics=numerics)
    if "repeat" in parts:
        keep("repeat", repeat(model, arguments.completions, arguments.tokens, 256))
    if "machine" in parts:
        keep("machine", machine(model, arguments.requests))
    if "trace" in parts:
        keep("trace", trace(model, arguments.trace_requests, arguments.rate, arguments.policies.split(",")))
    if "plain" in parts:
        with plain_lowering():
            plain = detcompile.compile(build(arguments.layers), numerics=numerics)
        keep("plain", repeat(plain, arguments.completions, min(arguments.tokens, 300), 256))


if __name__ == "__main__":
    main()
