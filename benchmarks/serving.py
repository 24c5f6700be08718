"""Measure throughput and latency of a server under open-loop load: requests arrive at given times.

    python -m benchmarks.serving --url http://127.0.0.1:8000 --rates 4,6,8       # a server that runs
    python -m benchmarks.serving --serve --options="--tbt-slo 25" --rates 4,6,8  # one that this starts
    python -m benchmarks.serving --front-alone                                   # no model behind the front
    python -m benchmarks.serving --beside-offline                                # the same by an engine without HTTP
    python -m benchmarks.serving --first-token --rates 4                         # what HTTP adds to its first tokens

Poisson arrivals, log-normal lengths (median, 90th percentile, maximum) and random token ids, drawn from ``--seed``.
``--model`` names the model; ``--shape 8b`` serves Qwen3-8B's shape with random weights instead. Needs
``pip install '.[serve]'``; the client (benchmarks.http_load) is a separate process, over httptools.

Writes benchmarks/results/serving-<mode>-<device>-<commit>.json: tokens a second, milliseconds to the first event and
between events, errors, and CPU seconds of every process, because other work may share the machine.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.http_load import percentiles
from benchmarks.kill_drill import engine_processes
from benchmarks.simulation import log_normal_trace

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6,
    "tie_word_embeddings": False, "eos_token_id": 151645,
}  # fmt: skip
PATIENT = ["--max-queue", "16384", "--max-queued-tokens", "100000000", "--timeout", "3600", "--queue-timeout", "3600"]
Requests = list[tuple[float, dict[str, Any]]]


def requests_of(arguments: argparse.Namespace, rate: float, vocab_size: int) -> Requests:
    """Return the trace: each request's arrival time and body. Rate 0 sends all at once."""
    shapes = {"prompt": arguments.prompt, "output": arguments.answer}
    trace = log_normal_trace(arguments.requests, rate or math.inf, arguments.seed, **shapes)
    common = {"temperature": arguments.temperature, "ignore_eos": True, "stream": True}
    common |= {"stream_options": {"include_usage": True}, "return_token_ids": True}  # events without a tokenizer, too
    tokens = random.Random(arguments.seed)
    requests: Requests = []
    for seed, arrival in enumerate(trace):
        shape = {"prompt": tokens.choices(range(3, vocab_size), k=arrival.num_prompt), "max_tokens": arrival.num_output}
        requests.append((arrival.time, common | shape | {"seed": seed}))
    return requests


def run_load(
    url: str, requests: Requests, key: str | None = None, *, texts: bool = False, firsts: bool = False
) -> dict[str, Any]:
    """Run the client process and return its measurements."""
    plan = {"url": url, "requests": requests, "key": key, "texts": texts, "firsts": firsts}
    command = [sys.executable, "-m", "benchmarks.http_load"]
    done = subprocess.run(command, input=json.dumps(plan), capture_output=True, text=True, check=True, cwd=ROOT)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


class Watched:
    """CPU time of a server's processes from now on, and the front's memory, sampled ten times a second.

    Attributes:
        most: largest resident memory of the front, in bytes.
    """

    def __init__(self, front: int) -> None:
        self._front = front
        self._engines = engine_processes(front) or children(front)
        self._before = self._seconds()
        self._memory = self.most = resident_bytes(front)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def usage(self) -> dict[str, Any]:
        """Stop sampling and return the usage since the start."""
        self._over.set()
        self._thread.join()
        front, engines = (after - before for before, after in zip(self._before, self._seconds()))
        return {
            "front CPU seconds": round(front, 2),
            "engine CPU seconds": round(engines, 2),
            "front MB before": round(self._memory / 2**20, 1),
            "front MB more": round((self.most - self._memory) / 2**20, 1),
        }

    def _look(self) -> None:
        while not self._over.wait(0.1):
            self.most = max(self.most, resident_bytes(self._front))

    def _seconds(self) -> tuple[float, float]:
        return cpu_seconds(self._front), sum(map(cpu_seconds, self._engines))


def children(pid: int) -> list[int]:
    """Return the ids of the processes that a process has started."""
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in paths for child in path.read_text().split()]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, with its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def serving(command: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Start a server process, wait until it is ready, and yield its URL and process id."""
    process = subprocess.Popen([sys.executable, "-m", *command], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("serving "):
                break
        else:
            raise RuntimeError("the server ended: " + "".join(lines))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield line.split(" on ")[1].split(";")[0], process.pid
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def front_alone(arguments: argparse.Namespace) -> dict[str, Any]:
    """Stream from an engine without a model: throughput, CPU time and memory of the front alone."""
    body = {"prompt": [5, 6, 7], "max_tokens": arguments.tokens, "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    requests = [(row * arguments.ramp / arguments.streams, body) for row in range(arguments.streams)]
    warm = [(row / 500, body | {"max_tokens": 8}) for row in range(200)]
    with serving(["benchmarks.scripted_engine", "--interval", str(arguments.interval)]) as (url, front):
        run_load(url, warm)
        watched = Watched(front)
        result = run_load(url, requests) | watched.usage()
    result["microseconds of the front a token"] = round(1e6 * result["front CPU seconds"] / result["tokens"], 2)
    result["tokens a second of the front's CPU time"] = round(result["tokens"] / result["front CPU seconds"])
    result["KB a stream"] = round(result["front MB more"] * 1024 / arguments.streams, 1)
    return {"found": result}


def beside_offline(arguments: argparse.Namespace) -> dict[str, Any]:
    """Send the same requests to an engine in this process and to a server, in turn."""
    from benchmarks.offline_engine import Offline

    with model_of(arguments) as (model, options):
        offline = Offline(model, "--random" in options, arguments.num_blocks)
        requests = requests_of(arguments, 0, offline.vocab_size)
        bounds = ["--num-blocks", str(arguments.num_blocks), "--no-spare", *PATIENT, *options]
        rounds: list[dict[str, Any]] = []
        with serving(["detcompile", "serve", model, "--port", "0", *bounds]) as (url, front):
            run_load(url, requests[: len(requests) // 4])
            offline.run(requests[: len(requests) // 4])
            for _ in range(arguments.rounds):
                watched = Watched(front)
                over_http = run_load(url, requests, texts=offline.has_texts) | watched.usage()
                rounds.append(compared(over_http, offline.run(requests)))
                print(json.dumps(rounds[-1]), flush=True)
        return {"median ratio": statistics.median(one["ratio"] for one in rounds), "rounds": rounds}


def first_token(arguments: argparse.Namespace) -> dict[str, Any]:
    """At each rate, send the same requests to a server and to an engine in this process, and report what HTTP adds."""
    from benchmarks.offline_engine import Offline

    results: dict[str, Any] = {}
    with model_of(arguments) as (model, options):
        offline = Offline(model, "--random" in options, arguments.num_blocks)
        bounds = ["--num-blocks", str(arguments.num_blocks), "--no-spare", *PATIENT, *options]
        with serving(["detcompile", "serve", model, "--port", "0", *bounds]) as (url, _front):
            for rate in arguments.rates:
                requests = requests_of(arguments, rate, offline.vocab_size)
                run_load(url, requests[: len(requests) // 4])
                offline.first_tokens(requests[: len(requests) // 4])
                rounds = []
                for _ in range(arguments.rounds):
                    over_http = run_load(url, requests, firsts=True)
                    assert not over_http["errors"], over_http["first errors"]
                    rounds.append((over_http["firsts"], offline.first_tokens(requests)))
                    print(rate, *map(percentiles, rounds[-1]), flush=True)
                results[f"{rate:g} requests a second"] = first_tokens_of(rounds)
    return {"found": results}


def first_tokens_of(rounds: list[tuple[list[float], list[float]]]) -> dict[str, Any]:
    """Return milliseconds to the first token with and without HTTP: per round, and for each request's fastest round."""
    names = ("http", "engine alone")
    soonest = [[min(times) for times in zip(*kind)] for kind in zip(*rounds)]  # less of what else the machine did
    added = [over_http - alone for over_http, alone in zip(*soonest)]
    return {
        "soonest of each request": dict(zip(names, map(percentiles, soonest))) | {"added": percentiles(added)},
        "rounds": [dict(zip(names, map(percentiles, one))) for one in rounds],
    }


def compared(over_http: dict[str, Any], offline: dict[str, Any]) -> dict[str, Any]:
    """Return one round: both results, and the share of the offline engine's speed that HTTP keeps."""
    texts, offline_texts = over_http.pop("texts", []), offline.pop("texts")
    differ = sum(one != other for one, other in zip(texts, offline_texts, strict=True))
    ratio = over_http["tokens a second"] / offline["tokens a second"]
    by_time = offline["CPU seconds"] / over_http["engine CPU seconds"]
    ratios = {"ratio": round(ratio, 3), "ratio of the engines' CPU seconds": round(by_time, 3)}
    return {"http": over_http, "offline": offline, "texts that differ": differ} | ratios


def served(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start a server with the given options and measure it."""
    with model_of(arguments) as (model, options):
        more = [*options, *PATIENT, *shlex.split(arguments.options)]
        with serving(["detcompile", "serve", model, "--port", "0", *more]) as (url, _front):
            run_load(url, requests_of(arguments, 0, arguments.vocab_size)[:8])
            return at_rates(arguments, url) | {"metrics": own_metrics(url)}


def at_rates(arguments: argparse.Namespace, url: str) -> dict[str, Any]:
    """Run the trace at each rate."""
    results = {}
    for rate in arguments.rates:
        requests = requests_of(arguments, rate, arguments.vocab_size)
        results[f"{rate:g} requests a second"] = run_load(url, requests, arguments.key)
        print(rate, json.dumps(results[f"{rate:g} requests a second"]), flush=True)
    return {"found": results}


def own_metrics(url: str) -> dict[str, float]:
    """Return counts of the engine from /metrics, renamed."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = [line.split() for line in answer.read().decode().splitlines() if line.startswith("detcompile:")]
    return {line[0]: float(line[1]) for line in lines if "{" not in line[0]}


@contextlib.contextmanager
def model_of(arguments: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Yield the model to serve, and the options that it needs."""
    with tempfile.TemporaryDirectory() as folder:
        if arguments.shape is None:
            yield arguments.model, []
        else:
            (Path(folder) / "config.json").write_text(json.dumps(QWEN3_8B))
            yield folder, ["--random"]


def hardware() -> str:
    """Return this machine's GPU, if torch sees one, its processor and its number of cores."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    gpu = ""
    with contextlib.suppress(ImportError):
        import torch

        gpu = torch.cuda.get_device_name() + ", " if torch.cuda.is_available() else ""
    return f"{gpu}{processor}, {len(os.sched_getaffinity(0))} cores"


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--url")
    for name in ("--serve", "--front-alone", "--beside-offline", "--first-token"):
        mode.add_argument(name, dest="mode", action="store_const", const=name.removeprefix("--"))
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--key", help="API key of the server at --url")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--shape", choices=["8b"])
    parser.add_argument("--options", default="", help="of detcompile serve, with --serve")
    parser.add_argument("--rates", type=_numbers(float), default=(6.0,), help="requests a second; 0: all at once")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=_numbers(int), default=(64, 128, 512), help="tokens: median, P90, most")
    parser.add_argument("--answer", type=_numbers(int), default=(96, 160, 512), help="tokens: median, P90, most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=2000, help="prompts take ids below it")
    parser.add_argument("--rounds", type=int, default=5, help="with --beside-offline, --first-token")
    parser.add_argument("--num-blocks", type=int, default=1500, help="KV blocks, with these two")
    parser.add_argument("--streams", type=int, default=1000, help="with --front-alone")
    parser.add_argument("--tokens", type=int, default=250, help="tokens a stream, with --front-alone")
    parser.add_argument("--interval", type=float, default=0.04, help="seconds a step, with --front-alone")
    parser.add_argument("--ramp", type=float, default=4.0, help="seconds until all streams began, with --front-alone")
    return parser.parse_args()


def _numbers(kind: type) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(kind(part) for part in text.split(","))


def main() -> int:
    arguments = parsed()
    modes = {"front-alone": front_alone, "beside-offline": beside_offline, "serve": served, "first-token": first_token}
    mode = arguments.mode or "url"
    results = at_rates(arguments, arguments.url) if mode == "url" else modes[mode](arguments)
    given = {name: value for name, value in vars(arguments).items() if name not in ("key", "out", "url", "commit")}
    report = {"commit": arguments.commit, "hardware": hardware(), "arguments": given} | results
    device = hardware().split(",")[0].replace(" ", "-").lower()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"serving-{mode}-{device}-{arguments.commit}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
