"""Answers of a server whose engines are killed while they are drawn, beside those of one that nobody disturbs.

    python -m benchmarks.kill_drill --commit $(git rev-parse --short HEAD) [--rounds 50] [--replicas 1] [--tp 1]

Every round asks for the same streams at once (several samples, penalties, log-probabilities, stop strings, greedy and
drawn) and kills or stops (SIGKILL, SIGSTOP) a random process of the engines when some of the tokens have come. The
script fails if a token is lost, comes twice, or is another one than before. A pause is the longest time between two
events of a stream.

Writes benchmarks/results/kill-drill-<cores>-cores-<commit>.json.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

__all__ = ["Drill", "bodies", "engine_processes"]

RESULTS = Path(__file__).parent / "results"
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"top_p": 0.9, "top_k": 50},
    {"n": 2, "logprobs": 3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    {"logprobs": 0, "min_p": 0.05, "logit_bias": {"17": 2.5}},
    {"stop": ["ee", "the end"], "min_tokens": 8},
]


def bodies(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Requests of all kinds, each with a seed and a prompt of its own."""
    asked = {"model": "tiny", "max_tokens": max_tokens, "stream": True, "return_token_ids": True, "ignore_eos": True}
    return [
        asked | {"prompt": [3 + index, *range(5, 5 + index % 30)], "seed": index} | KINDS[index % len(KINDS)]
        for index in range(count)
    ]


def engine_processes(server: int) -> list[int]:
    """The processes that a server has started, and those that these have."""
    found, waiting = [], [server]
    while waiting:
        children = Path(f"/proc/{waiting.pop()}/task").glob("*/children")
        started = [int(pid) for path in children for pid in path.read_text().split()]
        found += started
        waiting += started
    return [pid for pid in found if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class Drill:
    """Rounds against one server.

    Args:
        url: where it listens.
        server: its process.
        asked: the requests of a round.

    Attributes:
        pauses: seconds of each stream of each disturbed round.
    """

    def __init__(self, url: str, server: int, asked: Sequence[dict[str, Any]], seed: int = 0) -> None:
        self.pauses: list[float] = []
        self._url = url
        self._server = server
        self._asked = asked
        self._random = random.Random(seed)

    def undisturbed(self) -> list[Any]:
        """What every stream gives where nobody is killed."""
        return asyncio.run(self._round(None))

    def disturbed(self) -> list[Any]:
        """What every stream gives where a process of the engines is killed, or stopped, meanwhile."""
        return asyncio.run(self._round(self._random.choice(SIGNALS)))

    async def _round(self, number: int | None) -> list[Any]:
        self._num_events = 0
        limits = httpx.Limits(max_connections=len(self._asked))
        async with httpx.AsyncClient(base_url=self._url, timeout=180, limits=limits) as client:
            streams = [asyncio.create_task(self._stream(client, body, number is not None)) for body in self._asked]
            if number is not None:
                after = self._random.randint(len(streams), 8 * len(streams))
                while self._num_events < after and not all(stream.done() for stream in streams):
                    await asyncio.sleep(0.001)
                os.kill(self._random.choice(engine_processes(self._server)), number)
            return await asyncio.gather(*streams)

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any], disturbed: bool) -> Any:
        """Tokens, text, log-probabilities and the reason of its end, of each sample."""
        samples: dict[int, dict[str, Any]] = {}
        last, pause = time.monotonic(), 0.0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                self._num_events += 1
                now = time.monotonic()
                last, pause = now, max(pause, now - last)
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    sample = samples.setdefault(choice["index"], {"ids": [], "text": "", "logprobs": [], "end": None})
                    sample["ids"] += choice["token_ids"] or []
                    sample["text"] += choice["text"]
                    sample["logprobs"] += (choice.get("logprobs") or {}).get("token_logprobs", [])
                    sample["end"] = choice["finish_reason"] or sample["end"]
        if disturbed:
            self.pauses.append(pause)
        assert all(sample["end"] for sample in samples.values()), samples
        return samples


def main() -> int:
    """Run all rounds; the exit code says whether a stream differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--between", type=float, default=15.0, help="seconds between rounds, for the next spare")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "detcompile", "serve", "tiny", "--port", "0", "--max-restarts", "1000"]
    command += ["--replicas", str(arguments.replicas), "--tp", str(arguments.tp)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("serving "))
        drill = Drill(line.split()[3].rstrip(";"), process.pid, bodies(arguments.streams, arguments.tokens))
        expected = drill.undisturbed()
        num_differing = 0
        for number in range(arguments.rounds):
            time.sleep(arguments.between)
            found = drill.disturbed()
            num_differing += sum(one != other for one, other in zip(found, expected, strict=True))
            print(f"round {number}: {num_differing} differ, longest pause {max(drill.pauses[-len(found):]):.2f} s")
    finally:
        process.kill()
        process.wait()
    pauses = sorted(drill.pauses)
    result = {
        "commit": arguments.commit,
        "cores": os.cpu_count(),
        "rounds": arguments.rounds,
        "streams a round": arguments.streams,
        "tokens a sample": arguments.tokens,
        "replicas": arguments.replicas,
        "tp": arguments.tp,
        "seconds between rounds": arguments.between,
        "streams that differ": num_differing,
        "pause, s": {
            "median": round(statistics.median(pauses), 3),
            "P99": round(pauses[int(0.99 * len(pauses))], 3),
            "longest": round(pauses[-1], 3),
        },
    }
    name = f"kill-drill-{os.cpu_count()}-cores-{arguments.replicas}x{arguments.tp}-{arguments.commit}.json"
    (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(num_differing > 0)


if __name__ == "__main__":
    sys.exit(main())
