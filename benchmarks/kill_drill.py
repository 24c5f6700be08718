"""Kill a server or its engines during requests, and compare the answers with those of an undisturbed server.

    python -m benchmarks.kill_drill --commit $(git rev-parse --short HEAD) [--rounds 50] [--replicas 1] [--tp 1]

Every round sends the same requests at once: several samples, penalties, log-probabilities, stop strings, grammars,
greedy and sampled, with speculation. After some tokens it sends SIGKILL or SIGSTOP to a random engine process. Every
third round it kills the server itself and restarts it with its journal. Clients then reconnect: to a stream with their
idempotency key, to a background response with the number of its last event. The script fails if a token is lost,
repeated or changed. A pause is the longest time between two events of a stream.

Writes benchmarks/results/kill-drill-<cores>-cores-<commit>.json.
"""

import argparse
import asyncio
import collections
import functools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

__all__ = ["FRONT_EVERY", "Drill", "bodies", "engine_processes"]

RESULTS = Path(__file__).parent / "results"
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
FRONT_EVERY = 3  # in every third round the server is killed
RESPONSES_EVERY = 8  # every eighth request is a background response
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
RETRY_SECONDS = 0.2
START_SECONDS = 240
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"top_p": 0.9, "top_k": 50},
    {"n": 2, "logprobs": 3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    {"logprobs": 0, "min_p": 0.05, "logit_bias": {"17": 2.5}},
    {"stop": ["ee", "the end"], "min_tokens": 8},
    {"structured_outputs": {"regex": "[a-z ,]{80,}"}, "ignore_eos": False},
    {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 20}}, "n": 2},
    {"temperature": 0, "prompt": [7, 8, 9, 10] * 8},  # drafts are often right
]


def bodies(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return requests of all kinds, each with its own seed and prompt; some are background responses."""
    common = {"model": "tiny", "stream": True, "ignore_eos": True}
    completion = common | {"max_tokens": max_tokens, "return_token_ids": True}
    requests = [
        completion | {"prompt": [3 + index, *range(5, 5 + index % 30)], "seed": index} | KINDS[index % len(KINDS)]
        for index in range(count)
    ]
    response = common | {"max_output_tokens": max_tokens, "background": True}
    for index in range(0, count, RESPONSES_EVERY):
        requests[index] = response | {"input": f"Say {index}.", "seed": index}
    return requests


def engine_processes(server: int) -> list[int]:
    """Return the ids of a server's engine processes, at any depth below it."""
    pids, waiting = [], [server]
    while waiting:
        children = Path(f"/proc/{waiting.pop()}/task").glob("*/children")
        started = [int(pid) for path in children for pid in path.read_text().split()]
        pids += started
        waiting += started
    return [pid for pid in pids if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class Drill:
    """Rounds of requests against one server, which is restarted after it was killed.

    Args:
        start: starts a server with the previous one's journal; returns its URL and process.
        requests: the requests of a round.

    Attributes:
        process: the server.
        num_unfinished: streams that were open when a process was disturbed, over all rounds.
        num_restarts: engines that the server restarted, in rounds that disturbed an engine.
        pauses: seconds, for each stream of the rounds that disturbed an engine.
        long_pauses: seconds, for each stream of the rounds that killed the server.
    """

    def __init__(
        self, start: Callable[[], tuple[str, subprocess.Popen[str]]], requests: Sequence[dict[str, Any]], seed: int = 0
    ) -> None:
        self.num_unfinished = 0
        self.num_restarts = 0
        self.pauses: list[float] = []
        self.long_pauses: list[float] = []
        self._start = start
        self._requests = requests
        self._random = random.Random(seed)
        self._num_rounds = 0
        self._url, self.process = start()

    def undisturbed(self) -> list[Any]:
        """Return the results of all streams without a disturbance."""
        return asyncio.run(self._round([]))

    def disturbed(self) -> list[Any]:
        """Return the results of all streams while an engine process is killed or stopped, or the server is killed."""
        self._num_rounds += 1
        if self._num_rounds % FRONT_EVERY == 0:
            return asyncio.run(self._round(self.long_pauses, self._kill_server))
        before = self._restarts()
        streams = asyncio.run(self._round(self.pauses, self._kill_engine))
        self.num_restarts += self._restarts() - before
        return streams

    def _restarts(self) -> int:
        """Return how many engines the current server has restarted."""
        lines = httpx.get(f"{self._url}/metrics").text.splitlines()
        return next(
            int(float(line.split()[-1])) for line in lines if line.startswith("detcompile:engine_restarts_total")
        )

    async def _kill_engine(self) -> None:
        os.kill(self._random.choice(engine_processes(self.process.pid)), self._random.choice(SIGNALS))

    async def _kill_server(self) -> None:
        self.process.kill()
        self.process.wait()
        self._url, self.process = await asyncio.to_thread(self._start)

    async def _round(self, pauses: list[float], disturb: Callable[[], Any] | None = None) -> list[Any]:
        self._num_events = 0
        limits = httpx.Limits(max_connections=len(self._requests))
        async with httpx.AsyncClient(timeout=180, limits=limits) as client:
            streams = [
                asyncio.create_task(self._stream(client, body, pauses, by_name=index % 2 == 0))
                for index, body in enumerate(self._requests)
            ]
            if disturb is not None:
                after = self._random.randint(len(streams), 8 * len(streams))
                while self._num_events < after and not all(stream.done() for stream in streams):
                    await asyncio.sleep(0.001)
                self.num_unfinished += sum(not stream.done() for stream in streams)
                await disturb()
            return await asyncio.gather(*streams)

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any], pauses: list[float], by_name: bool) -> Any:
        """Return tokens, text, log-probabilities and finish reason of each sample, or a response's text and status."""
        if "input" in body:
            return await self._response(client, body, pauses)
        samples: dict[int, dict[str, Any]] = {}
        last, pause = time.monotonic(), 0.0
        async for event in self._events(client, body, by_name):
            self._num_events += 1
            now = time.monotonic()
            last, pause = now, max(pause, now - last)
            assert "error" not in event, event
            for choice in event["choices"]:
                sample = samples.setdefault(choice["index"], {"ids": [], "text": "", "logprobs": [], "end": None})
                sample["ids"] += choice["token_ids"] or []
                sample["text"] += choice["text"]
                sample["logprobs"] += (choice.get("logprobs") or {}).get("token_logprobs", [])
                sample["end"] = choice["finish_reason"] or sample["end"]
        pauses.append(pause)
        assert samples and all(sample["end"] for sample in samples.values()), samples
        return samples

    async def _response(self, client: httpx.AsyncClient, body: dict[str, Any], pauses: list[float]) -> Any:
        """Return a response's text and status. Whenever the server is lost, resume after the last event."""
        headers = {"Idempotency-Key": str(uuid.uuid4())}
        name, number, text, status = "", -1, "", ""
        last, pause, end = time.monotonic(), 0.0, time.monotonic() + START_SECONDS
        while not status:
            route = ("GET", f"{self._url}/v1/responses/{name}") if name else ("POST", f"{self._url}/v1/responses")
            cursor = {"stream": "true", "starting_after": str(number)} if name else {}
            data = None if name else body
            try:
                async with client.stream(*route, json=data, headers=headers, params=cursor) as response:
                    if response.status_code == 503:  # the server is starting
                        raise httpx.ConnectError((await response.aread()).decode())
                    assert response.status_code == 200, await response.aread()
                    async for line in response.aiter_lines():
                        if not line.startswith("data: "):
                            continue
                        event = json.loads(line.removeprefix("data: "))
                        assert event["sequence_number"] == number + 1, (event, number)
                        number += 1
                        self._num_events += 1
                        now = time.monotonic()
                        last, pause = now, max(pause, now - last)
                        name = event.get("response", {}).get("id", name)
                        text += event["delta"] if event["type"] == "response.output_text.delta" else ""
                        if event["type"] in ("response.completed", "response.incomplete"):
                            status, final_text = event["type"], event["response"]["output"][0]["content"][0]["text"]
                            assert final_text == text
            except httpx.TransportError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
        pauses.append(pause)
        return text, status

    async def _events(self, client: httpx.AsyncClient, body: dict[str, Any], by_name: bool) -> AsyncIterator[Any]:
        """Yield the events of a stream. Whenever the server is lost, reconnect and resume.

        Args:
            by_name: reconnect with the answer's id; otherwise send the request again with its idempotency key.
        """
        headers, name, end = {"Idempotency-Key": str(uuid.uuid4())}, "", time.monotonic() + START_SECONDS
        while True:
            lost = by_name and name
            method, path = ("GET", f"/v1/streams/{name}") if lost else ("POST", "/v1/completions")
            try:
                async with client.stream(
                    method, self._url + path, json=None if lost else body, headers=headers
                ) as response:
                    if response.status_code == 503:  # the server is starting
                        raise httpx.ConnectError((await response.aread()).decode())
                    assert response.status_code == 200, await response.aread()
                    name, event_id = response.headers["x-request-id"], ""
                    async for line in response.aiter_lines():
                        if line == "data: [DONE]":
                            return
                        if line.startswith("id: "):
                            event_id = line.removeprefix("id: ")
                        elif line.startswith("data: "):
                            headers["Last-Event-ID"] = event_id
                            yield json.loads(line.removeprefix("data: "))
                    raise AssertionError("a stream ended without [DONE]")
            except httpx.TransportError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(RETRY_SECONDS)


def started(command: Sequence[str]) -> tuple[str, subprocess.Popen[str]]:
    """Start a server and wait until it is ready. Return its URL and process.

    Raises:
        RuntimeError: the server ended; the message has its last lines.
    """
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: collections.deque[str] = collections.deque(maxlen=100)
    for line in process.stderr:
        lines.append(line)
        if line.startswith("serving "):
            # Keep reading: a full pipe blocks the server.
            threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True).start()
            return line.split()[3].rstrip(";"), process
    raise RuntimeError(f"the server ended with status {process.wait()}:\n{''.join(lines)}")


def summary(pauses: Sequence[float]) -> dict[str, float] | None:
    """Return median, P99 and longest pause in seconds; None without pauses."""
    if not pauses:
        return None
    ordered = sorted(pauses)
    places = {"median": statistics.median(ordered), "P99": ordered[int(0.99 * len(ordered))], "longest": ordered[-1]}
    return {name: round(value, 3) for name, value in places.items()}


def main() -> int:
    """Run all rounds. Return 1 if a stream differed, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--num-blocks", type=int, help="of an engine's KV cache; default: as memory allows")
    parser.add_argument("--between", type=float, default=15.0, help="seconds between rounds, for the next spare")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "detcompile", "serve", "tiny", "--port", "0", "--max-restarts", "1000"]
        command += ["--replicas", str(arguments.replicas), "--tp", str(arguments.tp), "--journal", f"{folder}/journal"]
        command += [] if arguments.num_blocks is None else ["--num-blocks", str(arguments.num_blocks)]
        Path(folder, "template").write_text(TEMPLATE)
        command += ["--speculation", "always", "--chat-template", f"{folder}/template"]
        drill = Drill(functools.partial(started, command), bodies(arguments.streams, arguments.tokens))
        try:
            expected = drill.undisturbed()
            num_differing = 0
            for number in range(arguments.rounds):
                time.sleep(arguments.between)
                streams = drill.disturbed()
                num_differing += sum(one != other for one, other in zip(streams, expected, strict=True))
                print(f"round {number}: {num_differing} differ", flush=True)
        finally:
            drill.process.kill()
            drill.process.wait()
    result = {
        "commit": arguments.commit,
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "rounds": arguments.rounds,
        "streams a round": arguments.streams,
        "tokens a sample": arguments.tokens,
        "replicas": arguments.replicas,
        "tp": arguments.tp,
        "seconds between rounds": arguments.between,
        "streams that differ": num_differing,
        "streams that had not ended": drill.num_unfinished,
        "engines started again": drill.num_restarts,
        "pause where an engine is lost, s": summary(drill.pauses),
        "pause where the server is killed, s": summary(drill.long_pauses),
    }
    name = f"kill-drill-{os.cpu_count()}-cores-{arguments.replicas}x{arguments.tp}-{arguments.commit}.json"
    (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(num_differing > 0)


if __name__ == "__main__":
    sys.exit(main())
