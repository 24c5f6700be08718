"""Random load on a server for a long time: descriptors, tasks, blocks and memory must not grow.

    python -m benchmarks.server_soak --minutes 10 --commit $(git rev-parse --short HEAD)

Clients ask at random (all kinds of the kill drill's requests, streamed and not, with keys and without); one in seven
leaves in the midst of its answer, one in ten reads slowly, and from time to time an engine is killed or stopped.
Between stretches of load everybody waits, and what the server holds then is noted. One request is repeated each time,
and must come out the same. Writes benchmarks/results/server-soak-<cores>-cores-<commit>.json.
"""

import argparse
import asyncio
import json
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

from benchmarks.kill_drill import KINDS, RESULTS, SIGNALS, engine_processes, started

__all__ = ["ROOM", "Soak", "growth"]

NUM_CLIENTS = 12
REST_SECONDS = 120.0  # for all to end, and for lost engines to be replaced
CANARY = {"model": "tiny", "prompt": [5, 6, 7], "seed": 1, "max_tokens": 24, "logprobs": 1, "return_token_ids": True}
# What may differ between two rests without being growth: sockets that close, memory that Python keeps for later.
ROOM = {"descriptors": 3.0, "tasks": 3.0, "threads": 3.0, "front MB": 12.0}


class Soak:
    """Random load on one server.

    Args:
        url: where it listens.
        server: its process.

    Attributes:
        rests: what the server held each time that nobody asked for anything.
        counts: requests by what became of them.
    """

    def __init__(self, url: str, server: int, seed: int = 0) -> None:
        self.rests: list[dict[str, float]] = []
        self.counts: Counter[str] = Counter()
        self._url = url
        self._server = server
        self._random = random.Random(seed)
        self._canary: Any = None

    async def run(self, seconds: float, stretch: float, kill_every: float) -> None:
        """Ask for so many seconds, with a rest after each stretch of them.

        Args:
            kill_every: seconds of load between two disturbances of an engine; 0 for none.

        Raises:
            AssertionError: an answer that is none, or another one than before; blocks that nobody holds.
        """
        end = time.monotonic() + seconds
        await self._rest()
        while time.monotonic() < end:
            stop = min(end, time.monotonic() + stretch)
            killer = asyncio.create_task(self._kill(kill_every, stop)) if kill_every else None
            await asyncio.gather(*(self._client(stop) for _ in range(NUM_CLIENTS)))
            if killer is not None:
                killer.cancel()
            await self._rest()

    async def _client(self, stop: float) -> None:
        while time.monotonic() < stop:
            body = {"model": "tiny", "max_tokens": self._random.randint(1, 60), "return_token_ids": True}
            body |= {"prompt": [self._random.randrange(3, 400) for _ in range(self._random.randint(1, 60))]}
            body |= self._random.choice(KINDS) | {"min_tokens": 0, "stream": self._random.random() < 0.7}
            headers = {"Connection": "close"}
            if self._random.random() < 0.3:
                headers["Idempotency-Key"] = str(uuid.UUID(int=self._random.getrandbits(128)))
            leaves = self._random.randint(1, 20) if self._random.random() < 1 / 7 else None
            pause = 0.1 if self._random.random() < 0.1 else 0.0
            await self._ask(body, headers, leaves, pause)

    async def _ask(self, body: dict[str, Any], headers: dict[str, str], leaves: int | None, pause: float) -> None:
        """One request; its client leaves after so many lines, and waits between two of them."""
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=180) as client,
            client.stream("POST", "/v1/completions", json=body, headers=headers) as response,
        ):
            if response.status_code != 200:
                said = (await response.aread()).decode()
                assert response.status_code in (429, 503), said  # it is full, or an engine could not be replaced
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

    async def _kill(self, every: float, stop: float) -> None:
        """Disturb engines; none once clients wait for their last answers, so that these come."""
        while time.monotonic() + every < stop:
            await asyncio.sleep(every)
            os.kill(self._random.choice(engine_processes(self._server)), self._random.choice(SIGNALS))
            self.counts["engines disturbed"] += 1

    async def _rest(self) -> None:
        """Wait until nothing is open and an engine serves, repeat the canary, and note what the server holds."""
        end = time.monotonic() + REST_SECONDS
        async with httpx.AsyncClient(base_url=self._url, timeout=60, headers={"Connection": "close"}) as client:
            answer = (await client.post("/v1/completions", json=CANARY)).json()["choices"]
            self._canary = self._canary or answer
            assert answer == self._canary, "the same request has another answer"
            while True:
                found = _numbers((await client.get("/metrics")).text)
                quiet = not found["vllm:num_requests_running"] and not found["vllm:num_requests_waiting"]
                if quiet and found["detcompile:engine_ready"] and len(engine_processes(self._server)) > 1:
                    break
                assert time.monotonic() < end, f"no rest: {found}"
                await asyncio.sleep(0.2)
            await asyncio.sleep(1.0)  # for sockets to close
            found = _numbers((await client.get("/metrics")).text)
        assert found["vllm:kv_cache_usage_perc"] == 0.0, "blocks are held by nobody"
        held = {"descriptors": len(os.listdir(f"/proc/{self._server}/fd")), "tasks": found["detcompile:tasks"]}
        status = Path(f"/proc/{self._server}/status").read_text()
        held["threads"] = float(re.search(r"Threads:\s+(\d+)", status)[1])  # type: ignore[index]
        held["front MB"] = round(int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024, 1)  # type: ignore[index]
        self.rests.append(held)


def growth(rests: list[dict[str, float]]) -> dict[str, float]:
    """How much more the server held in the last third of the rests than in the second one, by their medians.

    The first third is left out: pools fill, and code is imported.
    """
    third = max(1, len(rests) // 3)
    found = {}
    for name in ROOM:
        second, last = ([rest[name] for rest in part] for part in (rests[third : 2 * third], rests[-third:]))
        found[name] = round(statistics.median(last) - statistics.median(second), 1)
    return found


def _numbers(text: str) -> dict[str, float]:
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#") and "{" not in line]
    return {name: float(value) for name, value in lines}


def main() -> int:
    """Soak a server; the exit code says whether anything grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--stretch", type=float, default=30, help="seconds of load between two rests")
    parser.add_argument("--kill-every", type=float, default=20, help="seconds between two disturbed engines")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "detcompile", "serve", "tiny", "--port", "0", "--max-restarts", "1000"]
        command += ["--journal", f"{folder}/journal", "--queue-timeout", "180", "--speculation", "always"]
        url, process = started(command)
        try:
            soak = Soak(url, process.pid)
            asyncio.run(soak.run(60 * arguments.minutes, arguments.stretch, arguments.kill_every))
            journal = sum(path.stat().st_size for path in Path(folder).iterdir())
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
        finally:
            process.kill()
            process.wait()
    grown = growth(soak.rests)
    result = {
        "commit": arguments.commit,
        "cores": os.cpu_count(),
        "minutes": arguments.minutes,
        "requests": dict(soak.counts),
        "growth from the second third to the last": grown,
        "first rest": soak.rests[0],
        "last rest": soak.rests[-1],
        "rests": len(soak.rests),
        "journal MB": round(journal / 2**20, 1),
        "exit code": code,
    }
    name = f"server-soak-{os.cpu_count()}-cores-{arguments.commit}.json"
    (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return int(code != 0 or any(grown[name] > room for name, room in ROOM.items()))


if __name__ == "__main__":
    sys.exit(main())
