"""Switch a server's weights while clients ask all the time: is every token drawn by the version that it names?

    python -m benchmarks.weight_switches [--answers 10000] [--clients 32] [--tokens 40] [--mode keep] [--replays 300]

A server of the embedded model switches between two folders of weights once a second. ``--mode wait`` and ``abort``
pause it before each switch, ``keep`` does not. Before the load, every request is answered once by each version.
Under load, an answer that names one version must equal that version's. An answer that crosses a switch must begin as
the first version's, and up to ``--replays`` of these are replayed from their receipts with the weights of each version.
``mixed`` counts the answers that fail this. Prints one line of JSON.
"""

import argparse
import asyncio
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

import detcompile
from detcompile.models.hub import TINY_FOLDER
from detcompile.serving.receipts.envelope import Envelope, payload_of
from detcompile.serving.receipts.receipt import decode_receipt
from detcompile.serving.receipts.replay import Replayer

NUM_REQUESTS = 16  # different ones
SWITCH_SECONDS = 1.0
COMPLETIONS = "/v1/completions"


def new_weights(folder: Path) -> Path:
    """Write the embedded model's weights with noise."""
    draw = torch.Generator().manual_seed(0)
    tensors = load_file(TINY_FOLDER / "model.safetensors")
    noisy = {name: (each * (1 + 0.02 * torch.randn(each.shape, generator=draw))).to(each.dtype)
             for name, each in tensors.items()}  # fmt: skip
    folder.mkdir()
    save_file(noisy, folder / "model.safetensors")
    return folder


def request(number: int, num_tokens: int) -> dict[str, Any]:
    """Return one of the requests."""
    return {
        "prompt": f"def f{number}(x):\n", "max_tokens": num_tokens, "seed": number, "temperature": 1.0, "logprobs": 0,
        "n": 1 + number % 2, "top_p": 1.0 if number % 3 else 0.9, "ignore_eos": True, "return_token_ids": True,
        "receipt": True,
    }  # fmt: skip


class Load:
    """Clients of a server, and the switches.

    Attributes:
        answered: answers that ended and were not aborted.
        crossing: receipts of answers by two versions.
        mixed: answers that do not begin as those of the first version that they name.
        switches: seconds of each update.
    """

    def __init__(self, client: httpx.AsyncClient, folders: list[Path], given: argparse.Namespace) -> None:
        self._client = client
        self._folders = folders
        self._given = given
        self._expected: dict[tuple[int, str], list[dict[str, Any]]] = {}  # choices by request and version
        self._numbers = itertools.count()
        self.answered = self.mixed = 0
        self.crossing: list[dict[str, str]] = []
        self.switches: list[float] = []

    async def run(self) -> None:
        """Switch and ask until enough answers ended."""
        for place, folder in enumerate(self._folders):
            await self._post("/update_weights", {"weight_dir": str(folder), "weight_version": str(place)})
            bodies = [request(number, self._given.tokens) for number in range(NUM_REQUESTS)]
            for number, reply in enumerate(await asyncio.gather(*(self._post(COMPLETIONS, body) for body in bodies))):
                self._expected[number, str(place)] = reply["choices"]
        await asyncio.gather(self._switch(), *(self._ask() for _ in range(self._given.clients)))

    async def _ask(self) -> None:
        while self.answered < self._given.answers:
            number = next(self._numbers) % NUM_REQUESTS
            reply = await self._post(COMPLETIONS, request(number, self._given.tokens))
            if any(choice["finish_reason"] == "abort" for choice in reply["choices"]):
                continue
            self.answered += 1
            if len({version for choice in reply["choices"] for version in choice["weight_versions"]}) > 1:
                self.crossing.append(reply["receipt"])
            self.mixed += any(
                _drawn_first(choice) != _drawn_first(expected)[: len(_drawn_first(choice))]
                for choice in reply["choices"]
                for expected in self._expected[number, choice["weight_versions"][0]]
                if expected["index"] == choice["index"]
            )

    async def _switch(self) -> None:
        for place in itertools.cycle(range(len(self._folders))):
            if self.answered >= self._given.answers:
                return
            if self._given.mode != "keep":
                await self._post(f"/pause?mode={self._given.mode}")
            start = time.monotonic()
            await self._post("/update_weights", {"weight_dir": str(self._folders[place]), "weight_version": str(place)})
            self.switches.append(time.monotonic() - start)
            if self._given.mode != "keep":
                await self._post("/resume")
            await asyncio.sleep(SWITCH_SECONDS)

    async def _post(self, path: str, body: Any = None) -> Any:
        reply = await self._client.post(path, json=body)
        if reply.status_code != 200:
            raise SystemExit(f"{path} answered {reply.status_code}: {reply.text}")
        return reply.json()


def _drawn_first(choice: dict[str, Any]) -> list[tuple[int, float]]:
    """Return the tokens, with their log-probabilities, that the first version drew before another one drew any."""
    _, first = next(itertools.groupby(choice["weight_versions"]))
    return list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"]))[: len(list(first))]


def num_mixed(receipts: list[dict[str, str]], folder: Path) -> int:
    """Return how many receipts of answers by two versions are not reproduced."""
    if not receipts:
        return 0
    replayer = Replayer(detcompile.compile("tiny", device="cpu"), folders=[folder])
    checked = [replayer.check(decode_receipt(payload_of(Envelope(**receipt)))) for receipt in receipts]
    return sum(verdict.outcome != "equal" for verdict in checked)


@asynccontextmanager
async def serving(options: list[str], lines: list[str]) -> AsyncIterator[str]:
    """Run a server; yield its address."""
    command = [sys.executable, "-m", "detcompile", "serve", "tiny", "--port", "0", "--admin-key", "none", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    reader = threading.Thread(target=lambda pipe: lines.extend(pipe), args=(process.stderr,), daemon=True)
    reader.start()
    try:
        while (address := next(_addresses(lines), None)) is None:
            if process.poll() is not None:
                raise SystemExit("".join(lines))
            await asyncio.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()
        reader.join()


def _addresses(lines: list[str]) -> Iterator[str]:
    return (line.split()[3].rstrip(";") for line in list(lines) if line.startswith("serving tiny on "))


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--mode", choices=("keep", "wait", "abort"), default="keep")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--replays", type=int, default=300)
    given = parser.parse_args()
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        folders = [TINY_FOLDER, new_weights(Path(folder) / "new")]
        async with (
            serving(["--replicas", str(given.replicas)], lines) as address,
            httpx.AsyncClient(base_url=address, timeout=600, limits=httpx.Limits(max_connections=None)) as client,
        ):
            load, start = Load(client, folders, given), time.monotonic()
            await load.run()
            seconds = time.monotonic() - start
        replayed = load.crossing[:: 1 + len(load.crossing) // given.replays]
        replaying = time.monotonic()
        mixed = load.mixed + num_mixed(replayed, folders[1])
    held = [float(each) for each in re.findall(r"held for ([\d.]+) s", "".join(lines))][-len(load.switches) :]
    print(json.dumps({
        "mode": given.mode, "replicas": given.replicas, "clients": given.clients, "answers": load.answered,
        "switches": len(load.switches), "mixed": mixed, "crossing": len(load.crossing), "replayed": len(replayed),
        "seconds_held_median": statistics.median(held), "seconds_held_max": max(held),
        "seconds_of_a_switch_median": round(statistics.median(load.switches), 3), "seconds": round(seconds, 1),
        "seconds_of_replays": round(time.monotonic() - replaying, 1),
    }))  # fmt: skip
    if mixed:
        raise SystemExit(f"{mixed} answers were not drawn by the versions that they name")


if __name__ == "__main__":
    asyncio.run(main())
