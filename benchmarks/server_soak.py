"""Load a server at random for a long time: slots, descriptors, tasks, blocks and memory must not grow.

    python -m benchmarks.server_soak --minutes 10 --commit $(git rev-parse --short HEAD)
    python -m benchmarks.server_soak --minutes 120 --requests 20000 --stretch 120 --commit ...

Clients send requests to every route at random. A third are completions of all kinds of the kill drill, streamed or not,
with and without keys; the others are chats, messages, responses, verifications, tokenizations and invalid requests. One
client in seven disconnects after some lines of its answer, one in five at a random moment, often before its request is
admitted; one in ten reads slowly. From time to time an engine is killed or stopped. Between periods of load the script
waits until no slot is held, and records what the server still holds. One request is repeated each time and must give
the same answer. Writes benchmarks/results/server-soak-<cores>-cores-<commit>.json.
"""

import argparse
import asyncio
import json
import math
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from benchmarks.kill_drill import KINDS, RESULTS, SIGNALS, TEMPLATE, engine_processes, started

__all__ = ["ROOM", "Soak", "growth"]

NUM_CLIENTS = 12
OTHER_ROUTES = 2 / 3  # of the requests; the rest are completions
REST_SECONDS = 120.0  # limit for all requests to end and lost engines to be replaced
CANARY = {"model": "tiny", "prompt": [5, 6, 7], "seed": 1, "max_tokens": 24, "logprobs": 1, "return_token_ids": True,
          "receipt": True}  # fmt: skip
# "front MB" is the front's memory without "kept MB", the receipts and responses that it keeps, which are bounded.
# What may differ between two rests without being growth: sockets that close, memory that Python keeps for later.
ROOM = {"descriptors": 3.0, "tasks": 3.0, "threads": 3.0, "front MB": 12.0}
HELD = ("open_slots", "queued_tokens", "waiting_requests", "body_bytes")  # gauges that are 0 without requests
MOST_GROWTH = 1.1  # of the front's memory, from the first rest to the last


class Soak:
    """Random load on one server.

    Args:
        url: where it listens.
        server: its process.

    Attributes:
        rests: what the server held each time that it was idle.
        counts: requests by outcome.
        routes: requests by their routes.
    """

    def __init__(self, url: str, server: int, seed: int = 0) -> None:
        self.rests: list[dict[str, float]] = []
        self.counts: Counter[str] = Counter()
        self.routes: Counter[str] = Counter()
        self._names: list[str] = []  # of responses that were stored
        self._envelope: Any = None  # of a receipt
        self._url = url
        self._server = server
        self._random = random.Random(seed)
        self._canary: Any = None

    async def run(
        self, seconds: float, stretch: float, kill_every: float, *, most: float = math.inf, clients: int = NUM_CLIENTS
    ) -> None:
        """Send requests for ``seconds``, with a rest after each ``stretch``.

        Args:
            kill_every: seconds of load between two disturbances of an engine; 0 for none.
            most: requests after which it ends early.
            clients: how many send at the same time.

        Raises:
            AssertionError: an answer is invalid or differs from an earlier one, or blocks leaked.
        """
        end = time.monotonic() + seconds
        await self._rest()
        while time.monotonic() < end and self.routes.total() < most:
            stop = min(end, time.monotonic() + stretch)
            killer = asyncio.create_task(self._kill(kill_every, stop)) if kill_every else None
            await asyncio.gather(*(self._client(stop, most) for _ in range(clients)))
            if killer is not None:
                killer.cancel()
            await self._rest()

    async def _client(self, stop: float, most: float) -> None:
        while time.monotonic() < stop and self.routes.total() < most:
            if self._random.random() < OTHER_ROUTES:
                await self._other()
                continue
            self.routes["/v1/completions"] += 1
            body = {"model": "tiny", "max_tokens": self._random.randint(1, 60), "return_token_ids": True}
            body |= {"prompt": [self._random.randrange(3, 400) for _ in range(self._random.randint(1, 60))]}
            body |= self._random.choice(KINDS) | {"min_tokens": 0, "stream": self._random.random() < 0.7}
            key = str(uuid.UUID(int=self._random.getrandbits(128)))
            headers = {"Idempotency-Key": key} if self._random.random() < 0.3 else {}
            leaves = self._random.randint(1, 20) if self._random.random() < 1 / 7 else None
            pause = 0.1 if self._random.random() < 0.1 else 0.0
            await self._ask(body, headers, leaves, pause)

    async def _other(self) -> None:
        """Send a request to another route, or an invalid one; its client may disconnect at any moment."""
        method, path, body = self._random.choice(self._others())
        self.routes[f"{method} {path.split('resp_')[0]}"] += 1
        leaves = self._random.random() ** 3 if self._random.random() < 0.4 else None  # most of them within 0.1 s
        async with self._http() as client:
            try:
                async with asyncio.timeout(leaves):
                    answer = await client.request(method, path, json=body)
            except TimeoutError:
                self.counts["left at any moment"] += 1
                return
        if answer.status_code in (429, 503):
            self.counts[f"refused with {answer.status_code}"] += 1
            return
        assert answer.status_code in (200, 400, 404), (path, answer.status_code, answer.text)
        self.counts["other answered" if answer.status_code == 200 else "other refused"] += 1
        if path == "/v1/responses" and answer.status_code == 200 and "store" not in body and "stream" not in body:
            self._names = [*self._names[-50:], answer.json()["id"]]

    def _others(self) -> list[tuple[str, str, Any]]:
        """Return requests to all routes except completions."""
        draw = self._random
        text = "x" * draw.choice([5, 50, 500, 5000])
        length = draw.randint(1, 30)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": text[:500]}], "max_tokens": length}
        response = {"model": "tiny", "input": text[:500], "max_output_tokens": length}
        name = draw.choice(self._names) if self._names else "resp_none"
        return [
            *[("POST", "/v1/chat/completions", chat | {"stream": stream}) for stream in (True, False)],
            *[("POST", "/v1/messages", chat | {"stream": stream}) for stream in (True, False)],
            ("POST", "/v1/responses", response),
            ("POST", "/v1/responses", response | {"stream": True}),
            ("POST", "/v1/responses", response | {"store": False}),
            ("POST", "/v1/responses", response | {"background": True}),
            ("POST", "/v1/responses", response | {"pad": "x" * draw.choice([10, 1 << 20])}),
            ("GET", f"/v1/responses/{name}", None),
            ("GET", f"/v1/responses/{name}?stream=true", None),
            ("POST", f"/v1/responses/{name}/cancel", None),
            ("DELETE", f"/v1/responses/{name}", None),
            ("POST", "/v1/verify", self._envelope),
            ("POST", "/tokenize", {"prompt": text * 4}),
            ("POST", "/detokenize", {"tokens": [5, 6, 7] * 2000}),
            ("POST", "/v1/messages/count_tokens", {"messages": chat["messages"]}),
            ("POST", "/v1/completions", {"prompt": [[5] * 60] * 40, "max_tokens": 1}),
            ("POST", "/v1/completions", {"prompt": text, "max_tokens": 10**30}),
            ("POST", "/v1/embeddings", {"input": text}),
            ("GET", "/v1/models", None),
            ("GET", "/dashboard/state", None),
            ("GET", "/nothing", None),
        ]

    async def _ask(self, body: dict[str, Any], headers: dict[str, str], leaves: int | None, pause: float) -> None:
        """Send one request; disconnect after ``leaves`` lines, and pause between lines."""
        async with (
            self._http() as client,
            client.stream("POST", "/v1/completions", json=body, headers=headers) as response,
        ):
            if response.status_code != 200:
                text = (await response.aread()).decode()
                assert response.status_code in (429, 503), text  # it is full, or an engine could not be replaced
                self.counts[f"refused with {response.status_code}"] += 1
                return
            number = 0
            async for line in response.aiter_lines():
                number += 1
                assert '"error"' not in line[:20], line
                if leaves is not None and number >= leaves:
                    self.counts["left"] += 1
                    return
                if pause:
                    await asyncio.sleep(pause)
        self.counts["read slowly" if pause else "answered"] += 1

    def _http(self) -> httpx.AsyncClient:
        """Return a client that opens a new connection. TLS is off: loading certificates takes 24 ms a client."""
        return httpx.AsyncClient(base_url=self._url, timeout=180, headers={"Connection": "close"}, verify=False)

    async def _kill(self, every: float, stop: float) -> None:
        """Kill or stop engines until ``stop``, after which clients only wait for answers."""
        while time.monotonic() + every < stop:
            await asyncio.sleep(every)
            os.kill(self._random.choice(engine_processes(self._server)), self._random.choice(SIGNALS))
            self.counts["engines disturbed"] += 1

    async def _rest(self) -> None:
        """Wait until nothing is open and an engine is ready, repeat the canary, and record what the server holds."""
        end = time.monotonic() + REST_SECONDS
        async with self._http() as client:
            reply = (await client.post("/v1/completions", json=CANARY)).json()
            answer, self._envelope = reply["choices"], reply["receipt"]
            self._canary = self._canary or answer
            assert answer == self._canary, "the same request has another answer"
            while True:
                metrics = _numbers((await client.get("/metrics")).text)
                held = {name: metrics[f"detcompile:{name}"] for name in HELD}
                waits = any(metrics[f"vllm:num_requests_{name}"] for name in ("running", "waiting"))
                serves = metrics["detcompile:engine_ready"] and len(engine_processes(self._server)) > 1
                if serves and not waits and not any(held.values()):
                    break
                assert time.monotonic() < end, f"no rest: {held}, {metrics}"
                await asyncio.sleep(0.2)
            await asyncio.sleep(1.0)  # for sockets to close
            metrics = _numbers((await client.get("/metrics")).text)
        assert metrics["vllm:kv_cache_usage_perc"] == 0.0, "KV blocks are held without a request"
        held = {name.replace("_", " "): metrics[f"detcompile:{name}"] for name in HELD}
        held |= {"descriptors": len(os.listdir(f"/proc/{self._server}/fd")), "tasks": metrics["detcompile:tasks"]}
        status = Path(f"/proc/{self._server}/status").read_text()
        held["threads"] = float(re.search(r"Threads:\s+(\d+)", status)[1])  # type: ignore[index]
        held["kept MB"] = round(metrics["detcompile:kept_bytes"] / 2**20, 1)
        memory = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]
        held["front MB"] = round(memory - held["kept MB"], 1)
        self.rests.append(held)


def growth(rests: list[dict[str, float]]) -> dict[str, float]:
    """Return how much the medians grew from the second third of the rests to the last third.

    The first third is left out: pools fill, and code is imported.
    """
    third = max(1, len(rests) // 3)
    growths = {}
    for name in ROOM:
        second, last = ([rest[name] for rest in part] for part in (rests[third : 2 * third], rests[-third:]))
        growths[name] = round(statistics.median(last) - statistics.median(second), 1)
    return growths


def _numbers(text: str) -> dict[str, float]:
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#") and "{" not in line]
    return {name: float(value) for name, value in lines}


def main() -> int:
    """Soak a server. Return 1 if anything grew or the server failed, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--stretch", type=float, default=30, help="seconds of load between two rests")
    parser.add_argument("--kill-every", type=float, default=20, help="seconds between two disturbed engines; 0: none")
    parser.add_argument("--requests", type=int, default=10**9, help="requests after which it ends early")
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS, help="how many send at the same time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "detcompile", "serve", "tiny", "--port", "0", "--max-restarts", "1000"]
        command += ["--journal", f"{folder}/journal", "--queue-timeout", "180", "--speculation", "always"]
        command += ["--chat-template", f"{folder}/template.jinja"]
        Path(folder, "template.jinja").write_text(TEMPLATE)
        url, process = started(command)
        try:
            soak = Soak(url, process.pid)
            how = {"most": arguments.requests, "clients": arguments.clients}
            asyncio.run(soak.run(60 * arguments.minutes, arguments.stretch, arguments.kill_every, **how))
            journal = sum(path.stat().st_size for path in Path(folder).iterdir())
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
        finally:
            process.kill()
            process.wait()
    grown, warm, last = growth(soak.rests), soak.rests[min(1, len(soak.rests) - 1)], soak.rests[-1]
    result = {
        "commit": arguments.commit,
        "cores": os.cpu_count(),
        "minutes": arguments.minutes,
        "requests": dict(soak.counts),
        "routes": dict(sorted(soak.routes.items())),
        "growth from the second third to the last": grown,
        "first rest": soak.rests[0],
        "rest after the first stretch": warm,
        "last rest": last,
        "memory against the rest after the first stretch": round(last["front MB"] / warm["front MB"], 3),
        "rests": len(soak.rests),
        "journal MB": round(journal / 2**20, 1),
        "exit code": code,
    }
    name = f"server-soak-{os.cpu_count()}-cores-{arguments.commit}.json"
    (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    grows = any(grown[name] > room for name, room in ROOM.items()) or last["front MB"] > MOST_GROWTH * warm["front MB"]
    return int(code != 0 or grows)


if __name__ == "__main__":
    sys.exit(main())
