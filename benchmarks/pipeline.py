"""Compare N devices as N stages, N tensor-parallel ranks or N replicas: tokens a second, latencies, equal bytes.

    python -m benchmarks.pipeline --commit $(git rev-parse --short HEAD) [--devices 4] [--layers 36] [--only pp4,tp4]
    python -m benchmarks.pipeline --commit $(git rev-parse --short HEAD) --layers 8 --only pp1,pp2,pp2tp2 --bytes-only

An arrangement is a number of replicas, stages and ranks: "pp2tp2" is one model on four devices, "4xpp1tp1" are four of
one device each. Each replica is a process that builds Qwen3-8B's shape in bf16 with random weights, or with
``--device cpu`` the embedded model. All serve the same two workloads: requests that arrive at once, and a trace of
Poisson arrivals, which replicas take in turn. Before that, each answers the same mixed requests, with drafts and
without, and a padded batch: the script fails unless all arrangements and one device give the same digest.

With ``--bytes-only`` nothing is timed. Writes benchmarks/results/pipeline-<device>x<devices>-<layers>-<commit>.json,
and adds to it if it is there.
"""

import argparse
import functools
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import detcompile
from benchmarks.cpu import cpu_name
from benchmarks.model import build
from benchmarks.simulation import Arrival, latencies, log_normal_trace
from detcompile import CompiledModel, Numerics, SamplingParams
from detcompile.models.remote import compile_in_workers
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.speculation.speculator import SpeculationConfig

RESULTS = Path(__file__).parent / "results"


class Arrangement(NamedTuple):
    """Replicas of a model, each with stages, each of them with ranks."""

    replicas: int
    pp: int
    tp: int

    @classmethod
    def of(cls, name: str) -> "Arrangement":
        """Parse "2xpp1tp2"; a number that is left out is 1."""
        match = re.fullmatch(r"(?:(\d+)x)?(?:pp(\d+))?(?:tp(\d+))?", name)
        if match is None or not name:
            raise SystemExit(f"{name!r} is not an arrangement: write it like pp2tp2 or 4xpp1tp1")
        return cls(*(int(number or 1) for number in match.groups()))

    def __str__(self) -> str:
        return f"{self.replicas}xpp{self.pp}tp{self.tp}"


class Workloads(NamedTuple):
    """Requests that all arrangements serve on one kind of device."""

    offline: list[Arrival]
    load: list[Arrival]
    config: EngineConfig


def workloads(device: str, devices: int) -> Workloads:
    """Return the workloads, the same at every call."""
    if device == "cpu":
        rng = random.Random("offline")
        offline = [Arrival(0.0, rng.randint(8, 64), rng.randint(24, 40)) for _ in range(48)]
        load = log_normal_trace(24, 4.0, prompt=(60, 150, 300), output=(24, 48, 64))
        return Workloads(offline, load, EngineConfig(num_blocks=600, max_num_batched_tokens=256, prefix_caching=False))
    rng = random.Random("offline")
    offline = [Arrival(0.0, rng.randint(128, 384), rng.randint(96, 160)) for _ in range(512 * devices)]
    load = log_normal_trace(50 * devices, 3.0 * devices)
    config = EngineConfig(max_num_seqs=1024, max_num_batched_tokens=2048, prefix_caching=False)
    return Workloads(offline, load, config)


def compiled(device: str, layers: int, pp: int, tp: int) -> CompiledModel:
    """Compile the model in a process for each stage and rank, or in this one if it has one of each."""
    if device == "cpu":
        return detcompile.compile("tiny", device="cpu", pp=pp, tp=tp, progress=False)
    if pp * tp == 1:
        return detcompile.compile(build(layers))
    return compile_in_workers(functools.partial(build, layers), pp=pp, tp=tp, numerics=Numerics())


def digest(model: CompiledModel) -> dict[str, str]:
    """Return digests of logits, and of tokens and logprobs of mixed requests, with drafts and without."""
    rng = random.Random("digest")
    ids = torch.tensor([[rng.randrange(model.vocab_size) for _ in range(300)] for _ in range(2)])
    logits = model(ids.to(model.device)).logits.contiguous().cpu()
    digests = {"logits": hashlib.sha256(logits.view(torch.uint8).numpy().tobytes()).hexdigest()}
    kinds = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 50})
    given, params = [], []
    for index in range(48):
        given.append([rng.randrange(model.vocab_size) for _ in range(rng.randint(1, 200))] * 2)
        length = rng.randint(1, 48)
        params.append(SamplingParams(max_tokens=length, seed=index, logprobs=2, ignore_eos=True, **kinds[index % 3]))
    drafting = SpeculationConfig(max_nodes=4, switch="always")  # from the prompt, which repeats
    for name, speculation in (("answers", None), ("answers with drafts", drafting)):
        config = EngineConfig(num_blocks=400, block_size=32, max_num_batched_tokens=300, max_num_seqs=64)
        engine = model.engine(config, speculation=speculation)
        outputs = [output.outputs[0] for output in engine.generate(given, params, progress=False)]
        engine.check()
        results = [(one.token_ids, [(token.logprob, token.top) for token in one.logprobs or ()]) for one in outputs]
        digests[name] = hashlib.sha256(repr(results).encode()).hexdigest()
    return digests


def serve(engine: Engine, trace: Sequence[Arrival], prompts: Sequence[list[int]], start: float) -> dict[str, Any]:
    """Serve a trace that begins at ``start`` of the monotonic clock; return when each token came, from then."""
    names: list[str] = []
    times: dict[str, list[float]] = {}
    while len(names) < len(trace) or engine.has_unfinished_requests:
        now = time.monotonic() - start
        while len(names) < len(trace) and trace[len(names)].time <= now:
            params = SamplingParams(max_tokens=trace[len(names)].num_output, ignore_eos=True, seed=len(names))
            names.append(engine.add_request(prompts[len(names)], params, output_kind="final_only"))
        if engine.has_unfinished_requests:
            for output in engine.step():
                assert output.metrics is not None
                times[output.request_id] = [at - start for at in output.metrics.token_times]
        else:
            time.sleep(max(0.0, trace[len(names)].time - (time.monotonic() - start)))
    return {"times": [times[name] for name in names], "idle share": engine.stats.idle_share}


def replica(device: str, devices: int, layers: int, arrangement: Arrangement, number: int, bytes_only: bool) -> None:
    """Run one replica process: read start times from stdin, and print results as lines of JSON."""

    def tell(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=out, flush=True)

    out, sys.stdout = sys.stdout, sys.stderr
    started = time.monotonic()
    model = compiled(device, layers, arrangement.pp, arrangement.tp)
    seconds = {"compile seconds": time.monotonic() - started}
    tell(digest(model))
    if bytes_only:
        tell(seconds)
        return
    started = time.monotonic()
    work = workloads(device, devices)
    engine = model.engine(work.config)
    tell(seconds | {"engine seconds": time.monotonic() - started, "blocks": engine.stats.num_blocks})
    rng = np.random.Generator(np.random.Philox(1))
    for trace in (work.offline[:64], work.offline, work.load):  # the first warms up
        prompts = [rng.integers(0, model.vocab_size, arrival.num_prompt).tolist() for arrival in trace]
        start = float(sys.stdin.readline())
        part = slice(number, None, arrangement.replicas)
        tell(serve(engine, trace[part], prompts[part], start))


def measure(device: str, devices: int, layers: int, arrangement: Arrangement, bytes_only: bool) -> dict[str, Any]:
    """Run both workloads on an arrangement; return results and the digests of its replicas."""
    size = arrangement.pp * arrangement.tp
    command = [sys.executable, "-m", "benchmarks.pipeline", "--replica", str(arrangement), "--device", device]
    command += ["--layers", str(layers), "--devices", str(devices)]
    command += ["--bytes-only", "--number"] if bytes_only else ["--number"]
    processes = []
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))).split(",")
    try:
        for number in range(arrangement.replicas):
            seen = ",".join(visible[number * size : (number + 1) * size])
            processes.append(
                subprocess.Popen(
                    [*command, str(number)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | ({} if device == "cpu" else {"CUDA_VISIBLE_DEVICES": seen}),
                )
            )
        return _coordinated(processes, workloads(device, devices), bytes_only)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _coordinated(processes: Sequence[subprocess.Popen[str]], work: Workloads, bytes_only: bool) -> dict[str, Any]:
    """Start all replicas on each workload at one time, and merge their results."""

    def answers() -> list[dict[str, Any]]:
        lines = []
        for process in processes:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith("{")), None)
            if line is None:
                raise SystemExit("a replica has ended; its error is above")
            lines.append(json.loads(line))
        return lines

    def serve_all() -> list[dict[str, Any]]:
        start = time.monotonic() + 0.5
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{start}\n")
            process.stdin.flush()
        return answers()

    digests, made = answers(), answers()
    report: dict[str, Any] = {"digests": digests, "start": made}
    if bytes_only:
        return report
    serve_all()
    for name, trace in (("offline", work.offline), ("load", work.load)):
        replicas = serve_all()
        times = [tokens for replica in replicas for tokens in replica["times"]]
        arrivals = [arrival for number in range(len(replicas)) for arrival in trace[number :: len(replicas)]]
        assert [len(tokens) for tokens in times] == [arrival.num_output for arrival in arrivals]
        first = [1e3 * (tokens[0] - arrival.time) for tokens, arrival in zip(times, arrivals, strict=True)]
        between = [1e3 * (after - before) for tokens in times for before, after in pairwise(tokens)]
        seconds = max(tokens[-1] for tokens in times)
        count = sum(map(len, times))
        report[name] = {"output tokens": count, "seconds": seconds, "tokens/s": count / seconds}
        report[name] |= latencies(first, between) | {"idle share": [replica["idle share"] for replica in replicas]}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--devices", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--only", help="arrangements with commas between; default: stages, ranks, replicas and both")
    parser.add_argument("--bytes-only", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--replica", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.replica:
        one = Arrangement.of(given.replica)
        replica(given.device, given.devices, given.layers, one, given.number, given.bytes_only)
        return
    if not given.commit:
        parser.error("--commit is missing")
    n = given.devices
    names = (given.only or f"pp1,pp{n},tp{n},{n}xpp1" + (f",pp2tp{n // 2},pp2" if n > 2 else "")).split(",")
    hardware = cpu_name() if given.device == "cpu" else torch.cuda.get_device_name()
    label = re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")
    layers = "tiny" if given.device == "cpu" else given.layers
    path = given.out / f"pipeline-{label}x{n}-{layers}-{given.commit}.json"
    shape = f"Qwen3-8B shape, {given.layers} layers, bf16, random weights"
    shape = "embedded model" if given.device == "cpu" else shape
    about = {"commit": given.commit, "hardware": hardware, "devices": n, "torch": torch.__version__, "model": shape}
    report = json.loads(path.read_text()) if path.exists() else {}
    report |= about
    given.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        arrangement = Arrangement.of(name)
        report[str(arrangement)] = result = measure(given.device, n, given.layers, arrangement, given.bytes_only)
        digests = {json.dumps(one) for entry in report.values() if isinstance(entry, dict) for one in entry["digests"]}
        report["digests equal"] = len(digests) == 1
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{arrangement}: {json.dumps(result)}", flush=True)
        if len(digests) > 1:
            raise SystemExit(f"{len(digests)} digests: the arrangements differ")


if __name__ == "__main__":
    main()
